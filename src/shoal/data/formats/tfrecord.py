"""TFRecord files of `tf.train.Example`s as a table, without TensorFlow; compressed ones as a stream.

A file is a row of frames: length, its checksum, data, its checksum. One scan when a file is opened
finds the records and checks every length, without which the next record could not be found;
checksums of the data are checked when it is read. After the scan any range of records can be read
by itself.

Checksums are CRC-32C, rotated and offset by a constant ("masked"), little-endian. Records of some
hundred bytes are checked faster by the kernels here than by a library call each (measured: 123 ns
against 304 for 200 bytes, equal at about 800); long ones go to the library.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from shoal.data.arguments import OnError, skipping
from shoal.data.files import FileInfo, Files, Where, identity_of, remembered
from shoal.data.formats.example import Wanted, masked_crc, wanted_features
from shoal.data.formats.example_parser import ExampleParser
from shoal.data.formats.table import BadRows, Column, DecodedRows, TableBlock, empty_rows
from shoal.data.formats.table_source import RowStream, TableSource, open_row_stream
from shoal.data.remote.copies import CopiedFiles
from shoal.data.remote.located_files import files_at
from shoal.data.sources.source import Source
from shoal.data.stream import Stream
from shoal.errors import FileDamaged
from shoal.runtime.kernel_cache import INT, inlined, kernel, types, vector

HEAD = 12
"""Bytes before the data: length and its checksum."""

FRAME = 16
"""Bytes of a record that are not data."""

WHOLE, WRONG, UNCHECKED = 0, 1, 2
"""States of a record's data, as `frames` finds them."""

_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8
_MOST_BYTES = 1 << 62


def _tables() -> NDArray[np.uint32]:
    """Checksums of a byte that stands 0 to 7 bytes before the end."""
    tables = np.zeros((8, 256), np.uint32)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        tables[0, byte] = crc
    for step in range(1, 8):
        before = tables[step - 1]
        tables[step] = (before >> 8) ^ tables[0][before & 0xFF]
    return tables


_TABLES = _tables()


@inlined
def _u32(data: Any, at: int) -> Any:
    return (
        np.uint32(data[at])
        | (np.uint32(data[at + 1]) << np.uint32(8))
        | (np.uint32(data[at + 2]) << np.uint32(16))
        | (np.uint32(data[at + 3]) << np.uint32(24))
    )


@inlined
def _masked_crc(data: Any, begin: int, end: int) -> Any:
    """The masked checksum of data[begin:end], eight bytes at a time."""
    crc = np.uint32(0xFFFFFFFF)
    low = np.uint32(0xFF)
    at = begin
    while at + 8 <= end:
        crc ^= _u32(data, at)
        crc = (
            _TABLES[7, crc & low]
            ^ _TABLES[6, (crc >> np.uint32(8)) & low]
            ^ _TABLES[5, (crc >> np.uint32(16)) & low]
            ^ _TABLES[4, crc >> np.uint32(24)]
            ^ _TABLES[3, data[at + 4]]
            ^ _TABLES[2, data[at + 5]]
            ^ _TABLES[1, data[at + 6]]
            ^ _TABLES[0, data[at + 7]]
        )
        at += 8
    while at < end:
        crc = _TABLES[0, (crc ^ data[at]) & low] ^ (crc >> np.uint32(8))
        at += 1
    crc ^= np.uint32(0xFFFFFFFF)
    turned = (crc >> np.uint32(15)) | (crc << np.uint32(17))
    # Sums and shifts are of 64 bits in a kernel.
    return np.uint32((turned & np.uint32(0xFFFFFFFF)) + np.uint32(_MASK))


@inlined
def _length(data: Any, at: int) -> Any:
    """The length that a head says, or -1 where its checksum is another."""
    if _masked_crc(data, at, at + 8) != _u32(data, at + 8):
        return -1
    length = np.uint64(_u32(data, at)) | (np.uint64(_u32(data, at + 4)) << np.uint64(32))
    return np.int64(length) if length < np.uint64(_MOST_BYTES) else np.int64(-1)


@kernel((vector(types.uint8), INT, vector(types.int64, written=True)))
def scan(data: Any, at: int, offsets: Any) -> tuple[int, int, bool]:
    """Write where records begin whose heads lie in `data`, from the one at `at` on.

    Gives how many, where the next begins (perhaps behind the data), and
    whether the head there is damaged. Data is not looked at.
    """
    count = 0
    while at + HEAD <= len(data) and count < len(offsets):
        length = _length(data, at)
        if length < 0:
            return count, at, True
        offsets[count] = at
        count += 1
        at += length + FRAME
    return count, at, False


