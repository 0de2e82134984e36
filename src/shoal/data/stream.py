"""Streams: data that can only be read from its beginning, its stages and its batches.

Every rank reads the whole stream and keeps its part of each global batch: there is no random access
and no split, a shuffle is limited to its buffer, and a run that resumes in mid-epoch reads again up
to its position. `StreamFeed` also serves loaders whose items are batches already, whose length is
only known after reading. A stage is a function of (how to read the stage before, epoch) without
state, so reading again gives the same samples.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from shoal.config import job as jobs
from shoal.data.feed import BatchShare, EvenCut, check_call
from shoal.data.order import Order
from shoal.data.randomness import PrivateGenerators
from shoal.data.select import find_column
from shoal.data.sharding import UNSAID, Sharding, ShardPlan
from shoal.data.skipping import SkipLog, Skipped
from shoal.data.slice import Slice, keep_weights
from shoal.data.sources.derived import augment_seed, checked_weight, weighted
from shoal.data.sources.source import bad_sample, blame, call_user, line_of, name_of
from shoal.data.tree import Collate, Tree, map_tensors, tensors
from shoal.data.workers.loader_options import open_like, start_pass
from shoal.errors import ConfigError, DataError, EmptyDataset
from shoal.runtime import events
from shoal.runtime.seeds import mix

Open = Callable[[int], Iterator[Any]]
"""Reads what comes before, of an epoch, from its beginning."""

_BUFFER = 0x425546464552  # keeps shuffle(seed=0) of a stream apart from other uses of the seed
_MANY = 1 << 32  # repetitions between two epochs of an endless stream, which only a take after it can end


class StreamStage(NamedTuple):
    """One thing done to a stream."""

    run: Callable[[Open, int, SkipLog], Iterator[Any]]
    """The samples of an epoch."""

    described: dict[str, Any]
    """Fit for JSON."""

    is_endless: bool | None = None
    """Whether the stream has an end behind it; None where that is as before."""


def map_stage(fn: Callable[[Any], Any], *, on_error: str, max_skips: int | None) -> StreamStage:
    def run(before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        for number, sample in enumerate(before(epoch)):
            try:
                made = keep_weights(sample, fn(sample))
            except Exception as error:
                if on_error == "raise":
                    blame("map", fn, error, number, epoch)
                    raise
                bad = bad_sample("map", fn, error, number)
                skips.record([Skipped(epoch, number, bad, f"map({name_of(fn)})", max_skips)])
                continue
            yield made

    skips = {"on_error": "skip"} if on_error == "skip" else {}
    return StreamStage(run, {"stage": "map", "fn": name_of(fn), **skips})


def filter_stage(fn: Callable[[Any], Any]) -> StreamStage:
    def run(before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        for number, sample in enumerate(before(epoch)):
            if call_user("filter", fn, number, epoch, sample):
                yield sample

    return StreamStage(run, {"stage": "filter", "fn": name_of(fn)})


def augment_stage(fn: Callable[[Any, torch.Generator], Any], seed: int) -> StreamStage:
    """A function of each sample and a generator seeded by (seed, epoch, its number in the stream)."""

    def run(before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        generator = torch.Generator()
        for number, sample in enumerate(before(epoch)):
            generator.manual_seed(augment_seed(seed, epoch, number))
            try:
                made = keep_weights(sample, fn(sample, generator))
            except Exception as error:
                blame("augment", fn, error, number, epoch)
                raise
            yield made

    return StreamStage(run, {"stage": "augment", "fn": name_of(fn), "seed": seed})


def weight_stage(by: str | Callable[[Any], Any]) -> StreamStage:
    column = by if isinstance(by, str) else None

    def run(before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        for number, sample in enumerate(before(epoch)):
            if isinstance(by, str):
                weight = find_column(sample, by, None, "with_weights")
            else:
                weight = call_user("with_weights", by, number, epoch, sample)
            yield weighted(sample, checked_weight(weight, number), column=column)

    return StreamStage(run, {"stage": "with_weights", "weights": column or name_of(by)})


def take_stage(num_samples: int) -> StreamStage:
    """Only the first samples; not one more is read."""
    return StreamStage(
        lambda before, epoch, skips: itertools.islice(before(epoch), num_samples),
        {"stage": "take", "num_samples": num_samples},
        is_endless=False,
    )


def skip_stage(num_samples: int) -> StreamStage:
    """All but the first samples, which are read and dropped."""
    return StreamStage(
        lambda before, epoch, skips: itertools.islice(before(epoch), num_samples, None),
        {"stage": "skip", "num_samples": num_samples},
    )


def repeat_stage(times: int | None) -> StreamStage:
    """The stream several times, or without end; each time as an epoch of its own."""

    def run(before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        for repetition in itertools.count() if times is None else range(times):
            is_empty = True
            for sample in before(epoch * (times or _MANY) + repetition):
                is_empty = False
                yield sample
            if is_empty:
                return  # nor would the next one give anything

    return StreamStage(run, {"stage": "repeat", "times": times}, is_endless=True if times is None else None)


def shuffle_stage(seed: int, num_samples: int) -> StreamStage:
    """Samples leave a buffer at random when others come in; the order is a function of (seed, epoch) and of the stream."""

    def run(before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        drawn = random.Random(mix(_BUFFER, seed, epoch))
        buffer: list[Any] = []
        for sample in before(epoch):
            if len(buffer) < num_samples:
                buffer.append(sample)
                continue
            at = drawn.randrange(len(buffer))
            leaving, buffer[at] = buffer[at], sample
            yield leaving
        drawn.shuffle(buffer)
        yield from buffer

    return StreamStage(run, {"stage": "shuffle", "seed": seed, "buffer": num_samples})


class OwnStream(IterableDataset[Any]):
    """A stream that shoal itself reads."""

    seed = 0
    """Seed that random draws while it is read are mixed from."""

    def describe(self) -> dict[str, Any]:
        """Identity, fit for JSON."""
        raise NotImplementedError


class Stream(IterableDataset[Any]):
    """An IterableDataset, and what is done to its samples one after the other."""

    def __init__(self, dataset: IterableDataset[Any], stages: tuple[StreamStage, ...] = ()) -> None:
        self._dataset, self._stages = dataset, stages
        self._epoch = 0
        self.skips = SkipLog()
        """Bad samples that were left out."""

    @property
    def seed(self) -> int:
        """Seed that random draws while it is read are mixed from."""
        return self._dataset.seed if isinstance(self._dataset, OwnStream) else 0

    @property
    def is_endless(self) -> bool:
        said = [stage.is_endless for stage in self._stages if stage.is_endless is not None]
        return bool(said) and said[-1]

    def then(self, stage: StreamStage) -> Stream:
        return Stream(self._dataset, (*self._stages, stage))

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self._open(len(self._stages), self._epoch)

    def describe(self) -> list[dict[str, Any]]:
        source = {"source": "stream", "dataset": type(self._dataset).__qualname__}
        if isinstance(self._dataset, OwnStream):
            source = self._dataset.describe()
        return [source, *(stage.described for stage in self._stages)]

    def _open(self, num_stages: int, epoch: int) -> Iterator[Any]:
        """The samples of an epoch after the first so many stages."""
        if num_stages:
            last = self._stages[num_stages - 1]
            return last.run(lambda inner: self._open(num_stages - 1, inner), epoch, self.skips)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        return iter(self._dataset)


def stream_from(stream: Stream, *, epoch: int, start: int) -> Iterator[tuple[Any, int]]:
    """The samples of an epoch from position `start` on, each with the position behind it.

    Read one by one under private generators, as in batches: what the stream
    draws at random it draws again.
    """
    stream.set_epoch(epoch)
    generators = PrivateGenerators(mix(stream.seed, epoch))
    with generators:
        samples = itertools.islice(iter(stream), start, None)
    for position in itertools.count(start + 1):
        with generators:
            sample = next(samples, _END)
        if sample is _END:
            return
        yield sample, position


_END = object()


class StreamFeed:
    """Global batches in the order in which they are read.

    A stream that draws random numbers (a shuffle buffer, say) draws the same
    on every rank, in this process by private generators and in a DataLoader's
    processes by their seeds.
    """

    num_samples = None

    def __init__(
        self,
        dataset: Any,
        *,
        cut: EvenCut | None,
        collate: Collate,
        seed: int,
        order: Order | None = None,
        loader: DataLoader[Any] | None = None,
        description: list[dict[str, Any]],
    ) -> None:
        """Without a `cut`, items are batches already; with an `order`, they are read by index; `loader` is the user's."""
        self._dataset, self._cut, self._collate, self.seed = dataset, cut, collate, seed
        self._order, self._loader = order, loader
        self._description = description
        self.skips: SkipLog = getattr(dataset, "skips", None) or SkipLog()
        self.sharding: Sharding = UNSAID

    @property
    def is_endless(self) -> bool:
        return isinstance(self._dataset, Stream) and self._dataset.is_endless

    def batch_size(self, num_workers: int) -> int:
        return 0 if self._cut is None else self._cut.batch_size(num_workers)

    def num_steps(self, num_workers: int, start: int) -> None:
        """Only reading can tell."""

    def sharded(self, plan: ShardPlan) -> StreamFeed:
        feed = copy.copy(self)
        feed.sharding = plan.of_stream()
        return feed

    def describe(self) -> dict[str, Any]:
        stages = [*self._description, *(self._order.describe() if self._order else ())]
        sizes = {"batch_size": None} if self._cut is None else self._cut.describe()
        return {"stages": stages, **sizes, "seed": self.seed}

    def slices(
        self, *, epoch: int, start: int, rank: int, num_workers: int, stop: int | None = None
    ) -> Iterator[Slice]:
        """This rank's part of each global batch, from position `start` on, which is reached by reading."""
        size = self.batch_size(num_workers)
        check_call(start=start, rank=rank, num_workers=num_workers, batch_size=size)
        self.sharding.check(num_workers)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        dataset, position = self._dataset, 0
        if size and (self._loader is None or not self._loader.num_workers):
            # Samples come one by one, so the beginning can be skipped at any sample and need not be
            # collated.
            dataset, position = _Tail(dataset, start), start
        seed = mix(self.seed, epoch)
        generators = PrivateGenerators(seed)
        with generators:
            loader = open_like(
                self._loader,
                dataset,
                seed=seed,
                collate_fn=_CutCollate(
                    self._collate,
                    rank=rank,
                    num_workers=num_workers,
                    sharding=self.sharding,
                    items_are_batches=self._cut is None,
                    seed=seed,
                    position=position,
                ),
                sampler=None if self._order is None else _indices(self._order, epoch),
                batch_size=size or None,
                drop_last=self._cut is not None and self._cut.drop_last,
            )
            items = start_pass(loader)
        return self._slices(items, generators, epoch=epoch, start=start, stop=stop, position=position)

    def _slices(
        self,
        items: Iterator[tuple[Tree, BatchShare]],
        generators: PrivateGenerators,
        *,
        epoch: int,
        start: int,
        stop: int | None,
        position: int,
    ) -> Iterator[Slice]:
        while True:
            if stop is not None and position >= stop:
                return
            with generators:
                item = next(items, None)
            if item is None:
                break
            batch, share = item
            if self._loader is not None and self._loader.pin_memory:
                batch = self._collate.tidy(batch)  # pinning makes lists of tuples
            begin, position = position, position + share.num_global
            if begin < start < position:
                raise DataError(
                    f"the stream has a batch from sample {begin} to {position} and cannot go on from sample {start}, in the "
                    "middle of it: it is read in batches of another size than when the position was saved. Nothing was "
                    "changed; resume with the same batch size."
                )
            if begin >= start:
                first = begin + share.first
                yield Slice(
                    batch=batch,
                    num_local=share.num_local,
                    num_global=share.num_global,
                    epoch=epoch,
                    start=begin,
                    first=share.first,
                    indices=range(first, first + share.num_local),
                    cuts=share.cuts,
                )
        if position == 0:
            raise EmptyDataset(what="batch() (a stream, read to its end)")


