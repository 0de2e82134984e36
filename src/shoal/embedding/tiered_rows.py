"""Rows over RAM and disk: frames in memory for the hot ones, an unlinked file for the others.

The record of a row in the file is at the row's number, so only the frame of each row has to be
stored. The file has room before a row is written to it: a full disk is an error of `reserve`, never
of an eviction. Nothing is on disk before the limit is reached.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, TypeAlias

import numpy as np

from shoal import system
from shoal.embedding.growing_array import GrowingArray
from shoal.errors import TableMemoryTooSmall, TablesFull
from shoal.runtime.kernel_cache import INT, floating_kernel, inlined, kernel, matrix, types, vector

Array: TypeAlias = np.ndarray[Any, Any]

BLOCK = 1024
"""Rows that are in memory together, and so the fewest that a table has room for."""

_STEP_BYTES = 4 << 20  # by which a file grows at least
_MAPPED_BYTES = 64 << 20  # of the file, at least, that may count as this process's memory
_PAGE = mmap.PAGESIZE

# The use of a frame, in a byte: uses since the hand passed, whether the file is outdated, whether it is
# pinned.
_COUNT, _DIRTY, _PINNED = 0x3F, 0x40, 0x80


class RowBudget:
    """Bytes of rows that the tables of a process keep in memory. The largest table shrinks in favour of smaller ones."""

    def __init__(self, limit_bytes: int, directory: str, *, most_uses: int = 3) -> None:
        """`most_uses` is what the clock counts of a row at most: 1 is LRU, up to 63 the more it is LFU."""
        assert 1 <= most_uses <= _COUNT
        self.limit_bytes, self.directory, self.most_uses = limit_bytes, directory, most_uses
        self._tables: list[TieredRows] = []

    def add(self, rows: TieredRows) -> None:
        needed = BLOCK * sum(each.row_bytes for each in (*self._tables, rows))
        if needed > self.limit_bytes:
            raise TableMemoryTooSmall(
                limit_bytes=self.limit_bytes, needed_bytes=needed, num_tables=len(self._tables) + 1
            )
        self._tables.append(rows)

    @property
    def used_bytes(self) -> int:
        return sum(each.frame_bytes for each in self._tables)

    @property
    def disk_bytes(self) -> int:
        return sum(each.disk_bytes for each in self._tables)

    @property
    def num_hits(self) -> int:
        return sum(each.num_hits for each in self._tables)

    @property
    def num_misses(self) -> int:
        return sum(each.num_misses for each in self._tables)

    def take(self, rows: TieredRows, num_wanted: int) -> int:
        """Additional frames for a table, up to this number."""
        while (free := self._free(rows)) < num_wanted:
            givers = self._tables
            if rows.num_frames < BLOCK:
                # Everyone must get a block, or one call's rows do not fit: taken from all that have more,
                # not the largest alone.
                givers = [each for each in self._tables if each is not rows and each.num_frames > BLOCK]
            if not givers:
                break
            largest = max(givers, key=lambda each: each.frame_bytes)
            spare_bytes = largest.frame_bytes - BLOCK * largest.row_bytes
            if rows.num_frames >= BLOCK:
                spare_bytes = min(spare_bytes, (largest.frame_bytes - rows.frame_bytes) // 2)
            wanted = -(-(num_wanted - free) * rows.row_bytes // largest.row_bytes)
            num_given = min(wanted, spare_bytes // largest.row_bytes)
            if largest is rows or num_given < 1:
                break
            largest.give_up(num_given)
        return min(free, num_wanted)

    def cover(self) -> None:
        """Reserve disk space for all existing rows."""
        for each in self._tables:
            each.cover()

    def _free(self, rows: TieredRows) -> int:
        return max(0, self.limit_bytes - self.used_bytes) // rows.row_bytes


class TieredRows:
    """Rows by number, of which some are in memory; replaces the `RowsInMemory` of a table.

    `places` loads rows and returns their positions in `array`, valid until the next call. Eviction
    is by a clock over the number of uses since the hand passed.
    """

    block = BLOCK

    def __init__(self, width: int, dtype: Any, num_rows: int | None, budget: RowBudget) -> None:
        self._width, self._dtype = width, np.dtype(dtype)
        self.row_bytes: int = width * self._dtype.itemsize
        self._budget = budget
        max_frames = budget.limit_bytes // self.row_bytes
        self._frames = GrowingArray((width,), dtype, max_frames)
        self._frame_of = GrowingArray((), np.int32, num_rows)  # 1 + frame, by row; 0: on disk
        self._row_in = GrowingArray((), np.int32, max_frames)  # 1 + row, by frame; 0: none
        self._uses = GrowingArray((), np.uint8, max_frames)
        self.num_rows: int = 0
        self.num_frames: int = 0
        self._hand = 0
        self._file = RowFile(width, self._dtype, budget.directory)
        self._found = np.empty(BLOCK, np.int32)
        self.num_hits = self.num_misses = self.num_written = 0
        budget.add(self)  # last: a table that could not be made counts for nothing

    @property
    def array(self) -> Array:
        return self._frames.array

    @property
    def disk_bytes(self) -> int:
        return self._file.num_bytes

    @property
    def frame_bytes(self) -> int:
        return self.num_frames * self.row_bytes

    def expect(self, num_new: int) -> None:
        """Reserve room for new rows; TablesFull if the disk has none, and then nothing has changed."""
        num_rows = self.num_rows + num_new
        more_bytes = max(0, num_rows - self.num_frames) * self.row_bytes
        if more_bytes + self._budget.used_bytes > self._budget.limit_bytes:
            self._file.reserve(num_rows)
            self._budget.cover()  # any table may have to shrink

    def cover(self) -> None:
        self._file.reserve(self.num_rows)

    def reserve(self, num_rows: int) -> None:
        self.expect(num_rows - self.num_rows)
        self._frame_of.reserve(num_rows)
        self.num_rows = max(self.num_rows, num_rows)

    def places(self, rows: Array, *, is_written: bool, first_new: int | None = None) -> Array:
        """Places in `array` of up to `block` different rows; those from `first_new` on were nowhere. No row: below 0."""
        found = self._found[: len(rows)]
        num_missing = _touch(rows, self._frame_of.array, self._uses.array, found, self._budget.most_uses)
        self.num_hits += len(rows) - num_missing
        if num_missing:
            try:
                self._grow(num_missing)
            except TablesFull:
                _release(found, self._uses.array, 0)
                raise
            self._hand, num_written = _load(
                rows, found, self._frame_of.array, self._row_in.array, self._uses.array,
                self._frames.array, self._file.array, self._hand, self.num_frames,
                self.num_rows if first_new is None else first_new,
            )  # fmt: skip
            self.num_misses += num_missing
            self.num_written += num_written
            self._file.touched(num_missing + num_written, self.frame_bytes)
        _release(found, self._uses.array, is_written)
        return found

    def read(self, rows: Array) -> Array:
        """A copy of these rows from wherever they are; brings none to memory."""
        out = np.empty((len(rows), self._width), self._dtype)
        _copy(np.asarray(rows, np.int64), self._frame_of.array, self._frames.array, self._file.array, out)
        return out

    def move(self, holes: Array, moved: Array, num_left: int) -> None:
        """Rows `moved` become those of the numbers `holes`; what is from `num_left` on is gone."""
        frame_of, row_in, uses = self._frame_of.array, self._row_in.array, self._uses.array
        gone = np.concatenate([holes, np.arange(num_left, self.num_rows)])
        freed = frame_of[gone]
        kept = frame_of[moved]
        row_in[freed[freed > 0] - 1] = 0
        uses[freed[freed > 0] - 1] = 0
        in_memory = kept > 0
        frame_of[holes] = kept
        row_in[kept[in_memory] - 1] = holes[in_memory] + 1
        uses[kept[in_memory] - 1] |= _DIRTY
        holes, moved = holes[~in_memory], moved[~in_memory]
        for start in range(0, len(holes), BLOCK):
            part = slice(start, start + BLOCK)
            self._file.array[holes[part]] = self._file.array[moved[part]]
        self._frame_of.shrink(num_left)
        self.num_rows = num_left

    def give_up(self, num_frames: int) -> None:
        """Evict the rows of the last frames, and give back their memory."""
        left = self.num_frames - num_frames
        self._file.reserve(self.num_rows)
        self.num_written += _evict(
            left, self.num_frames, self._frame_of.array, self._row_in.array, self._uses.array,
            self._frames.array, self._file.array,
        )  # fmt: skip
        self.num_frames = left
        self._hand = 0
        for each in (self._frames, self._row_in, self._uses):
            each.shrink(left)

    def _grow(self, num_missing: int) -> None:
        num_more = self._budget.take(self, num_missing)
        if num_more:
            self._hand = self.num_frames  # the new ones are free
            self.num_frames += num_more
            for each in (self._frames, self._row_in, self._uses):
                each.reserve(self.num_frames)
        if num_more < num_missing:
            self._file.reserve(self.num_rows)
            assert self.num_frames >= BLOCK, "the eviction clock needs a frame for each row of a block"


class RowFile:
    """Records of rows in a file without a name, which is gone with the process. Mapped: a full disk is met in `reserve`."""

    def __init__(self, width: int, dtype: Any, directory: str) -> None:
        self._width, self._dtype, self._directory = width, np.dtype(dtype), directory
        self._row_bytes = width * self._dtype.itemsize
        self._fd: int | None = None
        self._memory: mmap.mmap | None = None
        self._num_touched = 0
        self.num_bytes = 0
        self.array = np.empty((0, width), dtype)

    def reserve(self, num_rows: int) -> None:
        wanted = num_rows * self._row_bytes
        if wanted <= self.num_bytes:
            return
        size = _in_pages(max(wanted, self.num_bytes + max(_STEP_BYTES, self.num_bytes // 4)))
        try:
            if self._fd is None:
                self._fd = system.temporary_file(self._directory)
            try:
                system.allocate(self._fd, self.num_bytes, size - self.num_bytes)
            except OSError:
                size = _in_pages(wanted)  # a nearly full disk may have room for just these
                system.allocate(self._fd, self.num_bytes, size - self.num_bytes)
        except OSError as error:
            raise TablesFull(
                directory=self._directory,
                num_bytes=self.num_bytes,
                wanted_bytes=wanted,
                reason=error.strerror or str(error),
            ) from None
        self.array = np.empty((0, self._width), self._dtype)  # no view may exist while the mapping moves
        if self._memory is None:
            self._memory = mmap.mmap(self._fd, size)
        elif system.IS_LINUX:
            self._memory.resize(size)
        else:
            self._memory = mmap.mmap(self._fd, size)  # the old mapping ends with the last view of it
        self._memory.madvise(mmap.MADV_RANDOM)
        self.num_bytes = size
        count = size // self._row_bytes
        flat = np.frombuffer(self._memory, self._dtype, count=count * self._width)
        self.array = flat.reshape(count, self._width)

    def touched(self, num_rows: int, in_memory_bytes: int) -> None:
        """Rows were read or written; pages of the file count as this process's until they are released."""
        self._num_touched += num_rows
        if self._memory is not None and self._num_touched * _PAGE > max(_MAPPED_BYTES, in_memory_bytes):
            self._memory.madvise(mmap.MADV_DONTNEED)  # the kernel has them still
            self._num_touched = 0

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


