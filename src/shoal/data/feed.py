"""Feeds: an epoch divided into global batches, and each of them over the workers.

Pure but for the reading itself: which worker reads which positions follows from (sizes, epoch,
start, rank, number of workers) alone, so a run may continue from any position at any number of
workers.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from shoal.config import job as jobs
from shoal.data.order import Indices, Order
from shoal.data.reader import Reader, Reading, ReadRequest
from shoal.data.sharding import UNSAID, ByCost, Loads, Sharding, ShardPlan
from shoal.data.skipping import SkipLog
from shoal.data.slice import Slice
from shoal.data.sources.source import StreamPlan
from shoal.data.tree import Tree
from shoal.errors import BatchTooSmall, ConfigError, DataError, EmptyDataset

_BLOCK = 8192  # positions permuted at once: 20 ns each, against 55 when 1,024 are


class Feed(Protocol):
    """Global batches of an epoch, divided over the workers: read by `Batches`."""

    seed: int
    """Seed that random draws within a batch are mixed from."""

    skips: SkipLog
    """Bad samples that were left out."""

    sharding: Sharding
    """Cut of each batch over the workers."""

    @property
    def is_endless(self) -> bool:
        """True where an epoch has no end."""

    @property
    def num_samples(self) -> int | None:
        """Samples of one epoch; None where only reading can tell, or where there is no end."""

    def batch_size(self, num_workers: int) -> int:
        """Samples of one global batch; 0 where only reading can tell."""

    def num_steps(self, num_workers: int, start: int) -> int | None:
        """Global batches of an epoch from position `start` on; None where only reading can tell."""

    def slices(
        self, *, epoch: int, start: int, rank: int, num_workers: int, stop: int | None = None
    ) -> Iterator[Slice]:
        """This rank's part of each of them that begins before `stop`. Refuses at once, not at the first slice."""

    def sharded(self, plan: ShardPlan) -> Feed:
        """The same, cut over the workers in another way."""

    def describe(self) -> dict[str, Any]:
        """Identity, fit for JSON."""


@dataclass(frozen=True, slots=True)
class BatchShare:
    """One rank's part of one global batch, as positions."""

    start: int
    """Position of the global batch."""

    num_global: int
    first: int
    """Of the rank's own samples within the global batch."""

    num_local: int
    begin: int
    """Positions to read are begin..end-1: the rank's own, or one that is borrowed."""

    end: int
    cuts: tuple[int, ...] = ()
    """Begin of each worker's part of the global batch, and the end of the last."""

    @classmethod
    def of(
        cls, start: int, stop: int, rank: int, num_workers: int, sharding: Sharding = UNSAID, epoch: int = 0
    ) -> BatchShare:
        cuts = tuple(sharding.cuts(start, stop, num_workers, epoch))
        first, last = cuts[rank], cuts[rank + 1]
        plan = jobs.current().verify
        if num_workers == 1 and plan is not None and plan.num_slices > 1:
            cuts = tuple(sharding.cuts(start, stop, plan.num_slices, epoch))
        begin = start + min(first, stop - start - 1)
        return cls(start, stop - start, first, last - first, begin, max(start + last, begin + 1), cuts)


class BatchCut(Protocol):
    """Bounds of the global batches of an epoch."""

    def batch_size(self, num_workers: int) -> int:
        """Samples of a full batch."""

    def num_steps(self, num_samples: int, num_workers: int, start: int) -> int:
        """Batches from `start` on."""

    def batches(
        self, num_samples: int, *, epoch: int, start: int, num_workers: int
    ) -> Iterator[tuple[int, int]]:
        """(begin, end) of each, from `start` on."""

    def describe(self) -> dict[str, Any]:
        """Identity, fit for JSON."""


@dataclass(frozen=True, slots=True)
class EvenCut:
    """Batches of one size."""

    size: int
    per_worker: bool = False
    """`size` is for each worker: the global batch grows with their number."""

    drop_last: bool = False
    """Leave a last batch out that is not full."""

    def batch_size(self, num_workers: int) -> int:
        return self.size * num_workers if self.per_worker else self.size

    def num_steps(self, num_samples: int, num_workers: int, start: int) -> int:
        size, rest = self.batch_size(num_workers), max(num_samples - start, 0)
        return rest // size if self.drop_last else -(-rest // size)

    def batches(
        self, num_samples: int, *, epoch: int, start: int, num_workers: int
    ) -> Iterator[tuple[int, int]]:
        size = self.batch_size(num_workers)
        for number in range(self.num_steps(num_samples, num_workers, start)):
            begin = start + number * size
            yield begin, min(begin + size, num_samples)

    def describe(self) -> dict[str, Any]:
        return {"batch_size": self.size, "per_worker": self.per_worker, "drop_last": self.drop_last}


