"""A user's torch DataLoader, read by every rank for its own part.

Its batch size is the batch of one update, its sampler gives the order, and everything else (collate
function, processes, pinning) is kept: each rank runs a DataLoader of its own over the same dataset,
fed with its own indices. torch's own simple samplers become computed orders. Any other is called
once per epoch, under seeds that are a function of (seed, epoch), so all ranks get one answer and a
resumed run gets it again.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data.distributed import DistributedSampler

from shoal.data.feed import BatchCut, BatchShare, EvenCut, Feed, IndexedFeed, even_cut, make_slice
from shoal.data.order import Indices, InOrder, Order, Positions, Shuffled
from shoal.data.randomness import PrivateGenerators
from shoal.data.reader import Reader, ReadRequest
from shoal.data.sharding import ShardPlan
from shoal.data.slice import Slice
from shoal.data.sources.source import torch_source
from shoal.data.stream import StreamFeed
from shoal.data.tree import Collate, Tree
from shoal.data.workers.loader_options import open_like, start_pass
from shoal.errors import ConfigError, DataError
from shoal.runtime.seeds import mix


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
    is_stream = isinstance(loader.dataset, IterableDataset)
    batch_sampler: Any = loader.batch_sampler
    if is_stream or batch_sampler is None:
        return StreamFeed(
            loader.dataset,
            cut=None if loader.batch_size is None else EvenCut(loader.batch_size, drop_last=loader.drop_last),
            collate=Collate(loader.collate_fn),
            seed=seed,
            order=None if is_stream else order_of(loader.sampler, seed=seed),
            loader=loader,
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
    if loader.num_workers or loader.pin_memory:
        return LoaderFeed(reader, order, cut, loader)
    return IndexedFeed(reader, order, cut)


class LoaderFeed(IndexedFeed):
    """Reads in the processes of a DataLoader."""

    def __init__(self, reader: Reader, order: Order, cut: BatchCut, loader: DataLoader[Any]) -> None:
        super().__init__(reader, order, cut)
        self._user = loader
        self._kept: tuple[DataLoader[Any], _Requests] | None = None

    def sharded(self, plan: ShardPlan) -> LoaderFeed:
        feed = super().sharded(plan)
        assert isinstance(feed, LoaderFeed)
        feed._kept = None
        return feed

    def _read(self, requests: Iterable[tuple[BatchShare, ReadRequest]]) -> Iterator[Slice]:
        loader, outbox = self._kept or self._open()
        if self._user.persistent_workers:
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
            if self._user.pin_memory:
                batch = self._reader.collate.tidy(batch)  # pinning makes lists of tuples
            share, request = waiting.popleft()
            yield make_slice(share, request, batch)

    def _open(self) -> tuple[DataLoader[Any], _Requests]:
        outbox = _Requests()
        loader = open_like(
            self._user,
            _ByRequest(self._reader),
            seed=self.seed,
            is_persistent=self._user.persistent_workers,
            inner_dataset=self._user.dataset,
            batch_size=None,
            collate_fn=_identity,
            sampler=outbox,
        )
        return loader, outbox


class _Requests:
    """The inner loader's sampler: sends requests ahead, and queues their shares until the batches return."""

    def __init__(self) -> None:
        self._requests: Iterable[tuple[BatchShare, ReadRequest]] = ()
        self.waiting: deque[tuple[BatchShare, ReadRequest]] = deque()

    def send(
        self, requests: Iterable[tuple[BatchShare, ReadRequest]]
    ) -> deque[tuple[BatchShare, ReadRequest]]:
        """Set the next pass's requests; return the queue of their shares."""
        self._requests, self.waiting = requests, deque()
        return self.waiting

    def __iter__(self) -> Iterator[ReadRequest]:
        waiting = self.waiting
        for share, request in self._requests:
            waiting.append((share, request))
            yield request


def _identity(batch: Any) -> Any:
    return batch


