"""Samples and batches of a table: by index, or as a stream where rows can only be read from their beginning.

A sample is a dict of columns, or (dict, label). The rows come from a storage;
here they become tensors, strings and padded lists, and a bad row becomes the
error of the request for it.
"""

from __future__ import annotations

import itertools
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.config import job as jobs
from shoal.data.arguments import OnError, by_name, skipping
from shoal.data.arguments import names as list_of_names
from shoal.data.cache.table_cache import open_storage
from shoal.data.files import FileInfo
from shoal.data.formats.table import (
    Column,
    DecodedRows,
    GrowingTable,
    Ragged,
    StagedTable,
    Table,
    unpack_list,
)
from shoal.data.order import Indices
from shoal.data.skipping import SkipLog, Skipped, SkipSamples
from shoal.data.sources.source import Source, StreamPlan
from shoal.data.stream import Open, OwnStream, Stream, StreamStage
from shoal.data.tree import Tree, as_objects
from shoal.errors import ConfigError, DataError, NoRecord, NoSuchColumn
from shoal.runtime import events
from shoal.runtime.user_frames import UserLine, calling_line


def chosen(
    there: Sequence[str], columns: Sequence[str] | None, where: str, *, needed: Sequence[str] = ()
) -> list[str]:
    """The names to read: `columns=` and what else is needed, in the order asked for, or all there are."""
    if isinstance(columns, (list, tuple)) and not columns:
        raise ConfigError(f"columns=[] leaves nothing to read; {where} has {', '.join(there)}")
    names = list(there) if columns is None else list_of_names("columns=", columns)
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        asked_by = "columns= names" if columns is not None else f"{where} names"
        raise ConfigError(
            f"{asked_by} {', '.join(doubled)} twice, and a sample is a dict. Give each column its own name."
        )
    names += [name for name in needed if name not in names]
    missing = [name for name in names if name not in there]
    if missing:
        by_columns = columns is not None and any(name in columns for name in missing)
        asked_by = "columns=" if by_columns else "label="
        raise NoSuchColumn(asked=missing, there=there, where=where, asked_by=asked_by)
    return names


def label_names(label: str | Sequence[str] | None) -> list[str]:
    if label is None or (isinstance(label, str) and label):
        return [] if label is None else [label]
    if not isinstance(label, Sequence) or isinstance(label, str):
        raise ConfigError(f"label= takes the name of a column, or a list of names, got {label!r}")
    return list_of_names("label=", label)


def split_label(columns: dict[str, Any], label: str | Sequence[str] | None) -> Any:
    """The columns as they are, or (inputs, label)."""
    if label is None:
        return columns
    target = columns.pop(label) if isinstance(label, str) else {name: columns.pop(name) for name in label}
    return columns, target


def check_names(asked_by: str, asked: Mapping[str, Any] | None, there: Sequence[str], where: str) -> None:
    """Refuse keys of `schema=` or `fill=` that are no columns."""
    missing = [name for name in by_name(asked_by, asked) if name not in there]
    if missing:
        raise NoSuchColumn(asked=missing, there=there, where=where, asked_by=asked_by)


