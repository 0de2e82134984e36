"""`shoal.Dataset`: a lazy pipeline of index functions.

A source (index to sample) and an order (position to index), or a stream. Every
stage returns a new dataset and reads nothing. Sources are in sources/ and
formats/, orders in order/; cutting into batches and over workers is `Batches`.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from shoal.data import arguments, formats, select
from shoal.data.arguments import above_zero, flag, function, shown, skipping, whole_number
from shoal.data.batches import Batches
from shoal.data.feed import IndexedFeed, even_cut
from shoal.data.order import InOrder, Order, Repeated, Shuffled, Window
from shoal.data.reader import DataIterator, Reader, samples_from
from shoal.data.select import By, Values
from shoal.data.skipping import SkipSamples
from shoal.data.sources.derived import (
    Augmented,
    Interleaved,
    RepeatedSource,
    WeightedSource,
    Zipped,
    as_source,
    mapped,
)
from shoal.data.sources.source import ArraySource, FunctionSource, Source, torch_source
from shoal.data.stream import (
    GeneratorStream,
    Stream,
    StreamFeed,
    augment_stage,
    filter_stage,
    map_stage,
    repeat_stage,
    shuffle_stage,
    skip_stage,
    stream_from,
    take_stage,
    weight_stage,
)
from shoal.data.tree import Collate, Tree
from shoal.data.workers.loader import feed_of
from shoal.data.workers.pool import PoolConfig, PooledFeed
from shoal.errors import ConfigError, DataError
from shoal.runtime.user_frames import calling_line

if TYPE_CHECKING:
    from shoal.data.mapreduce.api import Aggregate

STREAM_BUFFER = 10_000
"""Samples among which a stream is shuffled."""

Options = ParamSpec("Options")
D = TypeVar("D", bound="Dataset")


class FormatConstructor(Generic[Options]):
    """`Dataset.from_csv` and its like: signature and documentation are those of `open_csv` in formats/text.py.

    Loads the format when it is first asked for. Refusals name the user's line
    that called it: under a launcher no traceback does.
    """

    def __init__(self, load: Callable[[], Callable[Options, Source | Stream]]) -> None:
        self._load = load

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type[D]) -> Callable[Options, D]:
        opener = self._load()

        @functools.wraps(opener)
        def constructor(*args: Options.args, **options: Options.kwargs) -> D:
            try:
                return owner(opener(*args, **options))
            except DataError as error:
                error.opened_by(calling_line())
                raise

        constructor.__name__, constructor.__qualname__ = self._name, f"{owner.__name__}.{self._name}"
        signature = inspect.signature(opener).replace(return_annotation=owner.__name__)
        constructor.__signature__ = signature  # type: ignore[attr-defined]  # which `help` looks at
        return constructor


class Dataset:
    """Samples by index, lazily shuffled, split, mapped and batched.

    What an epoch holds is a function of (seed, epoch, index): it can be read
    from any position, by any number of workers.

        data = shoal.Dataset.from_arrays(({"dense": dense, "ids": ids}, label))
        train, test = data.split(0.9, 0.1, seed=0)
        batches = train.shuffle(seed=0).batch(1024)

    Tables (`from_csv`, `from_parquet`, ...) are decoded once and kept. `cache`
    says where: "auto", in RAM what fits and on disk what does not; "ram";
    "disk"; a `shoal.memory.CacheConfig(ram_bytes=..., directory=...)`; or None,
    which keeps only the blocks read last, for a table that is read once and in
    order. A row that cannot be read is an error that names it, when it is asked
    for; `on_error="skip"` leaves such rows out, at most `max_skips` different
    ones over all workers and epochs of a launch, and writes each down.
    """

    def __init__(self, source: Source | Stream, order: Order | None = None) -> None:
        if not isinstance(source, (Source, Stream)):
            raise ConfigError(
                f"a Dataset is made by one of its from_ methods, and was given a {type(source).__name__}. Nothing was started; write "
                "shoal.Dataset.from_arrays((x, y)), from_torch, from_parquet, from_generator ..."
            )
        self._source = source
        self._access: tuple[Reader, Order] | None = None
        if isinstance(source, Source):
            order = order or InOrder(source.num_samples)
            self._access = Reader(source, seed=order.seed), order

    @classmethod
    def from_arrays(cls, arrays: Tree) -> Self:
        """Rows of tensors or numpy arrays, in any nesting of dicts and tuples, of equal first dimension.

        Arrays are not copied where their memory allows it, and never written.

            Dataset.from_arrays((images, labels))
            Dataset.from_arrays(({"dense": dense, "ids": ids}, label))
        """
        return cls(ArraySource(arrays))

    @classmethod
    def from_function(cls, fn: Callable[[NDArray[np.int64]], Tree], num_samples: int) -> Self:
        """Samples computed from their index: `fn` takes an array of indices and returns their batch.

        What it returns is a tensor or array, or a dict or tuple of them, with one row per index.

            Dataset.from_function(lambda i: (torch.tensor(i % 10).float(), torch.tensor(i % 2)), 1_000_000)
        """
        fn = function("from_function", fn, of="an array of indices")
        return cls(FunctionSource(fn, whole_number("from_function(num_samples=)", num_samples, at_least=0)))

    @overload
    @classmethod
    def from_torch(cls, dataset: DataLoader[Any]) -> Batches: ...

    @overload
    @classmethod
    def from_torch(cls, dataset: Any) -> Self: ...

    @classmethod
    def from_torch(cls, dataset: Any) -> Self | Batches:
        """A torch Dataset, or a DataLoader, which gives Batches.

        A map-style dataset needs `__len__` and `__getitem__`. An
        IterableDataset is read as a stream: every worker reads all of it and
        keeps its part, there is no shuffle, split or length, and a resumed
        epoch is read again up to its position. A DataLoader keeps its
        settings, its sampler says the order, and its batch size is that of
        one update (of one worker, if it has a DistributedSampler).

            Dataset.from_torch(torchvision.datasets.FakeData()).shuffle(seed=0).batch(64)
        """
        if isinstance(dataset, DataLoader):
            return Batches(feed_of(dataset, default_seed=0))
        if isinstance(dataset, IterableDataset):
            return cls(Stream(dataset))
        if not hasattr(dataset, "__getitem__") or isinstance(dataset, (str, bytes, dict)):
            raise ConfigError(
                f"from_torch takes a torch Dataset or DataLoader, or anything with __len__ and __getitem__, but got a "
                f"{type(dataset).__name__}. For tensors and arrays there is from_arrays."
            )
        return cls(torch_source(dataset))

    @classmethod
    def from_generator(
        cls, fn: Callable[..., Iterable[Any]], *, num_samples: int | None = None, seed: int = 0
    ) -> Self:
        """Samples of a generator function, called anew for each epoch: fn(), or fn(epoch) if it takes an argument.

        A stream: every worker reads all of it and keeps its part, there is no
        split and no length, and a resumed epoch is read again up to its
        position. `num_samples` ends an epoch after that many, and fewer are
        an error. What it draws from the generators of torch, numpy or Python
        is a function of (seed, epoch), the same on every worker.

            def lines(epoch):
                for line in open("log.txt"):
                    yield parse(line)

            Dataset.from_generator(lines).batch(32)
        """
        if num_samples is not None:
            num_samples = whole_number("from_generator(num_samples=)", num_samples, at_least=1)
        seed = whole_number("from_generator(seed=)", seed)
        return cls(Stream(GeneratorStream(fn, num_samples=num_samples, seed=seed)))

    from_csv = FormatConstructor(lambda: formats.open_csv)
    from_jsonl = FormatConstructor(lambda: formats.open_jsonl)
    from_parquet = FormatConstructor(lambda: formats.open_parquet)
    from_tfrecord = FormatConstructor(lambda: formats.open_tfrecord)
    from_sql = FormatConstructor(lambda: formats.open_sql)
    from_huggingface = FormatConstructor(lambda: formats.open_huggingface)
    from_spark = FormatConstructor(lambda: formats.open_spark)
    from_ray = FormatConstructor(lambda: formats.open_ray)
    from_stream = FormatConstructor(lambda: formats.open_stream)

    # ---- functions of samples ----

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
            return self._streamed(map_stage(fn, on_error=on_error, max_skips=max_skips))
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
            return self._streamed(augment_stage(fn, seed))
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
            return self._streamed(weight_stage(weights))
        source, order = self._indexed("with_weights")
        if callable(weights) or (isinstance(weights, str) and weights):
            return type(self)(WeightedSource(source, weights), order)
        values = Values(source, order, weights, caller="with_weights")
        if values.is_checkable:
            select.checked_weights(values)
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

    # ---- selection and order ----

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
            return self._streamed(filter_stage(fn))
        source, order = self._indexed("filter")
        return type(self)(source, select.filtered(source, order, fn, batched=batched))

    def take(self, num_samples: int) -> Self:
        """Only the first samples of each epoch; all where there are fewer.

        data.take(1000)
        """
        num_samples = whole_number("take(n)", num_samples, at_least=0)
        if isinstance(self._source, Stream):
            return self._streamed(take_stage(num_samples))
        source, order = self._indexed("take")
        return type(self)(source, Window(order, num_samples=num_samples))

    def skip(self, num_samples: int) -> Self:
        """All but the first samples of each epoch.

        data.skip(1000)
        """
        num_samples = whole_number("skip(n)", num_samples, at_least=0)
        if isinstance(self._source, Stream):
            return self._streamed(skip_stage(num_samples))
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
            return self._streamed(repeat_stage(times))
        source, order = self._indexed("repeat")
        if order.is_endless:
            raise ConfigError("repeat after repeat() would wait for an end that never comes; call it once")
        _refuse_varying_length("repeat", order)
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
            return self._streamed(shuffle_stage(seed, buffer or STREAM_BUFFER))
        source, order = self._indexed("shuffle")
        if order.is_endless:
            raise ConfigError(
                "shuffle needs all samples first, and this has no end. Shuffle before repeat(); of a stream of records take a part: "
                "from_stream(..., until='now') or records=."
            )
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
        chosen = select.sampled(
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
        orders = select.split(source, order, parts, seed=seed, stratify=stratify, group=group, time=time)
        return tuple(type(self)(source, part) for part in orders)

    def folds(
        self, k: int, seed: int = 0, *, stratify: By | None = None, group: By | None = None
    ) -> list[tuple[Self, Self]]:
        """Pairs (train, validation) for k-fold cross validation, whose validation parts are disjoint and hold everything.

        `stratify` and `group` are as in `split`.

            for train, validation in data.folds(5, seed=0):
                ...
        """
        source, order = self._indexed("folds")
        k, seed = whole_number("folds(k)", k, at_least=2), whole_number("folds(seed=)", seed)
        pairs = select.folds(source, order, k, seed=seed, stratify=stratify, group=group)
        return [(type(self)(source, rest), type(self)(source, fold)) for rest, fold in pairs]

    # ---- several datasets ----

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

    # ---- reading ----

    def batch(self, size: int, *, per_worker: bool = False, drop_last: bool = False) -> Batches:
        """Batches of `size`: of one update, over all workers, or with `per_worker=True` of each worker.

        `drop_last=True` leaves a last batch out that is not full.

            data.shuffle(seed=0).batch(1024)
        """
        size = whole_number("batch(size)", size, at_least=1)
        cut = even_cut(
            size,
            per_worker=flag("batch(per_worker=)", per_worker),
            drop_last=flag("batch(drop_last=)", drop_last),
        )
        if isinstance(self._source, Stream):
            description = self._source.describe()
            return Batches(
                StreamFeed(
                    self._source,
                    cut=cut,
                    collate=Collate(),
                    seed=self._source.seed,
                    description=description,
                )
            )
        source, order = self._indexed("batch")
        reader = Reader(source, seed=order.seed)
        if source.num_processes:
            config = PoolConfig(num_processes=source.num_processes, timeout_s=source.timeout_s)
            return Batches(PooledFeed(reader, order, cut, config))
        return Batches(IndexedFeed(reader, order, cut))

    def iterator(self, position: Any = None) -> DataIterator[Any]:
        """Samples one by one, with a position that can be saved as JSON and gone on from, in the middle of an epoch.

        Needs no Trainer and no launcher; `batch(n).iterator()` gives batches.
        A position of another dataset is refused.

            it = data.shuffle(seed=0).iterator()
            sample, saved = it.next(), it.position
            it = data.shuffle(seed=0).iterator(saved)
        """
        if isinstance(self._source, Stream):
            stream, description = self._source, self._source.describe()
            return DataIterator(
                lambda epoch, start: stream_from(stream, epoch=epoch, start=start),
                description=description,
                seed=stream.seed,
                position=position,
            )
        reader, order = self._random_access("iterator")
        return DataIterator(
            lambda epoch, start: samples_from(reader, order, epoch=epoch, start=start),
            description=self._described(),
            seed=order.seed,
            position=position,
            plans=reader.source.plans(),
        )

    def map_reduce(
        self,
        map: Callable[[Any], Iterable[tuple[Any, Any]]],
        combine: Callable[[Any, Any], Any] | None = None,
        reduce: Callable[[Any, Any], Any] | None = None,
        partitions: int = 8,
        *,
        batched: bool | int = False,
        key: str | None = None,
        workers: int = 1,
        on: str = "",
        buffer_bytes: int = 64 << 20,
        timeout_s: float = 300.0,
        directory: str | os.PathLike[str] | None = None,
    ) -> Aggregate:
        """Results by key: `map` gives (key, value) pairs of every sample, `reduce` makes one result of a key's values.

        `map(sample)` yields pairs; with `batched=4096` it is given batches.
        `combine(key, values)` makes one value of a list of them, wherever
        several meet in memory, and must not mind how often. `reduce(key,
        values)` sees what is left, in the order of the data: a list, or
        without `combine`, where it may be long, an iterator. A key whose
        result is None is left out. Without `reduce`, `combine` is
        it; without both a key's result is the list of its values. Keys are
        numbers, strings, bytes, None or tuples of them; values anything made
        of numbers, strings, lists, dicts and arrays.

        Pairs are sorted on disk where they are more than `buffer_bytes`. The
        workers of a job share the tasks, and so do `workers` processes of
        this one; a task whose process died is run again, alone. With
        `on="ray"` or `"spark"` (`"ray:ADDRESS"`, `"spark:MASTER"`) they are
        ordinary tasks of that engine, whose machines must reach the data and
        `directory`. The result does not depend on any of this. It is kept in the host's cache and
        reused where data and functions are the same, as far as that can be
        told; `key` says it where it cannot. After `timeout_s` without a sign
        of life it is said who holds which task.

            data.map_reduce(lambda line: ((word, 1) for word in line.split()), lambda word, ones: sum(ones))
        """
        from shoal.data.mapreduce.api import map_reduce  # which is built on datasets

        return map_reduce(
            self._source,
            self._access,
            map,
            combine,
            reduce,
            partitions=partitions,
            batched=batched,
            key=key,
            workers=workers,
            on=on,
            buffer_bytes=buffer_bytes,
            timeout_s=timeout_s,
            directory=directory,
        )

    def stage(self) -> Dataset:
        """Copy all files to this host before the first step, where they lie elsewhere; returns the dataset.

        data = Dataset.from_parquet("clicks/*.parquet", location="central", spread="chain").stage()
        """
        if isinstance(self._source, Source):
            self._source.stage()
        return self

    def __len__(self) -> int:
        if self._access is None:
            raise TypeError("a stream has no length before it has been read")
        if self._access[1].is_endless:
            raise TypeError("a dataset that is repeated without end has no length")
        return self._access[1].num_samples

    def __getitem__(self, position: int) -> Any:
        """The sample at a position of the first epoch; negative positions count from the end."""
        reader, order = self._random_access("indexing")
        at = operator.index(position)
        at = at + len(self) if at < 0 else at
        if not 0 <= at < order.num_samples:
            raise IndexError(f"position {position} of a dataset of {order.num_samples} samples")
        [index] = order.indices(range(at, at + 1), 0)
        try:
            return reader.sample(int(index), epoch=0, position=at)
        except SkipSamples as found:
            raise next(iter(found.bad.values())) from None

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._source, Stream):
            return iter(self._source)
        reader, order = self._random_access("iterating")
        return (sample for sample, _ in samples_from(reader, order, epoch=0, start=0))

    def __repr__(self) -> str:
        if isinstance(self._source, Stream):
            named = [stage.get("source") or stage.get("stage") for stage in self._source.describe()]
            names = [str(name) for name in named]
            what = "a stream, read from its beginning"
        else:
            source, order = self._indexed("repr")
            names = [*source.names(), *order.names()]
            what = f"{order.num_samples} samples" if order.is_counted else "not counted yet"
            what = "without end" if order.is_endless else what
        return f"Dataset({what}: {' > '.join(names)})"

    def _streamed(self, stage: Any) -> Self:
        assert isinstance(self._source, Stream)
        return type(self)(self._source.then(stage))

    def _indexed(self, what: str) -> tuple[Source, Order]:
        if self._access is None:
            raise ConfigError(
                f"{what} needs random access, and this is a stream: it can only be read from its beginning. Nothing was "
                "read; a stream can be mapped, filtered, augmented, taken from, skipped in, repeated, shuffled in a buffer "
                "and batched. For the rest give a dataset with __getitem__ and __len__, or files."
            )
        return self._access[0].source, self._access[1]

    def _random_access(self, what: str) -> tuple[Reader, Order]:
        self._indexed(what)
        assert self._access is not None
        return self._access

    def _described(self) -> dict[str, Any]:
        source, order = self._indexed("describing")
        num_samples = None if order.is_endless else order.num_samples
        return {"num_samples": num_samples, "stages": [*source.describe(), *order.describe()]}


def _sides(what: str, datasets: Sequence[Dataset]) -> tuple[list[Source], list[Order]]:
    is_list = isinstance(datasets, Sequence) and len(datasets) > 0
    if not is_list or not all(isinstance(dataset, Dataset) for dataset in datasets):
        raise ConfigError(f"{what} takes datasets, at least one, got {datasets!r}")
    sides = [dataset._indexed(what) for dataset in datasets]
    for _, order in sides:
        _refuse_varying_length(what, order)
    return [as_source(source, order) for source, order in sides], [order for _, order in sides]


def _refuse_varying_length(what: str, order: Order) -> None:
    if order.length_varies:
        raise ConfigError(
            f"{what} needs epochs of one length, and a filter after take, skip or sample of a shuffled dataset keeps "
            "another number in each. Filter first."
        )