_WRITTEN = (*[vector(types.int64, written=True)] * 2, vector(types.uint8, written=True))


@kernel((vector(types.uint8), INT, *_WRITTEN))
def frames(data: Any, longest: int, begins: Any, ends: Any, state: Any) -> int:
    """Write where the data of each of len(begins) records begins and ends, and whether its checksum is right.

    Data of more than `longest` bytes is left UNCHECKED. Gives the number of
    whole frames: fewer than asked for where a head is damaged or the data ends.
    """
    at = 0
    for number in range(len(begins)):
        if at + HEAD > len(data):
            return number
        length = _length(data, at)
        if length < 0 or length > len(data) - at - FRAME:
            return number
        begin = at + HEAD
        end = begin + length
        begins[number], ends[number] = begin, end
        if length > longest:
            state[number] = UNCHECKED
        elif _masked_crc(data, begin, end) == _u32(data, end):
            state[number] = WHOLE
        else:
            state[number] = WRONG
        at = end + 4
    return len(begins)


_STRETCH_BYTES = 4 << 20
_SCAN_BYTES = 4 << 20
_HEAD_BYTES = 64 << 10  # read at a time where records are so long that most of the scan would be data
_LONG = 256 << 10
_LONGEST_HERE = 800  # above, a call of the library is faster than the loop

GZIP = b"\x1f\x8b"


class RecordSpan(NamedTuple):
    """Records that are read in one piece."""

    begin: int
    end: int
    first_record: int
    num_records: int


class Tail(NamedTuple):
    """Damaged end of a file: from here on, no record can be found."""

    begin: int
    record: int
    problem: str


class Scan(NamedTuple):
    """Result of one pass over a file. Fit for JSON."""

    stretches: list[RecordSpan]
    tail: Tail | None


class Records(NamedTuple):
    """The records of a stretch: record i is data[begins[i]:ends[i]]."""

    data: NDArray[np.uint8]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    wrong: NDArray[np.uint8]
    """1 where the data does not match its checksum."""


def is_gzip(files: Files, info: FileInfo) -> bool:
    """True for a compressed file, judged by its first bytes, whatever it is called."""
    head = files.read(info.url, 0, min(HEAD, info.num_bytes))
    if not head.startswith(GZIP):
        return False
    return len(head) < HEAD or masked_crc(head[:8]) != int.from_bytes(head[8:12], "little")


