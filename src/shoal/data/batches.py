"""Batches of a dataset, as fit, evaluate and predict read them.

Independent of the source. A feed divides epochs into slices; this module has the stages after
batching, and plain iteration in one process.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from shoal.config.choices import DRAIN_SLOWER_THAN
from shoal.data.arguments import flag, function, whole_number
from shoal.data.feed import Feed, IndexedFeed
from shoal.data.randomness import PrivateGenerators
from shoal.data.reader import DataIterator
from shoal.data.sharding import Loads, Sharding, ShardPlan
from shoal.data.skipping import Skipped
from shoal.data.slice import Slice, keep_weights
from shoal.data.sources.source import StreamPlan, blame_batch, import_plans, name_of
from shoal.data.tree import Tree, tensors
from shoal.data.workers.loader import feed_of
from shoal.data.workers.pool import PooledFeed
from shoal.data.workers.prefetch import pinned, prefetched, wants_pinning
from shoal.errors import ConfigError, DataError
from shoal.runtime.seeds import mix


class Batches:
    """Global batches of a dataset, one per update.

    Iterating gives whole batches, each pass the next epoch, also in a worker
    of a launched job: the Trainer and `shoal.setup` cut them over the workers.

        for inputs, target in data.shuffle(seed=0).batch(1024):
            ...
    """

    def __init__(self, feed: Feed, stages: tuple[_Stage, ...] = ()) -> None:
        self._feed, self._stages = feed, stages
        self._is_pinned = False
        self._next_epoch = 0

    def map(self, fn: Callable[[Tree], Tree]) -> Batches:
        """Apply `fn` to every batch: to the part of it that a worker holds.

        It must keep the samples it is given, in their order. Random numbers
        it draws are a function of (seed, epoch, position).

            data.batch(256).map(lambda batch: (batch[0].float() / 255, batch[1]))
        """
        fn = function("batch().map", fn, of="a batch")
        return Batches(self._feed, (*self._stages, _MapBatches(fn, self._feed.seed)))

    def prefetch(self, num_ahead: int = 2) -> Batches:
        """Read up to `num_ahead` batches ahead, in a thread.

        The stages before it then run beside the training step. They must not
        draw random numbers, whose generators a thread shares with that step:
        such a pipeline is refused when it is first read. What draws belongs
        into processes, `map(fn, workers=4)`, which read ahead by themselves;
        a `prefetch` behind them is welcome.

            data.shuffle(seed=0).batch(1024).prefetch(4)
        """
        num_ahead = whole_number("prefetch(n)", num_ahead, at_least=1)
        return Batches(self._feed, (*self._stages, _Prefetch(num_ahead)))

    def shard(
        self,
        how: str,
        *,
        cost: Any = None,
        weights: Sequence[float] | str | None = None,
        drain_slower_than: float | None = DRAIN_SLOWER_THAN,
        backup: bool = True,
        probe_every_s: float = 10.0,
    ) -> Batches:
        """Set how each batch is cut over the workers. Any cut gives an exact strategy the result of one process.

        "equal", as without it: parts that differ by at most one sample.

        "balanced": parts whose heaviest is as light as can be, by what a
        sample costs: `cost="length"` (of its longest input), `"bytes"`, the
        name of a column, an array with a number per sample of the source, or
        a function of the sample. What is no array is read from the samples,
        of the whole batch on every worker, once.

        "weighted": by `weights`, a number for each worker, or by how fast
        workers turn out to be, `weights="measured"`: agreed on by all of them
        every few steps, and kept in checkpoints. Speeds differ from run to
        run, and so may the last bits of the weights then.

        "dynamic", what relaxed strategies (ps:async, ps:ssp=K) do anyway:
        ranges of the epoch are handed out while it runs, a fast worker takes
        more of them, and what a dead one had goes back. With `backup` the last
        ranges of an epoch are handed out twice where a worker is slow with
        them, and the first result counts. A worker `drain_slower_than` times
        slower than the median of the others is given no more, but for a
        range every `probe_every_s` that shows whether it has recovered; None
        lets it be as slow as it likes.

        Under a relaxed strategy "equal" and "weighted" give each worker a
        fixed part of the epoch.

            data.batch(256).shard("balanced", cost="length")
            data.batch(256).shard("weighted", weights=[2, 1, 1])
        """
        plan = ShardPlan(
            how=how,
            cost=cost,
            weights=weights,
            drain_slower_than=drain_slower_than,
            backup=flag("shard(backup=)", backup),
            probe_every_s=probe_every_s,
        )
        return Batches(self._feed.sharded(plan), self._stages)

    def shard_unless_said(self, text: str) -> Batches:
        """Divide over the workers as `--shard` says, unless the script sets it."""
        if self.sharding.name:
            return self
        return Batches(self._feed.sharded(ShardPlan.parse(text)), self._stages)

    def loads(self, *, epoch: int, start: int, num_workers: int) -> Loads:
        """Evenness of the first batches from `start` on under shard("balanced")."""
        assert isinstance(self._feed, IndexedFeed)  # others have no costs
        return self._feed.loads(epoch=epoch, start=start, num_workers=num_workers)

    @property
    def sharding(self) -> Sharding:
        return self._feed.sharding

    @property
    def num_samples(self) -> int | None:
        """Samples in an epoch; None for a stream, whose length only shows when it is read, and for endless data."""
        return self._feed.num_samples

    @property
    def is_endless(self) -> bool:
        """True where an epoch has no end: `repeat()`."""
        return self._feed.is_endless

    @property
    def skipped(self) -> list[Skipped]:
        """Bad samples that this process has left out so far (on_error="skip"), each with its epoch, index and reason."""
        return self._feed.skips.skipped

    def batch_size(self, num_workers: int = 1) -> int:
        """Samples in a global batch; 0 where a DataLoader's items are batches already, of whatever size."""
        return self._feed.batch_size(num_workers)

    def num_steps(self, num_workers: int = 1, start: int = 0) -> int | None:
        """Global batches in an epoch from position `start` on; None for a stream."""
        return self._feed.num_steps(num_workers, start)

    def near(self, samples_per_range: int) -> list[int]:
        """Ranges of an epoch whose data this host has and others may not; none where that makes no difference."""
        return self._feed.near(samples_per_range) if isinstance(self._feed, IndexedFeed) else []

    def export_streams(self, position: int) -> list[dict[str, Any]]:
        """Offsets of the streams of records that this data is read from, for a checkpoint at `position`."""
        return [plan.export_state(position) for plan in self._plans()]

    def import_streams(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue streams at the offsets of a checkpoint."""
        import_plans(self._plans(), states)

    def _plans(self) -> list[StreamPlan]:
        return self._feed.plans() if isinstance(self._feed, IndexedFeed) else []

    def num_left_out(self, num_workers: int = 1) -> int:
        """Samples at the end of an epoch that are in no batch, with drop_last=True."""
        size, num_samples = self.batch_size(num_workers), self.num_samples
        if not size or num_samples is None or not self._feed.describe().get("drop_last"):
            return 0
        return num_samples % size

    def slices(
        self, *, epoch: int, start: int, rank: int, num_workers: int, stop: int | None = None
    ) -> Iterator[Slice]:
        """This rank's part of each global batch of an epoch, from position `start` (in samples) on and before `stop`.

        The positions do not depend on the number of workers, so an epoch goes
        on from any `Slice.start` at any other number. Raises at once where the
        dataset is empty or a batch cannot be cut over so many workers.
        """
        slices = self._feed.slices(epoch=epoch, start=start, rank=rank, num_workers=num_workers, stop=stop)
        stages: list[Callable[[Iterator[Slice]], Iterator[Slice]]] = list(self._stages)
        if self._is_pinned:  # in the read-ahead thread if there is one: it has time to spare
            reads_ahead = bool(stages) and isinstance(stages[-1], _Prefetch)
            stages.insert(len(stages) - reads_ahead, pinned)
        for stage in stages:
            slices = stage(slices)
        return slices

    def held(self) -> contextlib.AbstractContextManager[None]:
        """While entered, processes that read (`map(fn, workers=4)`) are kept from pass to pass, then ended.

        Without it each pass starts its own. `fit` does this by itself.

            with batches.held():
                for epoch in range(100):
                    for inputs, target in batches:
                        ...
        """
        return self._feed.held() if isinstance(self._feed, PooledFeed) else contextlib.nullcontext()

    def for_device(self, device: torch.device) -> Batches:
        """The same batches, page-locked where they go to a GPU, so that copying them there is no wait.

        `fit`, `evaluate` and `predict` do this by themselves.
        """
        if not wants_pinning(device):
            return self
        pinned_ones = copy.copy(self)
        pinned_ones._is_pinned = True
        return pinned_ones

    def iterator(self, position: Any = None) -> DataIterator[Tree]:
        """Whole batches one by one, with a position that can be saved as JSON and gone on from, in the middle of an epoch.

        Needs no Trainer and no launcher. The position counts samples: it may
        be gone on from with batches of another size. One of other data is
        refused.

            it = data.shuffle(seed=0).batch(256).iterator()
            batch, saved = it.next(), it.position
            it = data.shuffle(seed=0).batch(256).iterator(saved)
        """

        def begin(epoch: int, start: int) -> Iterator[tuple[Tree, int]]:
            for part in self.slices(epoch=epoch, start=start, rank=0, num_workers=1):
                if part.num_local:  # else all of the batch was bad, and skipped
                    yield part.batch, part.start + part.num_global

        described = {"num_samples": self.num_samples, "stages": self._feed.describe()["stages"]}
        return DataIterator(
            begin, description=described, seed=self._feed.seed, position=position, plans=self._plans()
        )

    def describe(self) -> dict[str, Any]:
        """Sizes, seeds and stages, as JSON values: data that differ here are different data."""
        described = self._feed.describe()
        described["after_batch"] = [stage.describe() for stage in self._stages]
        return {"num_samples": self.num_samples, **described}

    def __iter__(self) -> Iterator[Tree]:
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        slices = self.slices(epoch=epoch, start=0, rank=0, num_workers=1)
        return (part.batch for part in slices if part.num_local)  # a batch that is all bad is skipped

    def __len__(self) -> int:
        num_steps = self.num_steps()
        if num_steps is None:
            raise TypeError(
                "a dataset that is repeated without end has no number of batches"
                if self.is_endless
                else "the number of batches of a stream is not known before it has been read"
            )
        return num_steps

    def __repr__(self) -> str:
        of = "a stream" if self.num_samples is None else f"{self.num_samples} samples"
        of = "without end" if self.is_endless else of
        return f"Batches({of}, {self.batch_size() or '?'} per batch)"


def as_batches(data: Any, *, default_seed: int) -> Batches:
    """Batches of the argument of fit, evaluate or predict: Batches as they are, a DataLoader as its equivalent batches.

    `default_seed` replaces the loader's own random seed. Any other type is refused with advice.
    """
    if isinstance(data, Batches):
        return data
    if isinstance(data, DataLoader):
        return Batches(feed_of(data, default_seed=default_seed))
    from shoal.data.dataset import Dataset  # which is built on Batches

    if isinstance(data, Dataset):
        cure = "Say how many samples one update takes: data.batch(1024)."
    elif isinstance(data, TorchDataset):
        cure = "Put it in a DataLoader, or write shoal.Dataset.from_torch(data).batch(1024)."
    elif isinstance(data, torch.nn.Module):
        cure = "The model is the Trainer's: shoal.Trainer(model, loss=...).fit(data)."
    else:
        cure = "For tensors and arrays, write shoal.Dataset.from_arrays((inputs, target)).batch(1024)."
    raise ConfigError(
        f"data is given in batches, as shoal's own or as a torch DataLoader, but this is a {type(data).__name__}. {cure}"
    )


class _Stage(Protocol):
    """An operation on slices after batching."""

    def __call__(self, slices: Iterator[Slice]) -> Iterator[Slice]: ...

    def describe(self) -> dict[str, Any]: ...


class _MapBatches:
    def __init__(self, fn: Callable[[Tree], Tree], seed: int) -> None:
        self._fn, self._seed = fn, seed

    def __call__(self, slices: Iterator[Slice]) -> Iterator[Slice]:
        generators = PrivateGenerators(self._seed)
        for part in slices:
            with generators:
                generators.reseed(mix(self._seed, part.epoch, part.start + part.first))
                try:
                    batch = keep_weights(part.batch, self._fn(part.batch))
                except Exception as error:
                    blame_batch("batch().map", self._fn, error, part)
                    raise
            self._refuse_lost_rows(part, batch)
            yield replace(part, batch=batch)

    def _refuse_lost_rows(self, part: Slice, batch: Tree) -> None:
        num_rows = max(part.num_local, 1)
        given, got = ([tensor for tensor in tensors(tree) if tensor.dim()] for tree in (part.batch, batch))
        # A loader's own batch may hold tensors of other lengths; without any tensor of a row per sample,
        # rows cannot be dropped.
        if (
            all(len(tensor) == num_rows for tensor in given)
            and got
            and all(len(each) != num_rows for each in got)
        ):
            raise DataError(
                f"the function '{name_of(self._fn)}' of batch().map was given {num_rows} samples and returned tensors of "
                f"{', '.join(str(tuple(tensor.shape)) for tensor in got)}. It must keep every sample, in the same order; to "
                "leave samples out there is filter, before batch."
            )

    def describe(self) -> dict[str, Any]:
        return {"stage": "map", "fn": name_of(self._fn)}


class _Prefetch:
    def __init__(self, num_ahead: int) -> None:
        self._num_ahead = num_ahead

    def __call__(self, slices: Iterator[Slice]) -> Iterator[Slice]:
        return prefetched(slices, self._num_ahead)

    def describe(self) -> dict[str, Any]:
        return {"stage": "prefetch", "num_ahead": self._num_ahead}
