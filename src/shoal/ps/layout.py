"""Layout of a model on servers: table and chunk numbers, and dense parameters cut into chunks and placed in slots.

Pure, and a function of the model and of the servers at launch: every worker
comes to the same plan. Nothing here touches a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from shoal.errors import ConfigError
from shoal.runtime.transport.messages.client_server import ChunkSpec, DensePart

TABLES_PER_MODEL, CHUNKS_PER_MODEL = 1_000, 100_000
FIRST_NAMED = 1 << 40
"""Number of the first table that was declared by name."""


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
    if getattr(torch.optim, kind.__name__, None) is not kind:
        raise ConfigError(
            f"the optimizer {kind.__module__}.{kind.__qualname__} is not one of torch.optim: servers run torch's own "
            "classes by name, and nobody else's code. Nothing was started; use one of torch.optim, or another strategy."
        )
    if dense:
        _check_name(kind.__name__)
    return str(kind.__name__)


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """torch's class of that name; refused where there is none, or where it cannot run on a server."""
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


def plan_chunks(
    params: Sequence[Parameter],
    *,
    optimizer: str,
    slots_by_server: Sequence[Sequence[int]],
    chunk_bytes: int = 4 << 20,
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
        pack = _cut_and_pack if optimizer in ELEMENT_WISE else _pack
        chunks += [(dtype, parts) for parts in pack(mine, limit)]
    slots = _place([_num_bytes(dtype, parts) for dtype, parts in chunks], servers)
    return [
        ChunkSpec(number=number, slot=slot, dtype=dtype, parts=parts)
        for number, (slot, (dtype, parts)) in enumerate(zip(slots, chunks, strict=True))
    ]


def num_elements(part: DensePart) -> int:
    """Of a part."""
    return math.prod(part.shape)


def _elements_per_chunk(params: Sequence[Parameter], dtype: str, num_servers: int, chunk_bytes: int) -> int:
    total = sum(math.prod(shape) for _, shape, _, _ in params)
    most = max(_ALIGNED, chunk_bytes // element_size(dtype) // _ALIGNED * _ALIGNED)
    # A multiple of the servers' number of chunks, all of one size: each server gets as many bytes.
    num_chunks = max(1, -(-total // (most * num_servers))) * num_servers
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
    """Bytes of one element."""
    return torch_dtype(dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of that name; refused where it is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"torch has no dtype '{name}'. Nothing was declared.")
    return found
