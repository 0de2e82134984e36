"""Memory of a table's rows that other processes of the host read in place: an index by id, then rows by number.

When rows stay as they are is the protocol's business. Every change that the protocol does not
announce to readers begins with `begin_change`: a reader that finds another edition after reading
than before discards what it has read. Processors whose stores may be seen in another order have no
such memory.
"""

from __future__ import annotations

import mmap
import os
import platform
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal import system
from shoal.config.exchange_rule import ORDERED
from shoal.errors import ConfigError, WireError
from shoal.runtime.transport import memfd

_HEADER_BYTES = 64


def can_share_rows() -> bool:
    return system.IS_LINUX and platform.machine() in ORDERED


class RowViews:
    """The arrays in a mapping of such memory."""

    def __init__(self, memory: mmap.mmap, num_rows: int, width: int, dtype: np.dtype[Any]) -> None:
        self.edition = np.frombuffer(memory, np.int64, count=1)
        self.row_of: NDArray[np.int32] = np.frombuffer(
            memory, np.int32, count=num_rows, offset=_HEADER_BYTES
        )  # by id: 1 + the number of its row; 0: none
        start = _rows_start(num_rows)
        flat = np.frombuffer(memory, dtype, count=num_rows * width, offset=start)
        self.rows: NDArray[Any] = flat.reshape(num_rows, width)


class RowMemory:
    """The writer's end: zeros, taken from the system as they are touched."""

    def __init__(self, num_rows: int, width: int, dtype: np.dtype[Any]) -> None:
        """ConfigError, WireError or OSError where the system has no such memory."""
        self._row_bytes = width * dtype.itemsize
        self._start = _rows_start(num_rows)
        self.num_bytes = _in_pages(self._start + num_rows * self._row_bytes)
        fd = memfd.create(self.num_bytes, "shoal-rows")
        try:
            self._memory = memfd.map_shared(fd, self.num_bytes)
            self.descriptor = system.read_only(fd)
        finally:
            os.close(fd)
        weakref.finalize(self, os.close, self.descriptor)
        self.views = RowViews(self._memory, num_rows, width, dtype)

    @property
    def edition(self) -> int:
        return int(self.views.edition[0])

    def begin_change(self) -> None:
        """Rows change now that readers may be reading."""
        self.views.edition[0] += 1

    def give_back(self, first: int) -> None:
        """Rows from number `first` on are not needed: their memory is the system's again."""
        start = _in_pages(self._start + first * self._row_bytes)
        if start < self.num_bytes:
            self._memory.madvise(mmap.MADV_REMOVE, start)


def shared_memory_for(num_rows: int, width: int, dtype: np.dtype[Any]) -> RowMemory | None:
    """Such memory; None where the system has none."""
    try:
        return RowMemory(num_rows, width, dtype)
    except (ConfigError, WireError, OSError):
        return None  # a limit on file sizes (ulimit -f), or on address space


def _rows_start(num_rows: int) -> int:
    return _in_pages(_HEADER_BYTES + num_rows * 4)


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
