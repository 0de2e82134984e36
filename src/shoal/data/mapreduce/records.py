"""Sorted runs of (key, value) records in a file, one stretch per partition.

A file appears under its name only when it is whole: it is written beside it
and renamed. Its end says where each partition begins, how many records it has
and their checksum.
"""

from __future__ import annotations

import heapq
import itertools
import operator
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from shoal.errors import DataError

_LENGTHS = struct.Struct("<II")
_TAIL = struct.Struct("<Q")
_BUFFER_BYTES = 64 << 10
_WRITE_BYTES = 256 << 10

Record = tuple[bytes, bytes]
"""A key and a value, encoded."""


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """One partition's records in a file."""

    begin: int
    end: int
    num_records: int
    checksum: int

    @property
    def num_bytes_in_memory(self) -> int:
        """About what its records take as Python's objects."""
        return self.end - self.begin + 200 * self.num_records


class RunFile:
    """A finished file, open for reading: whoever holds it can read on when its name is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed in close()
        try:
            size = os.fstat(self._file.fileno()).st_size
            (tail_bytes,) = _TAIL.unpack(os.pread(self._file.fileno(), 8, size - 8))
            if tail_bytes > size - 8:
                raise ValueError("the tail is longer than the file")
            tail = os.pread(self._file.fileno(), tail_bytes, size - 8 - tail_bytes)
            self.stretches = msgspec.msgpack.decode(tail, type=list[Stretch])
        except (OSError, ValueError, struct.error, msgspec.MsgspecError):
            self._file.close()
            raise _damaged(path, "its end is not that of a run") from None

    def records(self, partition: int, *, check: bool = False) -> Iterator[Record]:
        """The records of a partition, by increasing key; with `check`, refused at the end if they changed."""
        stretch = self.stretches[partition]
        return self._records(stretch.begin, stretch.end, stretch.checksum if check else None)

    def load(self, partition: int) -> list[Record]:
        """All of them at once, checked."""
        stretch = self.stretches[partition]
        data = os.pread(self._file.fileno(), stretch.end - stretch.begin, stretch.begin)
        if zlib.crc32(data) != stretch.checksum:
            raise _damaged(self.path, "its records are not those that were written")
        found, at, unpack = [], 0, _LENGTHS.unpack_from
        while at < len(data):
            key_bytes, value_bytes = unpack(data, at)
            middle = at + 8 + key_bytes
            end = middle + value_bytes
            found.append((data[at + 8 : middle], data[middle:end]))
            at = end
        return found

    def records_from(self, offset: int) -> Iterator[Record]:
        """Of a file of one partition: the records from the one at this offset on."""
        return self._records(offset, self.stretches[0].end, None)

    def _records(self, at: int, end: int, expected: int | None) -> Iterator[Record]:
        fd, left, checksum = self._file.fileno(), b"", 0
        while True:
            begin = 0
            while len(left) - begin >= 8:
                key_bytes, value_bytes = _LENGTHS.unpack_from(left, begin)
                middle = begin + 8 + key_bytes
                if middle + value_bytes > len(left):
                    break
                yield left[begin + 8 : middle], left[middle : middle + value_bytes]
                begin = middle + value_bytes
            wanted = _BUFFER_BYTES
            if len(left) - begin >= 8:  # a record longer than what is read at once
                wanted = max(wanted, sum(_LENGTHS.unpack_from(left, begin)))
            data = os.pread(fd, min(wanted, end - at), at)
            if not data:
                if len(left) != begin or at != end:
                    raise _damaged(self.path, f"it ends {end - at} bytes before its records do")
                break
            at += len(data)
            checksum = zlib.crc32(data, checksum) if expected is not None else 0
            left = left[begin:] + data
        if expected is not None and checksum != expected:
            raise _damaged(self.path, "its records are not those that were written")

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class RunWriter:
    """Writes a file of runs: `add` by increasing partition and key, then `commit`; `abandon` leaves nothing."""

    def __init__(self, path: Path, num_partitions: int) -> None:
        self._path = path
        self._beside = path.with_name(f".{path.name}.{os.getpid()}")
        self._file: BinaryIO = open(self._beside, "wb", buffering=0)  # noqa: SIM115  closed by commit, abandon
        self._num_partitions = num_partitions
        self._stretches: list[Stretch] = []
        self._waiting = bytearray()
        self._begin = self._at = self._num_records = self._checksum = 0

    def add(self, partition: int, key: bytes, value: bytes) -> None:
        """One record more."""
        while partition > len(self._stretches):
            self._end_stretch()
        waiting = self._waiting
        waiting += _LENGTHS.pack(len(key), len(value))
        waiting += key
        waiting += value
        self._num_records += 1
        if len(waiting) > _WRITE_BYTES:
            self._flush()

    def commit(self) -> None:
        """The file is whole and has its name."""
        while len(self._stretches) < self._num_partitions:
            self._end_stretch()
        tail = msgspec.msgpack.encode(self._stretches)
        self._write(tail + _TAIL.pack(len(tail)))
        self._file.close()
        os.replace(self._beside, self._path)

    def abandon(self) -> None:
        """Nothing is left of it."""
        self._file.close()
        self._beside.unlink(missing_ok=True)

    def _end_stretch(self) -> None:
        self._flush()
        self._stretches.append(Stretch(self._begin, self._at, self._num_records, self._checksum))
        self._begin, self._num_records, self._checksum = self._at, 0, 0

    def _flush(self) -> None:
        self._checksum = zlib.crc32(self._waiting, self._checksum)
        self._at += len(self._waiting)
        self._write(self._waiting)
        self._waiting = bytearray()

    def _write(self, data: bytes | bytearray) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]


def merged(runs: Iterable[Iterable[Record]]) -> Iterator[Record]:
    """Several runs as one: by key, and equal keys in the order of the runs."""
    # The run's number decides between equal keys, so that values are never compared.
    numbered = [_numbered(number, run) for number, run in enumerate(runs)]
    return ((key, value) for key, _, value in heapq.merge(*numbered))


def merged_in_memory(runs: Iterable[list[Record]]) -> list[Record]:
    """The same of runs that fit into memory: a sort finds them sorted already, and is four times as fast."""
    return sorted(itertools.chain.from_iterable(runs), key=operator.itemgetter(0))


def _numbered(number: int, run: Iterable[Record]) -> Iterator[tuple[bytes, int, bytes]]:
    return ((key, number, value) for key, value in run)


def record_bytes(key: bytes, value: bytes) -> int:
    """What a record takes in a file."""
    return _LENGTHS.size + len(key) + len(value)


def _damaged(path: Path, problem: str) -> DataError:
    return DataError(
        f"the file {path} of a map_reduce is damaged: {problem}. Nothing of it was used; remove its directory, and the "
        "aggregate is computed again."
    )
