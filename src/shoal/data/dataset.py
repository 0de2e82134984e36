"""`shoal.Dataset`: a pipeline of index functions, put together lazily.

Holds a source (index to sample) and an order (position to index); every method
returns a new dataset and reads nothing. Cutting into batches and over workers
is `Batches`.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ConfigError
from shoal.data.batches import Batches, whole_number
from shoal.data.collate import Collate
from shoal.data.constructors import Constructors
from shoal.data.feed import IndexedFeed, even_cut
from shoal.data.order import InOrder, Order, Part, Shuffled
from shoal.data.reader import Reader
from shoal.data.sources.source import Mapped, Source
from shoal.data.split import part_sizes
from shoal.data.stream import Stream, StreamFeed

if TYPE_CHECKING:
    from shoal.data.map_reduce.aggregate import Aggregate


class Dataset(Constructors):
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

    def map(self, fn: Callable[[Any], Any]) -> Dataset:
        """Apply `fn` to every sample, when it is read; after `batch`, `map` is applied to batches, which is faster.

        Random numbers that `fn` draws from the generators of torch, numpy or
        Python are a function of (seed, epoch, position).

            data.map(lambda sample: (sample[0] / 255, sample[1]))
        """
        if isinstance(self._source, Stream):
            return Dataset(self._source.map(fn))
        _, order = self._random_access("map")
        return Dataset(Mapped(self._source, fn), order)

    def shuffle(self, seed: int = 0) -> Dataset:
        """Another order each epoch, a function of (seed, epoch).

        Nothing is stored, whatever the size: the order is computed.

            data.shuffle(seed=0)
        """
        _, order = self._random_access("shuffle")
        return Dataset(self._source, Shuffled(order, whole_number("shuffle(seed=)", seed)))

    def split(self, *parts: float, seed: int | None = 0) -> tuple[Dataset, ...]:
        """Disjoint parts, drawn at random: by fractions of at most 1 in all, or by numbers of samples.

        The sizes of fractions are rounded so that nothing is lost. With
        `seed=None` the parts are ranges in the order of the data.

            train, validation, test = data.split(0.8, 0.1, 0.1, seed=0)
        """
        _, order = self._random_access("split")
        if isinstance(order, Shuffled):
            raise ConfigError(
                "split after shuffle would move samples between the parts from epoch to epoch, test data into training. "
                "Split first, then shuffle the parts: data.split(0.9, 0.1, seed=0)[0].shuffle(seed=0)."
            )
        if seed is not None:
            seed = whole_number("split(seed=)", seed)
        sizes = part_sizes(order.num_samples, parts)
        begins = [sum(sizes[:number]) for number in range(len(sizes))]
        return tuple(
            Dataset(self._source, Part(order, begin=begin, num_samples=size, split_seed=seed))
            for begin, size in zip(begins, sizes, strict=True)
        )

    def batch(self, size: int, *, per_worker: bool = False, drop_last: bool = False) -> Batches:
        """Batches of `size`: of one update, over all workers, or with `per_worker=True` of each worker.

        `drop_last=True` leaves a last batch out that is not full.

            data.shuffle(seed=0).batch(1024)
        """
        size = whole_number("batch(size)", size, at_least=1)
        cut = even_cut(size, per_worker=per_worker, drop_last=drop_last)
        if isinstance(self._source, Stream):
            description = self._source.describe()
            return Batches(
                StreamFeed(self._source, cut=cut, collate=Collate(), seed=0, description=description)
            )
        reader, order = self._random_access("batch")
        return Batches(IndexedFeed(reader, order, cut))

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
        from shoal.data.map_reduce.calling import map_reduce  # which is built on datasets

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

    def __len__(self) -> int:
        if self._access is None:
            raise TypeError("a stream has no length before it has been read")
        return self._access[1].num_samples

    def __getitem__(self, position: int) -> Any:
        """The sample at a position of the first epoch; negative positions count from the end."""
        reader, order = self._random_access("indexing")
        at = operator.index(position)
        at = at + len(self) if at < 0 else at
        if not 0 <= at < len(self):
            raise IndexError(f"position {position} of a dataset of {len(self)} samples")
        [index] = order.indices(range(at, at + 1), 0)
        return reader.sample(int(index), epoch=0, position=at)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._source, Stream):
            return iter(self._source)
        return (self[position] for position in range(len(self)))

    def __repr__(self) -> str:
        what = "a stream" if self._access is None else f"{len(self)} samples"
        stages = [*self._source.describe(), *(self._access[1].describe() if self._access else ())]
        names = [stage.get("source") or stage.get("stage") for stage in stages]
        return f"Dataset({what}: {' > '.join(str(name) for name in names)})"

    def _random_access(self, what: str) -> tuple[Reader, Order]:
        """Reader and order, or a refusal for a stream."""
        if self._access is None:
            raise ConfigError(
                f"{what} needs random access, and an IterableDataset is a stream: it can only be read from its beginning. "
                "Nothing was read; shuffle inside the dataset, or give a map-style dataset with __getitem__ and __len__."
            )
        return self._access
