"""Sums of sparse gradients over the ranks: rows of embeddings with `sparse=True`.

Each rank merges its duplicate ids, all of them gather every rank's rows in one exchange, and each
sums them by id in rank order, so every rank has the same bits. Four and more ranks that share memory
divide the sum: each sums a range of ids in place and copies the sums of the other ranges. Between
hosts a row goes to one rank only, which sums it in the same order, and the sums are gathered: a
network carries each row twice, whatever the number of ranks. Row counts are exchanged first, because
ranks must agree on the size of the gather. Loops are compiled (`runtime/row_kernels.py`); torch sums
in the same order until they are, and for types they lack.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from shoal.collectives.reducer import Reducer, SharedParts, SharesMemory, SwapsParts, gather_rows
from shoal.runtime import kernel_cache, row_kernels

_LINE = 64  # bytes: every list begins at a multiple of any number's size
_TYPES = (torch.float32, torch.float64)
_MOST_ROWS = 1 << 36  # of a table: its weights alone would be 256 GiB and more
_SHARED_FROM = 4096
"""Rows per rank, on average, of all tables of one kind, from which ranks divide the sum: of 3,000 (batch 1,024 over 8 workers) it does not pay."""


class ScattersRows(Reducer, SwapsParts, Protocol):
    """A Reducer with an all-to-all."""


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
        # Not `coalesce`: it was seen to add duplicates in another order than the batch's.
        known, places = torch.unique(ids, return_inverse=True)
        return Rows(known, torch.zeros_like(values[: len(known)]).index_add_(0, places, values))
    keys, inverse = row_kernels.unique(ids.numpy())
    sums = np.empty((len(keys), values.shape[1]), values.numpy().dtype)
    row_kernels.sum_back(values.contiguous().numpy(), inverse, sums)
    return Rows(torch.from_numpy(keys), torch.from_numpy(sums))


def no_rows(table: Tensor) -> Rows:
    return Rows(torch.empty(0, dtype=torch.int64), torch.empty((0, *table.shape[1:]), dtype=table.dtype))


class RowExchange:
    """One exchange of the rows of several tables. Until `finish` returns, nothing of this rank's has changed."""

    def __init__(self, tables: Sequence[Rows], group: Reducer) -> None:
        """Start it: tell how many rows there are."""
        self._tables, self._group = tables, group
        self._counts = torch.zeros((group.num_workers, len(tables)), dtype=torch.int64)
        self._counts[group.rank] = torch.tensor([len(table.keys) for table in tables])
        self._work = group.start_all_reduce(self._counts)

    def finish(self) -> list[Rows]:
        """Rows of all ranks, summed, table by table."""
        self._group.finish(self._work, "the exchange of the sizes of sparse gradients")
        return _gathered(self._tables, self._counts, self._group)


