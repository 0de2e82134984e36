"""Layout of a model on servers: slots of rows, numbers of tables and chunks, dense parameters divided into chunks.

A row's slot is a hash of (table, key), fixed for good: checkpoints, deduplication and placement are
by slot. It shares no bits with the hashes that find a row or fill it, so the rows of one slot are
spread evenly in a table's index. The plan of chunks is a function of the model and of the servers
at launch: every worker computes the same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.embedding.kernels import slot_of as slot_of
from shoal.errors import ConfigError
from shoal.ps.weight_average import PREFIX, averaged, base_of
from shoal.runtime.kernel_cache import INT, floating_kernel, kernel, matrix, types, vector
from shoal.runtime.transport.messages.client_server import ChunkSpec, DensePart

TABLES_PER_MODEL, CHUNKS_PER_MODEL = 1_000, 100_000
FIRST_NAMED = 1 << 40  # number of the first table that was declared by name


def counter_of(table: int) -> int:
    """Counter of a table's updates: its model's steps, or, of one declared by name, its own pushes."""
    return table if table >= FIRST_NAMED else table // TABLES_PER_MODEL


def counter_of_update(tables: Iterable[int], model: int) -> int:
    """The same of an update of these tables: a model's, or a low-level push to a single table."""
    return next((table for table in tables if table >= FIRST_NAMED), model)


# ---- dense parameters ----------------------------------------------------------------------------


Parameter: TypeAlias = tuple[str, tuple[int, ...], str, int]
"""Name, shape, dtype ("float32") and parameter group."""

ELEMENT_WISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]
)
"""Optimizers that treat every element alone: their parameters may be cut anywhere."""


def is_element_wise(optimizer: str) -> bool:
    return optimizer.removeprefix(PREFIX) in ELEMENT_WISE


_REFUSED = {
    "LBFGS": "it calls the model again and again within one step, which no server can",
    "SparseAdam": "it takes sparse gradients only, which parameters that are not rows do not have",
}
_ALIGNED = 64  # elements; cuts fall where torch's vector loops begin a new one, so bits do not depend on cuts


def check_optimizer(
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer], *, dense: bool = True
) -> str:
    """The name under which servers know this optimizer; refused where they cannot run it on dense parameters."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    base = base_of(kind)
    if getattr(torch.optim, base.__name__, None) is not base:
        raise ConfigError(
            f"the optimizer {base.__module__}.{base.__qualname__} is not one of torch.optim: servers run torch's own "
            "classes by name, and nobody else's code. Nothing was started; use one of torch.optim, or another strategy."
        )
    hooks = () if isinstance(optimizer, type) else _hooks_of(optimizer)
    if hooks:
        raise ConfigError(
            f"the optimizer has a hook of the script's own on its step ({', '.join(hooks)}), and on parameter servers it never steps "
            "in a worker: the hook would not be called. Nothing was started; do it in a callback's on_step_end, with the weights of "
            "trainer.model, or use another strategy."
        )
    if dense:
        _check_name(base.__name__)
    return str(kind.__name__)


def _hooks_of(optimizer: torch.optim.Optimizer) -> list[str]:
    registered = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return [getattr(hook, "__qualname__", repr(hook)) for hooks in registered for hook in hooks.values()]


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """torch's class of that name, or one of them that keeps an average; refused where there is none, or where it cannot run on a server."""
    if name.startswith(PREFIX):
        base = name.removeprefix(PREFIX)
        if base.startswith(PREFIX):
            raise ConfigError(
                f"an optimizer keeps one average, and '{name:.60}' names several. Nothing was declared."
            )
        return averaged(optimizer_class(base))
    _check_name(name)
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)) or name == "Optimizer":
        raise ConfigError(
            f"torch {torch.__version__} has no optimizer '{name}' in torch.optim. Nothing was declared."
        )
    return found


def _check_name(name: str) -> None:
    if name in _REFUSED:
        raise ConfigError(
            f"the optimizer {name} cannot run on a parameter server: {_REFUSED[name]}. Nothing was started; use another "
            "optimizer, or another strategy."
        )


CHUNK_BYTES = 4 << 20
DEVICE_CHUNK_BYTES = 32 << 20
"""On a device, where a call of torch's optimizer costs as much as 100 MB of its memory."""


def plan_chunks(
    params: Sequence[Parameter],
    *,
    optimizer: str,
    slots_by_server: Sequence[Sequence[int]],
    chunk_bytes: int = CHUNK_BYTES,
    first_number: int = 0,
) -> list[ChunkSpec]:
    """Chunks of at most `chunk_bytes`, as evenly over servers as cuts allow, in the order of the parameters.

    Where the optimizer looks at a parameter as a whole none is cut, and a
    chunk may be as large as the largest. No chunk mixes dtypes.
    """
    servers = [list(slots) for slots in slots_by_server if slots]
    if not servers:
        raise ConfigError(
            "no server holds a slot: dense parameters have nowhere to go. Nothing was declared."
        )
    chunks: list[tuple[str, list[DensePart]]] = []
    for dtype in dict.fromkeys(dtype for _, _, dtype, _ in params):
        mine = [param for param in params if param[2] == dtype]
        limit = _elements_per_chunk(mine, dtype, len(servers), chunk_bytes)
        pack = _cut_and_pack if is_element_wise(optimizer) else _pack
        chunks += [(dtype, parts) for parts in pack(mine, limit)]
    slots = _place([_num_bytes(dtype, parts) for dtype, parts in chunks], servers)
    return [
        ChunkSpec(number=number, slot=slot, dtype=dtype, parts=parts)
        for number, (slot, (dtype, parts)) in enumerate(zip(slots, chunks, strict=True), first_number)
    ]


