"""A user's torch DataLoader, read by every rank for its own part.

Its batch size is the batch of one update, its sampler says the order, and
everything else (collate function, processes, pinning) is kept: each rank runs
a DataLoader of its own over the same dataset, fed with its own indices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data.distributed import DistributedSampler

from shoal.data.collate import Collate
from shoal.data.feed import BatchCut, BatchShare, EvenCut, Feed, IndexedFeed, even_cut, make_slice
from shoal.data.order.order import Order
from shoal.data.order.samplers import Drawn, DrawnCut, order_of, seed_with
from shoal.data.reader import Reader, ReadRequest
from shoal.data.sharding import ShardPlan
from shoal.data.slice import Slice
from shoal.data.sources.leaf import torch_source
from shoal.data.stream import StreamFeed
from shoal.data.tree import Tree
from shoal.data.workers.loader_options import LoaderOptions, identity, start_pass
from shoal.errors import ConfigError, DataError


def feed_of(loader: DataLoader[Any], *, default_seed: int) -> Feed:
    """The feed a DataLoader stands for.

    A DistributedSampler means that the batch size was meant for each worker;
    a batch sampler's batches are the global batches; with `batch_size=None`
    each item is one.
    """
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"{type(loader).__name__} has an __iter__ of its own, and shoal reads the dataset of a DataLoader itself, each "
            "worker its part: what that method does would be left out. Give a plain DataLoader, and do the rest in its "
            "collate_fn, or in a map: shoal.Dataset.from_torch(loader).map(fn)."
        )
    seed = seed_with(default_seed, loader.generator)
    options = LoaderOptions.of(loader)
    is_stream = isinstance(loader.dataset, IterableDataset)
    batch_sampler: Any = loader.batch_sampler
    if is_stream or batch_sampler is None:
        return StreamFeed(
            loader.dataset,
            cut=None if loader.batch_size is None else EvenCut(loader.batch_size, drop_last=loader.drop_last),
            collate=Collate(loader.collate_fn),
            seed=seed,
            order=None if is_stream else order_of(loader.sampler, seed=seed),
            options=options,
            description=[{"source": "stream", "dataset": type(loader.dataset).__qualname__}],
        )
    order: Order
    cut: BatchCut
    if type(batch_sampler) is BatchSampler:
        sampler = batch_sampler.sampler
        order = order_of(sampler, seed=seed)
        per_worker = isinstance(sampler, DistributedSampler)
        cut = even_cut(batch_sampler.batch_size, per_worker=per_worker, drop_last=batch_sampler.drop_last)
    else:
        order = Drawn(batch_sampler, seed, in_batches=True)
        cut = DrawnCut(order)
    reader = Reader(torch_source(loader.dataset), seed=seed, collate=Collate(loader.collate_fn))
    if options.num_processes or options.pin_memory:
        return LoaderFeed(reader, order, cut, options, loader.dataset)
    return IndexedFeed(reader, order, cut)


class LoaderFeed(IndexedFeed):
    """Reads in the processes of a DataLoader."""

    def __init__(
        self, reader: Reader, order: Order, cut: BatchCut, options: LoaderOptions, dataset: Any
    ) -> None:
        super().__init__(reader, order, cut)
        self._options, self._dataset = options, dataset
        self._kept: tuple[DataLoader[Any], _Requests] | None = None

    def sharded(self, plan: ShardPlan) -> LoaderFeed:
        """The same, cut over the workers in another way, and with processes of its own."""
        feed = super().sharded(plan)
        assert isinstance(feed, LoaderFeed)
        feed._kept = None
        return feed

    def _read(self, requests: Iterable[tuple[BatchShare, ReadRequest]]) -> Iterator[Slice]:
        loader, outbox = self._kept or self._open()
        if self._options.persistent:
            self._kept = loader, outbox
        waiting = outbox.send(requests)
        return self._receive(start_pass(loader), outbox, waiting)

    def _receive(
        self, batches: Iterator[Tree], outbox: _Requests, waiting: deque[tuple[BatchShare, ReadRequest]]
    ) -> Iterator[Slice]:
        while True:
            if outbox.waiting is not waiting:
                raise DataError(
                    "this DataLoader has persistent_workers=True and was started again while an earlier pass over it was "
                    "still being read; its processes serve one pass at a time. Finish the first pass, or leave "
                    "persistent_workers out."
                )
            try:
                batch = next(batches)
            except StopIteration:
                return
            if self._options.pin_memory:
                batch = self._reader.collate.tidy(batch)  # pinning makes lists of tuples
            share, request = waiting.popleft()
            yield make_slice(share, request, batch)

    def _open(self) -> tuple[DataLoader[Any], _Requests]:
        outbox = _Requests()
        loader = self._options.open(
            _ByRequest(self._reader),
            seed=self.seed,
            collate_fn=identity,
            sampler=outbox,
            persistent=True,
            inner_dataset=self._dataset,
        )
        return loader, outbox


class _Requests:
    """The inner loader's sampler: requests go out ahead, and what they were for waits for the batches to return."""

    def __init__(self) -> None:
        self._requests: Iterable[tuple[BatchShare, ReadRequest]] = ()
        self.waiting: deque[tuple[BatchShare, ReadRequest]] = deque()

    def send(
        self, requests: Iterable[tuple[BatchShare, ReadRequest]]
    ) -> deque[tuple[BatchShare, ReadRequest]]:
        """What the next pass asks for; returns where its shares wait."""
        self._requests, self.waiting = requests, deque()
        return self.waiting

    def __iter__(self) -> Iterator[ReadRequest]:
        waiting = self.waiting
        for share, request in self._requests:
            waiting.append((share, request))
            yield request


class _ByRequest(TorchDataset[Tree]):
    """The reader as a map-style dataset whose index is a request."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, request: ReadRequest) -> Tree:
        return self._reader(request)