def scan_file(files: Files, info: FileInfo, *, stretch_bytes: int = _STRETCH_BYTES) -> Scan:
    """Find every record of a file by reading it once; where records are long, only their heads."""
    stretches: list[RecordSpan] = []
    begin = at = first_record = num_records = last_begin = 0
    is_damaged = False
    num_read = _SCAN_BYTES
    while at + HEAD <= info.num_bytes and not is_damaged:
        data = np.frombuffer(files.read(info.url, at, min(at + num_read, info.num_bytes)), np.uint8)
        offsets = np.empty(len(data) // FRAME + 1, np.int64)
        count, next_at, is_damaged = scan(data, 0, offsets)
        offsets = offsets[:count] + at
        # A stretch ends before the first record that begins too far behind its own beginning.
        while count and offsets[-1] >= begin + stretch_bytes:
            cut = int(np.searchsorted(offsets, begin + stretch_bytes))
            stop, record = int(offsets[cut]), num_records + cut
            stretches.append(RecordSpan(begin, stop, first_record, record - first_record))
            begin, first_record = stop, record
        last_begin = int(offsets[-1]) if count else last_begin
        num_records += count
        at += next_at
        num_read = _HEAD_BYTES if count and next_at > count * _LONG else _SCAN_BYTES
    tail = None
    if at > info.num_bytes:  # the last record's data is not all there
        num_records -= 1
        needed, at = at - last_begin, last_begin
        tail = Tail(at, num_records, _cut_short(num_records, at, needed, info.num_bytes))
    elif is_damaged:
        perhaps = " (or it is no TFRecord file)" if num_records == 0 else ""
        tail = Tail(at, num_records, _damaged_head(num_records, f"{at:,}", perhaps))
    elif at < info.num_bytes:
        tail = Tail(at, num_records, _cut_short(num_records, at, None, info.num_bytes))
    if num_records > first_record:
        stretches.append(RecordSpan(begin, at, first_record, num_records - first_record))
    return Scan(stretches, tail)


def _cut_short(record: int, begin: int, needed: int | None, num_bytes: int) -> str:
    needs = "" if needed is None else f" and has {needed:,} bytes"
    return f"it is cut short: record {record + 1:,} begins at byte {begin:,}{needs}, and the file ends at byte {num_bytes:,}"


def _damaged_head(record: int, begin: str, perhaps: str = "") -> str:
    return (
        f"the length of record {record + 1:,}, at byte {begin}, does not match its checksum{perhaps}, so neither that "
        "record nor any behind it can be found"
    )


def read_stretch(files: Files, info: FileInfo, stretch: RecordSpan) -> Records:
    """The records of a stretch, each checked."""
    raw = files.read(info.url, stretch.begin, stretch.end)
    records, num_whole = split_records(raw, stretch.num_records)
    if num_whole < stretch.num_records:
        number = stretch.first_record + num_whole + 1
        problem = f"record {number:,} is not where it was when the file was scanned"
        raise FileDamaged(url=info.url, problem=problem)
    return records


def parsed(parser: ExampleParser, url: str, records: Records, first_record: int, offset: int) -> DecodedRows:
    """The rows of records that lie from byte `offset` of a file on."""

    def address(row: int) -> dict[str, Any]:
        begin = offset + int(records.begins[row]) - HEAD
        return {"where": url, "row": first_record + row + 1, "offset": begin}

    bad = BadRows(address)
    for row in np.flatnonzero(records.wrong).tolist():
        bad.add(row, None, checksum_reason(records, row))
    return DecodedRows(len(records.begins), parser.parse(*records, bad), bad)


def checksum_reason(records: Records, number: int) -> str:
    """Message about a record whose data does not match its checksum."""
    begin, end = int(records.begins[number]), int(records.ends[number])
    written = int.from_bytes(records.data[end : end + 4].tobytes(), "little")
    found = masked_crc(records.data[begin:end].tobytes())
    return f"its data does not match its checksum: {written:#010x} was written, {found:#010x} is found"


def split_records(raw: bytes, num_records: int) -> tuple[Records, int]:
    """The first records in these bytes, each checked, and how many of them are whole."""
    data = np.frombuffer(raw, np.uint8)
    begins, ends = np.empty(num_records, np.int64), np.empty(num_records, np.int64)
    state = np.empty(num_records, np.uint8)
    num_whole = frames(data, _LONGEST_HERE, begins, ends, state)
    begins, ends, state = begins[:num_whole], ends[:num_whole], state[:num_whole]
    for number in np.flatnonzero(state == UNCHECKED).tolist():
        begin, end = int(begins[number]), int(ends[number])
        written = int.from_bytes(raw[end : end + 4], "little")
        state[number] = WHOLE if masked_crc(raw[begin:end]) == written else WRONG
    return Records(data, begins, ends, state), num_whole


ENDINGS = (".tfrecord", ".tfrecords", ".tfrec", ".tfrecord.gz", ".tfrecords.gz")


def open_tfrecord(
    path: Where | CopiedFiles,
    schema: Mapping[str, Any],
    *,
    label: str | Sequence[str] | None = None,
    cache: Any = "auto",
    location: str = "shared",
    spread: str = "on-demand",
    on_error: OnError = "raise",
    max_skips: int | None = None,
) -> Source | Stream:
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
    files, where = files_at(path, location, spread)
    features = wanted_features(schema)
    on_error, max_skips = skipping("", on_error, max_skips)
    found = files.expand(where, ENDINGS)
    if any(is_gzip(files, info) for info in found):
        return open_row_stream(
            RecordStream(files, tuple(found), features),
            format="tfrecord",
            files=found,
            is_compressed=lambda info: is_gzip(files, info),
            label=label,
            on_error=on_error,
            max_skips=max_skips,
        )
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
        for each in (scan, frames):
            each.prepare()  # here, so that forked processes need not
        self.columns: tuple[Column, ...] = tuple(feature.column for feature in features)
        scans = remembered(
            identity_of(found, format="tfrecord scan"), lambda: [scan_file(files, info) for info in found]
        )
        described = [feature.describe() for feature in features]
        self.identity = identity_of(found, format="tfrecord", features=described, tail=keeps_damaged_tail)
        self._num_files = len(found)
        self._places: list[tuple[FileInfo, RecordSpan | Tail]] = []
        blocks = []
        # Values of ragged columns are counted by what they take in the file.
        row_bytes = sum(8 if column.is_ragged else column.row_bytes for column in self.columns)
        for info, (stretches, tail) in zip(found, scans, strict=True):
            for stretch in itertools.starmap(RecordSpan, stretches):
                self._places.append((info, stretch))
                num_bytes = row_bytes * stretch.num_records + stretch.end - stretch.begin
                blocks.append(TableBlock(stretch.num_records, num_bytes, info.url, stretch.first_record))
            if tail is not None:
                if not keeps_damaged_tail:
                    raise FileDamaged(url=info.url, problem=Tail(*tail).problem)
                self._places.append((info, Tail(*tail)))
                blocks.append(TableBlock(1, row_bytes, info.url, Tail(*tail).record))
        self.blocks: tuple[TableBlock, ...] = tuple(blocks)

    def read(self, block: int) -> DecodedRows:
        info, part = self._places[block]
        if isinstance(part, RecordSpan):
            records = read_stretch(self._files, info, part)
            return parsed(self._parser, info.url, records, part.first_record, part.begin)
        bad = BadRows(lambda row: {"where": info.url, "row": part.record + 1, "offset": part.begin})
        bad.add(0, None, part.problem)
        return empty_rows(self.columns, 1, bad)

    def is_here(self, block: int) -> bool:
        return self._files.is_here(self._places[block][0].url)

    def stage(self) -> None:
        self._files.stage()

    def describe(self) -> dict[str, Any]:
        return {
            "format": "tfrecord",
            "num_files": self._num_files,
            "features": [feature.describe() for feature in self._features],
        }


_CHUNK_BYTES = 1 << 20


class RecordStream(RowStream):
    """Stretches of records of one file after the other, parsed."""

    def __init__(self, files: Files, found: tuple[FileInfo, ...], features: tuple[Wanted, ...]) -> None:
        self._files, self._found, self._features = files, found, features
        self._parser = ExampleParser(features)
        self.columns = tuple(feature.column for feature in features)

    def __iter__(self) -> Iterator[DecodedRows]:
        for info in self._found:
            with self._files.open(info.url) as raw:
                if is_gzip(self._files, info):
                    with gzip.GzipFile(fileobj=raw, mode="rb") as unpacked:
                        yield from self._rows(info, cast(BinaryIO, unpacked))
                else:
                    yield from self._rows(info, raw)

    def describe(self) -> dict[str, Any]:
        features = [feature.describe() for feature in self._features]
        num_files = len(self._found)
        return {"source": "stream", "format": "tfrecord", "num_files": num_files, "features": features}

    def _rows(self, info: FileInfo, file: BinaryIO) -> Iterator[DecodedRows]:
        """Stretches of whole records, as they come."""
        data, first_record, offset, num_wanted = b"", 0, 0, _CHUNK_BYTES
        while chunk := _next_chunk(info, file, num_wanted):
            data += chunk
            array = np.frombuffer(data, np.uint8)
            begins = np.empty(len(data) // FRAME + 1, np.int64)
            count, next_at, is_damaged = scan(array, 0, begins)
            num_wanted = max(next_at - len(data), _CHUNK_BYTES)
            if next_at > len(data):  # the last one is incomplete so far
                count, next_at = count - 1, int(begins[count - 1])
            if count:
                records, _ = split_records(data[:next_at], count)
                yield parsed(self._parser, info.url, records, first_record, offset)
            data, first_record, offset = data[next_at:], first_record + count, offset + next_at
            if is_damaged:
                problem = _damaged_head(first_record, f"{offset:,} of what is unpacked")
                raise FileDamaged(url=info.url, problem=problem)
        if data:
            raise FileDamaged(
                url=info.url,
                problem=f"it is cut short: record {first_record + 1:,} begins at byte {offset:,} of what is unpacked, which "
                f"ends at byte {offset + len(data):,}",
            )


def _next_chunk(info: FileInfo, file: BinaryIO, num_bytes: int) -> bytes:
    try:
        return file.read(num_bytes)
    except (EOFError, OSError, zlib.error) as error:
        raise FileDamaged(url=info.url, problem=f"it cannot be unpacked to its end ({error})") from None
