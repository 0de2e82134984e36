"""Decoded rows of a table: each block decoded once and kept in RAM or on disk, or decoded again as it passes.

The seam between tables and caches: `TableSource` asks for rows by number. All
workers of a host share the kept rows: a block is decoded by whichever of them
needs it first, and a worker that was started again finds it there.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from shoal import system
from shoal.config import job as jobs
from shoal.data.cache import CacheConfig, cache_plan
from shoal.data.cache.cache_plan import piece_bytes, place, say_where
from shoal.data.cache.row_file import Field
from shoal.data.cache.row_store import UNLIMITED, RowPrefetch, RowSpec, RowStore, row_layout
from shoal.data.formats.table import Column, DecodedRows, GrowingTable, Ragged, Table, joined_ragged
from shoal.data.tree import Tree
from shoal.errors import BadSample, CacheFull, DataError
from shoal.runtime import serialization

_PASSING_BYTES = 256 << 20


class Gathered(NamedTuple):
    """Requested rows, in request order, as writable copies."""

    columns: dict[str, torch.Tensor | Ragged]
    """Tensors [rows, *shape]; a Ragged for lists of several lengths, text and bytes."""

    bad: Mapping[int, BadSample]
    """Error by row of the table, among the requested ones."""


class Storage(Protocol):
    """The rows of one table by their number, 0 to num_rows - 1."""

    @property
    def looks_ahead(self) -> bool:
        """Whether `will_need` does anything."""

    def gather(self, rows: range | NDArray[np.int64]) -> Gathered:
        """Copies of these rows."""

    def will_need(self, rows: NDArray[np.int64]) -> None:
        """These rows will be asked for next, in this order."""


def open_storage(table: Table, *, cache: Any = "auto") -> Storage:
    """Storage of a table.

    `cache` is "auto", "ram", "disk", a `shoal.memory.CacheConfig`, or None: then blocks are decoded
    each time, for data read once and in order.
    """
    if cache is None or isinstance(table, GrowingTable):
        return PassingBlocks(table)
    return StoredRows(table, CacheConfig.of(cache))


class RecentBlocks:
    """LRU of blocks by number, within a limit in bytes. Threads may share it; a block may be loaded twice."""

    def __init__(self, limit_bytes: int, *, name: str) -> None:
        self.name, self.granted_bytes = name, 0
        self._limit = limit_bytes
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._blocks: OrderedDict[int, tuple[Tree, int]] = OrderedDict()  # the one used last is last
        self._num_bytes = self._num_hits = self._num_misses = 0
        cache_plan.register(self)

    def get(self, number: int, load: Callable[[int], Tree]) -> Tree:
        if self._pid != os.getpid():  # in a forked child: a thread of its parent may have held it
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            if number in self._blocks:
                self._num_hits += 1
                self._blocks.move_to_end(number)
                return self._blocks[number][0]
            self._num_misses += 1
        block = load(number)
        num_bytes = serialization.num_bytes(block)
        with self._lock:
            if number not in self._blocks and num_bytes <= self._limit:
                self._blocks[number] = block, num_bytes
                self._num_bytes += num_bytes
            while self._num_bytes > self._limit:
                _, (_, freed) = self._blocks.popitem(last=False)
                self._num_bytes -= freed
        return block

    def filled_bytes(self) -> int:
        """0: no memory was granted to it."""
        return 0

    def figures(self) -> dict[str, Any]:
        hits, misses = self._num_hits, self._num_misses
        ram = {
            "num_bytes": self._num_bytes,
            "limit_bytes": self._limit,
            "num_hits": hits,
            "num_misses": misses,
        }
        return {
            "kind": "blocks",
            "num_blocks": len(self._blocks),
            "num_loads": misses,
            "ram": {**ram, "hit_rate": cache_plan.hit_rate(hits, misses)},
        }


class PassingBlocks:
    """The blocks that were touched last, as they were decoded."""

    looks_ahead = False

    def __init__(self, table: Table) -> None:
        self._table = table
        self._limit = min(_PASSING_BYTES, cache_plan.for_caches())
        self._grown: list[int] = []
        self._begin(np.cumsum([0, *(block.num_rows for block in table.blocks)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return PassingBlocks, (self._table,)

    def _begin(self, bounds: NDArray[np.int64]) -> None:
        self._bounds = bounds
        self._blocks = RecentBlocks(self._limit, name="decoded blocks")
        self._bad: dict[int, Mapping[int, BadSample]] = {}

    def _grow_to(self, num_rows: int) -> None:
        if not isinstance(self._table, GrowingTable):
            return
        bounds = self._table.bounds_to(num_rows)
        if bounds is not self._grown:
            self._grown = bounds
            self._begin(np.asarray(bounds))
        elif len(bounds) > len(self._bounds):
            self._bounds = np.append(self._bounds, bounds[len(self._bounds) :])

    def gather(self, rows: range | NDArray[np.int64]) -> Gathered:
        wanted = np.asarray(rows, dtype=np.int64)
        self._grow_to(int(wanted.max()) + 1)
        if wanted.min() < self._bounds[0]:
            raise DataError(
                f"sample {wanted.min():,} of a stream was asked for, and the checkpoint that it goes on from holds the offsets from sample "
                f"{self._bounds[0]:,} on alone. Nothing was read; resume in the run directory, which holds all of them."
            )
        of_block = np.searchsorted(self._bounds, wanted, side="right") - 1
        order = np.argsort(of_block, kind="stable")
        parts: dict[str, list[Any]] = {column.name: [] for column in self._table.columns}
        bad: dict[int, BadSample] = {}
        for block in np.unique(of_block).tolist():
            columns, first = self._blocks.get(block, self._decode), int(self._bounds[block])
            local = wanted[order][of_block[order] == block] - first
            for name, column in columns.items():
                parts[name].append(column.take(local) if isinstance(column, Ragged) else column[local])
            wrong = self._bad[block]
            bad |= {first + row: wrong[row] for row in (local.tolist() if wrong else ()) if row in wrong}
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return Gathered({name: _joined(pieces, back) for name, pieces in parts.items()}, bad)

    def will_need(self, rows: NDArray[np.int64]) -> None:
        """Nothing is prefetched: a shuffled table would be decoded completely for one batch."""

    def _decode(self, block: int) -> dict[str, Any]:
        decoded: DecodedRows = self._table.read(block)
        self._bad[block] = decoded.bad
        return decoded.columns


def _joined(pieces: list[Any], back: NDArray[np.int64]) -> torch.Tensor | Ragged:
    if isinstance(pieces[0], Ragged):
        return joined_ragged(pieces).take(back)
    return torch.from_numpy(np.concatenate(pieces)[back])


_THERE, _THERE_WITH_BAD_ROWS = 1, 2
_MAX_DECODERS = 4
_DECODING_NEEDS = 3  # memory relative to the result: read, decoded, as columns
_PATIENCE_S = 0.002  # between two checks of a block that another process is decoding


class StoredRows:
    """A table's rows in a `RowStore`."""

    def __init__(self, table: Table, config: CacheConfig) -> None:
        self._table, self._config = table, config
        self._bounds = np.cumsum([0, *(block.num_rows for block in table.blocks)])
        self._bad: dict[int, BadSample] = {}
        self._bad_of_block: dict[int, Mapping[int, BadSample]] = {}
        self._is_whole = self._said = False
        self._lock = threading.Lock()
        job = jobs.current()
        fields = {c.name: Field.of(c.dtype, c.shape) for c in table.columns if not c.is_ragged}
        lists = {c.name: c.dtype for c in table.columns if c.is_ragged}
        row_bytes = row_layout(fields, lists).row_bytes
        num_rows = int(self._bounds[-1])
        list_bytes = sum(_list_bytes(block, table.columns) for block in table.blocks) if lists else 0
        budget = cache_plan.for_caches()
        self._limit = budget if config.ram_bytes is None else config.ram_bytes
        self._placement = placed = place(
            num_rows, row_bytes + list_bytes / max(num_rows, 1), config, budget_bytes=budget
        )
        spec = RowSpec(
            fields=fields,
            lists=lists,
            num_rows=num_rows,
            num_parts=len(table.blocks),
            num_ram_rows=placed.num_ram_rows,
            # Sizes of lists are estimates; if all of them go to RAM, so does the excess of an
            # underestimate.
            heap_ram_bytes=UNLIMITED
            if placed.num_ram_rows == num_rows
            else max(placed.ram_bytes - placed.num_ram_rows * row_bytes, 0),
        )
        where = table.blocks[0].where if table.blocks else "a table"
        self._what = where.rpartition(", ")[0] or where
        self._store = RowStore(
            spec,
            name=self._what,
            directory=config.directory,
            shared_as=table.identity if job.launched else None,
            granted_bytes=self._placement.ram_bytes,
        )
        self._ahead = RowPrefetch(self._take, row_bytes=row_bytes, piece_bytes=piece_bytes(self._limit))

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredRows, (self._table, self._config)  # a task of an engine decodes its own

    @property
    def looks_ahead(self) -> bool:
        return not self._store.is_all_in_ram

    def gather(self, rows: range | NDArray[np.int64]) -> Gathered:
        taken = None
        if self.looks_ahead and not isinstance(rows, range):
            taken = self._ahead.take(rows)
            if taken is not None:
                self._store.count_ahead(len(rows))
        columns: dict[str, Any] = self._store.unpack(self._take(rows) if taken is None else taken)
        if self._store.spec.lists:
            columns = {column.name: columns[column.name] for column in self._table.columns}
        return Gathered(columns, self._bad_among(rows) if self._bad else {})

    def will_need(self, rows: NDArray[np.int64]) -> None:
        if self.looks_ahead and len(rows):
            self._ahead.announce(rows)

    # ---- decoding ----------------------------------------------------------------------------------

    def _take(self, rows: range | NDArray[np.int64]) -> torch.Tensor:
        if not self._is_whole:
            self._have(self._blocks_of(rows))
        return self._store.take(rows)

    def _blocks_of(self, rows: range | NDArray[np.int64]) -> list[int]:
        if isinstance(rows, range):
            ends = np.asarray([rows[0], rows[-1]])
            first, last = (np.searchsorted(self._bounds, ends, side="right") - 1).tolist()
            return list(range(min(first, last), max(first, last) + 1))
        found: list[int] = np.unique(np.searchsorted(self._bounds, rows, side="right") - 1).tolist()
        return found

    def _have(self, blocks: Sequence[int]) -> None:
        """Return when all of these are decoded, by this process or others, and their bad rows are known."""
        flags = self._store.flags
        missing = [block for block in blocks if not flags[block]]
        if self._store.is_first and not self._said and self._lock.acquire(blocking=False):
            try:
                self._begin()
            finally:
                self._lock.release()
        while missing:
            self._decode(missing)
            missing = [block for block in missing if not flags[block]]
            if missing:
                time.sleep(_PATIENCE_S)  # another process decodes them; if it dies, its locks are free
        for block in blocks:
            if flags[block] == _THERE_WITH_BAD_ROWS:
                self._learn_bad(block)
        self._is_whole = bool(flags.all())

    def _decode(self, blocks: Sequence[int]) -> None:
        largest = max(self._table.blocks[block].num_bytes for block in blocks)
        cores = len(system.cores()) // jobs.current().num_sharers
        room = self._limit // (_DECODING_NEEDS * max(largest, 1))
        num_threads = max(1, min(_MAX_DECODERS, cores, room, len(blocks)))
        try:
            if num_threads == 1:
                for block in blocks:
                    self._decode_one(block)
            else:
                with ThreadPoolExecutor(num_threads, "shoal-decode") as threads:
                    for _ in threads.map(self._decode_one, blocks):
                        pass
        finally:
            _give_back_unused()

    def _decode_one(self, block: int) -> None:
        with self._store.claimed(block) as is_ours:
            if not is_ours or self._store.flags[block]:
                return
            rows = self._table.read(block)
            self._store.write(int(self._bounds[block]), rows.num_rows, rows.columns)
            if rows.bad:
                self._bad_of_block[block] = rows.bad
            self._store.flags[block] = _THERE_WITH_BAD_ROWS if rows.bad else _THERE

    def _learn_bad(self, block: int) -> None:
        """Find the bad rows of a block; one that another process decoded is decoded again."""
        first = int(self._bounds[block])
        if block not in self._bad_of_block:
            self._bad_of_block[block] = self._table.read(block).bad
        known = self._bad_of_block[block]
        if known and first + next(iter(known)) not in self._bad:
            self._bad.update({first + row: bad for row, bad in known.items()})

    def _bad_among(self, rows: range | NDArray[np.int64]) -> dict[int, BadSample]:
        asked = rows if isinstance(rows, range) else rows.tolist()
        return {row: self._bad[row] for row in asked if row in self._bad}

    def _begin(self) -> None:
        """Once, by the process that made the store: report the placement, and check the room unless others have begun to fill it."""
        if self._said:
            return
        placed, directory = self._placement, self._store.directory
        if placed.disk_bytes and not self._store.flags.any():
            free = cache_plan.free_disk_bytes(directory)
            if free < placed.disk_bytes:
                raise CacheFull(
                    what=self._what,
                    directory=str(directory),
                    needed_bytes=placed.disk_bytes,
                    free_bytes=free,
                    reason="the rows that do not fit in RAM do not fit there either",
                )
        self._said = True
        say_where(self._what, placed, directory)


def _give_back_unused() -> None:
    """Return the memory that Arrow pools for further blocks."""
    arrow = sys.modules.get("pyarrow")
    if arrow is not None:
        arrow.default_memory_pool().release_unused()


def _list_bytes(block: Any, columns: Sequence[Column]) -> int:
    """Estimated bytes of a block's lists: its bytes without the fixed columns."""
    fixed = sum(c.dtype.itemsize * int(np.prod(c.shape)) for c in columns if not c.is_ragged)
    return max(int(block.num_bytes) - int(block.num_rows) * fixed, 0)
