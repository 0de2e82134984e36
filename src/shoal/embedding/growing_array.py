"""Arrays that grow in place, in memory that is reserved and not taken."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from shoal import system

_RESERVED_BYTES = 16 << 30
_HUGE_PAGE = 2 << 20
_HUGE_FROM_BYTES = 32 << 20


class GrowingArray:
    """Zeros, as many rows of `row_shape` as requested.

    `array` is replaced when more than the reservation is needed; do not keep it over a call of
    `reserve`.
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
        wanted = num_rows * self.row_bytes
        if wanted > len(self._memory):
            del self.array  # the kernel may move the mapping, so no view may exist
            num_bytes = _in_pages(max(wanted, 2 * len(self._memory)))
            if system.IS_LINUX:
                self._memory.resize(num_bytes)
            else:
                self._memory = _moved(self._memory, len(self._memory), num_bytes)
            self._view()
        if wanted > _HUGE_FROM_BYTES and self._huge_from > wanted:
            # Large tables are touched all over: fewer, larger pages. Small ones must not round up to 2 MiB.
            self._huge_from = start = -(-wanted // _HUGE_PAGE) * _HUGE_PAGE
            if start < len(self._memory):
                system.use_huge_pages(self._memory, start)

    def shrink(self, num_rows: int) -> None:
        """Give back the memory of rows from `num_rows` on; they are zeros again."""
        start = num_rows * self.row_bytes
        whole_pages = _in_pages(start)
        if whole_pages < len(self._memory) and system.IS_LINUX:
            self._memory.madvise(mmap.MADV_DONTNEED, whole_pages)
        elif whole_pages < len(
            self._memory
        ):  # elsewhere that is only a hint, and leaves the rows as they were
            self._memory = _moved(self._memory, whole_pages, len(self._memory))
            self._view()
        end = min(whole_pages, len(self.array) * self.row_bytes) // self.row_bytes
        self.array[num_rows : max(end, num_rows)] = 0


def _in_pages(num_bytes: int) -> int:
    return max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _moved(memory: mmap.mmap, num_bytes: int, room: int) -> mmap.mmap:
    """The first bytes in a mapping of their own, of another size."""
    moved = _reserved(room)
    moved[:num_bytes] = memory[:num_bytes]
    return moved


def _reserved(num_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | system.NO_RESERVE
    while True:
        try:
            return mmap.mmap(-1, num_bytes, flags=flags)
        except (OSError, ValueError):
            # Address space is limited here (ulimit -v, vm.overcommit_memory=2): begin with less, grow by moving.
            if num_bytes <= 64 * mmap.PAGESIZE:
                raise
            num_bytes = _in_pages(num_bytes // 16)
