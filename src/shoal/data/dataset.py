"""`shoal.Dataset`: a pipeline of index functions, put together lazily.

Holds a source (index to sample) and an order (position to index); its stages
are in stages.py. Here is what comes of them: samples, batches, iterators.
Cutting into batches and over workers is `Batches`.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from shoal.data.arguments import flag, whole_number
from shoal.data.batches import Batches
from shoal.data.collate import Collate
from shoal.data.feed import IndexedFeed, even_cut
from shoal.data.iterator import DataIterator
from shoal.data.order.order import InOrder, Order
from shoal.data.reader import Reader, samples_from
from shoal.data.skipping import SkipSamples
from shoal.data.sources.source import Source
from shoal.data.stages import Stages
from shoal.data.stream import Stream, StreamFeed, stream_from
from shoal.data.workers.pool import PoolConfig
from shoal.data.workers.pooled_feed import PooledFeed

if TYPE_CHECKING:
    from shoal.data.mapreduce.aggregate import Aggregate


class Dataset(Stages):
    """Samples by index, lazily shuffled, split, mapped and batched.

    What an epoch holds is a function of (seed, epoch, index): it can be read
    from any position, by any number of workers.

        data = shoal.Dataset.from_arrays(({"dense": dense, "ids": ids}, label))
        train, test = data.split(0.9, 0.1, seed=0)
        batches = train.shuffle(seed=0).batch(1024)
    """

    def __init__(self, source: Source | Stream, order: Order | None = None) -> None:
        self._source = source
        self._access: tuple[Reader, Order] | None = None
        if isinstance(source, Source):
            order = order or InOrder(source.num_samples)
            self._access = Reader(source, seed=order.seed), order

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
        this one; a task whose process died is run again, alone. The result
        does not depend on their number. It is kept in the host's cache and
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

    def _described(self) -> dict[str, Any]:
        source, order = self._indexed("describing")
        num_samples = None if order.is_endless else order.num_samples
        return {"num_samples": num_samples, "stages": [*source.describe(), *order.describe()]}

    def _random_access(self, what: str) -> tuple[Reader, Order]:
        """Reader and order, or a refusal for a stream."""
        self._indexed(what)
        assert self._access is not None
        return self._access
