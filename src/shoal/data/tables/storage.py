"""Where decoded rows of a table wait until they are asked for.

The seam between tables and memory: `TableSource` asks for rows by number and
does not know whether they lie in RAM, on disk, or are decoded just now.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.core.data_errors import BadSample
from shoal.data.tables.table import Ragged, Rows, Table


class Gathered(NamedTuple):
    """Rows that were asked for, in the order in which they were, as copies that may be written."""

    columns: dict[str, torch.Tensor | Ragged]
    """Tensors [rows, *shape]; a Ragged for lists of several lengths, text and bytes."""

    bad: Mapping[int, BadSample]
    """Row of the table to what is wrong with it, of the rows asked for."""


class Storage(Protocol):
    """The rows of one table by their number, 0 to num_rows - 1."""

    def gather(self, rows: range | NDArray[np.int64]) -> Gathered:
        """Copies of these rows."""

    def describe(self) -> dict[str, Any]:
        """What is kept where, for people."""


def open_storage(table: Table, *, cache: Any = "auto") -> Storage:
    """The storage of a table: `cache` is "auto", or what `shoal.memory` takes."""
    return DecodedBlocks(table)


class DecodedBlocks:
    """Every block that was touched, as it was decoded."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._bounds = np.cumsum([0, *(block.num_rows for block in table.blocks)])
        self._blocks: dict[int, Rows] = {}
        self._lock = threading.Lock()

    def gather(self, rows: range | NDArray[np.int64]) -> Gathered:
        """Block by block, then put into the order asked for."""
        wanted = np.asarray(rows, dtype=np.int64)
        of_block = np.searchsorted(self._bounds, wanted, side="right") - 1
        order = np.argsort(of_block, kind="stable")
        parts: dict[str, list[Any]] = {column.name: [] for column in self._table.columns}
        bad: dict[int, BadSample] = {}
        for block in np.unique(of_block).tolist():
            decoded, first = self._decoded(block), int(self._bounds[block])
            local = wanted[order][of_block[order] == block] - first
            for name, column in decoded.columns.items():
                parts[name].append(column.take(local) if isinstance(column, Ragged) else column[local])
            bad |= {
                first + row: decoded.bad[row]
                for row in (local.tolist() if decoded.bad else ())
                if row in decoded.bad
            }
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return Gathered({name: _joined(pieces, back) for name, pieces in parts.items()}, bad)

    def describe(self) -> dict[str, Any]:
        """Blocks in RAM, of how many."""
        return {"blocks_in_ram": len(self._blocks), "num_blocks": len(self._table.blocks)}

    def _decoded(self, block: int) -> Rows:
        with self._lock:
            if block not in self._blocks:
                self._blocks[block] = self._table.read(block)
            return self._blocks[block]


def _joined(pieces: list[Any], back: NDArray[np.int64]) -> torch.Tensor | Ragged:
    if not isinstance(pieces[0], Ragged):
        return torch.from_numpy(np.concatenate(pieces)[back])
    lengths = np.concatenate([np.diff(piece.offsets) for piece in pieces])
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return Ragged(np.concatenate([piece.values for piece in pieces]), offsets).take(back)
