"""Tables and chunks of a server, and the one place where an update changes them.

An `Update` is the same on a primary and on its replicas: summed arrays and their factor.
Independent of views, deduplication and senders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.embedding.row_table import Array, RowTable
from shoal.embedding.tiered_rows import RowBudget
from shoal.errors import ConfigError, ShoalError
from shoal.ps import codecs
from shoal.ps.codecs import Codec
from shoal.ps.layout import (
    add_squares,
    counter_of,
    counter_of_update,
    first_wrong_key,
    num_elements,
    slot_of,
    torch_dtype,
)
from shoal.ps.server.actions import Frame
from shoal.ps.server.dense import DenseStore, as_flat, check_settings
from shoal.ps.server.progress import Slots, Vector, no_slots
from shoal.runtime import row_kernels
from shoal.runtime.transport.messages.client_server import (
    ChunkSpec,
    DeclareDense,
    Settings,
    TableSpec,
    TableTiers,
)

_INT64 = np.iinfo(np.int64)


class ServerTable(RowTable):
    """A table as a server has it.

    One sum may be in progress: `accumulate` once per rank, in rank order, then `take_sum`.
    Contributions are kept by reference: their memory must stay unchanged until `take_sum`, and with
    a single rank until its result is no longer used.
    """

    def __init__(self, spec: TableSpec, budget: RowBudget | None = None, *, is_shared: bool = False) -> None:
        super().__init__(spec, budget, is_shared=is_shared)
        self._parts: list[tuple[Array, Array]] = []

    def check_keys(self, keys: Array) -> None:
        """Refuse keys that are not strictly increasing, or out of range; nothing else may be called with such."""
        limit = self.spec.num_rows
        low, high = (0, limit - 1) if limit is not None else (int(_INT64.min), int(_INT64.max))
        wrong = first_wrong_key(keys, low, high)
        if wrong >= 0:
            before = f"{keys[wrong - 1]}, " if wrong else ""
            expected = "strictly increasing" + (f" and in 0..{high}" if limit is not None else "")
            raise ConfigError(
                f"the keys for table '{self.spec.name}' must be {expected}, but at place {wrong} of {len(keys)} they are "
                f"{before}{keys[wrong]}. Nothing was changed; send each key once, sorted."
            )

    # ---- the sum of a step ----

    def accumulate(self, keys: Array, grads: Array) -> None:
        self._parts.append((keys, grads))

    def sum_of_squares(self, out: Array) -> None:
        """Add the squares of the sum under way to `out` (float64, one per slot)."""
        if self._parts:
            keys, rows = self._summed()
            add_squares(slot_of(self.spec.number, keys), rows, out)

    def take_sum(self) -> tuple[Array, Array]:
        """Keys, strictly increasing, and rows of the sum in progress, which ends; empty without a contribution."""
        taken = self._summed() if self._parts else None
        self._parts = []
        return taken or (np.empty(0, np.int64), np.empty((0, self.dim), self.dtype))

    def _summed(self) -> tuple[Array, Array]:
        """Sum of all parts. Every row is read once, whatever the number of ranks."""
        if len(self._parts) > 1:
            keys_of, rows_of = zip(*self._parts, strict=True)
            self._parts = [row_kernels.sum_lists(keys_of, rows_of)]
        return self._parts[0]

    # ---- by slot ----

    def read(self, slot: int, *, tracker: str = "", since: int = 0) -> tuple[Array, Array, Array]:
        """Keys in increasing order, values and state of a slot: copies. Where the tracker is this one's, of rows
        that changed after `since`.
        """
        return self.read_since(slot, since if tracker and tracker == self.tracker else None)


Keys = npt.NDArray[np.int64]
Values = npt.NDArray[np.floating]


class Refusal(Exception):
    """Internal: an invalid request. Answered with PsRefused and what was expected."""


@dataclass(slots=True)
class Update:
    """One change of rows and chunks, ready to be applied."""

    slots: Slots  # slots in which it counts, whether or not anything of it lies there
    # By table: keys and the gradients of their rows.
    rows: dict[int, tuple[Keys, Values]] = field(default_factory=dict)
    # By chunk: its gradient, and the parts without one.
    dense: dict[int, tuple[Tensor, tuple[int, ...]]] = field(default_factory=dict)
    factor: float = 1.0  # factor of all gradients
    step: int = 0  # number of updates before it
    # Of the optimizer's groups; empty: as declared. Not remembered: every update carries its own.
    settings: list[Settings] = field(default_factory=list)
    # Of tables; of those that are not among them, as they were declared.
    table_settings: dict[int, dict[str, float]] = field(default_factory=dict)
    model: int = 0  # whose settings they are
    # Instead of gradients: table, keys, and their values and state after `whole_after` updates, in several pieces.
    whole: list[tuple[int, Keys, Values]] = field(default_factory=list)
    whole_after: int | None = None


class Contents:
    """Tables and chunks of all slots of one server."""

    def __init__(self) -> None:
        self.tables: dict[int, ServerTable] = {}
        self.dense = DenseStore()
        self.declared_dense: dict[int, DeclareDense] = {}
        self.chunks: dict[int, ChunkSpec] = {}
        self._groups: dict[int, list[Settings]] = {}  # by model, as they were declared
        self._of_tables: dict[int, dict[str, float]] = {}  # settings that came with a table's last update
        # By model: settings that were found to be right.
        self._checked: dict[int, tuple[list[Settings], dict[int, dict[str, float]]]] = {}
        self._model_of_chunk: dict[int, int] = {}
        self.held: Slots = no_slots()
        self.memory_problem: Callable[[int], str | None] = lambda nbytes: None
        """Reason why this many more bytes cannot be taken, if so; set by the process."""
        self.row_budget: RowBudget | None = None  # of --table-memory
        self.shares_rows = False
        """Tables to come are read by the clients of this host; exact steps only."""

    # ---- declarations ---------------------------------------------------------------------------

    def declare_table(self, spec: TableSpec) -> bool:
        known = self.tables.get(spec.number)
        if known is None:
            try:
                self.tables[spec.number] = ServerTable(spec, self.row_budget, is_shared=self.shares_rows)
            except (ShoalError, OSError, OverflowError, ValueError) as error:
                raise Refusal(f"table {spec.number} cannot be: {error}") from None
            return True
        if known.spec != spec:
            raise Refusal(f"table {spec.number} was declared as {known.spec}, now as {spec}")
        return False

    def declare_dense(self, message: DeclareDense) -> bool:
        known = self.declared_dense.get(message.model)
        if known is not None:
            if known != message:
                raise Refusal(_difference(known, message))
            return False
        taken = [chunk.number for chunk in message.chunks if chunk.number in self.chunks]
        if taken:
            model = self._model_of_chunk[taken[0]]
            raise Refusal(f"chunk {taken[0]} of model {message.model} is one of model {model} already")
        kept = [chunk for chunk in message.chunks if self.held[chunk.slot]]
        numbers = [chunk.number for chunk in message.chunks]
        if len(set(numbers)) < len(numbers):
            raise Refusal(f"of the {len(numbers)} chunks of model {message.model} two have the same number")
        try:
            problem = self.memory_problem(sum(map(chunk_bytes, kept)))
            if problem is not None:
                raise Refusal(problem)
            check_settings(message.optimizer, message.groups)
            self.dense.declare(kept, message.optimizer, message.groups)
        except (ShoalError, OSError, OverflowError, TypeError, ValueError, RuntimeError) as error:
            for chunk in kept:
                self.dense.drop(chunk.number)
            raise Refusal(str(error)) from None
        self.declared_dense[message.model] = message
        self.chunks |= {chunk.number: chunk for chunk in message.chunks}
        self._model_of_chunk |= dict.fromkeys((chunk.number for chunk in message.chunks), message.model)
        self._groups[message.model] = [dict(group) for group in message.groups]
        return True

    def hold(self, slots: Slots) -> None:
        dropped = self.held & ~slots
        if dropped.any():
            self.empty(dropped)
        self.held = slots.copy()
        for table in self.tables.values():
            table.begin_change()
        for number, chunk in self.chunks.items():
            if not slots[chunk.slot]:
                self.dense.drop(number)
        for declared in self.declared_dense.values():
            kept = [chunk for chunk in declared.chunks if slots[chunk.slot]]
            self.dense.declare(kept, declared.optimizer, declared.groups)

    def empty(self, slots: Slots) -> None:
        for table in self.tables.values():
            table.drop_slots(slots)

    def table(self, number: int) -> ServerTable:
        if number not in self.tables:
            raise Refusal(
                f"table {number} was never declared here; there are {sorted(self.tables) or 'none'}"
            )
        return self.tables[number]

    def chunk(self, number: int) -> ChunkSpec:
        if number not in self.chunks:
            raise Refusal(
                f"chunk {number} was never declared here; there are {len(self.chunks)}, counted from 0"
            )
        return self.chunks[number]

    def chunks_of(self, slots: Slots) -> list[int]:
        return [number for number in sorted(self.chunks) if slots[self.chunks[number].slot]]

    @property
    def shared_bytes(self) -> int:
        """Memory of tables that clients read, which does not count as this process's own."""
        shared = (table for table in list(self.tables.values()) if table.shared is not None)
        return sum(table.num_bytes + table.num_index_bytes for table in shared)

    def tiers(self) -> TableTiers:
        budget = self.row_budget
        return TableTiers(
            num_rows=sum(table.num_rows for table in self.tables.values()),
            memory_bytes=sum(table.num_bytes for table in self.tables.values())
            if budget is None
            else budget.used_bytes,
            disk_bytes=budget.disk_bytes if budget is not None else 0,
            num_hits=budget.num_hits if budget is not None else 0,
            num_misses=budget.num_misses if budget is not None else 0,
            num_counted=sum(table.num_counted for table in self.tables.values()),
            num_evicted=sum(table.num_evicted for table in self.tables.values()),
        )

    # ---- frames ---------------------------------------------------------------------------------

    def keys(self, table: ServerTable, frame: Frame, mine: Slots) -> Keys:
        """A copy of the keys in a frame: whole, strictly increasing, in range, and all of slots that are `mine`.

        A copy, because the client can write to the frame at any time, and kernels take keys on trust.
        """
        keys = as_array(frame, np.int64, "keys").copy()
        try:
            table.check_keys(keys)
        except ShoalError as error:
            raise Refusal(str(error)) from None
        if not mine.all():
            slots = slot_of(table.spec.number, keys)
            foreign = ~mine[slots]
            if foreign.any():
                at = int(np.flatnonzero(foreign)[0])
                raise Refusal(
                    f"{int(foreign.sum())} of {len(keys)} keys of table {table.spec.number} are of slots whose primary is "
                    f"another server, the first is key {int(keys[at])} of slot {int(slots[at])}"
                )
        return keys

    def values(
        self, table: ServerTable, frame: Frame, num_rows: int, codec: str = "", *, is_whole: bool = False
    ) -> Values:
        """One row of values per key, as they lie in a frame; decoded, where they have a codec. `is_whole`: with state."""
        if is_whole:
            rows, width = as_array(frame, table.spec.dtype, "rows"), table.dim + table.state_dim
            if len(rows) != num_rows * width or table.policy is not None or codec:
                raise Refusal(
                    f"whole rows of table {table.spec.number} are {width} {table.spec.dtype}, as they are, of a table without a "
                    f"policy; got {len(rows)} numbers for {num_rows} keys"
                )
            return rows.reshape(num_rows, width)
        if codec:
            return _decoded(codec, frame, (num_rows, table.spec.dim), table.dtype)
        values = as_array(frame, table.spec.dtype, "values")
        if len(values) != num_rows * table.spec.dim:
            raise Refusal(
                f"table {table.spec.number} has rows of {table.spec.dim} {table.spec.dtype}: {num_rows} keys need "
                f"{num_rows * table.spec.dim} values, got {len(values)}"
            )
        return values.reshape(num_rows, table.spec.dim)

    def gradient(self, chunk: ChunkSpec, frame: Frame, codec: str = "") -> Tensor:
        """The elements of a chunk, as they lie in a frame; decoded, where they have a codec."""
        if codec:
            shape = (1, sum(map(num_elements, chunk.parts)))
            return torch.from_numpy(_decoded(codec, frame, shape, _encodable(chunk)).reshape(-1))
        expected = chunk_bytes(chunk)
        if memoryview(frame).nbytes != expected:
            raise Refusal(
                f"chunk {chunk.number} has {expected} bytes of {chunk.dtype}, got {memoryview(frame).nbytes}"
            )
        gradient = as_flat(frame, torch_dtype(chunk.dtype))
        device = self.dense.memory.device
        # To a device at once: others still compute.
        return gradient if device is None else gradient.to(device)

    # ---- change ---------------------------------------------------------------------------------

    def check_settings(
        self, model: int, settings: list[Settings], table_settings: dict[int, dict[str, float]]
    ) -> None:
        """Refuse hyper-parameters of groups, tables or rules that there are not."""
        if self._checked.get(model) == (settings, table_settings):
            return  # every worker sends them with every step
        num_groups = len(self._groups.get(model, []))
        if settings and len(settings) != num_groups:
            raise Refusal(f"the optimizer has {num_groups} groups here, got settings of {len(settings)}")
        for number, (known, new) in enumerate(zip(self._groups.get(model, []), settings, strict=False)):
            for key, value in new.items():
                if key == "params" or (key in known and not _is_alike(known[key], value)):
                    raise Refusal(
                        f"{key} of parameter group {number} was declared as {known.get(key)!r}, and cannot become {value!r}"
                    )
        for number, given in table_settings.items():
            table = self.table(number)
            if given != self._of_tables.get(number):
                table.rule.complete(given)
        self._checked[model] = settings, table_settings

    def apply(self, update: Update) -> dict[int, Keys]:
        """Change rows and chunks; the same arrays give the same bits wherever they are applied.

        Returns the keys of rows that a policy dropped after it, by table.
        """
        for number in sorted(update.rows):
            table = self.tables[number]
            keys, values = update.rows[number]
            self._have_settings(table, update.table_settings.get(number, {}))
            table.step = update.step
            table.apply(keys, values, update.factor)
        for number, keys, values in update.whole:
            self.tables[number].set_whole(keys, values)
            self.tables[number].step = update.whole_after or 0
        settings = self._groups.get(update.model, [])
        if update.settings:
            settings = [{**old, **new} for old, new in zip(settings, update.settings, strict=True)]
        for number in sorted(update.dense):
            gradient, unused = update.dense[number]
            self.dense.update(number, gradient, unused, settings, factor=update.factor)
        evicted = {}
        counter = counter_of_update(update.rows, update.model)
        for number, table in self.tables.items():
            # Also without rows for it in this update: a sweep must not depend on the placement of keys.
            if table.policy is not None and counter_of(number) == counter:
                table.step = update.step + 1
                gone = table.sweep(update.slots)
                if len(gone):
                    evicted[number] = gone
        return evicted

    def _have_settings(self, table: ServerTable, given: dict[str, float]) -> None:
        if given != self._of_tables.get(table.spec.number, {}):
            table.settings = {**table.rule.complete(table.spec.settings), **given}
            self._of_tables[table.spec.number] = given

    def squares(self, update: Update, out: Vector) -> None:
        for number in sorted(update.dense):
            out[self.chunks[number].slot] += self.dense.sum_of_squares(number, update.dense[number][0])


