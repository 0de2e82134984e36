"""Tables and chunks of a server, and the one place where an update changes them.

An `Update` is the same on a primary and on its replicas: arrays that were
summed already, and their factor. Nothing here knows of views, deduplication
or senders.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.embedding.row_table import RowTable
from shoal.errors import ConfigError, ShoalError
from shoal.ps.kernels import add_digests, add_rows, add_squares, first_wrong_key, slot_of
from shoal.ps.layout import num_elements, torch_dtype
from shoal.ps.server.actions import Frame
from shoal.ps.server.applied_seqs import Slots, no_slots
from shoal.ps.server.dense import DenseStore, as_flat
from shoal.runtime.transport.messages.client_server import ChunkSpec, DeclareDense, Settings, TableSpec

_INT64 = np.iinfo(np.int64)


class ServerTable(RowTable):
    """A table as a server has it.

    One sum may be under way: `accumulate` once per rank, in rank order, then
    `take_sum`. The first contribution is kept by reference until a second
    comes: its memory must stay as it is until `take_sum` or `drop_sum`, and
    with a single rank until what `take_sum` gave is done with.
    """

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        self._sum: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None

    def check_keys(self, keys: np.ndarray[Any, Any]) -> None:
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

    def accumulate(self, keys: np.ndarray[Any, Any], grads: np.ndarray[Any, Any]) -> None:
        """Add one rank's contribution to the sum under way."""
        if self._sum is None:
            self._sum = keys, grads
            return
        before_keys, before = self._sum
        size = len(before_keys) + len(keys)
        all_keys, rows = np.empty(size, np.int64), np.empty((size, self.dim), self.dtype)
        num_keys = add_rows(before_keys, before, keys, grads, all_keys, rows)
        self._sum = all_keys[:num_keys], rows[:num_keys]

    def sum_of_squares(self, out: np.ndarray[Any, Any]) -> None:
        """Add the squares of the sum under way to `out` (float64, one per slot)."""
        if self._sum is not None:
            keys, rows = self._sum
            add_squares(slot_of(self.spec.number, keys), rows, out)

    def take_sum(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Keys, strictly increasing, and rows of the sum under way, which ends; nothing where nobody contributed."""
        taken = self._sum
        self._sum = None
        return taken or (np.empty(0, np.int64), np.empty((0, self.dim), self.dtype))

    def drop_sum(self) -> None:
        """Forget the sum under way."""
        self._sum = None

    # ---- by slot ----

    def read(self, slot: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Keys in increasing order, values and state of a slot: copies."""
        return self.read_rows(np.flatnonzero(self._slots() == slot))

    def drop_slots(self, mask: np.ndarray[Any, Any]) -> None:
        """Drop all rows of the slots for which `mask` (256 bools) is true, and give their memory back."""
        self.drop_rows(np.asarray(mask, bool)[self._slots()])

    def digest(self, slot: int) -> int:
        """A hash of a slot's keys, values and state: equal on every holder of equal rows."""
        return int(self.digests()[slot])

    def digests(self) -> np.ndarray[Any, Any]:
        """The same of all slots (uint64), in one pass."""
        out = np.zeros(NUM_SLOTS, np.uint64)
        words = self._table.array[: self.num_rows].view(np.uint32 if self.dtype.itemsize == 4 else np.uint64)
        add_digests(self._slots(), self._index.keys.array[: self.num_rows], words, out)
        return out

    def _slots(self) -> np.ndarray[Any, Any]:
        return slot_of(self.spec.number, self._index.keys.array[: self.num_rows])


Keys = npt.NDArray[np.int64]
Values = npt.NDArray[np.floating]
Vector = npt.NDArray[np.float64]


class Refusal(Exception):
    """Not an error of this process: what was asked of it cannot be. It is answered PsRefused, with what was expected."""


@dataclass(slots=True)
class Update:
    """One change of rows and chunks, ready to be applied."""

    slots: Slots
    """Slots in which it counts, whether or not anything of it lies there."""

    rows: dict[int, tuple[Keys, Values]] = field(default_factory=dict)
    """By table: keys and the gradients of their rows."""

    dense: dict[int, tuple[Tensor, tuple[int, ...]]] = field(default_factory=dict)
    """By chunk: its gradient, and the parts without one."""

    factor: float = 1.0
    """Factor of all gradients."""

    step: int = 0
    """Number of updates before it."""

    settings: list[Settings] = field(default_factory=list)
    """Of the optimizer's groups; empty: as they were declared. They are not remembered: an update says what it needs."""

    table_settings: dict[int, dict[str, float]] = field(default_factory=dict)
    """Of tables; of those that are not among them, as they were declared."""

    model: int = 0
    """Whose settings they are."""


class Contents:
    """Tables and chunks of all slots of one server."""

    def __init__(self) -> None:
        self.tables: dict[int, ServerTable] = {}
        self.dense = DenseStore()
        self.declared_dense: dict[int, DeclareDense] = {}
        self.chunks: dict[int, ChunkSpec] = {}
        self._groups: dict[int, list[Settings]] = {}  # by model, as they were declared
        self._of_tables: dict[int, dict[str, float]] = {}  # settings that came with a table's last update
        self._model_of_chunk: dict[int, int] = {}
        self.held: Slots = no_slots()

    # ---- what there is --------------------------------------------------------------------------

    def declare_table(self, spec: TableSpec) -> bool:
        """There is this table; whether that is news."""
        known = self.tables.get(spec.number)
        if known is None:
            self.tables[spec.number] = ServerTable(spec)
            return True
        if known.spec != spec:
            raise Refusal(f"table {spec.number} was declared as {known.spec}, now as {spec}")
        return False

    def declare_dense(self, message: DeclareDense) -> bool:
        """These are the dense parameters of a model; whether that is news."""
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
        try:
            self.dense.declare(kept, message.optimizer, message.groups)
        except ShoalError as error:
            raise Refusal(str(error)) from None
        self.declared_dense[message.model] = message
        self.chunks |= {chunk.number: chunk for chunk in message.chunks}
        self._model_of_chunk |= dict.fromkeys((chunk.number for chunk in message.chunks), message.model)
        self._groups[message.model] = [dict(group) for group in message.groups]
        return True

    def hold(self, slots: Slots) -> None:
        """These slots are held from now on, and no others."""
        dropped = self.held & ~slots
        if dropped.any():
            self.empty(dropped)
        self.held = slots.copy()
        for number, chunk in self.chunks.items():
            if not slots[chunk.slot]:
                self.dense.drop(number)
        for declared in self.declared_dense.values():
            kept = [chunk for chunk in declared.chunks if slots[chunk.slot]]
            self.dense.declare(kept, declared.optimizer, declared.groups)

    def empty(self, slots: Slots) -> None:
        """Forget the rows of these slots."""
        for table in self.tables.values():
            table.drop_slots(slots)

    def table(self, number: int) -> ServerTable:
        """The table of this number."""
        if number not in self.tables:
            raise Refusal(
                f"table {number} was never declared here; there are {sorted(self.tables) or 'none'}"
            )
        return self.tables[number]

    def chunk(self, number: int) -> ChunkSpec:
        """The chunk of this number."""
        if number not in self.chunks:
            raise Refusal(
                f"chunk {number} was never declared here; there are {len(self.chunks)}, counted from 0"
            )
        return self.chunks[number]

    def chunks_of(self, slots: Slots) -> list[int]:
        """The chunks that lie in these slots, in order."""
        return [number for number in sorted(self.chunks) if slots[self.chunks[number].slot]]

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

    def values(self, table: ServerTable, frame: Frame, num_rows: int) -> Values:
        """One row of values per key, as they lie in a frame."""
        values = as_array(frame, table.spec.dtype, "values")
        if len(values) != num_rows * table.spec.dim:
            raise Refusal(
                f"table {table.spec.number} has rows of {table.spec.dim} {table.spec.dtype}: {num_rows} keys need "
                f"{num_rows * table.spec.dim} values, got {len(values)}"
            )
        return values.reshape(num_rows, table.spec.dim)

    def gradient(self, chunk: ChunkSpec, frame: Frame) -> Tensor:
        """The elements of a chunk, as they lie in a frame."""
        expected = chunk_bytes(chunk)
        if memoryview(frame).nbytes != expected:
            raise Refusal(
                f"chunk {chunk.number} has {expected} bytes of {chunk.dtype}, got {memoryview(frame).nbytes}"
            )
        return as_flat(frame, torch_dtype(chunk.dtype))

    # ---- change ---------------------------------------------------------------------------------

    def check_settings(
        self, model: int, settings: list[Settings], table_settings: dict[int, dict[str, float]]
    ) -> None:
        """Refuse hyper-parameters of groups, tables or rules that there are not."""
        num_groups = len(self._groups.get(model, []))
        if settings and len(settings) != num_groups:
            raise Refusal(f"the optimizer has {num_groups} groups here, got settings of {len(settings)}")
        for number, given in table_settings.items():
            table = self.table(number)
            if given != self._of_tables.get(number):
                table.rule.complete(given)

    def apply(self, update: Update) -> None:
        """Change rows and chunks; the same arrays give the same bits wherever they are applied."""
        for number in sorted(update.rows):
            table = self.tables[number]
            keys, values = update.rows[number]
            self._have_settings(table, update.table_settings.get(number, {}))
            table.step = update.step
            table.apply(keys, values, update.factor)
        settings = self._groups.get(update.model, [])
        if update.settings:
            settings = [{**old, **new} for old, new in zip(settings, update.settings, strict=True)]
        for number in sorted(update.dense):
            gradient, unused = update.dense[number]
            self.dense.update(number, gradient, unused, settings, factor=update.factor)

    def _have_settings(self, table: ServerTable, given: dict[str, float]) -> None:
        if given != self._of_tables.get(table.spec.number, {}):
            table.settings = {**table.rule.complete(table.spec.settings), **given}
            self._of_tables[table.spec.number] = given

    def squares(self, update: Update, out: Vector) -> None:
        """Add the sums of squares of an update's chunks, by slot."""
        for number in sorted(update.dense):
            out[self.chunks[number].slot] += self.dense.sum_of_squares(number, update.dense[number][0])

    def digests(self) -> list[int]:
        """By slot: a number that two servers share when they hold the same in it."""
        digests = [0] * NUM_SLOTS
        for number in sorted(self.tables):
            for slot, digest in enumerate(self.tables[number].digests().tolist()):
                digests[slot] = (digests[slot] * 1_000_003 + digest) % 2**64
        for number, chunk in sorted(self.chunks.items()):
            if number in self.dense:
                digests[chunk.slot] = (digests[chunk.slot] * 1_000_003 + self.dense.digest(number)) % 2**64
        return digests


def restrict(update: Update, slots: Slots, chunks: dict[int, ChunkSpec]) -> Update:
    """The part of an update in these slots."""
    if not (update.slots & ~slots).any():
        return update
    rows = {}
    for number, (keys, values) in update.rows.items():
        inside = slots[slot_of(number, keys)]
        rows[number] = (keys, values) if inside.all() else (keys[inside], values[inside])
    dense = {number: each for number, each in update.dense.items() if slots[chunks[number].slot]}
    return replace(update, slots=update.slots & slots, rows=rows, dense=dense)


def chunk_bytes(chunk: ChunkSpec) -> int:
    """Bytes of a chunk's elements."""
    return sum(map(num_elements, chunk.parts)) * torch_dtype(chunk.dtype).itemsize


def as_array(frame: Frame, dtype: npt.DTypeLike, what: str) -> np.ndarray[Any, Any]:
    """A frame as numbers, where it lies."""
    size = np.dtype(dtype).itemsize
    num_bytes = memoryview(frame).nbytes
    if num_bytes % size:
        raise Refusal(f"{what} are {np.dtype(dtype).name}, {size} bytes each; got {num_bytes} bytes")
    return np.frombuffer(frame, dtype=dtype) if num_bytes else np.zeros(0, dtype)


def bytes_of(array: np.ndarray[Any, Any] | Tensor) -> memoryview:
    """An array or tensor as a frame, where it lies."""
    if isinstance(array, Tensor):
        array = array.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return (
        memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        if array.nbytes
        else memoryview(b"")
    )


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
