"""TFRecord files as stretches of records: found by one scan, read by range.

The scan checks the checksum of every length, without which the next record
could not be found; that of the data is checked when it is read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.data.files import FileInfo, Files
from shoal.data.formats import record_kernels as kernels
from shoal.errors import FileDamaged

_STRETCH_BYTES = 4 << 20
_SCAN_BYTES = 4 << 20
_HEAD_BYTES = 64 << 10  # read at a time where records are so long that most of the scan would be data
_LONG = 256 << 10
_LONGEST_HERE = 800  # above, a call of the library is faster than the loop

GZIP = b"\x1f\x8b"


class Stretch(NamedTuple):
    """Records that are read in one piece."""

    begin: int
    end: int
    first_record: int
    num_records: int


class Tail(NamedTuple):
    """What stands at the end of a damaged file: from here on, no record can be found."""

    begin: int
    record: int
    problem: str


class Scan(NamedTuple):
    """What one pass over a file found. Fit for JSON."""

    stretches: list[Stretch]
    tail: Tail | None


@dataclass(frozen=True, slots=True)
class RecordFile:
    """One file, scanned."""

    info: FileInfo
    stretches: tuple[Stretch, ...]
    tail: Tail | None

    @classmethod
    def of(cls, info: FileInfo, scan: Sequence[Any]) -> RecordFile:
        """From a scan, which may have been through JSON."""
        stretches, tail = scan
        return cls(info, tuple(Stretch(*stretch) for stretch in stretches), Tail(*tail) if tail else None)


class Records(NamedTuple):
    """The records of a stretch: record i is data[begins[i]:ends[i]]."""

    data: NDArray[np.uint8]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    wrong: NDArray[np.uint8]
    """1 where the data does not match its checksum."""


def prepare() -> None:
    """Load what is compiled: processes that are forked from this one need not."""
    kernels.scan.prepare()
    kernels.frames.prepare()


def is_gzip(files: Files, info: FileInfo) -> bool:
    """Whether the file is compressed: by its first bytes, whatever it is called."""
    head = files.read(info.url, 0, min(kernels.HEAD, info.num_bytes))
    if not head.startswith(GZIP):
        return False
    return len(head) < kernels.HEAD or masked_crc(head[:8]) != int.from_bytes(head[8:12], "little")


def scan_file(files: Files, info: FileInfo, *, stretch_bytes: int = _STRETCH_BYTES) -> Scan:
    """Find every record of a file by reading it once; where records are long, only their heads."""
    stretches: list[Stretch] = []
    begin = at = first_record = num_records = last_begin = 0
    is_damaged = False
    num_read = _SCAN_BYTES
    while at + kernels.HEAD <= info.num_bytes and not is_damaged:
        data = np.frombuffer(files.read(info.url, at, min(at + num_read, info.num_bytes)), np.uint8)
        offsets = np.empty(len(data) // kernels.FRAME + 1, np.int64)
        count, next_at, is_damaged = kernels.scan(data, 0, offsets)
        offsets = offsets[:count] + at
        # A stretch ends before the first record that begins too far behind its own beginning.
        while count and offsets[-1] >= begin + stretch_bytes:
            cut = int(np.searchsorted(offsets, begin + stretch_bytes))
            stop, record = int(offsets[cut]), num_records + cut
            stretches.append(Stretch(begin, stop, first_record, record - first_record))
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
        tail = Tail(at, num_records, _damaged_head(num_records, at))
    elif at < info.num_bytes:
        tail = Tail(at, num_records, _cut_short(num_records, at, None, info.num_bytes))
    if num_records > first_record:
        stretches.append(Stretch(begin, at, first_record, num_records - first_record))
    return Scan(stretches, tail)


def _cut_short(record: int, begin: int, needed: int | None, num_bytes: int) -> str:
    needs = "" if needed is None else f" and has {needed:,} bytes"
    return f"it is cut short: record {record + 1:,} begins at byte {begin:,}{needs}, and the file ends at byte {num_bytes:,}"


def _damaged_head(record: int, begin: int) -> str:
    perhaps = " (or it is no TFRecord file)" if record == 0 else ""
    return (
        f"the length of record {record + 1:,}, at byte {begin:,}, does not match its checksum{perhaps}, so neither that "
        "record nor any behind it can be found"
    )


def read_stretch(files: Files, file: RecordFile, stretch: Stretch) -> Records:
    """The records of a stretch, each checked."""
    raw = files.read(file.info.url, stretch.begin, stretch.end)
    records, num_whole = split_records(raw, stretch.num_records)
    if num_whole < stretch.num_records:
        raise FileDamaged(
            url=file.info.url,
            problem=f"record {stretch.first_record + num_whole + 1:,} is not where it was when the file was scanned",
        )
    return records


def checksum_reason(records: Records, number: int) -> str:
    """What is wrong with a record whose data does not match its checksum."""
    begin, end = int(records.begins[number]), int(records.ends[number])
    written = int.from_bytes(records.data[end : end + 4].tobytes(), "little")
    found = masked_crc(records.data[begin:end].tobytes())
    return f"its data does not match its checksum: {written:#010x} was written, {found:#010x} is found"


def split_records(raw: bytes, num_records: int) -> tuple[Records, int]:
    """The first records in these bytes, each checked, and how many of them are whole."""
    data = np.frombuffer(raw, np.uint8)
    begins, ends = np.empty(num_records, np.int64), np.empty(num_records, np.int64)
    state = np.empty(num_records, np.uint8)
    num_whole = kernels.frames(data, _LONGEST_HERE, begins, ends, state)
    begins, ends, state = begins[:num_whole], ends[:num_whole], state[:num_whole]
    for number in np.flatnonzero(state == kernels.UNCHECKED).tolist():
        begin, end = int(begins[number]), int(ends[number])
        written = int.from_bytes(raw[end : end + 4], "little")
        state[number] = kernels.WHOLE if masked_crc(raw[begin:end]) == written else kernels.WRONG
    return Records(data, begins, ends, state), num_whole


def frame(data: bytes) -> bytes:
    """A record around its data."""
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data)))
    )


def masked_crc(data: bytes) -> int:
    """CRC-32C, turned and moved by a constant."""
    import google_crc32c

    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
