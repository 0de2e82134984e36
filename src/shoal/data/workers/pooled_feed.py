"""The feed of `map(fn, workers=4)`: batches that are read in a pool of processes.

The processes run the whole of the reading, source and functions alike, a share
of a batch at a time. They start with the first pass and end with it, unless
they are `held` for several, as `fit` does.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shoal.data.feed import BatchCut, BatchShare, IndexedFeed
from shoal.data.order.order import Order
from shoal.data.reader import Reader, Reading, ReadRequest
from shoal.data.sharding import ShardPlan
from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.data.workers.pool import PoolConfig, ProcessPool


@runtime_checkable
class HoldsProcesses(Protocol):
    """A feed whose processes can be kept between passes."""

    def held(self) -> contextlib.AbstractContextManager[None]:
        """While entered, what a pass has started is there for the next one."""


class PooledFeed(IndexedFeed):
    """Reads in a pool of processes; what is read stays the same."""

    _announces = False

    def __init__(self, reader: Reader, order: Order, cut: BatchCut, config: PoolConfig) -> None:
        super().__init__(reader, order, cut)
        self._config = config
        self._idle: ProcessPool | None = None
        self._num_holders = 0

    def sharded(self, plan: ShardPlan) -> PooledFeed:
        """The same, cut over the workers in another way, and with processes of its own."""
        feed = super().sharded(plan)
        assert isinstance(feed, PooledFeed)
        feed._idle, feed._num_holders = None, 0
        return feed

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While entered, what a pass has started is there for the next one."""
        self._num_holders += 1
        try:
            yield
        finally:
            self._num_holders -= 1
            if not self._num_holders and self._idle is not None:
                pool, self._idle = self._idle, None
                pool.close()

    def give_back(self, pool: ProcessPool) -> None:
        """A pass is over. Two at a time have a pool each, of which one is kept."""
        if self._num_holders and self._idle is None:
            pool.call_off()
            self._idle = pool
        else:
            pool.close()

    def _read(self, requests: Iterable[tuple[BatchShare, ReadRequest]]) -> Iterator[Slice]:
        pool, self._idle = self._idle, None
        return _Pass(self, pool or self._open(), requests)

    def _open(self) -> ProcessPool:
        self._reader.source.share()
        return ProcessPool(partial(_read, self._reader), self._config, describe=self._describe_request)

    def _describe_request(self, request: ReadRequest) -> tuple[str, list[Any]]:
        indices = (
            request.indices.tolist() if isinstance(request.indices, np.ndarray) else list(request.indices)
        )
        stages = [
            f"{stage.get('stage', stage.get('source'))}({stage['fn']})"
            for stage in self._reader.source.describe()
            if "fn" in stage
        ]
        return ", ".join(stages) or "reading", indices


class _Pass:
    """One pass over a pool. Not a generator: one that was never started would not give the pool back."""

    def __init__(
        self, feed: PooledFeed, pool: ProcessPool, requests: Iterable[tuple[BatchShare, ReadRequest]]
    ) -> None:
        self._feed = feed
        self._pool: ProcessPool | None = pool
        self._asked: deque[tuple[BatchShare, ReadRequest]] = deque()
        try:
            self._read: Iterator[Reading | Tree] = pool.run(_tasks(requests, self._asked))
        except BaseException:
            self._end()
            raise

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Slice:
        if self._pool is None:
            raise StopIteration
        try:
            read = next(self._read)
            share, request = self._asked.popleft()
            return self._feed._slice(share, read if isinstance(read, Reading) else Reading(read, request))
        except StopIteration:
            self.close()
            raise
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Read no further."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self._feed.give_back(pool)

    def _end(self) -> None:
        """Whatever was on the way when an error came must not be met by the next pass."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def __del__(self) -> None:
        self.close()


def _tasks(
    requests: Iterable[tuple[BatchShare, ReadRequest]], asked: deque[tuple[BatchShare, ReadRequest]]
) -> Iterator[ReadRequest]:
    """The requests alone; what they are for waits. Not a method: the pool must not keep the pass alive."""
    for share, request in requests:
        asked.append((share, request))
        yield request


def _read(reader: Reader, request: ReadRequest) -> Reading | Tree:
    """In a process: what was read; the batch alone where that is all there is to say."""
    reading = reader.read(request)
    return reading if reading.skipped else reading.batch