def _is_alike(old: object, new: object) -> bool:
    """Whether a hyper-parameter may change so: a number to a number, a pair to a pair."""
    if isinstance(old, list):
        return isinstance(new, list) and len(new) == len(old)
    is_number = isinstance(old, int | float) or old is None
    return (isinstance(new, int | float) or new is None) if is_number else type(new) is type(old)


def restrict(update: Update, slots: Slots, chunks: dict[int, ChunkSpec]) -> Update:
    if not (update.slots & ~slots).any():
        return update
    rows = {}
    for number, (keys, values) in update.rows.items():
        inside = slots[slot_of(number, keys)]
        rows[number] = (keys, values) if inside.all() else (keys[inside], values[inside])
    dense = {number: each for number, each in update.dense.items() if slots[chunks[number].slot]}
    whole = []
    for number, keys, values in update.whole:
        inside = slots[slot_of(number, keys)]
        whole.append((number, keys, values) if inside.all() else (number, keys[inside], values[inside]))
    return replace(update, slots=update.slots & slots, rows=rows, dense=dense, whole=whole)


def chunk_bytes(chunk: ChunkSpec) -> int:
    return sum(map(num_elements, chunk.parts)) * torch_dtype(chunk.dtype).itemsize


def pulled_bytes(chunk: ChunkSpec, codec: str) -> int:
    """Bytes of a chunk as it is pulled."""
    used = codec_of(codec)
    if used is None:
        return chunk_bytes(chunk)
    _encodable(chunk)
    return used.num_bytes(1, sum(map(num_elements, chunk.parts)))


