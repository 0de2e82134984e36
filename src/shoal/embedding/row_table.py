"""The rows of one table in one process: found by key, values and optimizer state side by side, changed by a rule.

Single-threaded. Knows nothing of servers, slots or ranks: ps/server/contents.py
adds those. A row nobody wrote has values that are a function of (seed, key).
Row numbers are dense: the keys of rows 0..n-1 are the first n of `keys`, and a
new row gets number n.
"""

from __future__ import annotations

import secrets
from typing import Any, TypeAlias

import numpy as np

from shoal.embedding.growing_array import GrowingArray
from shoal.embedding.rules import rule_named
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

    def __init__(self, limit: int) -> None:
        self.keys = GrowingArray((), np.int64, limit)
        self.num_rows = 0
        self._rows = GrowingArray((), np.int32, limit)
        self._limit = limit

    def find(self, keys: Array, rows: Array) -> int:
        return _find_in_array(keys, self._rows.array[: self._limit], rows)

    def add(self, keys: Array, rows: Array, num_new: int) -> None:
        self.num_rows = _add_to_array(
            keys, self._rows.array[: self._limit], rows, self.keys.array, self.num_rows
        )

    def rebuild(self, dropped: Array, num_rows: int) -> None:
        self._rows.array[dropped] = 0
        self._rows.array[self.keys.array[:num_rows]] = np.arange(1, num_rows + 1, dtype=np.int32)
        self.num_rows = num_rows
        self.keys.shrink(num_rows)

    @property
    def num_bytes(self) -> int:
        return self._limit * 4 + self.num_rows * 8