class TableSource(Source):
    """Rows of a table.

    A batch holds copies. Lists of several lengths are padded behind to the
    longest of the batch: whole numbers with -1, floats with 0, booleans with
    False. Strings are a numpy array of `str`, bytes one of objects; lists of
    strings are such an array each, and in a batch an array of those.
    """

    runs_user_code = False

    def __init__(
        self,
        table: Table,
        *,
        label: str | Sequence[str] | None = None,
        cache: Any = "auto",
        on_error: OnError = "raise",
        max_skips: int | None = None,
    ) -> None:
        self.table = table
        self.on_error, self.max_skips = skipping("", on_error, max_skips)
        if isinstance(table, GrowingTable):
            self.num_samples = table.num_rows
        else:
            self.num_samples = sum(block.num_rows for block in table.blocks)
        self._columns = {column.name: column for column in table.columns}
        self._ragged = [column for column in table.columns if column.is_ragged]
        self._label = label
        self._labels = label_names(label)
        missing = [name for name in self._labels if name not in self._columns]
        if missing:
            where = table.blocks[0].where if table.blocks else "the table"
            raise NoSuchColumn(asked=missing, there=list(self._columns), where=where, asked_by="label=")
        if label is not None and len(self._labels) == len(self._columns):
            raise ConfigError(
                f"label={label!r} leaves no column for the inputs: the table has {', '.join(self._columns)}. Read more "
                "columns, or read without label=."
            )
        self._cache = cache
        self._opened_at = calling_line()
        self._storage = open_storage(table, cache=cache)

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """The rows: numbers as tensors, lists as tensors of their own length, strings as `str`."""
        columns = self._gather(indices)
        rows = {name: column_samples(self._columns[name], column) for name, column in columns.items()}
        return [
            split_label({name: values[row] for name, values in rows.items()}, self._label)
            for row in range(len(indices))
        ]

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        columns: dict[str, Any] = self._gather(indices)
        for column in self._ragged:
            columns[column.name] = _batch(column, columns[column.name])
        return split_label(columns, self._label)

    @property
    def looks_ahead(self) -> bool:  # type: ignore[override]  # a property may stand for a plain attribute
        return self._storage.looks_ahead

    def will_need(self, indices: Indices, epoch: int = 0) -> None:
        if self.looks_ahead:
            self._storage.will_need(np.asarray(indices, dtype=np.int64))

    def here(self) -> NDArray[np.bool_] | None:
        """Whether this host has each sample itself, by index; None where all hosts have all."""
        if not isinstance(self.table, StagedTable):
            return None
        here = [self.table.is_here(number) for number in range(len(self.table.blocks))]
        if all(here):
            return None
        return np.repeat(here, [block.num_rows for block in self.table.blocks])

    def stage(self) -> None:
        if isinstance(self.table, StagedTable):
            try:
                self.table.stage()
            except DataError as error:
                error.opened_by(self._opened_at)
                raise

    def plans(self) -> list[StreamPlan]:
        plan = getattr(self.table, "plan", None)
        return [] if plan is None else [plan]

    def describe(self) -> list[dict[str, Any]]:
        stage = {"source": "table", **self.table.describe(), "num_samples": self.num_samples}
        stage["columns"] = [column.describe() for column in self.table.columns]
        if self._label is not None:
            stage["label"] = self._label if isinstance(self._label, str) else self._labels
        return [stage]

    def _gather(self, indices: Indices) -> dict[str, torch.Tensor | Ragged]:
        rows = indices if isinstance(indices, range) else np.asarray(indices, dtype=np.int64)
        try:
            gathered = self._storage.gather(rows)
        except DataError as error:
            error.opened_by(self._opened_at)
            raise
        if gathered.bad:
            bad = {
                row: sample.at_index(row).opened_by(self._opened_at)
                for row, sample in sorted(gathered.bad.items())
            }
            wrong = [sample for sample in bad.values() if not isinstance(sample, NoRecord)]
            if self.on_error == "skip" or not wrong:
                raise SkipSamples(bad, max_skips=self.max_skips)
            raise wrong[0]
        return gathered.columns


def padding_of(dtype: np.dtype[Any]) -> Any:
    """Padding behind the end of a shorter list."""
    return -1 if dtype.kind == "i" else 0


def _batch(column: Column, values: Ragged) -> Any:
    if column.kind != "number":
        return _objects(column, values)
    lengths = np.diff(values.offsets)
    longest = int(lengths.max(initial=0))
    padded = np.full((values.num_rows, longest), padding_of(values.values.dtype), dtype=values.values.dtype)
    padded[np.arange(longest) < lengths[:, None]] = values.values[values.offsets[0] : values.offsets[-1]]
    return torch.from_numpy(padded)