def even_cut(size: int, *, per_worker: bool, drop_last: bool) -> EvenCut:
    """Batches of `size`. One process that is the reference of several workers takes their batches of one step as one."""
    plan = jobs.current().verify
    if per_worker and plan is not None and plan.stands_for > 1:
        return EvenCut(size * plan.stands_for, drop_last=drop_last)
    return EvenCut(size, per_worker=per_worker, drop_last=drop_last)


class IndexedFeed:
    """Batches of a source with random access.

    Subclasses may read elsewhere (in a DataLoader's processes) by replacing
    `_read`; what is read stays the same.
    """

    _announces = True
    """Announce the next reads to the source; useless if another process reads it."""

    def __init__(self, reader: Reader, order: Order, cut: BatchCut) -> None:
        self._reader, self._order, self._cut = reader, order, cut
        self.sharding: Sharding = UNSAID
        self.seed = reader.seed
        source = reader.source
        self.skips = SkipLog(lambda: json.dumps([source.describe(), order.describe()], default=str))

    @property
    def is_endless(self) -> bool:
        return self._order.is_endless

    @property
    def num_samples(self) -> int | None:
        return None if self.is_endless else self._order.num_samples

    def plans(self) -> list[StreamPlan]:
        """Plans of the streams of records among its sources."""
        return self._reader.source.plans()

    def near(self, samples_per_range: int) -> list[int]:
        """Ranges of an epoch most of whose samples this host has and others may not, where the order is always the same."""
        here = self._reader.source.here()
        if here is None or self._order.is_computed or self.is_endless or len(here) != self._order.num_samples:
            return []
        begins = range(0, len(here), samples_per_range)
        return [
            number
            for number, begin in enumerate(begins)
            if here[begin : begin + samples_per_range].mean() > 0.5
        ]

    def batch_size(self, num_workers: int) -> int:
        return self._cut.batch_size(num_workers)

    def num_steps(self, num_workers: int, start: int) -> int | None:
        num_samples = self.num_samples
        return None if num_samples is None else self._cut.num_steps(num_samples, num_workers, start)

    def slices(
        self, *, epoch: int, start: int, rank: int, num_workers: int, stop: int | None = None
    ) -> Iterator[Slice]:
        num_samples = self._order.length(epoch)
        check_call(start=start, rank=rank, num_workers=num_workers, batch_size=self.batch_size(num_workers))
        self.sharding.check(num_workers)
        if num_samples == 0:
            raise EmptyDataset(what="batch()")
        if start > num_samples:
            raise DataError(
                f"the epoch has {num_samples} samples and cannot go on from sample {start}: this is not the dataset the "
                "position was saved for. Nothing was read; give the same data, or start a new run."
            )
        if start == 0 and self._cut.num_steps(num_samples, num_workers, 0) == 0:
            raise DataError(
                f"{num_samples} samples make no batch of {self.batch_size(num_workers)}, and drop_last=True leaves the "
                "rest out. Nothing was read; make the batch smaller, or keep the last one with drop_last=False."
            )
        batches = self._cut.batches(num_samples, epoch=epoch, start=start, num_workers=num_workers)
        if stop is not None:  # prefetching must not read data that another worker trains
            batches = itertools.takewhile(lambda batch: batch[0] < stop, batches)
        shares = (
            BatchShare.of(begin, end, rank, num_workers, self.sharding, epoch) for begin, end in batches
        )
        return self._read(self._locate(shares, epoch))

    def loads(self, *, epoch: int, start: int, num_workers: int) -> Loads:
        """Balance of the cuts of the first batches from `start` on, where they go by costs."""
        assert isinstance(self.sharding, ByCost)
        ranges = self._cut.batches(
            self._order.length(epoch), epoch=epoch, start=start, num_workers=num_workers
        )
        return self.sharding.loads(ranges, num_workers, epoch)

    def sharded(self, plan: ShardPlan) -> IndexedFeed:
        feed = copy.copy(self)
        feed.sharding = plan.of_source(self._reader.source, self._order)
        return feed

    def describe(self) -> dict[str, Any]:
        stages = [*self._reader.source.describe(), *self._order.describe()]
        return {"stages": stages, **self._cut.describe(), "seed": self.seed}

    def _read(self, requests: Iterable[tuple[BatchShare, ReadRequest]]) -> Iterator[Slice]:
        return (self._slice(share, self._reader.read(request)) for share, request in requests)

    def _slice(self, share: BatchShare, reading: Reading) -> Slice:
        """Slice of a share that has been read, without its bad samples."""
        if not reading.skipped:
            return make_slice(share, reading.request, reading.batch)
        if share.num_local:  # a borrowed sample is its owner's to skip
            self.skips.record(reading.skipped)
        if reading.batch is None:
            lent = self._borrow(share, reading.request.epoch)
            return replace(
                make_slice(share, lent.request, lent.batch),
                num_local=0,
                num_asked=share.num_local,
                indices=(),
            )
        left = make_slice(share, reading.request, reading.batch)
        request = reading.request
        places = tuple(request.place(number) - share.start for number in range(len(request.indices)))
        return replace(left, num_local=len(places), num_asked=share.num_local, places=places)

    def _borrow(self, share: BatchShare, epoch: int) -> Reading:
        """A readable sample for a rank whose own are all bad: the next one in the epoch."""
        num_samples = self._order.length(epoch)
        for number in range(num_samples):
            at = (share.end + number) % num_samples
            lent = self._reader.read(ReadRequest(self._order.indices(range(at, at + 1), epoch), epoch, at))
            if lent.batch is not None:
                return lent
        raise DataError(
            f"none of the {num_samples} samples of the epoch can be read: all are bad, and on_error='skip' leaves them "
            "out. Nothing was trained; Batches.skipped says what is wrong with them."
        )

    def _locate(self, shares: Iterable[BatchShare], epoch: int) -> Iterator[tuple[BatchShare, ReadRequest]]:
        """Indices of the positions; for many batches at once if that is cheaper."""
        if not self._order.is_computed:
            for share in shares:
                indices = self._order.indices(range(share.begin, share.end), epoch)
                yield share, ReadRequest(indices, epoch, share.begin)
            return
        waiting: tuple[list[BatchShare], Indices] | None = None
        for block in _blocks(shares):
            positions = np.concatenate([np.arange(share.begin, share.end, dtype=np.int64) for share in block])
            indices = self._order.indices(positions, epoch)
            if not self._announces or not self._reader.source.looks_ahead:
                yield from _requests(block, indices, epoch)
                continue
            # A block is read while the one before it is trained on.
            self._reader.source.will_need(indices, epoch)
            if waiting is not None:
                yield from _requests(*waiting, epoch)
            waiting = block, indices
        if waiting is not None:
            yield from _requests(*waiting, epoch)