class _ByRequest(TorchDataset[Tree]):
    """The reader as a map-style dataset whose index is a request."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, request: ReadRequest) -> Tree:
        return self._reader(request)


def order_of(sampler: Any, *, seed: int) -> Order:
    """The order a sampler stands for.

    A DistributedSampler is not applied: it would leave each rank its share of
    the data, of which shoal would take a share once more. Its dataset is used
    whole; its shuffle flag and seed are kept.
    """
    if isinstance(sampler, DistributedSampler):
        dataset: Any = sampler.dataset
        whole = InOrder(len(dataset))
        return Shuffled(whole, sampler.seed) if sampler.shuffle else whole
    if type(sampler) is SequentialSampler:
        return InOrder(len(sampler.data_source))
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return Shuffled(InOrder(len(sampler.data_source)), seed_with(seed, sampler.generator))
    return Drawn(sampler, seed)


def seed_with(seed: int, generator: torch.Generator | None) -> int:
    """The seed, and the one a user gave to a generator: changing either changes the order."""
    return seed if generator is None else mix(seed, generator.initial_seed())


@dataclass(frozen=True, slots=True)
class _Epoch:
    """Indices that a sampler gave for one epoch."""

    indices: Indices
    ends: list[int]
    """End of each of its batches; empty for a sampler of single samples."""


class Drawn(Order):
    """The indices a foreign sampler gives, drawn anew each epoch and kept for that epoch.

    Also those of a batch sampler, joined; `DrawnCut` cuts them again.
    """

    def __init__(self, sampler: Any, seed: int, *, in_batches: bool = False) -> None:
        for part in _parts(sampler):
            if getattr(part, "num_replicas", 1) > 1:
                raise ConfigError(
                    f"the sampler {type(part).__name__} gives each of {part.num_replicas} ranks its own share of the "
                    "data, and shoal shares every batch out itself: samples would be lost. Nothing was read; give the "
                    "DataLoader a sampler over the whole data, or torch's DistributedSampler, which shoal knows."
                )
        self.sampler, self.seed = sampler, seed
        self._in_batches = in_batches
        self._epochs: dict[int, _Epoch] = {}

    @property
    def num_samples(self) -> int:
        """The sampler's own length, or the number of indices it gives in the first epoch."""
        if not self._in_batches and hasattr(self.sampler, "__len__"):
            return len(self.sampler)
        return self.length(0)

    def length(self, epoch: int) -> int:
        return len(self.drawn(epoch).indices)

    def indices(self, positions: Positions, epoch: int) -> Indices:
        indices = self.drawn(epoch).indices
        if isinstance(positions, range):
            return indices[positions.start : positions.stop]
        return indices[positions] if isinstance(indices, np.ndarray) else [indices[at] for at in positions]

    def describe(self) -> list[dict[str, Any]]:
        return [{"stage": "sampler", "sampler": type(self.sampler).__qualname__, "seed": self.seed}]

    def drawn(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            for other in [kept for kept in self._epochs if kept != 0]:
                del self._epochs[other]  # epoch 0 stays: sizes are asked of it
            given = draw(self.sampler, seed=self.seed, epoch=epoch)
            ends: list[int] = []
            if self._in_batches:
                given = [batch for batch in given if len(batch)]
                ends = list(itertools.accumulate(len(batch) for batch in given))
                given = list(itertools.chain.from_iterable(given))
            self._epochs[epoch] = _Epoch(_as_integers(given), ends)
        return self._epochs[epoch]


class DrawnCut:
    """The batches of a foreign batch sampler are the global batches."""

    def __init__(self, order: Drawn) -> None:
        self._order = order

    def batch_size(self, num_workers: int) -> int:
        """The sampler's own batch size, or its largest batch in the first epoch."""
        size = getattr(self._order.sampler, "batch_size", None)
        if isinstance(size, int):
            return size
        ends = self._order.drawn(0).ends
        return max((end - begin for begin, end in zip([0, *ends], ends, strict=False)), default=0)

    def num_steps(self, num_samples: int, num_workers: int, start: int) -> int:
        return sum(end > start for end in self._order.drawn(0).ends)

    def batches(
        self, num_samples: int, *, epoch: int, start: int, num_workers: int
    ) -> Iterator[tuple[int, int]]:
        """(begin, end) of each, from `start` on; of one that `start` lies in, the rest."""
        begin = 0
        for end in self._order.drawn(epoch).ends:
            if end > start:
                yield max(begin, start), end
            begin = end

    def describe(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size(1), "per_worker": False, "drop_last": False}


def draw(sampler: Any, *, seed: int, epoch: int) -> list[Any]:
    """Everything a sampler gives in an epoch, on every rank the same; generators are as before afterwards."""
    parts = _parts(sampler)
    own = [part.generator for part in parts if isinstance(getattr(part, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in own]
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    try:
        for generator in own:
            generator.manual_seed(mix(seed, generator.initial_seed(), epoch))
        with PrivateGenerators(mix(seed, epoch)):
            return list(sampler)
    finally:
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)


def _parts(sampler: Any) -> list[Any]:
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, inner]


def _as_integers(given: list[Any]) -> Indices:
    try:
        return np.array([operator.index(index) for index in given], dtype=np.int64)
    except TypeError:
        return given  # samples named by something else: the dataset knows
