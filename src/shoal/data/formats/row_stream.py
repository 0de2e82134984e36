"""Rows that can only be read from their beginning, as a stream of samples like those of a table.

For files that are compressed as a whole: nobody can find a row in them
without unpacking all before it.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.config import job as jobs
from shoal.data.files import FileInfo
from shoal.data.formats.schema import label_names
from shoal.data.formats.source import column_samples
from shoal.data.formats.table import Column, Rows
from shoal.data.skipping import SkipLog, Skipped
from shoal.data.stream import OwnStream, Stream
from shoal.data.stream_stages import Open
from shoal.errors import DataError, NoSuchColumn
from shoal.runtime import events as happenings
from shoal.runtime.user_frames import UserLine, calling_line


class RowStream(OwnStream):
    """Stretches of decoded rows, one after the other."""

    columns: tuple[Column, ...]

    @abstractmethod
    def __iter__(self) -> Iterator[Rows]:
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
    """The stream of these rows, and a word about it: there is less that it can do than files that are not compressed."""
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
    happenings.tell(
        "read as a stream",
        format=format,
        files=[info.url for info in packed[:10]],
        reason=reason,
        consequence=consequence,
    )
    if jobs.rank() == 0:
        print(
            f"shoal: {reason}, {packed[0].url} the first of them, so this is a stream: {consequence}; unpacked, or as "
            "Parquet, it can be shuffled, split and resumed anywhere",
            file=sys.stderr,
        )
    return Stream(rows, (_Samples(rows.columns, label, on_error, max_skips, calling_line()),))


@dataclass(frozen=True, slots=True)
class _Samples:
    """From stretches to samples; a bad one is refused, or left out, when it is its turn."""

    columns: tuple[Column, ...]
    label: str | Sequence[str] | None
    on_error: str
    max_skips: int | None
    opened_at: UserLine | None

    def run(self, before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        """The samples of an epoch."""
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
                yield self._arranged({name: values[row] for name, values in columns.items()})
            number += rows.num_rows

    def describe(self) -> dict[str, Any]:
        """The label."""
        return {"stage": "samples", "label": label_names(self.label)}

    def _values(self, column: Column, rows: Rows) -> Sequence[Any]:
        values = rows.columns[column.name]
        if isinstance(values, np.ndarray):
            # A copy: a sample may be written, and what was read may not.
            return column_samples(column, torch.from_numpy(values.copy()))
        return column_samples(column, values)

    def _arranged(self, sample: dict[str, Any]) -> Any:
        labels = {name: sample.pop(name) for name in label_names(self.label)}
        if self.label is None:
            return sample
        return sample, labels[self.label] if isinstance(self.label, str) else labels