def column_samples(column: Column, values: torch.Tensor | Ragged) -> Sequence[Any]:
    if isinstance(values, torch.Tensor):
        return values.unbind(0)
    if column.kind == "text" and not column.is_list:
        # Not through an array, whose strings end before zeros.
        return [piece.decode() for piece in _pieces(values)]
    if column.kind != "number":
        return list(_objects(column, values))
    return torch.split_with_sizes(torch.from_numpy(values.values), np.diff(values.offsets).tolist())


def _objects(column: Column, values: Ragged) -> Any:
    pieces = _pieces(values)
    if column.is_list:
        return as_objects([unpack_list(piece, is_text=column.kind == "text") for piece in pieces])
    if column.kind == "text":
        return np.array([piece.decode() for piece in pieces], dtype=np.str_)
    return as_objects(pieces)


def _pieces(values: Ragged) -> list[bytes]:
    raw, offsets = values.values.tobytes(), values.offsets.tolist()
    return [raw[begin:end] for begin, end in itertools.pairwise(offsets)]


class RowStream(OwnStream):
    """Stretches of decoded rows, one after the other."""

    columns: tuple[Column, ...]

    @abstractmethod
    def __iter__(self) -> Iterator[DecodedRows]:
        """From the beginning."""


def open_row_stream(
    rows: RowStream,
    *,
    format: str,
    files: Sequence[FileInfo],
    is_compressed: Callable[[FileInfo], bool],
    label: str | Sequence[str] | None,
    on_error: str,
    max_skips: int | None,
) -> Stream:
    """The stream of these rows, with a message to the user: it can do less than files that are not compressed."""
    names = [column.name for column in rows.columns]
    missing = [name for name in label_names(label) if name not in names]
    if missing:
        raise NoSuchColumn(asked=missing, there=names, where=files[0].url, asked_by="label=")
    packed = [info for info in files if is_compressed(info)]
    megabytes = sum(info.num_bytes for info in packed) / 1e6
    reason = (
        f"{len(packed)} of {len(files)} file{'' if len(files) == 1 else 's'} "
        f"{'is' if len(packed) == 1 else 'are'} compressed ({megabytes:,.1f} MB)"
    )
    consequence = "every worker reads all of it, and a resumed epoch is read again up to its position"
    events.emit(
        "read as a stream",
        format=format,
        files=[info.url for info in packed[:10]],
        reason=reason,
        consequence=consequence,
    )
    if jobs.current().rank == 0:
        print(
            f"shoal: {reason}, {packed[0].url} the first of them, so this is a stream: {consequence}; unpacked, or as "
            "Parquet, it can be shuffled, split and resumed anywhere",
            file=sys.stderr,
        )
    samples = _Samples(rows.columns, label, on_error, max_skips, calling_line())
    described = {"stage": "samples", "label": label_names(label)}
    return Stream(rows, (StreamStage(samples.run, described),))


@dataclass(frozen=True, slots=True)
class _Samples:
    """From stretches to samples; a bad one is refused, or left out, when it is its turn."""

    columns: tuple[Column, ...]
    label: str | Sequence[str] | None
    on_error: str
    max_skips: int | None
    opened_at: UserLine | None

    def run(self, before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        try:
            yield from self._samples(before, epoch, skips)
        except DataError as error:
            error.opened_by(self.opened_at)
            raise

    def _samples(self, before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        number = 0
        for rows in before(epoch):
            columns = {column.name: self._values(column, rows) for column in self.columns}
            for row in range(rows.num_rows):
                if row in rows.bad:
                    bad = rows.bad[row].at_index(number + row)
                    if self.on_error == "raise":
                        raise bad
                    skips.record([Skipped(epoch, number + row, bad, "source", self.max_skips)])
                    continue
                yield split_label({name: values[row] for name, values in columns.items()}, self.label)
            number += rows.num_rows

    def _values(self, column: Column, rows: DecodedRows) -> Sequence[Any]:
        values = rows.columns[column.name]
        if isinstance(values, np.ndarray):
            # A copy: a sample may be written, and what was read may not.
            return column_samples(column, torch.from_numpy(values.copy()))
        return column_samples(column, values)
