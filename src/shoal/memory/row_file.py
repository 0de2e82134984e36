"""Rows of one length in a file without a name, in RAM or on disk, read in any order.

On disk they are read through a mapping of which only a part is ever kept in
this process's memory: measured, that costs a third of a system call per row,
and needs no Python per row. What the kernel keeps of the file is its own
affair, and given back when memory is short.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.memory import nameless

_STRETCH_BYTES = 16 << 20  # of a file on disk: how much of it is mapped into memory at once
_SLOW_S_PER_ROW = (
    20e-6  # rows that are not in the kernel's cache: then several threads wait for the disk at once
)
_NUM_THREADS = 8
_PAGE = mmap.ALLOCATIONGRANULARITY


class RowFile:
    """`num_rows` rows from `offset` on. The descriptor stays its owner's."""

    def __init__(self, fd: int, *, offset: int, num_rows: int, row_bytes: int, is_on_disk: bool) -> None:
        self.num_rows, self.row_bytes = num_rows, row_bytes
        self._fd, self._offset, self._is_on_disk = fd, offset, is_on_disk
        self._map = mmap.mmap(fd, num_rows * row_bytes, offset=offset) if num_rows else None
        if self._map is not None and is_on_disk:
            self._map.madvise(mmap.MADV_RANDOM)
        empty = bytearray(8)
        words = torch.frombuffer(self._map if self._map is not None else empty, dtype=torch.int64)
        self._rows = words[: num_rows * row_bytes // 8].view(num_rows, row_bytes // 8)
        self._is_slow = False

    def write(self, begin: int, rows: NDArray[np.uint8]) -> None:
        """Rows that follow each other; OSError where the disk takes no more."""
        nameless.write_at(self._fd, self._offset + begin * self.row_bytes, rows)

    def put(self, numbers: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Rows here and there."""
        for number, row in zip(numbers.tolist(), rows, strict=True):
            nameless.write_at(self._fd, self._offset + number * self.row_bytes, row)

    def take(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        """Copies of these rows, in this order: int64, [n, words]."""
        if not self._is_on_disk or not len(numbers):
            return self._rows.index_select(0, torch.from_numpy(numbers))
        return self._take_from_disk(numbers)

    def take_range(self, begin: int, end: int) -> torch.Tensor:
        """Copies of rows that follow each other."""
        if not self._is_on_disk:
            return self._rows[begin:end].clone()
        found = torch.empty((end - begin, self.row_bytes // 8), dtype=torch.int64)
        nameless.read_at(self._fd, self._offset + begin * self.row_bytes, found.numpy())
        return found

    def _take_from_disk(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        began = time.perf_counter()
        order = np.argsort(numbers)
        ascending = numbers[order]
        found = torch.empty((len(numbers), self.row_bytes // 8), dtype=torch.int64)
        stretch = ascending * self.row_bytes // _STRETCH_BYTES
        cuts = [0, *(np.flatnonzero(np.diff(stretch)) + 1).tolist(), len(numbers)]
        targets = torch.from_numpy(order)

        def read(part: int) -> None:
            chosen = slice(cuts[part], cuts[part + 1])
            rows = torch.from_numpy(ascending[chosen])
            found.index_copy_(0, targets[chosen], self._rows.index_select(0, rows))
            self._let_go_of(int(stretch[cuts[part]]))

        parts = range(len(cuts) - 1)
        if self._is_slow and len(parts) > 1:
            with ThreadPoolExecutor(_NUM_THREADS, "shoal-rows") as threads:
                list(threads.map(read, parts))
        else:
            for part in parts:
                read(part)
        if len(numbers) >= 64:
            per_row = (time.perf_counter() - began) / len(numbers)
            self._is_slow = per_row * (_NUM_THREADS if self._is_slow else 1) > _SLOW_S_PER_ROW
        return found

    def _let_go_of(self, stretch: int) -> None:
        assert self._map is not None
        begin = stretch * _STRETCH_BYTES
        length = min(_STRETCH_BYTES + _PAGE, len(self._map) - begin)
        self._map.madvise(mmap.MADV_DONTNEED, begin, length)


class Heap:
    """Bytes of any length in a file that grows; rows say where theirs begin."""

    def __init__(self, fd: int, *, is_on_disk: bool) -> None:
        self._fd, self._is_on_disk = fd, is_on_disk
        self._view = memoryview(b"")
        self._lock = threading.Lock()

    def write(self, at: int, data: Any) -> None:
        """Put bytes at a place that was asked for before."""
        nameless.write_at(self._fd, at, data)

    def read(self, at: int, length: int) -> bytes | memoryview:
        """The bytes at a place; in RAM without a copy."""
        if not length:
            return b""
        if self._is_on_disk:
            return os.pread(self._fd, length, at)
        if at + length > len(self._view):
            with self._lock:
                size = os.fstat(self._fd).st_size
                self._view = memoryview(mmap.mmap(self._fd, size))
        return self._view[at : at + length]