class SharedRowExchange(RowExchange):
    """The same exchange by ranks that share memory: each adds up a range of the keys and copies the sums of the others.

    Two meetings of all ranks guard the memory: after the first, everybody's
    rows can be read; after the second, everybody's sums, and rows may be written again.
    Ranges are quantiles of all ranks' keys. They decide who adds a row up, not in which order.
    """

    def __init__(self, tables: Sequence[Rows], group: Reducer, memory: SharedParts) -> None:
        """Start it: write this rank's rows, and tell how many there are."""
        self._memory = memory
        memory.is_in_use = True
        places, num_bytes = _lay_out(tables, torch.tensor([len(table.keys) for table in tables]))
        if 0 < num_bytes <= memory.num_bytes:
            _pack(tables, places, memory.own[group.rank])
        super().__init__(tables, group)

    def finish(self) -> list[Rows]:
        group, memory, counts = self._group, self._memory, self._counts
        group.finish(self._work, "the exchange of the sizes of sparse gradients")
        memory.is_in_use = False
        if int(counts.sum()) <= _SHARED_FROM * counts.numel():
            return _gathered(self._tables, counts, group)
        laid_out = [_lay_out(self._tables, each) for each in counts]
        most = max(num_bytes for _, num_bytes in laid_out)
        if most > memory.num_bytes:
            rows = _gathered(self._tables, counts, group)
            memory.grow(2 * most)
            return rows
        sums = torch.zeros((group.num_workers, len(self._tables), 2), dtype=torch.int64)
        at = 0
        for number, table in enumerate(self._tables):
            lists = [
                _rows_at(memory.own[rank], *places[number], int(counts[rank, number]), table)
                for rank, (places, _) in enumerate(laid_out)
            ]
            begin, end = self._range(lists)
            mine = [_between(rows, begin, end) for rows in lists]
            room = sum(len(rows.keys) for rows in mine)
            (place,), num_bytes = _lay_out([table], torch.tensor([room]))
            out = _rows_at(memory.sums[group.rank][at:], *place, room, table)
            sums[group.rank, number] = torch.tensor([room, _sum(mine, table, out)])
            at += num_bytes
        group.finish(group.start_all_reduce(sums), "the exchange of sums of sparse gradients")
        return self._collect(sums)

    def _range(self, lists: Sequence[Rows]) -> tuple[int | None, int | None]:
        """The first key of a table that this rank adds up, and the first that it does not."""
        rank, num = self._group.rank, self._group.num_workers
        lists = [rows for rows in lists if len(rows.keys)]
        if not lists:
            return None, None
        # A quantile of a rank represents a fixed number of its rows, so no rank sums more than three times the mean.
        rows_of = np.repeat([len(rows.keys) for rows in lists], num - 1)
        keys = np.concatenate(
            [rows.keys.numpy()[np.arange(1, num) * len(rows.keys) // num] for rows in lists]
        )
        order = np.argsort(keys, kind="stable")
        up_to = rows_of[order].cumsum()
        bounds = keys[order][np.searchsorted(up_to, up_to[-1] * np.arange(num) // num)].tolist()
        return bounds[rank] if rank else None, bounds[rank + 1] if rank + 1 < num else None

    def _collect(self, sums: Tensor) -> list[Rows]:
        """The sums of all ranges, one after the other: their keys increase."""
        found, at = [], [0] * self._group.num_workers
        for number, table in enumerate(self._tables):
            parts = []
            for rank, (room, num_rows) in enumerate(sums[:, number].tolist()):
                (place,), num_bytes = _lay_out([table], torch.tensor([room]))
                parts.append(_rows_at(self._memory.sums[rank][at[rank] :], *place, num_rows, table))
                at[rank] += num_bytes
            found.append(
                Rows(torch.cat([part.keys for part in parts]), torch.cat([part.values for part in parts]))
            )
        return found


class RowScatter:
    """The same exchange, with each row sent only to the rank that sums it."""

    def __init__(self, tables: Sequence[Rows], group: ScattersRows) -> None:
        """Start it: tell how many rows there are for whom."""
        self._group, num = group, group.num_workers
        self._for = [_cut(table, num) for table in tables]  # by table, then by rank
        self._counts = torch.zeros((num, len(tables), num), dtype=torch.int64)
        self._counts[group.rank] = torch.tensor([[len(rows.keys) for rows in cut] for cut in self._for])
        self._work = group.start_all_reduce(self._counts)

    def finish(self) -> list[Rows]:
        group = self._group
        group.finish(self._work, "the exchange of the sizes of sparse gradients")
        likes = [no_rows(cut[0].values) for cut in self._for]
        places, num_bytes = _lay_out(likes, self._counts.amax((0, 2)))
        packed = torch.empty((group.num_workers, num_bytes), dtype=torch.uint8)
        for rank, part in enumerate(packed):
            _pack([cut[rank] for cut in self._for], places, part)
        parts = (group.swap_parts(packed) if num_bytes else packed).reshape(-1)
        mine = [
            _merge(parts, num_bytes, *place, self._counts[:, number, group.rank], like)
            for number, (like, place) in enumerate(zip(likes, places, strict=True))
        ]
        return RowExchange(mine, group).finish()


class TableExchange:
    """The exchange of all tables of a model: those with rows of one shape and type go as one.

    A table of its own costs a fixed number of calls for each rank, a row of it little.
    """

    def __init__(self, tables: Sequence[Rows], group: Reducer) -> None:
        alike: dict[object, list[int]] = {}
        for number, table in enumerate(tables):
            alike.setdefault((table.values.dtype, table.values.shape[1:]), []).append(number)
        self._alike = list(alike.values())
        self._exchange = _start([_joined([tables[n] for n in numbers]) for numbers in self._alike], group)

    def finish(self) -> list[Rows]:
        """Rows of all ranks, summed, table by table."""
        found: dict[int, Rows] = {}
        for numbers, rows in zip(self._alike, self._exchange.finish(), strict=True):
            found.update(zip(numbers, _apart(rows, len(numbers)), strict=True))
        return [found[number] for number in range(len(found))]


def _start(tables: Sequence[Rows], group: Reducer) -> RowExchange | SharedRowExchange | RowScatter:
    if (
        isinstance(group, SharesMemory)
        and (memory := group.shared_parts) is not None
        and not memory.is_in_use
    ):
        return SharedRowExchange(tables, group, memory)
    if isinstance(group, SwapsParts) and group.scatters_rows and group.num_workers > 2:
        return RowScatter(tables, cast(ScattersRows, group))
    return RowExchange(tables, group)


def _joined(tables: Sequence[Rows]) -> Rows:
    """Tables with rows of one kind as one: keys of the second begin where no row of the first can be."""
    if len(tables) == 1:
        return tables[0]
    keys = [table.keys + number * _MOST_ROWS for number, table in enumerate(tables)]
    return Rows(torch.cat(keys), torch.cat([table.values for table in tables]))


def _apart(rows: Rows, num_tables: int) -> list[Rows]:
    """The tables that `_joined` made one."""
    ends = np.searchsorted(rows.keys.numpy(), np.arange(1, num_tables) * _MOST_ROWS).tolist()
    parts = pairwise([0, *ends, len(rows.keys)])
    return [
        Rows(rows.keys[begin:end] - number * _MOST_ROWS, rows.values[begin:end])
        for number, (begin, end) in enumerate(parts)
    ]


def _gathered(tables: Sequence[Rows], counts: Tensor, group: Reducer) -> list[Rows]:
    """Rows of all ranks, with these numbers of each table, gathered and summed by each rank."""
    places, num_bytes = _lay_out(tables, counts.amax(0))
    packed = torch.empty(num_bytes, dtype=torch.uint8)
    _pack(tables, places, packed)
    parts = _side_by_side(gather_rows(group, packed)) if num_bytes else packed
    return [
        _merge(parts, num_bytes, *place, counts[:, number], table)
        for number, (table, place) in enumerate(zip(tables, places, strict=True))
    ]


def _cut(table: Rows, num_ranks: int) -> list[Rows]:
    """A table's rows by the rank that adds them up: a hash of the id, as frequent ids are often neighbours."""
    spread = (table.keys.numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    owner = torch.from_numpy((spread % np.uint64(num_ranks)).astype(np.int64))
    order = torch.argsort(owner, stable=True)
    keys, values = table.keys[order], table.values[order]
    ends = [0, *torch.bincount(owner, minlength=num_ranks).cumsum(0).tolist()]
    return [Rows(keys[begin:end], values[begin:end]) for begin, end in pairwise(ends)]


def _lay_out(tables: Sequence[Rows], most: Tensor) -> tuple[list[tuple[int, int]], int]:
    """Where keys and rows of each table begin in a part that has room for so many of each; and the bytes of a part."""
    places, num_bytes = [], 0
    for table, count in zip(tables, most.tolist(), strict=True):
        keys_at, rows_at = num_bytes, num_bytes + _whole_lines(8 * count)
        num_bytes = rows_at + _whole_lines(count * _row_bytes(table))
        places.append((keys_at, rows_at))
    return places, num_bytes


def _pack(tables: Sequence[Rows], places: Sequence[tuple[int, int]], part: Tensor) -> None:
    for table, (keys_at, rows_at) in zip(tables, places, strict=True):
        for tensor, at in ((table.keys, keys_at), (table.values, rows_at)):
            part[at : at + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))


def _rows_at(part: Tensor, keys_at: int, rows_at: int, count: int, like: Rows) -> Rows:
    """So many rows of a table that begin at these bytes, where they are."""
    values = part[rows_at : rows_at + count * _row_bytes(like)].view(like.values.dtype)
    return Rows(
        part[keys_at : keys_at + 8 * count].view(torch.int64), values.view(count, *like.values.shape[1:])
    )


def _between(rows: Rows, begin: int | None, end: int | None) -> Rows:
    """The rows of keys from `begin` on and below `end`."""
    first = 0 if begin is None else int(np.searchsorted(rows.keys.numpy(), begin))
    last = len(rows.keys) if end is None else int(np.searchsorted(rows.keys.numpy(), end))
    return Rows(rows.keys[first:last], rows.values[first:last])


def _merge(parts: Tensor, num_bytes: int, keys_at: int, rows_at: int, counts: Tensor, like: Rows) -> Rows:
    """The rows of one table, at these bytes of every rank's part, added up in rank order."""
    if not (room := int(counts.sum())):
        return Rows(like.keys, like.values)
    lists = [
        _rows_at(part, keys_at, rows_at, count, like)
        for part, count in zip(parts.view(len(counts), num_bytes), counts.tolist(), strict=True)
    ]
    out = Rows(torch.empty(room, dtype=torch.int64), like.values.new_empty((room, *like.values.shape[1:])))
    num_rows = _sum(lists, like, out)
    return Rows(out.keys[:num_rows], out.values[:num_rows])


def _sum(lists: Sequence[Rows], like: Rows, out: Rows) -> int:
    """Write the sum of several ranks' rows, added in their order, to `out`, which has room for all; how many rows it has."""
    lists = [rows for rows in lists if len(rows.keys)]
    if not lists:
        return 0
    if _is_compiled() and like.values.dtype in _TYPES and like.values.dim() == 2:
        keys, _ = row_kernels.sum_lists(
            [rows.keys.numpy() for rows in lists],
            [rows.values.numpy() for rows in lists],
            from_zero=True,
            out=(out.keys.numpy(), out.values.numpy()),
        )
        return len(keys)
    size = 1 + max(int(rows.keys[-1]) for rows in lists)
    total = no_rows(like.values).gradient(size)
    for rows in lists:
        # + 0.0: the compiled loop adds to zero, which has a -0.0 become 0.0.
        total = total + Rows(rows.keys, rows.values + 0.0).gradient(size)
    total = total.coalesce()
    num_rows = total._nnz()
    out.keys[:num_rows], out.values[:num_rows] = total.indices()[0], total.values()
    return num_rows


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
    """True if the loops are on this machine's disk; else the warm parent compiles them, for the next start."""
    return kernel_cache.is_compiled(row_kernels.KERNELS)