def _indices(order: Order, epoch: int) -> Iterable[Any]:
    indices = order.indices(range(order.length(epoch)), epoch)
    return indices.tolist() if isinstance(indices, np.ndarray) else indices


class _Tail(IterableDataset[Any]):
    """A stream without its first samples."""

    def __init__(self, dataset: IterableDataset[Any], num_skipped: int) -> None:
        self._dataset, self._num_skipped = dataset, num_skipped

    def __iter__(self) -> Iterator[Any]:
        samples, began = iter(self._dataset), time.monotonic()
        num_read = sum(1 for _ in itertools.islice(samples, self._num_skipped))
        if num_read:
            waited_s = time.monotonic() - began
            events.emit("stream read again", num_samples=num_read, seconds=round(waited_s, 3))
            if jobs.current().rank == 0:
                print(
                    f"shoal: this is a stream, so its first {num_read:,} samples were read again to go on behind them, in "
                    f"{waited_s:.1f} s",
                    file=sys.stderr,
                )
        yield from samples


class _CutCollate:
    """Collates only this rank's part of a global batch, wherever the loader reads.

    Ranks collate different samples, so a collate function must not draw from the generators of the
    stream itself, or the ranks would soon read different streams.
    """

    def __init__(
        self,
        collate: Collate,
        *,
        rank: int,
        num_workers: int,
        sharding: Sharding,
        items_are_batches: bool,
        seed: int,
        position: int,
    ) -> None:
        self._collate, self._rank, self._num_workers = collate, rank, num_workers
        self._sharding, self._items_are_batches = sharding, items_are_batches
        self._seed, self._position = seed, position
        self._generators = PrivateGenerators(seed)

    def __call__(self, read: Any) -> tuple[Tree, BatchShare]:
        with self._generators:
            self._generators.reseed(mix(self._seed, self._position, self._rank))
            batch, share = self._cut_batch(read) if self._items_are_batches else self._cut_samples(read)
        self._position += share.num_global
        return batch, share

    def _cut_samples(self, samples: list[Any]) -> tuple[Tree, BatchShare]:
        share = BatchShare.of(0, len(samples), self._rank, self._num_workers, self._sharding)
        return self._collate(samples[share.begin : share.end]), share

    def _cut_batch(self, item: Any) -> tuple[Tree, BatchShare]:
        batch = self._collate(item)
        share = BatchShare.of(0, _num_rows(batch), self._rank, self._num_workers, self._sharding)
        return map_tensors(lambda tensor: tensor[share.begin : share.end], batch), share


