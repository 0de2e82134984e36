"""The stages of a dataset: what is done to samples, and which of them there are.

Every method returns a new dataset and reads nothing. Stages that change
samples are sources (in sources/), stages that choose and arrange them are
orders (see choosing.py); a stream has stages of its own (stream_stages.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from shoal.data import arguments
from shoal.data.arguments import above_zero, flag, function, shown, skipping, whole_number
from shoal.data.constructors import Constructors
from shoal.data.order import select as choosing
from shoal.data.order.order import InOrder, Order, Repeated, Shuffled, Window
from shoal.data.order.select import checked_weights
from shoal.data.reader import Reader
from shoal.data.sources.combined import Interleaved, RepeatedSource, Zipped, as_source
from shoal.data.sources.mapped import Augmented, WeightedSource, mapped
from shoal.data.sources.source import Source
from shoal.data.stream import (
    AugmentStream,
    FilterStream,
    MapStream,
    RepeatStream,
    ShuffleStream,
    SkipStream,
    Stream,
    TakeStream,
    WeightStream,
)
from shoal.data.values import By, Values
from shoal.errors import ConfigError

STREAM_BUFFER = 10_000
"""Samples among which a stream is shuffled."""


class Stages(Constructors):
    """The stages of `shoal.Dataset`."""

    _source: Source | Stream
    _access: tuple[Reader, Order] | None

    def __init__(self, source: Source | Stream, order: Order | None = None) -> None:
        raise NotImplementedError

    # ---- what is done to samples ----------------------------------------------------------------

    def map(
        self,
        fn: Callable[[Any], Any],
        *,
        batched: bool = False,
        workers: int = 0,
        timeout_s: float = 600.0,
        on_error: str = "raise",
        max_skips: int | None = None,
    ) -> Self:
        """Apply `fn` to every sample, when it is read; with `batched=True` to the batch of those that are read together.

        A batched function gets tensors with one row per sample and must keep
        the rows; how many they are may differ from call to call. It is much
        faster. Random numbers that `fn` draws from the generators of torch,
        numpy or Python are a function of (seed, epoch, position).

        Where `fn` raises, the error says for which sample; `on_error="skip"`
        leaves such samples out, at most `max_skips` of them over all workers,
        and writes each down (`Batches.skipped`, and the job's events).

        With `workers=4` so many processes beside this one run everything up
        to the batch, ahead of the training step: the same batches in the same
        order. One that dies is replaced and its batches are read again; one
        that takes longer than `timeout_s` over a batch is an error that says
        where it stands. They are forks, made when a pass (or `fit`) begins,
        with one thread each and without connections or a GPU: let `fn` leave
        samples on the CPU, and a dataset open its connections when it is read.

            data.map(lambda sample: (sample[0] / 255, sample[1]))
            data.map(lambda batch: (batch[0].float() / 255, batch[1]), batched=True)
            data.map(decode, workers=4)
        """
        workers = whole_number("map(workers=)", workers, at_least=0)
        timeout_s = above_zero("map(timeout_s=)", timeout_s, "seconds")
        fn, batched = function("map", fn), flag("map(batched=)", batched)
        on_error, max_skips = skipping("map", on_error, max_skips)
        if isinstance(self._source, Stream):
            if batched or workers:
                raise ConfigError(
                    f"map({'batched=True' if batched else 'workers='}) needs random access, and this is a stream. Map its "
                    "samples one by one, or its batches: data.batch(256).map(fn)."
                )
            return self._streamed(MapStream(fn, on_error=on_error, max_skips=max_skips))
        source, order = self._indexed("map")
        made = mapped(source, fn, batched=batched, on_error=on_error, max_skips=max_skips)
        if workers:
            made.num_processes = max(made.num_processes, workers)
            made.timeout_s = max(made.timeout_s, timeout_s)
        return type(self)(made, order)

    def augment(self, fn: Callable[[Any, torch.Generator], Any], seed: int = 0) -> Self:
        """Change every sample at random: `fn(sample, generator)` draws from a torch.Generator that is seeded for it.

        The seed is a function of (seed, epoch, index): another draw each
        epoch, the same at any number of workers, in any order and after a
        resume. A sample that `repeat` gives twice is drawn for twice; one
        that `sample` draws twice, once.

            data.augment(lambda s, g: (s[0] + 0.1 * torch.randn(s[0].shape, generator=g), s[1]), seed=0)
        """
        seed, fn = whole_number("augment(seed=)", seed), function("augment", fn, of="(sample, generator)")
        if isinstance(self._source, Stream):
            return self._streamed(AugmentStream(fn, seed))
        source, order = self._indexed("augment")
        return type(self)(Augmented(source, fn, seed), order)

    def with_weights(self, weights: By) -> Self:
        """Give every sample (inputs, target) a weight: batches are (inputs, target, weight), and the loss is weighted.

        `weights` is a column's name (which is no input any more), an array
        with one number per sample in the order of the dataset, or a function
        of a sample. The loss of a batch is sum(w · loss) / sum(w), over all
        workers; metrics count every sample alike.

            data.with_weights("importance")
            data.with_weights(lambda sample: 2.0 if sample[1] == 1 else 1.0)
        """
        if isinstance(self._source, Stream):
            if not callable(weights) and not (isinstance(weights, str) and weights):
                raise ConfigError(
                    f"with_weights on a stream takes a column's name or a function of a sample, got {shown(weights)}"
                )
            return self._streamed(WeightStream(weights))
        source, order = self._indexed("with_weights")
        if callable(weights) or (isinstance(weights, str) and weights):
            return type(self)(WeightedSource(source, weights), order)
        values = Values(source, order, weights, caller="with_weights")
        if values.is_checkable:
            checked_weights(values)
        inside = as_source(source, order)
        return type(self)(WeightedSource(inside, values), InOrder(lambda: inside.num_samples, parts=[order]))

    def cache(
        self,
        where: str = "auto",
        *,
        ram_bytes: int | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Keep what has been read: the stages before it run once per sample.

        "auto" keeps in RAM what fits and on disk what does not, and says
        which; "ram" and "disk" say it themselves. `ram_bytes` is the most it
        may take of the RAM, `directory` where files go.

            data.map(decode).cache().augment(crop)
        """
        source, order = self._indexed("cache")
        if source.uses_epoch:
            raise ConfigError(
                "cache keeps a sample for all epochs, and a stage before it (augment, or a shuffled dataset in a zip) gives "
                "another one in each. Call cache before that stage."
            )
        if ram_bytes is not None:
            ram_bytes = whole_number("cache(ram_bytes=)", ram_bytes, at_least=0)
        if directory is not None:
            directory = arguments.directory("cache(directory=)", directory)
        from shoal.data.cache.sample_cache import cached

        return type(self)(cached(source, where=where, ram_bytes=ram_bytes, directory=directory), order)

    # ---- which samples there are ----------------------------------------------------------------

    def filter(self, fn: Callable[[Any], Any], batched: bool = False) -> Self:
        """Only the samples for which `fn` is true; with `batched=True` it gets a batch and returns a truth value per row.

        Costs one pass over the data, when the length or the first sample is
        asked for, in every worker (all of them get the same), and keeps two
        bits per sample. After a shuffle it also goes through the order of
        each epoch. Put it before `map` stages that are slow, and after none
        that draw random numbers.

            data.filter(lambda sample: sample[1] >= 0)
        """
        fn, batched = function("filter", fn), flag("filter(batched=)", batched)
        if isinstance(self._source, Stream):
            if batched:
                raise ConfigError(
                    "filter(batched=True) needs random access, and this is a stream: filter sample by sample"
                )
            return self._streamed(FilterStream(fn))
        source, order = self._indexed("filter")
        return type(self)(source, choosing.filtered(source, order, fn, batched=batched))

    def take(self, num_samples: int) -> Self:
        """Only the first samples of each epoch; all where there are fewer.

        data.take(1000)
        """
        num_samples = whole_number("take(n)", num_samples, at_least=0)
        if isinstance(self._source, Stream):
            return self._streamed(TakeStream(num_samples))
        source, order = self._indexed("take")
        return type(self)(source, Window(order, num_samples=num_samples))

    def skip(self, num_samples: int) -> Self:
        """All but the first samples of each epoch.

        data.skip(1000)
        """
        num_samples = whole_number("skip(n)", num_samples, at_least=0)
        if isinstance(self._source, Stream):
            return self._streamed(SkipStream(num_samples))
        source, order = self._indexed("skip")
        return type(self)(source, Window(order, begin=num_samples))

    def repeat(self, times: int | None = None) -> Self:
        """The whole `times` times in one epoch; without a number, without end, for `fit(max_steps=...)`.

        Each repetition is as an epoch of its own: shuffled and augmented
        anew. Samples keep apart: repetition r of index i is r·n + i.

            data.shuffle(seed=0).repeat(3)
        """
        if times is not None:
            times = whole_number("repeat(n)", times, at_least=1)
        if isinstance(self._source, Stream):
            return self._streamed(RepeatStream(times))
        source, order = self._indexed("repeat")
        if order.is_endless:
            raise ConfigError("repeat after repeat() would wait for an end that never comes; call it once")
        if order.length_varies:
            raise ConfigError(
                "repeat needs epochs of one length, and a filter after take, skip or sample of a shuffled dataset keeps "
                "another number in each. Filter first."
            )
        return type(self)(RepeatedSource(source, times), Repeated(order, times=times, source=source))

    def shuffle(self, seed: int = 0, *, buffer: int | None = None) -> Self:
        """Another order each epoch, a function of (seed, epoch).

        Nothing is stored, whatever the size: the order is computed. Only a
        stream is shuffled in a buffer of `buffer` samples (10,000 unless said
        otherwise): a random one of those leaves when the next comes in.
        Resuming reads the stream again and gives the same order.

            data.shuffle(seed=0)
        """
        seed = whole_number("shuffle(seed=)", seed)
        if buffer is not None:
            buffer = whole_number("shuffle(buffer=)", buffer, at_least=1)
        if isinstance(self._source, Stream):
            return self._streamed(ShuffleStream(seed, buffer or STREAM_BUFFER))
        source, order = self._indexed("shuffle")
        if order.is_endless:
            raise ConfigError("shuffle after repeat() would need all of it first. Shuffle, then repeat.")
        return type(self)(source, Shuffled(order, seed))

    def sample(
        self,
        num_samples: int | None = None,
        weights: By | None = None,
        replacement: bool = True,
        seed: int = 0,
    ) -> Self:
        """Samples drawn at random, anew each epoch: as many as there are, or `num_samples`; by weight where given.

        `weights` is a column's name, an array or a function of a sample.
        With replacement each draw is a function of (seed, epoch, position),
        and weights cost 8 bytes per sample. Without, a heavier sample comes
        earlier, and the order of an epoch is kept while it lasts.

            data.sample(10_000, weights="importance", seed=0)
        """
        if num_samples is not None:
            num_samples = whole_number("sample(num_samples=)", num_samples, at_least=1)
        source, order = self._indexed("sample")
        chosen = choosing.sampled(
            source,
            order,
            num_samples=num_samples,
            weights=weights,
            replacement=flag("sample(replacement=)", replacement),
            seed=whole_number("sample(seed=)", seed),
        )
        return type(self)(source, chosen)

    def split(
        self,
        *parts: float,
        seed: int | None = 0,
        stratify: By | None = None,
        group: By | None = None,
        time: By | None = None,
    ) -> tuple[Self, ...]:
        """Disjoint parts, drawn at random: by fractions of at most 1 in all, or by numbers of samples.

        The sizes of fractions are rounded so that nothing is lost. With
        `seed=None` the parts are ranges in the order of the data. One of
        these, a column's name, an array or a function of a sample, may say
        how to part: `stratify` gives every part its share of each value,
        `group` leaves samples of one value together (sizes are then as near
        as they can be), `time` sorts, and later parts are later.

            train, validation, test = data.split(0.8, 0.1, 0.1, seed=0)
            train, test = data.split(0.9, 0.1, group="user")
        """
        source, order = self._indexed("split")
        if seed is not None:
            seed = whole_number("split(seed=)", seed)
        orders = choosing.split(source, order, parts, seed=seed, stratify=stratify, group=group, time=time)
        return tuple(type(self)(source, part) for part in orders)

    def folds(
        self, k: int, seed: int = 0, *, stratify: By | None = None, group: By | None = None
    ) -> list[tuple[Self, Self]]:
        """For cross validation: k pairs (train, validation) whose validation parts are disjoint and hold everything.

        `stratify` and `group` are as in `split`.

            for train, validation in data.folds(5, seed=0):
                ...
        """
        source, order = self._indexed("folds")
        k, seed = whole_number("folds(k)", k, at_least=2), whole_number("folds(seed=)", seed)
        pairs = choosing.folds(source, order, k, seed=seed, stratify=stratify, group=group)
        return [(type(self)(source, rest), type(self)(source, fold)) for rest, fold in pairs]

    # ---- several datasets -----------------------------------------------------------------------

    @classmethod
    def zip(cls, *datasets: Self) -> Self:
        """Tuples of one sample of each dataset; as many as the shortest has.

        Dataset.zip(images, labels)
        """
        sources, orders = _sides("zip", datasets)
        source = Zipped(*sources)
        return cls(source, InOrder(lambda: source.num_samples, parts=orders))

    @classmethod
    def interleave(cls, datasets: Sequence[Self], block: int = 1) -> Self:
        """The samples of all datasets in turns, `block` of each at a time; who has no more is passed over.

        Dataset.interleave([english, german], block=8)
        """
        block = whole_number("interleave(block=)", block, at_least=1)
        sources, orders = _sides("interleave", datasets)
        if any(order.is_endless for order in orders):
            raise ConfigError(
                "interleave goes on until every dataset is read, and repeat() has no end. Call repeat on what interleave "
                "gives, or take(n) before."
            )
        source = Interleaved(sources, block)
        return cls(source, InOrder(lambda: source.num_samples, parts=orders))

    # ---- for the stages themselves --------------------------------------------------------------

    def _streamed(self, stage: Any) -> Self:
        assert isinstance(self._source, Stream)
        return type(self)(self._source.then(stage))

    def _indexed(self, what: str) -> tuple[Source, Order]:
        """Source and order, or a refusal for a stream."""
        if self._access is None:
            raise ConfigError(
                f"{what} needs random access, and this is a stream: it can only be read from its beginning. Nothing was "
                "read; a stream can be mapped, filtered, augmented, taken from, skipped in, repeated, shuffled in a buffer "
                "and batched. For the rest give a dataset with __getitem__ and __len__, or files."
            )
        return self._access[0].source, self._access[1]


def _sides(what: str, datasets: Sequence[Stages]) -> tuple[list[Source], list[Order]]:
    is_list = isinstance(datasets, Sequence) and len(datasets) > 0
    if not is_list or not all(isinstance(dataset, Stages) for dataset in datasets):
        raise ConfigError(f"{what} takes datasets, at least one, got {datasets!r}")
    sides = [dataset._indexed(what) for dataset in datasets]
    return [as_source(source, order) for source, order in sides], [order for _, order in sides]
