"""Where a dataset's samples may come from: one constructor per kind of source.

Only the front door: each of them opens a source and hands it to `Dataset`,
which knows none of them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from shoal.data.arguments import function, whole_number
from shoal.data.batches import Batches
from shoal.data.files import Where
from shoal.data.sources.leaf import ArraySource, FunctionSource, torch_source
from shoal.data.sources.source import Source
from shoal.data.stream import Stream
from shoal.data.tree import Tree
from shoal.data.workers.loader import feed_of
from shoal.errors import ConfigError, DataError
from shoal.runtime.user_frames import calling_line

if TYPE_CHECKING:
    from shoal.data.remote.copies import CopiedFiles


Made = TypeVar("Made")
Says = ParamSpec("Says")


def _opens(make: Callable[Says, Made]) -> Callable[Says, Made]:
    """A constructor whose refusals name the user's line that called it: under a launcher no traceback does."""

    @functools.wraps(make)
    def opened(*args: Says.args, **options: Says.kwargs) -> Made:
        try:
            return make(*args, **options)
        except DataError as error:
            error.opened_by(calling_line())
            raise

    return opened


class Constructors:
    """The `from_...` methods of `shoal.Dataset`.

    Tables are decoded once and kept. `cache` says where: "auto", in RAM what
    fits and on disk what does not; "ram"; "disk"; a
    `shoal.memory.CacheConfig(ram_bytes=..., directory=...)`; or None, which
    keeps only the blocks read last, for a table that is read once and in
    order.

    A row that cannot be read is an error that names it, when it is asked for;
    `on_error="skip"` leaves such rows out, at most `max_skips` different ones
    over all workers and epochs of a launch, and writes each down.
    """

    def __init__(self, source: Source | Stream) -> None:
        raise NotImplementedError

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
    @_opens
    def from_csv(
        cls,
        path: Where | CopiedFiles,
        *,
        label: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        schema: Mapping[str, Any] | None = None,
        fill: Mapping[str, Any] | None = None,
        delimiter: str | None = None,
        quote: str | None = '"',
        header: bool | None = None,
        names: Sequence[str] | None = None,
        cache: Any = "auto",
        location: str = "shared",
        spread: str = "on-demand",
        on_error: Literal["raise", "skip"] = "raise",
        max_skips: int | None = None,
    ) -> Self:
        """Rows of CSV files: a file, a list, a directory, a pattern, or any URL that fsspec opens.

        A sample is a dict of columns, or (dict, label). Types are those of the
        first rows (floats are float32, whole numbers int64, times int64
        nanoseconds) or what `schema` says, for some columns or all. Names come
        from the header, or from `names` where there is none. The delimiter is
        a tab for .tsv and else a comma. Empty fields, NA and null are missing
        values in columns of numbers: an error that names row, line and column,
        or what `fill` says. All files are read through once to find where
        rows end; compressed ones (.gz) cannot be read from the middle and
        become a stream: no length, no split, a shuffle within a buffer.

            Dataset.from_csv("clicks-*.csv", label="clicked")
            Dataset.from_csv("clicks.tsv", names=["y", "price", "user"], schema={"user": "str"}, fill={"price": 0})
        """
        from shoal.data.formats.csv import open_csv
        from shoal.data.remote.located_files import files_at

        files, there = files_at(path, location, spread)
        source = open_csv(
            there,
            label=label,
            columns=columns,
            schema=schema,
            fill=fill,
            delimiter=delimiter,
            quote=quote,
            header=header,
            names=names,
            cache=cache,
            on_error=on_error,
            max_skips=max_skips,
            files=files,
        )
        return cls(source)

    @classmethod
    @_opens
    def from_jsonl(
        cls,
        path: Where | CopiedFiles,
        *,
        label: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        schema: Mapping[str, Any] | None = None,
        fill: Mapping[str, Any] | None = None,
        cache: Any = "auto",
        location: str = "shared",
        spread: str = "on-demand",
        on_error: Literal["raise", "skip"] = "raise",
        max_skips: int | None = None,
    ) -> Self:
        """Lines of JSON files, each an object: a file, a list, a directory, a pattern, or any URL that fsspec opens.

        A sample is a dict of the object's keys, or (dict, label). Types are
        those of the first rows (floats are float32, whole numbers int64, times
        int64 nanoseconds) or what `schema` says, for some keys or all; lists
        may be `"list[int64]"`, padded to the longest of a batch, or
        `"float32[8]"`. A key that is missing or null is an error that names
        row, line and key, or what `fill` says; keys that the first rows do not
        have are left out. All files are read through once to find where lines
        end; compressed ones (.gz) become a stream, without length or split.

            Dataset.from_jsonl("reviews-*.jsonl", columns=["text", "stars"], label="stars")
            Dataset.from_jsonl("users.jsonl", schema={"ids": "list[int64]"}, fill={"ids": []})
        """
        from shoal.data.formats.jsonl import open_jsonl
        from shoal.data.remote.located_files import files_at

        files, there = files_at(path, location, spread)
        source = open_jsonl(
            there,
            label=label,
            columns=columns,
            schema=schema,
            fill=fill,
            cache=cache,
            on_error=on_error,
            max_skips=max_skips,
            files=files,
        )
        return cls(source)

    @classmethod
    @_opens
    def from_parquet(
        cls,
        path: Where | CopiedFiles,
        *,
        label: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        where: Any = None,
        fill: Mapping[str, Any] | None = None,
        cache: Any = "auto",
        location: str = "shared",
        spread: str = "on-demand",
        on_error: Literal["raise", "skip"] = "raise",
        max_skips: int | None = None,
    ) -> Self:
        """Rows of Parquet files: a file, a list, a directory, a pattern, or any URL that fsspec opens.

        A sample is a dict of columns, or (dict, label). `columns` are the only
        ones that are read. `where` keeps the rows that fulfil all of its
        conditions, or with a list of lists those of any list; row groups whose
        statistics rule them out are not read. A missing value is an error that
        names its row, or what `fill` says. Timestamps and dates are int64
        nanoseconds since 1970, decimals float64, lists of several lengths are
        padded to the longest of a batch. With `on_error="skip"` bad rows are
        left out, at most `max_skips` of them.

            Dataset.from_parquet("clicks/*.parquet", label="clicked")
            Dataset.from_parquet("s3://bucket/clicks/", columns=["price", "user"], where=[("price", ">", 3)])
        """
        from shoal.data.formats.parquet import open_parquet
        from shoal.data.remote.located_files import files_at

        files, there = files_at(path, location, spread)
        source = open_parquet(
            there,
            label=label,
            columns=columns,
            where=where,
            fill=fill,
            cache=cache,
            on_error=on_error,
            max_skips=max_skips,
            files=files,
        )
        return cls(source)

    @classmethod
    @_opens
    def from_huggingface(
        cls,
        dataset: Any,
        *,
        split: str | None = None,
        label: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        fill: Mapping[str, Any] | None = None,
        cache: Any = "auto",
        on_error: Literal["raise", "skip"] = "raise",
        max_skips: int | None = None,
    ) -> Self:
        """A Dataset of Hugging Face's `datasets`, or one split of a DatasetDict.

        Its Arrow columns are read as those of a Parquet file: a sample is a
        dict, or (dict, label). Images and nested columns, and data sets with a
        transform, are asked row by row, which is slower. An IterableDataset is
        read as a stream: every worker reads all of it and keeps its part,
        there is no split or length, and a resumed epoch is read again up to
        its position. Shuffle here, not there: then nothing is stored.

            Dataset.from_huggingface(datasets.load_dataset("imdb"), split="train", label="label").shuffle(seed=0)
        """
        from shoal.data.formats.huggingface import open_huggingface

        source = open_huggingface(
            dataset,
            split=split,
            label=label,
            columns=columns,
            fill=fill,
            cache=cache,
            on_error=on_error,
            max_skips=max_skips,
        )
        return cls(source)

    @classmethod
    @_opens
    def from_tfrecord(
        cls,
        path: Where | CopiedFiles,
        schema: Mapping[str, Any],
        *,
        label: str | Sequence[str] | None = None,
        cache: Any = "auto",
        location: str = "shared",
        spread: str = "on-demand",
        on_error: Literal["raise", "skip"] = "raise",
        max_skips: int | None = None,
    ) -> Self:
        """Rows of TFRecord files that hold `tf.train.Example`s: a file, a list, a directory, a pattern or a URL.

        `schema` says which features to read, as a `shoal.data.Feature` or as
        a type alone, which is one value. Files are scanned once when they are
        opened; every checksum is looked at. A record that lacks a feature, or
        holds another type or number of values, is an error that names it, or
        with `on_error="skip"` left out. Compressed files (GZIP) can only be
        read from their beginning: they are a stream, which every worker reads
        whole and a resumed epoch reads again up to its position.

            schema = {"dense": Feature("float32", (13,)), "ids": Feature("int64", None), "clicked": "int64"}
            Dataset.from_tfrecord("clicks/*.tfrecord", schema, label="clicked")
        """
        from shoal.data.formats.tfrecord import open_tfrecord
        from shoal.data.remote.located_files import files_at

        files, there = files_at(path, location, spread)
        source = open_tfrecord(
            there, schema, label=label, cache=cache, on_error=on_error, max_skips=max_skips, files=files
        )
        return cls(source)

    @classmethod
    @_opens
    def from_sql(
        cls,
        query: str,
        connection: str | os.PathLike[str],
        *,
        key: str | None = None,
        partitions: int | None = None,
        label: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        schema: Mapping[str, Any] | None = None,
        fill: Mapping[str, Any] | None = None,
        cache: Any = "auto",
        on_error: Literal["raise", "skip"] = "raise",
        max_skips: int | None = None,
        timeout_s: float = 30.0,
    ) -> Self:
        """Rows of a table, or of a query, in PostgreSQL ("postgresql://user:password@host/name") or SQLite (a path).

        Rows are read in ranges of `key`, a column with an order (the primary
        key, if nothing is said), about as many rows in each; `partitions` says
        how many ranges. So each worker asks for the ranges its samples lie in.
        Without a key the whole is one range. `schema` gives columns other
        types ({"price": "float32"}), `fill` says what stands for NULL.

        Everything is read in read-only transactions, each range in its own. A
        range that has another number of rows than when the table was opened
        is refused; values that change while their number stays are not
        noticed, so let nobody write while you train, or read from a copy. A
        database that closes the connection is asked again for `timeout_s`.

            Dataset.from_sql("clicks", "postgresql://me@db.example/ads", label="clicked")
            Dataset.from_sql("SELECT * FROM visits WHERE day < '2024-05-01'", "visits.db", key="id", partitions=64)
        """
        from shoal.data.formats.sql import open_sql

        source = open_sql(
            query,
            connection,
            key=key,
            partitions=partitions,
            label=label,
            columns=columns,
            schema=schema,
            fill=fill,
            cache=cache,
            on_error=on_error,
            max_skips=max_skips,
            timeout_s=timeout_s,
        )
        return cls(source)

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
        from shoal.data.stream import GeneratorStream

        if num_samples is not None:
            num_samples = whole_number("from_generator(num_samples=)", num_samples, at_least=1)
        seed = whole_number("from_generator(seed=)", seed)
        return cls(Stream(GeneratorStream(fn, num_samples=num_samples, seed=seed)))