def _num_rows(batch: Tree) -> int:
    shapes = [tuple(tensor.shape) for tensor in tensors(batch)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        raise DataError(
            "the DataLoader has batch_size=None, so each item is taken as a global batch and cut by its first dimension, "
            f"but the tensors of one item have the shapes {shapes}. Let every tensor have one row per sample, or give "
            "the DataLoader a batch_size."
        )
    return shapes[0][0]


class GeneratorStream(OwnStream):
    """Samples of a user's generator function: one pass over its result is one epoch.

    A generator's middle can only be reached from its beginning, so a resumed epoch is read again up
    to its position, with a message.
    """

    def __init__(self, fn: Any, *, num_samples: int | None, seed: int) -> None:
        if not callable(fn):
            cure = "; give a function that makes it: from_generator(lambda: ...)" if _is_iterable(fn) else ""
            raise ConfigError(
                f"from_generator takes a function that returns a new iterator for each epoch, got a {type(fn).__name__}{cure}."
            )
        self._fn, self._num_samples, self.seed = fn, num_samples, seed
        self._takes_epoch = _takes_epoch(fn)
        self._epoch = 0
        self._last: Any = None

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self._read(self._epoch)

    def _read(self, epoch: int) -> Iterator[Any]:
        samples = self._begun(epoch)
        number = 0
        while self._num_samples is None or number < self._num_samples:
            try:
                sample = next(samples)
            except StopIteration:
                break
            except Exception as error:
                where = f" at {place}" if (place := line_of(error, self._fn)) else ""
                error.add_note(
                    f"raised by the generator {name_of(self._fn)} after {number} samples of epoch {epoch}{where}"
                )
                raise
            yield sample
            number += 1
        if self._num_samples is not None and number < self._num_samples:
            raise DataError(
                f"the generator {name_of(self._fn)} ended after {number} samples of epoch {epoch}, and num_samples says "
                f"{self._num_samples}. What was trained is whole; let it give that many, or leave num_samples out."
            )

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "source": "generator",
            "fn": name_of(self._fn),
            "resumes": "by reading again",
        }
        return described if self._num_samples is None else {**described, "num_samples": self._num_samples}

    def _begun(self, epoch: int) -> Iterator[Any]:
        made = self._fn(epoch) if self._takes_epoch else self._fn()
        if not _is_iterable(made):
            raise ConfigError(
                f"from_generator({name_of(self._fn)}) should return an iterator of samples, and returned a "
                f"{type(made).__name__}. Write a function with yield, or return an iterable."
            )
        samples: Iterator[Any] = iter(made)
        if samples is made and made is self._last:
            raise DataError(
                f"from_generator({name_of(self._fn)}) returned the iterator of the epoch before, which has been read already. "
                "What was trained is whole; let the function make a new one each time it is called."
            )
        self._last = made
        return samples


def _is_iterable(thing: Any) -> bool:
    return hasattr(thing, "__iter__") or hasattr(thing, "__getitem__")


def _takes_epoch(fn: Callable[..., Any]) -> bool:
    """True where it has a parameter that must be given, or one named epoch."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some that are written in C tell nothing
        return False
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    keyword_only = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is parameter.KEYWORD_ONLY
    ]
    if len(required) > 1 or keyword_only:
        names = ", ".join([*(parameter.name for parameter in required), *keyword_only])
        raise ConfigError(
            f"from_generator calls {name_of(fn)} with nothing, or with the epoch, and it wants {names}. Give a function of "
            "the epoch that knows the rest: from_generator(lambda epoch: fn(path, epoch))."
        )
    first = next(iter(parameters), None)
    return bool(required) or (first is not None and first.name == "epoch")