_ROWS = vector(types.int32)
_NUMBERS = vector(types.int32, written=True)
_USES = vector(types.uint8, written=True)


@kernel((_ROWS, _ROWS, _USES, _NUMBERS, INT))
def _touch(rows: Any, frame_of: Any, uses: Any, found: Any, most_uses: int) -> int:
    """Pin what is in memory; -1 for what is not, -2 for what is no row. Returns how many are not in memory."""
    num_missing = 0
    for i in range(len(rows)):
        row = rows[i]
        if row < 0:
            found[i] = -2
            continue
        frame = frame_of[row] - 1
        found[i] = frame
        if frame < 0:
            num_missing += 1
        else:
            if uses[frame] & _COUNT < most_uses:
                uses[frame] += 1
            uses[frame] |= _PINNED
    return num_missing


@inlined
def _copy_row(source: Any, i: int, target: Any, j: int) -> None:
    for d in range(source.shape[1]):
        target[j, d] = source[i, d]


@floating_kernel(
    lambda dtype: (
        _ROWS, _NUMBERS, _NUMBERS, _NUMBERS, _USES, matrix(dtype, written=True), matrix(dtype, written=True),
        INT, INT, INT,
    )
)  # fmt: skip
def _load(
    rows: Any,
    found: Any,
    frame_of: Any,
    row_in: Any,
    uses: Any,
    frames: Any,
    file: Any,
    hand: int,
    num_frames: int,
    first_new: int,
) -> Any:
    """Put rows that are not in memory into frames that were not used for longest, and their rows to the file."""
    num_written = 0
    for i in range(len(rows)):
        if found[i] != -1:
            continue
        while uses[hand] & (_PINNED | _COUNT):
            if not uses[hand] & _PINNED:
                uses[hand] -= 1
            hand = hand + 1 if hand + 1 < num_frames else 0
        old = row_in[hand] - 1
        if old >= 0:
            if uses[hand] & _DIRTY:
                _copy_row(frames, hand, file, old)
                num_written += 1
            frame_of[old] = 0
        row = rows[i]
        if row < first_new:
            _copy_row(file, row, frames, hand)
        row_in[hand] = row + 1
        frame_of[row] = hand + 1
        found[i] = hand
        uses[hand] = _PINNED
        hand = hand + 1 if hand + 1 < num_frames else 0
    return hand, num_written


