"""TFRecord files of which some are compressed, record after record."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, cast

import numpy as np

from shoal.data.files import FileInfo, Files
from shoal.data.formats import record_kernels as kernels
from shoal.data.formats.arrow import BadRows
from shoal.data.formats.example_parser import ExampleParser
from shoal.data.formats.example_schema import Wanted
from shoal.data.formats.record_files import checksum_reason, is_gzip, split_records
from shoal.data.formats.row_stream import RowStream, open_row_stream
from shoal.data.formats.table import Rows
from shoal.data.stream import Stream
from shoal.errors import FileDamaged

_CHUNK_BYTES = 1 << 20


def open_stream(
    files: Files,
    found: Sequence[FileInfo],
    features: tuple[Wanted, ...],
    *,
    label: str | Sequence[str] | None,
    on_error: str,
    max_skips: int | None,
) -> Stream:
    """The stream of these files."""
    return open_row_stream(
        RecordStream(files, tuple(found), features),
        format="tfrecord",
        files=found,
        is_compressed=lambda info: is_gzip(files, info),
        label=label,
        on_error=on_error,
        max_skips=max_skips,
    )


class RecordStream(RowStream):
    """Stretches of records of one file after the other, parsed."""

    def __init__(self, files: Files, found: tuple[FileInfo, ...], features: tuple[Wanted, ...]) -> None:
        self._files, self._found, self._features = files, found, features
        self._parser = ExampleParser(features)
        self.columns = tuple(feature.column for feature in features)

    def __iter__(self) -> Iterator[Rows]:
        for info in self._found:
            with self._files.open(info.url) as raw:
                if is_gzip(self._files, info):
                    with gzip.GzipFile(fileobj=raw, mode="rb") as unpacked:
                        yield from self._rows(info, cast(BinaryIO, unpacked))
                else:
                    yield from self._rows(info, raw)

    def describe(self) -> dict[str, Any]:
        """Format and number of files, and what is looked for in their records."""
        described = [feature.describe() for feature in self._features]
        return {
            "source": "stream",
            "format": "tfrecord",
            "num_files": len(self._found),
            "features": described,
        }

    def _rows(self, info: FileInfo, file: BinaryIO) -> Iterator[Rows]:
        """Stretches of whole records, as they come."""
        data, first_record, offset, num_wanted = b"", 0, 0, _CHUNK_BYTES
        while chunk := _next_chunk(info, file, num_wanted):
            data += chunk
            array = np.frombuffer(data, np.uint8)
            begins = np.empty(len(data) // kernels.FRAME + 1, np.int64)
            count, next_at, is_damaged = kernels.scan(array, 0, begins)
            num_wanted = max(next_at - len(data), _CHUNK_BYTES)
            if next_at > len(data):  # the last one is not all there yet
                count, next_at = count - 1, int(begins[count - 1])
            if count:
                yield self._parsed(info, data[:next_at], count, first_record, offset)
            data, first_record, offset = data[next_at:], first_record + count, offset + next_at
            if is_damaged:
                problem = (
                    f"the length of record {first_record + 1:,}, at byte {offset:,} of what is unpacked, does not match its "
                    "checksum, so neither that record nor any behind it can be found"
                )
                raise FileDamaged(url=info.url, problem=problem)
        if data:
            raise FileDamaged(
                url=info.url,
                problem=f"it is cut short: record {first_record + 1:,} begins at byte {offset:,} of what is unpacked, which "
                f"ends at byte {offset + len(data):,}",
            )

    def _parsed(self, info: FileInfo, data: bytes, count: int, first_record: int, offset: int) -> Rows:
        records, _ = split_records(data, count)

        def address(row: int) -> dict[str, Any]:
            begin = offset + int(records.begins[row]) - kernels.HEAD
            return {"where": info.url, "row": first_record + row + 1, "offset": begin}

        bad = BadRows(address)
        for row in np.flatnonzero(records.wrong).tolist():
            bad.add(row, None, checksum_reason(records, row))
        return Rows(count, self._parser.parse(*records, bad), bad)


def _next_chunk(info: FileInfo, file: BinaryIO, num_bytes: int) -> bytes:
    try:
        return file.read(num_bytes)
    except (EOFError, OSError, zlib.error) as error:
        raise FileDamaged(url=info.url, problem=f"it cannot be unpacked to its end ({error})") from None
