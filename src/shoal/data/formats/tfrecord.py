"""TFRecord files of `tf.train.Example`s as a table, without TensorFlow.

Files are scanned when they are opened; after that any stretch of records can
be read by itself. Compressed ones cannot, and are a stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.arguments import OnError, skipping
from shoal.data.cache.disk_cache import identity_of, remembered
from shoal.data.files import FileInfo, Files, SharedFiles, Where
from shoal.data.formats.arrow import BadRows
from shoal.data.formats.example_parser import ExampleParser
from shoal.data.formats.example_schema import Wanted, wanted_features
from shoal.data.formats.record_files import (
    RecordFile,
    Stretch,
    checksum_reason,
    is_gzip,
    prepare,
    read_stretch,
    scan_file,
)
from shoal.data.formats.source import TableSource
from shoal.data.formats.table import Block, Column, Rows, empty_rows
from shoal.data.sources.source import Source
from shoal.data.stream import Stream
from shoal.errors import FileDamaged

ENDINGS = (".tfrecord", ".tfrecords", ".tfrec", ".tfrecord.gz", ".tfrecords.gz")


def open_tfrecord(
    where: Where,
    schema: Mapping[str, Any],
    *,
    label: str | Sequence[str] | None = None,
    cache: Any = "auto",
    on_error: OnError = "raise",
    max_skips: int | None = None,
    files: Files | None = None,
) -> Source | Stream:
    """The source of `Dataset.from_tfrecord`: a table, or a stream where a file is compressed."""
    features = wanted_features(schema)
    on_error, max_skips = skipping("", on_error, max_skips)
    files = files or SharedFiles()
    found = files.expand(where, ENDINGS)
    if any(is_gzip(files, info) for info in found):
        from shoal.data.formats.tfrecord_stream import open_stream

        return open_stream(files, found, features, label=label, on_error=on_error, max_skips=max_skips)
    table = TFRecordTable(files, found, features, keeps_damaged_tail=on_error == "skip")
    return TableSource(table, label=label, cache=cache, on_error=on_error, max_skips=max_skips)


class TFRecordTable:
    """Records in stretches of a few MiB.

    With `keeps_damaged_tail`, the part of a file behind which no record can be
    found is one bad row of a block of its own; otherwise it is refused at once.
    """

    def __init__(
        self,
        files: Files,
        found: Sequence[FileInfo],
        features: tuple[Wanted, ...],
        *,
        keeps_damaged_tail: bool = False,
    ) -> None:
        self._files, self._features = files, features
        self._parser = ExampleParser(features)
        prepare()
        self.columns: tuple[Column, ...] = tuple(feature.column for feature in features)
        scans = remembered(
            identity_of(found, format="tfrecord scan"), lambda: [scan_file(files, info) for info in found]
        )
        self._scanned = [RecordFile.of(info, scan) for info, scan in zip(found, scans, strict=True)]
        described = [feature.describe() for feature in features]
        self.identity = identity_of(found, format="tfrecord", features=described, tail=keeps_damaged_tail)
        self._places: list[tuple[RecordFile, Stretch | None]] = []
        blocks = []
        row_bytes = sum(_row_bytes(column) for column in self.columns)
        for file in self._scanned:
            for stretch in file.stretches:
                self._places.append((file, stretch))
                num_bytes = row_bytes * stretch.num_records + stretch.end - stretch.begin
                blocks.append(Block(stretch.num_records, num_bytes, file.info.url, stretch.first_record))
            if file.tail is not None:
                if not keeps_damaged_tail:
                    raise FileDamaged(url=file.info.url, problem=file.tail.problem)
                self._places.append((file, None))
                blocks.append(Block(1, row_bytes, file.info.url, file.tail.record))
        self.blocks: tuple[Block, ...] = tuple(blocks)

    def read(self, block: int) -> Rows:
        """Check and parse one stretch."""
        file, stretch = self._places[block]
        if stretch is None:
            return self._damaged_tail(file)
        records = read_stretch(self._files, file, stretch)
        bad = BadRows(partial(_address, file.info.url, stretch, records.begins))
        for row in np.flatnonzero(records.wrong).tolist():
            bad.add(row, None, checksum_reason(records, row))
        return Rows(stretch.num_records, self._parser.parse(*records, bad), bad)

    def is_here(self, block: int) -> bool:
        """Whether this host has the file of a block itself."""
        return self._files.is_here(self._places[block][0].info.url)

    def stage(self) -> None:
        """Have all files at this host."""
        self._files.stage()

    def describe(self) -> dict[str, Any]:
        """Format and number of files, and what is looked for in their records."""
        return {
            "format": "tfrecord",
            "num_files": len(self._scanned),
            "features": [feature.describe() for feature in self._features],
        }

    def _damaged_tail(self, file: RecordFile) -> Rows:
        tail = file.tail
        assert tail is not None
        bad = BadRows(lambda row: {"where": file.info.url, "row": tail.record + 1, "offset": tail.begin})
        bad.add(0, None, tail.problem)
        return empty_rows(self.columns, 1, bad)


def _address(url: str, stretch: Stretch, begins: NDArray[np.int64], row: int) -> dict[str, Any]:
    """Where a record is: its number, and the byte at which its frame begins."""
    offset = stretch.begin + int(begins[row]) - 12
    return {"where": url, "row": stretch.first_record + row + 1, "offset": offset}


def _row_bytes(column: Column) -> int:
    """Of a fixed number of values; those of others are counted by what they take in the file."""
    return 8 if column.is_ragged else column.dtype.itemsize * int(np.prod(column.shape))
