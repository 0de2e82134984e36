"""Where decoded rows of a table wait until they are asked for.

The seam between tables and memory: `TableSource` asks for rows by number and
does not know whether they lie in RAM, on disk, or are decoded just now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.cache import BlockStore, CacheConfig, Limits, available
from shoal.data.formats.table import Ragged, Rows, Table
from shoal.errors import BadSample

_PASSING_BYTES = 256 << 20


class Gathered(NamedTuple):
    """Rows that were asked for, in the order in which they were, as copies that may be written."""

    columns: dict[str, torch.Tensor | Ragged]
    """Tensors [rows, *shape]; a Ragged for lists of several lengths, text and bytes."""

    bad: Mapping[int, BadSample]
    """Row of the table to what is wrong with it, of the rows asked for."""


class Storage(Protocol):
    """The rows of one table by their number, 0 to num_rows - 1."""

    @property
    def looks_ahead(self) -> bool:
        """Whether `will_need` does anything."""

    def gather(self, rows: range | NDArray[np.int64]) -> Gathered:
        """Copies of these rows."""

    def will_need(self, rows: NDArray[np.int64]) -> None:
        """These rows will be asked for next, in this order."""

    def describe(self) -> dict[str, Any]:
        """What is kept where, for people."""


def open_storage(table: Table, *, cache: Any = "auto") -> Storage:
    """The storage of a table.

    `cache` is "auto", "ram", "disk", a `shoal.memory.CacheConfig`, or None:
    then blocks are decoded again and again, for what is read once and in
    order.
    """
    from shoal.data.cache.stored_rows import StoredRows

    if cache is None:
        return PassingBlocks(table)
    return StoredRows(table, CacheConfig.of(cache))


class PassingBlocks:
    """The blocks that were touched last, as they were decoded."""

    looks_ahead = False

    def __init__(self, table: Table) -> None:
        self._table = table
        self._bounds = np.cumsum([0, *(block.num_rows for block in table.blocks)])
        limit = min(_PASSING_BYTES, available.for_caches())
        self._blocks = BlockStore(Limits(ram_bytes=limit, disk_bytes=0), name="decoded blocks")
        self._bad: dict[int, Mapping[int, BadSample]] = {}

    def gather(self, rows: range | NDArray[np.int64]) -> Gathered:
        """Block by block, then put into the order asked for."""
        wanted = np.asarray(rows, dtype=np.int64)
        of_block = np.searchsorted(self._bounds, wanted, side="right") - 1
        order = np.argsort(of_block, kind="stable")
        parts: dict[str, list[Any]] = {column.name: [] for column in self._table.columns}
        bad: dict[int, BadSample] = {}
        for block in np.unique(of_block).tolist():
            columns, first = self._blocks.get(block, self._decode), int(self._bounds[block])
            local = wanted[order][of_block[order] == block] - first
            for name, column in columns.items():
                parts[name].append(
                    Ragged(*column).take(local) if isinstance(column, tuple) else column[local]
                )
            wrong = self._bad[block]
            bad |= {first + row: wrong[row] for row in (local.tolist() if wrong else ()) if row in wrong}
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return Gathered({name: _joined(pieces, back) for name, pieces in parts.items()}, bad)

    def will_need(self, rows: NDArray[np.int64]) -> None:
        """Nothing is read ahead: a shuffled table would be decoded as a whole for one batch."""

    def describe(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {"cache": None, **self._blocks.figures()}

    def _decode(self, block: int) -> dict[str, Any]:
        decoded: Rows = self._table.read(block)
        self._bad[block] = decoded.bad
        return {
            name: tuple(column) if isinstance(column, Ragged) else column
            for name, column in decoded.columns.items()
        }


def _joined(pieces: list[Any], back: NDArray[np.int64]) -> torch.Tensor | Ragged:
    if not isinstance(pieces[0], Ragged):
        return torch.from_numpy(np.concatenate(pieces)[back])
    lengths = np.concatenate([np.diff(piece.offsets) for piece in pieces])
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return Ragged(np.concatenate([piece.values for piece in pieces]), offsets).take(back)
