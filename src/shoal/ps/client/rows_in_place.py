"""Rows of a table read where a server of this host has them, in memory that it shares."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.embedding.row_table import RowsInMemory, find_in_array, first_values_of, gather
from shoal.embedding.rules import rule_named
from shoal.embedding.shared_rows import RowViews
from shoal.runtime.transport.messages.client_server import TableSpec


class RowsInPlace:
    """The rows of one table on one server, as of one edition of its memory."""

    def __init__(self, spec: TableSpec, fd: int, num_bytes: int, edition: int) -> None:
        """OSError or ValueError where the memory cannot be mapped."""
        assert spec.num_rows is not None
        self._edition = edition
        self._init = first_values_of(spec)
        memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        width = spec.dim + rule_named(spec.rule).state_dim(spec.dim)
        self._views = RowViews(memory, spec.num_rows, width, np.dtype(spec.dtype))

    def pull(self, keys: NDArray[np.int64], out: NDArray[Any]) -> bool:
        """Write the values of `keys` to `out`, also of rows that are not there yet; False where they were changed meanwhile."""
        if not self._is_current:
            return False
        rows = np.empty(min(len(keys), RowsInMemory.block), np.int32)
        for start in range(0, len(keys), RowsInMemory.block):
            block = keys[start : start + RowsInMemory.block]
            places = rows[: len(block)]
            find_in_array(block, self._views.row_of, places)
            gather(places, block, self._views.rows, out[start : start + len(block)], *self._init)
        return self._is_current

    @property
    def _is_current(self) -> bool:
        return int(self._views.edition[0]) == self._edition
