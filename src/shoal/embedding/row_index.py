"""Index from keys to row numbers, and the growing arrays that rows lie in.

An array where ids are below a known number, open addressing where they are
not. Row numbers are dense: the keys of rows 0..n-1 are the first n of `keys`,
and a new row gets number n. Nothing here knows what is in a row.
"""

from __future__ import annotations

import mmap
from typing import Any, Protocol

import numpy as np
from numba import types

from shoal.runtime.kernel_cache import INT, ask_for, inlined, kernel, mixed, vector

_RESERVED_BYTES = 16 << 30
_MAP_NORESERVE = 0x4000  # Linux; the standard library names it from 3.13 on
_HUGE_PAGE = 2 << 20
_HUGE_FROM_BYTES = 32 << 20


class GrowingArray:
    """Zeros, as many rows of `row_shape` as are asked for.

    `array` is replaced when more than what was reserved is wanted; nobody
    keeps it over a call of `reserve`.
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: Any, num_rows: int | None = None) -> None:
        self._row_shape, self._dtype = row_shape, np.dtype(dtype)
        self.row_bytes: int = self._dtype.itemsize * int(np.prod(row_shape, dtype=np.int64))
        wanted = _RESERVED_BYTES if num_rows is None else num_rows * self.row_bytes
        self._memory = _reserved(_in_pages(wanted))
        self._huge_from = len(self._memory)
        self._view()

    def _view(self) -> None:
        capacity = len(self._memory) // self.row_bytes
        flat = np.frombuffer(
            self._memory, self._dtype, count=capacity * self.row_bytes // self._dtype.itemsize
        )
        self.array = flat.reshape(capacity, *self._row_shape)

    def reserve(self, num_rows: int) -> None:
        """See to it that `array` has at least so many rows."""
        wanted = num_rows * self.row_bytes
        if wanted > len(self._memory):
            del self.array  # the kernel may move the mapping, which nobody may look at meanwhile
            self._memory.resize(_in_pages(max(wanted, 2 * len(self._memory))))
            self._view()
        if wanted > _HUGE_FROM_BYTES and self._huge_from > wanted:
            # Large tables are touched all over: fewer, larger pages. Small ones must not round up to 2 MiB.
            self._huge_from = start = -(-wanted // _HUGE_PAGE) * _HUGE_PAGE
            if start < len(self._memory):
                self._memory.madvise(mmap.MADV_HUGEPAGE, start)

    def shrink(self, num_rows: int) -> None:
        """Give back the memory of rows from `num_rows` on; they are zeros again."""
        start = num_rows * self.row_bytes
        whole_pages = _in_pages(start)
        if whole_pages < len(self._memory):
            self._memory.madvise(mmap.MADV_DONTNEED, whole_pages)
        end = min(whole_pages, len(self.array) * self.row_bytes) // self.row_bytes
        self.array[num_rows : max(end, num_rows)] = 0


def _in_pages(num_bytes: int) -> int:
    return max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _reserved(num_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    while True:
        try:
            return mmap.mmap(-1, num_bytes, flags=flags)
        except (OSError, ValueError):
            # Address space is limited here (ulimit -v, vm.overcommit_memory=2): begin with less, grow by moving.
            if num_bytes <= 64 * mmap.PAGESIZE:
                raise
            num_bytes = _in_pages(num_bytes // 16)


_KEYS = vector(types.int64)
_ROWS = vector(types.int32, written=True)
_MAX_ROWS = 2**31 - 2


class RowIndex(Protocol):
    """Rows by key. `find` writes -1 for keys without a row and returns how many those are."""

    keys: GrowingArray
    num_rows: int

    def find(self, keys: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> int: ...
    def add(self, keys: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], num_new: int) -> None: ...
    def rebuild(self, dropped: np.ndarray[Any, Any], num_rows: int) -> None: ...
    @property
    def num_bytes(self) -> int: ...


class ArrayIndex:
    """Ids below `limit`: an int32 per id, 1 + its row."""

    def __init__(self, limit: int) -> None:
        self.keys = GrowingArray((), np.int64, limit)
        self.num_rows = 0
        self._rows = GrowingArray((), np.int32, limit)
        self._limit = limit

    def find(self, keys: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> int:
        """Write the rows of `keys`; a key out of range has none and cannot get one."""
        return _find_in_array(keys, self._rows.array[: self._limit], rows)

    def add(self, keys: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], num_new: int) -> None:
        """Give a row to every key that has none (rows[i] < 0)."""
        self.num_rows = _add_to_array(
            keys, self._rows.array[: self._limit], rows, self.keys.array, self.num_rows
        )

    def rebuild(self, dropped: np.ndarray[Any, Any], num_rows: int) -> None:
        """Only the first `num_rows` of `keys` are left; `dropped` are gone."""
        self._rows.array[dropped] = 0
        self._rows.array[self.keys.array[:num_rows]] = np.arange(1, num_rows + 1, dtype=np.int32)
        self.num_rows = num_rows
        self.keys.shrink(num_rows)

    @property
    def num_bytes(self) -> int:
        """Of the array and of the keys."""
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

    def find(self, keys: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> int:
        """Write the rows of `keys`."""
        return _find_hashed(keys, self._entries, self._row_bits, self.keys.array, rows)

    def add(self, keys: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], num_new: int) -> None:
        """Give a row to every key that has none (rows[i] < 0)."""
        wanted = self.num_rows + num_new
        assert wanted < _MAX_ROWS
        self.keys.reserve(wanted)
        if wanted > self._max_load * len(self._entries):
            self._rehash(wanted)
        self.num_rows = _add_hashed(keys, self._entries, self._row_bits, rows, self.keys.array, self.num_rows)

    def rebuild(self, dropped: np.ndarray[Any, Any], num_rows: int) -> None:
        """Only the first `num_rows` of `keys` are left."""
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
        """Of the entries and of the keys."""
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