def _blocks(shares: Iterable[BatchShare]) -> Iterator[list[BatchShare]]:
    """The shares of about `_BLOCK` positions at a time."""
    block: list[BatchShare] = []
    num_positions = 0
    for share in shares:
        block.append(share)
        num_positions += share.end - share.begin
        if num_positions >= _BLOCK:
            yield block
            block, num_positions = [], 0
    if block:
        yield block


def _requests(
    block: list[BatchShare], indices: Indices, epoch: int
) -> Iterator[tuple[BatchShare, ReadRequest]]:
    at = 0
    for share in block:
        length = share.end - share.begin
        yield share, ReadRequest(indices[at : at + length], epoch, share.begin)
        at += length


def make_slice(share: BatchShare, request: ReadRequest, batch: Tree) -> Slice:
    return Slice(
        batch=batch,
        num_local=share.num_local,
        num_global=share.num_global,
        epoch=request.epoch,
        start=share.start,
        first=share.first,
        indices=_as_ints(request.indices) if share.num_local else (),
        cuts=share.cuts,
    )


def check_call(*, start: int, rank: int, num_workers: int, batch_size: int) -> None:
    if not 0 <= rank < num_workers:
        raise ConfigError(f"rank must be from 0 to {num_workers - 1} with {num_workers} workers, got {rank}")
    if start < 0:
        raise ConfigError(f"an epoch cannot be read from position {start}; the first sample is at 0")
    if 0 < batch_size < num_workers:
        raise BatchTooSmall(batch_size=batch_size, num_workers=num_workers)


def _as_ints(indices: Indices) -> range | list[int] | tuple[()]:
    if isinstance(indices, np.ndarray):
        listed: list[int] = indices.tolist()
        return listed
    if isinstance(indices, list) and not all(isinstance(index, int) for index in indices):
        return ()
    return indices