class HashedIndex:
    """Any int64: entries of 4 bytes, 1 + the row in the low bits and a piece of the key's hash above it.

    The piece spares a look at the keys, so a table may be as full as 92 %
    and a lookup still touches one line of entries and one of keys.
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
def _find_in_array(keys: Any, row_of: Any, rows: Any) -> int:
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
    # A few keys at a time, in three passes, so that each pass finds in the cache what the one before asked for:
    # the entries, then the key of the first entry with the right piece, then whether it is the key.
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


class RowsInMemory(GrowingArray):
    """Values and state of all rows, each at its number. `TieredRows` does the same over RAM and disk."""

    block = _BLOCK

    def places(self, rows: Array, *, is_written: bool, first_new: int | None = None) -> Array:
        return rows

    def read(self, rows: Array) -> Array:
        return self.array[rows]

    def move(self, holes: Array, moved: Array, num_left: int) -> None:
        for start in range(0, len(holes), _BLOCK):
            part = slice(start, start + _BLOCK)
            self.array[holes[part]] = self.array[moved[part]]
        self.shrink(num_left)


class RowTable:
    """Rows by key. What is read or written comes as C-contiguous arrays of the table's dtype, keys strictly increasing.

    Rows are numbered 0..n-1 without holes, so every pass over the table is
    a pass over the beginning of an array. With a `budget` not all of them are
    in memory.
    """

    def __init__(self, spec: TableSpec, budget: RowBudget | None = None) -> None:
        self.spec, self.dim, self.dtype = spec, spec.dim, np.dtype(spec.dtype)
        if spec.dim < 1 or spec.num_rows == 0:
            raise ConfigError(
                f"table '{spec.name}' has {spec.dim} numbers per row and {spec.num_rows} rows; both must be at least 1. "
                "Nothing was declared."
            )
        self.rule = rule_named(spec.rule)
        self._settings = self.rule.complete(spec.settings)
        self.step = 0
        self.state_dim = self.rule.state_dim(spec.dim)
        self._first_state = self._settings[self.rule.first_state] if self.rule.first_state else 0.0
        self._init = (_INITS[spec.init], spec.scale, mix(spec.seed))
        width = self.dim + self.state_dim
        self._table: RowsInMemory | TieredRows = (
            RowsInMemory((width,), self.dtype, spec.num_rows)
            if budget is None
            else TieredRows(width, self.dtype, spec.num_rows, budget)
        )
        self._block = self._table.block
        self._index = (
            HashedIndex(self._table.row_bytes) if spec.num_rows is None else ArrayIndex(spec.num_rows)
        )
        self._rows = np.empty(self._block, np.int32)
        self._new_state = np.empty((0, self.state_dim), self.dtype)
        self._stamps: GrowingArray | None = None
        self._clock = 0  # blocks of rows that were written since stamps are kept
        self.tracker = ""  # name of these stamps: another process has others

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
    def num_bytes(self) -> int:
        return self.num_rows * self._table.row_bytes

    @property
    def num_index_bytes(self) -> int:
        return self._index.num_bytes

    def expect(self, keys: Array, num_pushes: int) -> None:
        """Have room for what so many pushes like this one may bring; TablesFull where the disk has none, and nothing changed."""
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
            _gather(places, block, self._table.array, out[start : start + self._block], *self._init)

    def apply(self, keys: Array, grads: Array, factor: float = 1.0) -> None:
        """One update of the table: the rule, with gradients times `factor`. Counts also where no key is given."""
        self.step += 1
        numbers = np.array(self.rule.numbers(self._settings, self.step), self.dtype)
        for start in range(0, len(keys), self._block):
            places = self._places_of(keys[start : start + self._block])
            self.rule.kernel(places, grads[start : start + self._block], self._table.array, factor, numbers)

    def set(self, keys: Array, values: Array, state: Array | None, step: int) -> None:
        """Set rows, and how many updates there were. Without `state` they have that of new rows."""
        self.step = step
        for start in range(0, len(keys), self._block):
            places = self._places_of(keys[start : start + self._block])
            some = values[start : start + self._block]
            with_state = self._new_state if state is None else state[start : start + self._block]
            _scatter(places, some, with_state, self._table.array, self._first_state)

    def read_rows(self, rows: Array) -> tuple[Array, Array, Array]:
        """Keys in increasing order, values and state of these rows by number: copies."""
        keys = self._index.keys.array[rows]
        order = np.argsort(keys)
        whole = self._table.read(rows[order])
        return (
            keys[order],
            np.ascontiguousarray(whole[:, : self.dim]),
            np.ascontiguousarray(whole[:, self.dim :]),
        )

    def read_whole(self, keys: Array) -> Array:
        """Values and state of these keys side by side: a copy. All of them are there."""
        rows = np.empty(len(keys), np.int32)
        self._index.find(keys, rows)
        return self._table.read(rows)

    def set_whole(self, keys: Array, whole: Array) -> None:
        """Set rows as `read_whole` gave them."""
        for start in range(0, len(keys), self._block):
            places = self._places_of(keys[start : start + self._block])
            self._table.array[places] = whole[start : start + self._block]

    def drop_rows(self, is_dropped: Array) -> None:
        """Drop rows by number (a bool per row). The last ones move to the holes, and what they held is given back."""
        num_left = len(is_dropped) - int(np.count_nonzero(is_dropped))
        if num_left == len(is_dropped):
            return
        keys = self._index.keys.array
        dropped = keys[: len(is_dropped)][is_dropped]
        holes = np.flatnonzero(is_dropped[:num_left])
        moved = num_left + np.flatnonzero(~is_dropped[num_left:])
        keys[holes] = keys[moved]
        if self._stamps is not None:
            self._stamps.array[holes] = self._stamps.array[moved]
            self._stamps.shrink(num_left)
        self._table.move(holes, moved, num_left)
        self._index.rebuild(dropped, num_left)

    def _places_of(self, keys: Array) -> Array:
        """Where the rows of these keys are in memory, to be written; those that are not there come to be."""
        rows = self._rows[: len(keys)]
        num_missing = self._index.find(keys, rows)
        first = self._index.num_rows
        if num_missing:
            self._table.reserve(first + num_missing)
            self._index.add(keys, rows, num_missing)
        if self._stamps is not None:
            if self._clock == np.iinfo(np.uint32).max:
                # Stamps start anew under another name, so the next save reads all rows.
                self._stamps.array[:] = 0
                self._clock, self.tracker = 0, secrets.token_hex(8)
            self._clock += 1
            self._stamps.reserve(self._index.num_rows)
            self._stamps.array[rows[rows >= 0]] = self._clock
        places = self._table.places(rows, is_written=True, first_new=first)
        if num_missing:
            _begin(rows, first, keys, places, self._table.array, self.dim, self._first_state, *self._init)
            if rows.min() < 0:
                raise ConfigError(
                    f"table '{self.spec.name}' has {self.spec.num_rows} rows, but a key lies outside 0.."
                    f"{self.spec.num_rows}-1. Rows before it may be new, none was changed."
                )
        return places


# ---- what a row is before anybody wrote it ------------------------------------------------------------


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
def _gather(rows: Any, keys: Any, table: Any, out: Any, init: int, scale: float, seed: int) -> None:
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