def _encodable(chunk: ChunkSpec) -> str:
    if chunk.dtype not in ("float32", "float64"):
        raise Refusal(f"chunk {chunk.number} is of {chunk.dtype}, and only float32 and float64 have codecs")
    return chunk.dtype


def codec_of(name: str) -> Codec | None:
    try:
        return codecs.codec(name)
    except ConfigError as error:
        raise Refusal(str(error)) from None


def _decoded(name: str, frame: Frame, shape: tuple[int, int], dtype: npt.DTypeLike) -> Array:
    codec = codec_of(name)
    assert codec is not None
    expected, found = codec.num_bytes(*shape), memoryview(frame).nbytes
    if (
        found != expected if codec.has_fixed_size else found > expected
    ):  # before anything is allocated for them
        raise Refusal(f"{shape[0]} rows of {shape[1]} numbers are {expected} bytes in {name}, got {found}")
    out = np.empty(shape, dtype)
    # A copy: the client can write to the frame at any time.
    codec.decode(bytearray(memoryview(frame).cast("B")), out)
    return out


def encode_into(name: str, values: Array, into: memoryview) -> None:
    codec = codec_of(name)
    assert codec is not None
    encoded = codec.encode(values)
    into[: encoded.nbytes] = encoded.data


def as_array(frame: Frame, dtype: npt.DTypeLike, what: str) -> Array:
    size = np.dtype(dtype).itemsize
    num_bytes = memoryview(frame).nbytes
    if num_bytes % size:
        raise Refusal(f"{what} are {np.dtype(dtype).name}, {size} bytes each; got {num_bytes} bytes")
    return np.frombuffer(frame, dtype=dtype) if num_bytes else np.zeros(0, dtype)


def _difference(old: DeclareDense, new: DeclareDense) -> str:
    return (
        f"workers built different optimizers or models: {_first_difference(old, new)}. What the servers hold was not "
        "changed; the script must build the same on every worker, whatever shoal.rank() is."
    )


def _first_difference(old: DeclareDense, new: DeclareDense) -> str:
    if old.optimizer != new.optimizer:
        return f"the optimizer is {old.optimizer} on one and {new.optimizer} on another"
    if len(old.groups) != len(new.groups):
        return f"the optimizer has {len(old.groups)} parameter groups on one and {len(new.groups)} on another"
    for number, (one, other) in enumerate(zip(old.groups, new.groups, strict=True)):
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key):
                return f"{key} of parameter group {number} is {one.get(key)} on one and {other.get(key)} on another"
    if len(old.chunks) != len(new.chunks):
        return f"dense parameters are {len(old.chunks)} chunks on one and {len(new.chunks)} on another"
    a, b = next((a, b) for a, b in zip(old.chunks, new.chunks, strict=True) if a != b)  # else they were equal
    return f"chunk {a.number} is {a} on one and {b} on another"
