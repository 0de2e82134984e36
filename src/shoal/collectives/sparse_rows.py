"""Sums of sparse gradients over the ranks: rows of embeddings with `sparse=True`.

Each rank merges its duplicate ids, all of them gather everybody's rows in one
exchange, and each adds them up by id in rank order, so every rank has the same
bits. How many rows a rank has travels ahead, because ranks must agree on the
size of what they gather. Loops are compiled (`runtime/row_kernels.py`); torch
adds in the same order until they are, and what they have no type for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.collectives.reducer import Reducer, gather_rows
from shoal.runtime import kernel_cache, row_kernels

_LINE = 64  # bytes: every list begins at a multiple of any number's size
_TYPES = (torch.float32, torch.float64)


class Rows(NamedTuple):
    """Rows of one table: ids in increasing order, and a row of values for each."""

    keys: Tensor
    values: Tensor

    def gradient(self, num_rows: int) -> Tensor:
        """As autograd has it, of a table of so many rows."""
        shape = (num_rows, *self.values.shape[1:])
        return torch.sparse_coo_tensor(
            self.keys[None], self.values, shape, is_coalesced=True, check_invariants=False
        )


def rows_of(gradient: Tensor) -> Rows:
    """The rows of a sparse gradient in host memory, those of the same id added up in their order."""
    ids, values = gradient._indices()[0].cpu(), gradient._values().cpu()
    if gradient.is_coalesced():
        return Rows(ids, values)
    if not _is_compiled() or values.dtype not in _TYPES or values.dim() != 2:
        # Not `coalesce`: it was seen to add duplicates in another order than the batch has.
        known, places = torch.unique(ids, return_inverse=True)
        return Rows(known, torch.zeros_like(values[: len(known)]).index_add_(0, places, values))
    keys, inverse = row_kernels.unique(ids.numpy())
    sums = np.empty((len(keys), values.shape[1]), values.numpy().dtype)
    row_kernels.sum_back(values.contiguous().numpy(), inverse, sums)
    return Rows(torch.from_numpy(keys), torch.from_numpy(sums))


def no_rows(table: Tensor) -> Rows:
    return Rows(torch.empty(0, dtype=torch.int64), torch.empty((0, *table.shape[1:]), dtype=table.dtype))


class RowExchange:
    """One exchange of the rows of all tables of a model. Until `finish` returns, nothing of this rank's has changed."""

    def __init__(self, tables: Sequence[Rows], group: Reducer) -> None:
        """Start it: tell how many rows there are."""
        self._tables, self._group = tables, group
        self._counts = torch.zeros((group.num_workers, len(tables)), dtype=torch.int64)
        self._counts[group.rank] = torch.tensor([len(table.keys) for table in tables])
        self._work = group.start_all_reduce(self._counts)

    def finish(self) -> list[Rows]:
        """Rows of all ranks, summed, table by table."""
        group = self._group
        group.finish(self._work, "the exchange of the sizes of sparse gradients")
        places, num_bytes = [], 0
        for table, most in zip(self._tables, self._counts.amax(0).tolist(), strict=True):
            keys_at, rows_at = num_bytes, num_bytes + _whole_lines(8 * most)
            num_bytes = rows_at + _whole_lines(most * _row_bytes(table))
            places.append((keys_at, rows_at))
        packed = torch.empty(num_bytes, dtype=torch.uint8)
        for table, (keys_at, rows_at) in zip(self._tables, places, strict=True):
            for tensor, at in ((table.keys, keys_at), (table.values, rows_at)):
                packed[at : at + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
        parts = _side_by_side(gather_rows(group, packed)) if num_bytes else packed
        return [
            _merge(parts, num_bytes, *place, self._counts[:, number], table)
            for number, (table, place) in enumerate(zip(self._tables, places, strict=True))
        ]


def _merge(parts: Tensor, num_bytes: int, keys_at: int, rows_at: int, counts: Tensor, like: Rows) -> Rows:
    """The rows of one table, at these bytes of every rank's part, added up in rank order."""
    num_rows, shape = int(counts.sum()), like.values.shape[1:]
    if not num_rows:
        return Rows(like.keys, like.values)
    if _is_compiled() and like.values.dtype in _TYPES and len(shape) == 1:
        memory: Any = parts.view(len(counts), num_bytes).numpy()
        dtype, row_bytes = like.values.numpy().dtype, _row_bytes(like)
        ranks = [(part, count) for part, count in zip(memory, counts.tolist(), strict=True) if count]
        keys, sums = row_kernels.sum_lists(
            [part[keys_at : keys_at + 8 * count].view(np.int64) for part, count in ranks],
            [
                part[rows_at : rows_at + row_bytes * count].view(dtype).reshape(count, -1)
                for part, count in ranks
            ],
            from_zero=True,
        )
        return Rows(torch.from_numpy(keys), torch.from_numpy(sums))
    listed = []
    for part, count in zip(parts.view(len(counts), num_bytes), counts.tolist(), strict=True):
        values = part[rows_at : rows_at + count * _row_bytes(like)].view(like.values.dtype)
        listed.append(
            # + 0.0: the compiled loop adds to zero, which has a -0.0 become 0.0.
            Rows(part[keys_at : keys_at + 8 * count].view(torch.int64), values.reshape(count, *shape) + 0.0)
        )
    size = 1 + max(int(rows.keys[-1]) for rows in listed if len(rows.keys))
    total = no_rows(like.values).gradient(size)
    for rows in listed:
        total = total + rows.gradient(size)
    total = total.coalesce()
    return Rows(total.indices()[0], total.values())


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """Equal parts as one tensor; without a copy where they are neighbours in memory."""
    first = parts[0]
    is_one = all(
        part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and part.storage_offset() == at * len(first)
        for at, part in enumerate(parts)
    )
    return first.as_strided((len(parts) * len(first),), (1,)) if is_one else torch.cat(parts)


def _row_bytes(table: Rows) -> int:
    return math.prod(table.values.shape[1:]) * table.values.itemsize


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


@functools.cache
def _is_compiled() -> bool:
    """True where the loops are on this machine's disk; else the warm parent has them compiled, for the next start."""
    return kernel_cache.is_compiled(row_kernels.KERNELS)