@kernel((_ROWS, _USES, INT))
def _release(found: Any, uses: Any, is_written: int) -> None:
    mark = _DIRTY if is_written else 0
    for i in range(len(found)):
        if found[i] >= 0:
            uses[found[i]] = (uses[found[i]] & ~_PINNED) | mark


@floating_kernel(
    lambda dtype: (vector(types.int64), _ROWS, matrix(dtype), matrix(dtype), matrix(dtype, written=True))
)
def _copy(rows: Any, frame_of: Any, frames: Any, file: Any, out: Any) -> None:
    for i in range(len(rows)):
        frame = frame_of[rows[i]] - 1
        if frame >= 0:
            _copy_row(frames, frame, out, i)
        else:
            _copy_row(file, rows[i], out, i)


@floating_kernel(
    lambda dtype: (INT, INT, _NUMBERS, _NUMBERS, _USES, matrix(dtype), matrix(dtype, written=True))
)
def _evict(first: int, last: int, frame_of: Any, row_in: Any, uses: Any, frames: Any, file: Any) -> int:
    num_written = 0
    for frame in range(first, last):
        row = row_in[frame] - 1
        if row >= 0:
            if uses[frame] & _DIRTY:
                _copy_row(frames, frame, file, row)
                num_written += 1
            frame_of[row] = 0
    return num_written
