"""Hugging Face `datasets`: their Arrow tables, read like any other table.

Datasets with columns that no tensor holds (images, nested records), or with a transform, are read
row by row through the library. An IterableDataset is a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from shoal.data.arguments import OnError, skipping
from shoal.data.files import identity_of
from shoal.data.formats.arrow import Fill, columns_of, decoded
from shoal.data.formats.table import Column, DecodedRows, TableBlock
from shoal.data.formats.table_source import TableSource, check_names, chosen, label_names, split_label
from shoal.data.order import Indices
from shoal.data.sources.source import Source
from shoal.data.stream import OwnStream, Stream
from shoal.errors import ConfigError, DataError, NoSuchColumn

_BLOCK_ROWS = 1 << 15


def open_huggingface(
    dataset: Any,
    *,
    split: str | None = None,
    label: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    fill: Mapping[str, Any] | None = None,
    cache: Any = "auto",
    on_error: OnError = "raise",
    max_skips: int | None = None,
) -> Source | Stream:
    """A Dataset of Hugging Face's `datasets`, or one split of a DatasetDict.

    Its Arrow columns are read as those of a Parquet file: a sample is a
    dict, or (dict, label). Images and nested columns, and data sets with a
    transform, are asked row by row, which is slower. An IterableDataset is
    read as a stream: every worker reads all of it and keeps its part,
    there is no split or length, and a resumed epoch is read again up to
    its position. Shuffle here, not there: then nothing is stored.

        Dataset.from_huggingface(datasets.load_dataset("imdb"), split="train", label="label").shuffle(seed=0)
    """
    import datasets

    on_error, max_skips = skipping("", on_error, max_skips)
    dataset = _one_split(dataset, split)
    if isinstance(dataset, datasets.IterableDataset):
        return _stream(dataset, label=label, columns=columns, fill=fill)
    if not isinstance(dataset, datasets.Dataset):
        raise ConfigError(
            f"from_huggingface takes a Dataset, DatasetDict or IterableDataset of the package datasets, but got a "
            f"{type(dataset).__name__}. To load one by name, use datasets.load_dataset(...)."
        )
    where = "the data set"
    names = chosen(dataset.column_names, columns, where, needed=label_names(label))
    check_names("fill=", fill, names, where)
    if dataset.format["type"] != "custom":
        try:
            table = HuggingfaceTable(dataset, names, fill)
        except DataError as error:
            if fill:
                raise
            why = str(error)
        else:
            return TableSource(table, label=label, cache=cache, on_error=on_error, max_skips=max_skips)
    else:
        why = "it has a transform"
    return RowsByDatasets(dataset.select_columns(names), label, why)


class HuggingfaceTable:
    """The Arrow table behind a Dataset, in blocks of rows, with its selection of indices."""

    def __init__(self, dataset: Any, names: Sequence[str], fill: Mapping[str, Any] | None) -> None:
        self._dataset = dataset.select_columns(list(names)).with_format("arrow")
        self.columns: tuple[Column, ...] = columns_of(dataset.features.arrow_schema, "the data set", names)
        self._fill = Fill(fill, self.columns)
        self._length = len(dataset)
        # The fingerprint covers the files and every operation since; without one, nothing is reused.
        fingerprint = getattr(dataset, "_fingerprint", None) or f"{id(dataset):x}"
        self.identity = identity_of(
            (), format="huggingface", fingerprint=fingerprint, columns=names, fill=fill
        )
        row_bytes = max(dataset.data.nbytes // max(len(dataset.data), 1), 1)
        begins = range(0, self._length, _BLOCK_ROWS)
        ends = [min(begin + _BLOCK_ROWS, self._length) for begin in begins]
        self.blocks = tuple(
            TableBlock(end - begin, (end - begin) * row_bytes, f"the data set, rows {begin} to {end}", begin)
            for begin, end in zip(begins, ends, strict=True)
        )

    def read(self, block: int) -> DecodedRows:
        first = self.blocks[block].first_row
        table: pa.Table = self._dataset[first : first + self.blocks[block].num_rows]
        return decoded(
            table, self.columns, self._fill, lambda row: {"where": "the data set", "row": first + row + 1}
        )

    def describe(self) -> dict[str, Any]:
        return {"format": "huggingface"}


class RowsByDatasets(Source):
    """A Dataset asked row by row: numbers as tensors, unless it has a format of its own."""

    runs_user_code = True

    def __init__(self, dataset: Any, label: str | Sequence[str] | None, why: str) -> None:
        self._dataset = dataset if dataset.format["type"] else dataset.with_format("torch")
        self._label, self._why = label, why
        self.num_samples = len(dataset)

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        wanted = indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
        return [split_label(dict(row), self._label) for row in self._dataset.__getitems__(wanted)]

    def describe(self) -> list[dict[str, Any]]:
        stage = {"source": "huggingface", "num_samples": self.num_samples, "by_row_because": self._why}
        return [{**stage, "columns": list(self._dataset.column_names)}]


class HuggingfaceStream(OwnStream):
    """An IterableDataset, with its columns chosen and its label apart."""

    def __init__(self, dataset: Any, label: str | Sequence[str] | None) -> None:
        self._dataset, self._label = dataset, label

    def set_epoch(self, epoch: int) -> None:
        self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        wanted = label_names(self._label)
        for row in self._dataset:
            missing = [name for name in wanted if name not in row]
            if missing:
                raise NoSuchColumn(asked=missing, there=list(row), where="the data set", asked_by="label=")
            yield split_label(dict(row), self._label)

    def describe(self) -> dict[str, Any]:
        described = {"source": "stream", "format": "huggingface", "label": label_names(self._label)}
        return {**described, "columns": self._dataset.column_names}


def _one_split(dataset: Any, split: str | None) -> Any:
    if not isinstance(dataset, dict):
        if split is not None:
            raise ConfigError(
                f"split={split!r} chooses from a DatasetDict, and this is one {type(dataset).__name__}"
            )
        return dataset
    if not dataset:
        raise ConfigError(
            "from_huggingface was given a DatasetDict without any split, so there is nothing to read"
        )
    if split is None and len(dataset) == 1:
        return next(iter(dataset.values()))
    if split not in dataset:
        asked = "none was chosen" if split is None else f"there is no {split!r}"
        raise ConfigError(
            f"the DatasetDict has the splits {', '.join(map(repr, dataset))}, and {asked}: say split={next(iter(dataset))!r}, "
            "for instance."
        )
    return dataset[split]


def _stream(
    dataset: Any,
    *,
    label: str | Sequence[str] | None,
    columns: Sequence[str] | None,
    fill: Mapping[str, Any] | None,
) -> Stream:
    if fill:
        raise ConfigError(
            "fill= is for data sets with random access; fill a stream's values with its own map(...)"
        )
    there = dataset.column_names  # None where only reading can tell
    if columns is not None or there is not None:
        labels = label_names(label)
        names = chosen(there or [*(columns or ()), *labels], columns, "the data set", needed=labels)
        dataset = dataset.select_columns(names) if columns is not None else dataset
    formatted = getattr(getattr(dataset, "_formatting", None), "format_type", None)
    return Stream(HuggingfaceStream(dataset if formatted else dataset.with_format("torch"), label))