def num_elements(part: DensePart) -> int:
    return math.prod(part.shape)


SMALL_BYTES = 96 << 10
"""Chunks are not cut smaller than this for the sake of an even share: what each costs by itself is then more (ADR 69)."""


def _elements_per_chunk(params: Sequence[Parameter], dtype: str, num_servers: int, chunk_bytes: int) -> int:
    total = sum(math.prod(shape) for _, shape, _, _ in params)
    most = max(_ALIGNED, chunk_bytes // element_size(dtype) // _ALIGNED * _ALIGNED)
    # A multiple of the servers' number of chunks, all of one size: each server gets as many bytes.
    num_chunks = max(1, -(-total // (most * num_servers))) * num_servers
    num_chunks = min(num_chunks, max(1, total * element_size(dtype) // SMALL_BYTES))
    return min(most, max(_ALIGNED, -(-total // (num_chunks * _ALIGNED)) * _ALIGNED))


def _cut_and_pack(params: Sequence[Parameter], limit: int) -> list[list[DensePart]]:
    chunks: list[list[DensePart]] = [[]]
    room = limit
    for name, shape, _, group in params:
        size, offset = math.prod(shape), 0
        while True:
            if room < min(size - offset, _ALIGNED):
                chunks.append([])
                room = limit
            # A cut falls on a multiple; a parameter's end falls where it falls.
            take = size - offset if size - offset <= room else room // _ALIGNED * _ALIGNED
            part_shape = list(shape) if take == size else [take]
            chunks[-1].append(DensePart(parameter=name, shape=part_shape, offset=offset, group=group))
            room -= take
            offset += take
            if offset >= size:
                break
    return [parts for parts in chunks if parts]


def _pack(params: Sequence[Parameter], limit: int) -> list[list[DensePart]]:
    chunks: list[list[DensePart]] = [[]]
    room = limit
    for name, shape, _, group in params:
        size = math.prod(shape)
        if size > room and chunks[-1]:
            chunks.append([])
            room = limit
        chunks[-1].append(DensePart(parameter=name, shape=list(shape), offset=0, group=group))
        room -= size
    return [parts for parts in chunks if parts]


def _place(sizes: Sequence[int], servers: Sequence[Sequence[int]]) -> list[int]:
    # The largest first, each to the server that has least; within it to the slot that has least.
    by_server = [0] * len(servers)
    by_slot = {slot: 0 for slots in servers for slot in slots}
    placed = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        server = min(range(len(servers)), key=lambda server: (by_server[server], server))
        slot = min(servers[server], key=lambda slot: (by_slot[slot], slot))
        by_server[server] += sizes[number]
        by_slot[slot] += sizes[number]
        placed[number] = slot
    return placed


def _num_bytes(dtype: str, parts: Sequence[DensePart]) -> int:
    return sum(num_elements(part) for part in parts) * element_size(dtype)


def element_size(dtype: str) -> int:
    return torch_dtype(dtype).itemsize


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"torch has no dtype '{name}'. Nothing was declared.")
    return found


assert NUM_SLOTS == 256, "a slot is a byte of the hash"


# ---- loops over keys and rows --------------------------------------------------------------------


def partition(
    keys: np.ndarray[Any, Any], owner_of_slot: np.ndarray[Any, Any], table: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The keys' places (int32) grouped by the server that owns their slot, and where each server's group begins.

    Server s gets keys[order[starts[s]:starts[s + 1]]]: increasing where `keys` is. `starts` has one entry more than
    the highest owner plus one.
    """
    owners = np.ascontiguousarray(owner_of_slot, np.int64)
    starts = np.zeros(int(owners.max()) + 2, np.int64)
    order = np.empty(len(keys), np.int32)
    _partition(slot_of(table, keys), owners, starts, order)
    return order, starts


@kernel(
    (
        vector(types.uint8), vector(types.int64), vector(types.int64, written=True), vector(types.int32, written=True)
    )
)  # fmt: skip
def _partition(slots: Any, owners: Any, starts: Any, order: Any) -> None:
    for i in range(len(slots)):
        starts[owners[slots[i]] + 1] += 1
    for server in range(1, len(starts)):
        starts[server] += starts[server - 1]
    at = starts.copy()
    for i in range(len(slots)):
        server = owners[slots[i]]
        order[at[server]] = i
        at[server] += 1


@kernel((vector(types.int64), INT, INT))
def first_wrong_key(keys: Any, low: int, high: int) -> int:
    """The first place where keys are not strictly increasing or not in low..high (both included); -1 where all are."""
    for i in range(len(keys)):
        if keys[i] < low or keys[i] > high or (i > 0 and keys[i] <= keys[i - 1]):
            return i
    return -1


@floating_kernel(lambda dtype: (vector(types.uint8), matrix(dtype), vector(types.float64, written=True)))
def add_squares(slots: Any, rows: Any, out: Any) -> None:
    """Add the square of every number to its slot's entry of `out`, row after row."""
    for i in range(len(slots)):
        total = 0.0
        for d in range(rows.shape[1]):
            value = np.float64(rows[i, d])
            total += value * value
        out[slots[i]] += total
