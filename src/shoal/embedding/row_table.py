"""The rows of one table in one process: found by key, values and optimizer state side by side, changed by a rule.

Single-threaded. Independent of servers, slots and ranks: ps/server/contents.py adds those. An
unwritten row has values that are a function of (seed, key). Row numbers are dense: the keys of rows
0..n-1 are the first n of `keys`, and a new row gets number n.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from shoal.embedding.growing_array import GrowingArray
from shoal.embedding.kernels import NUM_SLOTS, slot_of
from shoal.embedding.row_statistics import RowStatistics, as_admitted, num_columns
from shoal.embedding.rules import rule_named
from shoal.embedding.shared_rows import RowMemory, shared_memory_for
from shoal.embedding.tiered_rows import RowBudget, TieredRows
from shoal.errors import ConfigError
from shoal.runtime.kernel_cache import (
    INT,
    ask_ahead,
    ask_for,
    floating_kernel,
    inlined,
    kernel,
    matrix,
    mixed,
    types,
    vector,
)
from shoal.runtime.row_kernels import put, take
from shoal.runtime.seeds import mix
from shoal.runtime.transport.messages.client_server import TableSpec

Array: TypeAlias = np.ndarray[Any, Any]

_KEYS = vector(types.int64)
_ROWS = vector(types.int32, written=True)
_MAX_ROWS = 2**31 - 2


class ArrayIndex:
    """Rows of ids below `limit`: an int32 per id, 1 + its row.

    `find` writes -1 for keys without a row and returns how many those are;
    `add` gives them a row. A key out of range has none and cannot get one.
    """

    def __init__(self, limit: int, row_of: Array | None = None) -> None:
        """`row_of` is memory for it: zeros."""
        self.keys = GrowingArray((), np.int64, limit)
        self.num_rows = 0
        self._row_of = GrowingArray((), np.int32, limit).array[:limit] if row_of is None else row_of
        self._limit = limit

    def find(self, keys: Array, rows: Array) -> int:
        return find_in_array(keys, self._row_of, rows)

    def add(self, keys: Array, rows: Array, num_new: int) -> None:
        self.num_rows = _add_to_array(keys, self._row_of, rows, self.keys.array, self.num_rows)

    def rebuild(self, dropped: Array, num_rows: int) -> None:
        self._row_of[dropped] = 0
        self._row_of[self.keys.array[:num_rows]] = np.arange(1, num_rows + 1, dtype=np.int32)
        self.num_rows = num_rows
        self.keys.shrink(num_rows)

    @property
    def num_bytes(self) -> int:
        return self._limit * 4 + self.num_rows * 8


class HashedIndex:
    """Any int64: entries of 4 bytes, 1 + the row in the low bits and a piece of the key's hash above it.

    The piece avoids reading the keys, so a table may be as full as 92 % and a lookup still touches
    one line of entries and one of keys.
    """

    def __init__(self, row_bytes: int) -> None:
        self.keys = GrowingArray((), np.int64)
        self.num_rows = 0
        # An index of a tenth of its rows: 8 bytes are the key's, so these are left for its entry.
        left = 0.1 * row_bytes - 8
        is_tight = left > 0 and 4 / left > 0.35
        self._load_after_growth, self._max_load = (min(0.835, 4 / left), 0.92) if is_tight else (0.35, 0.7)
        self._entries = np.zeros(64, np.uint32)
        self._row_bits = 6

    def find(self, keys: Array, rows: Array) -> int:
        return _find_hashed(keys, self._entries, self._row_bits, self.keys.array, rows)

    def add(self, keys: Array, rows: Array, num_new: int) -> None:
        wanted = self.num_rows + num_new
        assert wanted < _MAX_ROWS
        self.keys.reserve(wanted)
        if wanted > self._max_load * len(self._entries):
            self._rehash(wanted)
        self.num_rows = _add_hashed(keys, self._entries, self._row_bits, rows, self.keys.array, self.num_rows)

    def rebuild(self, dropped: Array, num_rows: int) -> None:
        self.num_rows = num_rows
        self.keys.shrink(num_rows)
        self._rehash(num_rows)

    def _rehash(self, num_wanted: int) -> None:
        size = max(64, int(num_wanted / self._load_after_growth) + 1)
        self._row_bits = size.bit_length()
        self._entries = np.zeros(size, np.uint32)
        _enter_all(self.keys.array, self.num_rows, self._entries, self._row_bits)

    @property
    def num_bytes(self) -> int:
        return self._entries.nbytes + self.num_rows * 8


_SOON = 24  # keys ahead, whose entries are asked for


@kernel((_KEYS, vector(types.int32), _ROWS))
def find_in_array(keys: Any, row_of: Any, rows: Any) -> int:
    limit, num_missing = len(row_of), 0
    for i in range(len(keys)):
        if i + _SOON < len(keys):
            ask_for(row_of, keys[i + _SOON])
        key = keys[i]
        row = -1
        if 0 <= key < limit:
            row = row_of[key] - 1
        rows[i] = row
        num_missing += row < 0
    return num_missing


@kernel((_KEYS, vector(types.int32, written=True), _ROWS, vector(types.int64, written=True), INT))
def _add_to_array(keys: Any, row_of: Any, rows: Any, row_keys: Any, num_rows: int) -> int:
    for i in range(len(keys)):
        key = keys[i]
        if rows[i] < 0 and 0 <= key < len(row_of):
            if row_of[key] == 0:
                row_keys[num_rows] = key
                num_rows += 1
                row_of[key] = num_rows
            rows[i] = row_of[key] - 1
    return num_rows


_TOGETHER = 64


@inlined
def _hash(key: int) -> Any:
    return mixed(np.uint64(key) + np.uint64(0x632BE59BD9B4E019))


@inlined
def _home(hashed: Any, size: Any) -> Any:
    return ((hashed >> np.uint64(32)) * size) >> np.uint64(32)


@kernel((_KEYS, vector(types.uint32), INT, _KEYS, _ROWS))
def _find_hashed(keys: Any, entries: Any, row_bits: int, row_keys: Any, rows: Any) -> int:
    # A few keys at a time, in three passes, so that each pass finds in the cache what the previous one
    # prefetched: the entries, then the key of the first entry with the right piece, then whether it is the
    # key.
    size, num_missing = np.uint64(len(entries)), 0
    row_mask = np.uint32((1 << row_bits) - 1)
    hashes, places = np.empty(_TOGETHER, np.uint64), np.empty(_TOGETHER, np.uint64)
    for start in range(0, len(keys), _TOGETHER):
        count = min(_TOGETHER, len(keys) - start)
        for i in range(count):
            hashes[i] = _hash(keys[start + i])
            ask_for(entries, _home(hashes[i], size))
        for i in range(count):
            at, entry = _match(entries, size, row_mask, np.uint32(hashes[i]), _home(hashes[i], size))
            places[i] = at
            ask_for(row_keys, entry & row_mask)
        for i in range(count):
            key, at = keys[start + i], places[i]
            row = np.int64(entries[at] & row_mask) - 1
            while row >= 0 and row_keys[row] != key:
                at += np.uint64(1)
                at, entry = _match(
                    entries, size, row_mask, np.uint32(hashes[i]), at if at < size else np.uint64(0)
                )
                row = np.int64(entry & row_mask) - 1
            rows[start + i] = row
            if row < 0:
                num_missing += 1
    return num_missing


@inlined
def _match(entries: Any, size: Any, row_mask: Any, hashed: Any, at: Any) -> Any:
    """The first place from `at` on that is empty or has the right piece of hash, and what is there."""
    piece = hashed & ~row_mask
    entry = entries[at]
    while entry != 0 and (entry & ~row_mask) != piece:
        at += np.uint64(1)
        if at == size:
            at = np.uint64(0)
        entry = entries[at]
    return at, entry


@kernel((_KEYS, vector(types.uint32, written=True), INT, _ROWS, vector(types.int64, written=True), INT))
def _add_hashed(keys: Any, entries: Any, row_bits: int, rows: Any, row_keys: Any, num_rows: int) -> int:
    size = np.uint64(len(entries))
    row_mask = np.uint32((1 << row_bits) - 1)
    for i in range(len(keys)):
        if i + _SOON < len(keys):
            ask_for(entries, _home(_hash(keys[i + _SOON]), size))
        if rows[i] >= 0:
            continue
        key = keys[i]
        hashed = _hash(key)
        piece = np.uint32(hashed) & ~row_mask
        at = _home(hashed, size)
        while True:
            entry = entries[at]
            if entry == 0:
                row_keys[num_rows] = key
                num_rows += 1
                entries[at] = piece | np.uint32(num_rows)
                rows[i] = num_rows - 1
                break
            if (entry & ~row_mask) == piece and row_keys[np.int64(entry & row_mask) - 1] == key:
                rows[i] = np.int64(entry & row_mask) - 1
                break
            at += np.uint64(1)
            if at == size:
                at = np.uint64(0)
    return num_rows


@kernel((_KEYS, INT, vector(types.uint32, written=True), INT))
def _enter_all(row_keys: Any, num_rows: int, entries: Any, row_bits: int) -> None:
    size = np.uint64(len(entries))
    row_mask = np.uint32((1 << row_bits) - 1)
    for row in range(num_rows):
        if row + _SOON < num_rows:
            ask_for(entries, _home(_hash(row_keys[row + _SOON]), size))
        hashed = _hash(row_keys[row])
        at = _home(hashed, size)
        while entries[at] != 0:
            at += np.uint64(1)
            if at == size:
                at = np.uint64(0)
        entries[at] = (np.uint32(hashed) & ~row_mask) | np.uint32(row + 1)


_BLOCK = 16384
_INITS = {"zeros": 0, "normal": 1, "uniform": 2}


def first_values_of(spec: TableSpec) -> tuple[int, float, int]:
    """The last arguments of `gather`: with the key they give the values of a row that was never written."""
    return _INITS[spec.init], spec.scale, mix(spec.seed)


class RowsInMemory(GrowingArray):
    """Values and state of all rows, each at its number. `TieredRows` does the same over RAM and disk."""

    block = _BLOCK

    def places(self, rows: Array, *, is_written: bool, first_new: int | None = None) -> Array:
        return rows

    def read(self, rows: Array) -> Array:
        out, places = np.empty((len(rows), self.array.shape[1]), self.array.dtype), rows.astype(np.int32)
        take(self.array, places, out)
        return out

    def move(self, holes: Array, moved: Array, num_left: int) -> None:
        for start in range(0, len(holes), _BLOCK):
            part = slice(start, start + _BLOCK)
            self.array[holes[part]] = self.array[moved[part]]
        self.shrink(num_left)


class SharedRows(RowsInMemory):
    """The same in memory that other processes read."""

    def __init__(self, memory: RowMemory) -> None:
        self.array = memory.views.rows
        self.row_bytes = self.array.strides[0]
        self._shared = memory

    def reserve(self, num_rows: int) -> None:
        pass  # there is room for as many as there can be

    def shrink(self, num_rows: int) -> None:
        self._shared.give_back(num_rows)


class Candidates:
    """Ids that were seen less often than `admit_after`: an index and their statistics, no rows.

    An admitted one stays with 0 sightings until there are enough of them to rebuild the index.
    """

    def __init__(self, statistics: RowStatistics) -> None:
        self.index, self.statistics = HashedIndex(0), statistics
        self.stamps = GrowingArray((), np.uint32)
        self._num_gone = 0

    @property
    def keys(self) -> Array:
        return self.index.keys.array[: self.index.num_rows]

    def find(self, keys: Array) -> Array:
        """Their places, -1 for those that are not here."""
        places = np.empty(len(keys), np.int32)
        self.index.find(keys, places)
        places[(places >= 0) & (self.statistics.sightings(places) == 0)] = -1
        return places

    def add(self, keys: Array, clock: int) -> Array:
        places = np.empty(len(keys), np.int32)
        num_missing = self.index.find(keys, places)
        if num_missing:
            wanted = self.index.num_rows + num_missing
            self.statistics.reserve(wanted)
            self.stamps.reserve(wanted)
            self.index.add(keys, places, num_missing)
        self.stamps.array[places] = clock
        return places

    def remove(self, keys: Array) -> None:
        places = self.find(keys)
        there = places[places >= 0]
        self.statistics.forget(there)
        self._num_gone += len(there)
        if self._num_gone > max(1024, self.index.num_rows // 2):
            self.tidy()

    def tidy(self) -> None:
        """Remove what stayed behind."""
        if self._num_gone:
            self.drop(np.zeros(self.index.num_rows, np.bool_))

    def alive(self) -> Array:
        return np.flatnonzero(self.statistics.sightings(np.arange(self.index.num_rows)))

    def drop(self, is_dropped: Array) -> Array:
        """Drop these, and what stayed behind; the keys of those that were still counted."""
        is_counted = self.statistics.sightings(np.arange(self.index.num_rows)) > 0
        keys = self.keys
        dropped = keys[is_dropped & is_counted]
        is_left = is_counted & ~is_dropped
        num_left = int(np.count_nonzero(is_left))
        gone = keys[~is_left]
        holes = np.flatnonzero(~is_left[:num_left])
        moved = num_left + np.flatnonzero(is_left[num_left:])
        keys[holes] = keys[moved]
        self.stamps.array[holes] = self.stamps.array[moved]
        self.stamps.shrink(num_left)
        self.statistics.move(holes, moved, num_left)
        self.index.rebuild(gone, num_left)
        self._num_gone = 0
        return dropped


class _BySlot:
    """Rows in the order of their slots."""

    def __init__(self, rows: Array, slots: Array) -> None:
        self._rows = rows[np.argsort(slots, kind="stable")]
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(slots, minlength=NUM_SLOTS))])

    def of(self, slot: int) -> Array:
        return self._rows[self._starts[slot] : self._starts[slot + 1]]


class RowTable:
    """Rows by key. What is read or written comes as C-contiguous arrays of the table's dtype, keys strictly increasing.

    Rows are numbered 0..n-1 without holes, so every pass over the table is
    a pass over the beginning of an array. With a `budget` not all of them are
    in memory.
    """

    def __init__(self, spec: TableSpec, budget: RowBudget | None = None, *, is_shared: bool = False) -> None:
        """With `is_shared` other processes can read its rows, if their number is known and the system can."""
        self.spec, self.dim, self.dtype = spec, spec.dim, np.dtype(spec.dtype)
        if spec.dim < 1 or spec.num_rows == 0:
            raise ConfigError(
                f"table '{spec.name}' has {spec.dim} numbers per row and {spec.num_rows} rows; both must be at least 1. "
                "Nothing was declared."
            )
        self.rule = rule_named(spec.rule)
        self._settings = self.rule.complete(spec.settings)
        self.step = 0
        self.policy = spec.policy
        self.rule_dim = self.rule.state_dim(spec.dim)
        self.state_dim = self.rule_dim + num_columns(spec.policy)
        self._first_state = self._settings[self.rule.first_state] if self.rule.first_state else 0.0
        self._init = first_values_of(spec)
        width = self.dim + self.rule_dim
        self.shared: RowMemory | None = None
        if is_shared and spec.num_rows is not None and budget is None and spec.policy is None:
            self.shared = shared_memory_for(spec.num_rows, width, self.dtype)
        self._table: RowsInMemory | TieredRows
        if self.shared is not None:
            self._table = SharedRows(self.shared)
        elif budget is None:
            self._table = RowsInMemory((width,), self.dtype, spec.num_rows)
        else:
            self._table = TieredRows(width, self.dtype, spec.num_rows, budget)
        self._block = self._table.block
        row_of = None if self.shared is None else self.shared.views.row_of
        self._index = (
            HashedIndex(self._table.row_bytes) if spec.num_rows is None else ArrayIndex(spec.num_rows, row_of)
        )
        self._rows = np.empty(self._block, np.int32)
        self._new_state = np.empty((0, self.rule_dim), self.dtype)
        self._stamps: GrowingArray | None = None
        self._clock = 0  # blocks of rows that were written since stamps are kept
        self.tracker = ""  # name of these stamps: another process has others
        self._sorted: tuple[_BySlot, _BySlot] | None = None  # as long as there are the same rows
        self._dropped: list[tuple[int, Array]] = []  # keys of rows that went, and the clock at which
        self.statistics: RowStatistics | None = None
        self.candidates: Candidates | None = None
        self.evicted = np.zeros(NUM_SLOTS, np.int64)  # rows that sweeps dropped, by slot
        self.now_s: Callable[[], float] = time.time
        if spec.policy is not None:
            self.statistics = RowStatistics(spec.policy, spec.number, spec.num_rows)
            self.candidates = Candidates(RowStatistics(spec.policy, spec.number))

    def begin_change(self) -> None:
        """Rows change at a moment that readers of its memory do not know of: not by `apply`."""
        if self.shared is not None:
            self.shared.begin_change()

    # ---- rows that changed ----

    def track(self) -> int:
        """Stamp rows that change from now on, 4 bytes each; the newest stamp there is."""
        if self._stamps is None:
            self._stamps, self.tracker = GrowingArray((), np.uint32, self.spec.num_rows), secrets.token_hex(8)
            self._stamps.reserve(self.num_rows)
        return self._clock

    def stamps(self, rows: Array) -> Array:
        assert self._stamps is not None
        return self._stamps.array[rows]

    @property
    def settings(self) -> dict[str, float]:
        """The rule's hyper-parameters; what is assigned may be a part of them."""
        return self._settings

    @settings.setter
    def settings(self, settings: dict[str, float]) -> None:
        self._settings = self.rule.complete({**self._settings, **settings})

    @property
    def num_rows(self) -> int:
        return self._index.num_rows

    @property
    def num_evicted(self) -> int:
        return int(self.evicted.sum())

    @property
    def num_counted(self) -> int:
        """Ids that were seen and have no row yet."""
        return len(self.candidates.alive()) if self.candidates is not None else 0

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self._table.row_bytes

    @property
    def num_index_bytes(self) -> int:
        return self._index.num_bytes

    def expect(self, keys: Array, num_pushes: int) -> None:
        """Reserve room for this many similar pushes; TablesFull, with nothing changed, if the disk has none."""
        if not isinstance(self._table, TieredRows):
            return
        num_new = num_pushes * sum(
            self._index.find(block, self._rows[: len(block)])
            for block in (keys[first : first + self._block] for first in range(0, len(keys), self._block))
        )
        most = self.spec.num_rows
        self._table.expect(num_new if most is None else min(num_new, most - self.num_rows))

    def pull(self, keys: Array, out: Array) -> None:
        """Write the values of `keys` to `out`, also of rows that are not there yet."""
        for start in range(0, len(keys), self._block):
            block = keys[start : start + self._block]
            rows = self._rows[: len(block)]
            self._index.find(block, rows)
            places = self._table.places(rows, is_written=False)
            gather(places, block, self._table.array, out[start : start + self._block], *self._init)

    def apply(self, keys: Array, grads: Array, factor: float = 1.0) -> None:
        """One update of the table: the rule, with gradients times `factor`. Counts also where no key is given."""
        self.step += 1
        sightings = np.empty(0, np.int64)
        if self.policy is not None:
            keys, grads, sightings = self._admit(keys, grads)
        numbers = np.array(self.rule.numbers(self._settings, self.step), self.dtype)
        for start in range(0, len(keys), self._block):
            block = slice(start, start + self._block)
            places = self._places_of(keys[block])
            self.rule.kernel(places, grads[block], self._table.array, factor, numbers)
            if self.statistics is not None:
                rows = self._rows[: len(places)]
                self.statistics.sighted(rows, keys[block], sightings[block], self.step, self.now_s())

    def _admit(self, keys: Array, grads: Array) -> tuple[Array, Array, Array]:
        """Count a sighting of these keys; returns those with a row, their gradients, and how often each was seen."""
        assert self.policy is not None
        assert self.statistics is not None
        assert self.candidates is not None
        self._sorted = None
        rows = np.empty(len(keys), np.int32)
        num_missing = self._index.find(keys, rows)
        seen = np.where(rows >= 0, self.statistics.sightings(rows), 0) + 1
        if not num_missing or self.policy.admit_after == 1:
            return keys, grads, seen
        is_new = rows < 0
        new = keys[is_new]
        places = self.candidates.find(new)
        seen[is_new] += np.where(places >= 0, self.candidates.statistics.sightings(places), 0)
        is_admitted = ~is_new | (seen >= self.policy.admit_after)
        waiting = keys[~is_admitted]
        if len(waiting):
            places = self.candidates.add(waiting, self._tick())
            self.candidates.statistics.sighted(places, waiting, seen[~is_admitted], self.step, self.now_s())
        self.candidates.remove(keys[is_new & is_admitted])
        return keys[is_admitted], np.ascontiguousarray(grads[is_admitted]), seen[is_admitted]

    def sweep(self, slots: Array | None = None) -> Array:
        """Evict rows by the policy, if this update is due for a sweep; returns the evicted keys.

        `slots`: a bool per slot in which the update counts.
        """
        gone = np.empty(0, np.int64)
        if self.policy is None or self.step % self.policy.sweep_every:
            return gone
        assert self.statistics is not None
        assert self.candidates is not None
        now: dict[str, Any] = {"step": self.step, "now_s": self.now_s()}
        keys = self._index.keys.array[: self.num_rows]
        is_over = self.statistics.to_drop(keys, slots, **now)
        gone = keys[is_over]
        np.add.at(self.evicted, self._slots()[is_over], 1)
        self.drop_rows(is_over)
        self._sorted = None
        self.candidates.tidy()
        is_over = self.candidates.statistics.to_drop(self.candidates.keys, slots, **now)
        if is_over.any():
            gone = np.concatenate([gone, self.candidates.drop(is_over)])
        self._note_dropped(gone)
        return np.sort(gone)

    def _note_dropped(self, keys: Array) -> None:
        if self._stamps is None or not len(keys):
            return
        self._dropped.append((self._tick(), keys))
        if sum(len(each) for _, each in self._dropped) > 1024 + self.num_rows:
            self._rename_stamps()

    def dropped_since(self, clock: int) -> Array:
        """Keys of rows that went after that stamp and did not come back, in increasing order."""
        later = [np.empty(0, np.int64), *(keys for at, keys in self._dropped if at > clock)]
        keys = np.unique(np.concatenate(later))
        rows = np.empty(len(keys), np.int32)
        self._index.find(keys, rows)
        is_back = rows >= 0
        if self.candidates is not None:
            is_back |= self.candidates.find(keys) >= 0
        return keys[~is_back]

    def set(self, keys: Array, values: Array, state: Array | None, step: int) -> None:
        """Set rows, and how many updates there were. Without `state` they have that of new rows.

        Where there is a policy, `state` has statistics in its last columns: rows that are not admitted are only
        counted, and rows with 0 sightings go.
        """
        self.step = step
        self.begin_change()
        columns = None
        if self.policy is not None:
            keys, values, state, columns = self._admitted(keys, values, state)
        for start in range(0, len(keys), self._block):
            places = self._places_of(keys[start : start + self._block])
            some = values[start : start + self._block]
            with_state = self._new_state if state is None else state[start : start + self._block]
            _scatter(places, some, with_state, self._table.array, self._first_state)
            if self.statistics is not None and columns is not None:
                block = slice(start, start + len(some))
                self.statistics.set(self._rows[: len(some)], keys[block], columns[block])

    def _admitted(
        self, keys: Array, values: Array, state: Array | None
    ) -> tuple[Array, Array, Array | None, Array]:
        """The admitted among these rows: keys, values, the rule's state, statistics. The others are only counted, or go."""
        self._sorted = None
        assert self.policy is not None
        assert self.statistics is not None
        assert self.candidates is not None
        if state is None:
            columns = as_admitted(self.policy, len(keys), self.step, self.now_s(), self.dtype)
        else:
            state, columns = state[:, : self.rule_dim], state[:, self.rule_dim :]
        is_admitted = columns[:, 0] >= self.policy.admit_after
        others = keys[~is_admitted]
        if len(others):
            rows = np.empty(len(others), np.int32)
            self._index.find(others, rows)
            is_dropped = np.zeros(self.num_rows, np.bool_)
            is_dropped[rows[rows >= 0]] = True
            np.add.at(self.evicted, self._slots()[is_dropped], 1)
            self.drop_rows(is_dropped)
            is_counted = ~is_admitted & (columns[:, 0] > 0)
            gone = keys[~is_admitted & ~is_counted]
            self.candidates.remove(gone)
            self._note_dropped(gone)
            places = self.candidates.add(keys[is_counted], self._tick())
            self.candidates.statistics.set(places, keys[is_counted], columns[is_counted])
            keys, values, columns = keys[is_admitted], values[is_admitted], columns[is_admitted]
            state = None if state is None else state[is_admitted]
        self.candidates.remove(keys)
        of_rule = None if state is None else np.ascontiguousarray(state)
        return keys, np.ascontiguousarray(values), of_rule, columns

    def read_rows(self, rows: Array) -> tuple[Array, Array, Array]:
        """Keys in increasing order, values and state of these rows by number: copies."""
        keys = self._index.keys.array[rows]
        order = np.argsort(keys)
        whole = self._table.read(rows[order])
        state = whole[:, self.dim :]
        if self.statistics is not None:
            state = np.concatenate([state, self.statistics.columns(rows[order], self.dtype)], axis=1)
        return keys[order], np.ascontiguousarray(whole[:, : self.dim]), np.ascontiguousarray(state)

    def read_all(self) -> tuple[Array, Array, Array]:
        """All rows as `read_rows` gives them, and ids that have none yet, with the values that they would have."""
        return self.read_since(None, None)

    def read_since(self, slot: int | None, stamp: int | None) -> tuple[Array, Array, Array]:
        """The same of one slot, of what changed after this stamp; rows that went have 0 sightings."""
        rows = np.arange(self.num_rows) if slot is None else self._by_slot()[0].of(slot)
        if stamp is not None:
            rows = rows[self.stamps(rows) > stamp]
        if self.candidates is None:
            return self.read_rows(rows)
        counted = self.candidates.alive() if slot is None else self._by_slot()[1].of(slot)
        if stamp is not None:
            counted = counted[self.candidates.stamps.array[counted] > stamp]
        keys = [self._index.keys.array[rows], self.candidates.keys[counted]]
        if stamp is not None:
            gone = self.dropped_since(stamp)
            keys.append(gone if slot is None else gone[slot_of(self.spec.number, gone) == slot])
        every = np.sort(np.concatenate(keys))
        whole = self.read_whole(every)
        return every, np.ascontiguousarray(whole[:, : self.dim]), np.ascontiguousarray(whole[:, self.dim :])

    def num_rows_of(self, slot: int) -> int:
        """Rows of a slot, and ids that are counted there."""
        return sum(len(each.of(slot)) for each in self._by_slot())

    def _by_slot(self) -> tuple[_BySlot, _BySlot]:
        """Rows, and ids that are counted. Cached until they change: a reader of all slots asks 256 times."""
        if self._sorted is None:
            counted = np.empty(0, np.int32)
            slots_of_counted = np.empty(0, np.uint8)
            if self.candidates is not None:
                counted = self.candidates.alive().astype(np.int32)
                slots_of_counted = self.candidates.statistics.slots(len(self.candidates.keys))[counted]
            rows = np.arange(self.num_rows, dtype=np.int32)
            self._sorted = _BySlot(rows, self._slots()), _BySlot(counted, slots_of_counted)
        return self._sorted

    def _slots(self) -> Array:
        if self.statistics is not None:
            return self.statistics.slots(self.num_rows)
        return slot_of(self.spec.number, self._index.keys.array[: self.num_rows])

    def read_whole(self, keys: Array) -> Array:
        """Values and state of these keys side by side: a copy. Without a policy all of them are there."""
        rows = np.empty(len(keys), np.int32)
        num_missing = self._index.find(keys, rows)
        if self.statistics is None:
            return self._table.read(rows)
        assert self.candidates is not None
        whole = np.empty((len(keys), self.dim + self.state_dim), self.dtype)
        width = self.dim + self.rule_dim
        if num_missing:
            is_new = rows < 0
            new = keys[is_new]
            values = np.empty((len(new), self.dim), self.dtype)
            self.pull(new, values)
            whole[is_new, : self.dim], whole[is_new, self.dim : width] = values, self._first_state
            places = self.candidates.find(new)
            columns = self.candidates.statistics.columns(np.maximum(places, 0), self.dtype)
            whole[is_new, width:] = np.where(places[:, None] >= 0, columns, 0)
        there = rows >= 0
        whole[there, :width] = self._table.read(rows[there])
        whole[there, width:] = self.statistics.columns(rows[there], self.dtype)
        return whole

    def pull_whole(self, keys: Array, out: Array) -> None:
        """Write values and state of `keys` to `out`, also of rows that are not there yet. Of tables without a policy."""
        for start in range(0, len(keys), self._block):
            block, some = keys[start : start + self._block], out[start : start + self._block]
            rows = self._rows[: len(block)]
            num_missing = self._index.find(block, rows)
            if not num_missing:
                some[:] = self._table.read(rows)
                continue
            is_new = rows < 0
            values = np.empty((num_missing, self.dim), self.dtype)
            self.pull(block[is_new], values)  # writes to self._rows
            some[is_new, : self.dim], some[is_new, self.dim :] = values, self._first_state
            self._index.find(block, rows)
            some[~is_new] = self._table.read(rows[~is_new])

    def set_whole(self, keys: Array, whole: Array) -> None:
        """Set rows as `read_whole` gave them."""
        if self.policy is not None:
            self.set(keys, whole[:, : self.dim], whole[:, self.dim :], self.step)
            return
        self.begin_change()
        for start in range(0, len(keys), self._block):
            places = self._places_of(keys[start : start + self._block])
            put(whole[start : start + self._block], places, self._table.array)

    def drop_rows(self, is_dropped: Array) -> None:
        """Drop rows by number (a bool per row). The last ones move to the holes, and what they held is given back."""
        num_left = len(is_dropped) - int(np.count_nonzero(is_dropped))
        if num_left == len(is_dropped):
            return
        self._sorted = None
        self.begin_change()
        keys = self._index.keys.array
        dropped = keys[: len(is_dropped)][is_dropped]
        holes = np.flatnonzero(is_dropped[:num_left])
        moved = num_left + np.flatnonzero(~is_dropped[num_left:])
        keys[holes] = keys[moved]
        if self._stamps is not None:
            self._stamps.array[holes] = self._stamps.array[moved]
            self._stamps.shrink(num_left)
        if self.statistics is not None:
            self.statistics.move(holes, moved, num_left)
        self._table.move(holes, moved, num_left)
        self._index.rebuild(dropped, num_left)

    def drop_slots(self, slots: Array) -> None:
        """Drop all rows of these slots (a bool per slot): another server has them."""
        self._sorted = None
        if self.policy is not None and self._stamps is not None:
            self._rename_stamps()  # if a slot comes back, rows deleted elsewhere meanwhile are unknown
        self.drop_rows(slots[self._slots()])
        if self.candidates is not None:
            self.candidates.drop(slots[self.candidates.statistics.slots(len(self.candidates.keys))])
        self.evicted[slots] = 0

    def _tick(self) -> int:
        """The next stamp; 0 where none are kept."""
        if self._stamps is None:
            return 0
        if self._clock == np.iinfo(np.uint32).max:
            self._rename_stamps()
        self._clock += 1
        return self._clock

    def _rename_stamps(self) -> None:
        """Stamps start anew under another name, so the next save reads all rows."""
        assert self._stamps is not None
        self._stamps.array[: self._index.num_rows] = 0
        if self.candidates is not None:
            self.candidates.stamps.array[: self.candidates.index.num_rows] = 0
        self._clock, self.tracker, self._dropped = 0, secrets.token_hex(8), []

    def _places_of(self, keys: Array) -> Array:
        """Places of these keys' rows in memory, for writing; missing rows are created."""
        rows = self._rows[: len(keys)]
        num_missing = self._index.find(keys, rows)
        first = self._index.num_rows
        if num_missing:
            self._table.reserve(first + num_missing)
            self._index.add(keys, rows, num_missing)
            self._sorted = None
            if self.statistics is not None:
                self.statistics.reserve(self._index.num_rows)
        if self._stamps is not None:
            self._stamps.reserve(self._index.num_rows)
            self._stamps.array[rows[rows >= 0]] = self._tick()
        places = self._table.places(rows, is_written=True, first_new=first)
        if num_missing:
            _begin(rows, first, keys, places, self._table.array, self.dim, self._first_state, *self._init)
            if rows.min() < 0:
                raise ConfigError(
                    f"table '{self.spec.name}' has {self.spec.num_rows} rows, but a key lies outside 0.."
                    f"{self.spec.num_rows}-1. Rows before it may be new, none was changed."
                )
        return places


# ---- initial values of rows ----------------------------------------------------------------------------


@inlined
def _first_values(out: Any, i: int, dim: int, key: int, init: int, scale: float, seed: int) -> None:
    if init == 0:
        for d in range(dim):
            out[i, d] = 0
        return
    golden = np.uint64(0x9E3779B97F4A7C15)
    word = mixed(np.uint64(key) * golden + np.uint64(seed))
    for d in range(0, dim, 2):
        word += golden
        first = (np.float64(mixed(word) >> np.uint64(11)) + 0.5) * (1.0 / 9007199254740992.0)
        word += golden
        second = (np.float64(mixed(word) >> np.uint64(11)) + 0.5) * (1.0 / 9007199254740992.0)
        if init == 1:  # two normals from two uniforms (Box and Muller)
            radius, angle = np.sqrt(-2.0 * np.log(first)), 2.0 * np.pi * second
            first, second = radius * np.cos(angle), radius * np.sin(angle)
        else:
            first, second = 2.0 * first - 1.0, 2.0 * second - 1.0
        out[i, d] = scale * first
        if d + 1 < dim:
            out[i, d + 1] = scale * second


@floating_kernel(
    lambda dtype: (
        vector(types.int32), INT, vector(types.int64), vector(types.int32), matrix(dtype, written=True),
        INT, types.float64, INT, types.float64, INT,
    )
)  # fmt: skip
def _begin(
    rows: Any,
    first: int,
    keys: Any,
    places: Any,
    table: Any,
    dim: int,
    first_state: float,
    init: int,
    scale: float,
    seed: int,
) -> None:
    """Write the first values and state of rows from number `first` on."""
    for i in range(len(rows)):
        if rows[i] >= first:
            _first_values(table, places[i], dim, keys[i], init, scale, seed)
            for d in range(dim, table.shape[1]):
                table[places[i], d] = first_state


@floating_kernel(
    lambda dtype: (
        vector(types.int32), vector(types.int64), matrix(dtype), matrix(dtype, written=True),
        INT, types.float64, INT,
    )
)  # fmt: skip
def gather(rows: Any, keys: Any, table: Any, out: Any, init: int, scale: float, seed: int) -> None:
    dim = out.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row = rows[i]
        if row < 0:
            _first_values(out, i, dim, keys[i], init, scale, seed)
        else:
            for d in range(dim):
                out[i, d] = table[row, d]


@floating_kernel(
    lambda dtype: (
        vector(types.int32), matrix(dtype), matrix(dtype), matrix(dtype, written=True), types.float64
    )
)  # fmt: skip
def _scatter(rows: Any, values: Any, state: Any, table: Any, first_state: float) -> None:
    """Set rows; where `state` has none, to that of new rows."""
    dim = values.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row = rows[i]
        for d in range(dim):
            table[row, d] = values[i, d]
        for d in range(dim, table.shape[1]):
            table[row, d] = state[i, d - dim] if len(state) else first_state
