"""Sorted runs of (key, value) records in files, and the buffer of a map task that spills them.

Keys are encoded as bytes with the same order, so that runs are merged by comparing bytes, and a
key's partition is equal in every process. A file is written under a temporary name and renamed when
it is complete. Its end has the beginning of each partition, its number of records and their
checksum. Values of a key keep the order in which they were given, through every spill and merge, so
the input of a combine or reduce function does not depend on the process that ran the task.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import operator
import os
import struct
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeAlias

import msgspec
import numpy as np
import torch

from shoal.data.sources.source import name_of
from shoal.errors import DataError
from shoal.runtime.serialization import NotSerializable, decode, encode, num_bytes

Key: TypeAlias = "int | float | str | bytes | tuple[Any, ...] | None"

_NONE, _BELOW, _INT, _ABOVE, _FLOAT, _STR, _BYTES, _TUPLE = range(1, 9)
_SMALLEST, _LARGEST = -(1 << 63), (1 << 63) - 1
_WORD = struct.Struct(">BQ")
_LENGTH = struct.Struct(">BI")
_BITS = struct.Struct(">Q")
_DOUBLE = struct.Struct(">d")
_SIGN = 1 << 63
_ALL = (1 << 64) - 1
# The end of a text sorts before anything that could follow; a zero within it is marked, so that it does not.
_END, _ZERO = b"\x00\x01", b"\x00\xff"


def plain_key(key: Any) -> Key:
    """The key as one of Python's own: numpy's and torch's numbers become those, True and False 1 and 0."""
    kind = type(key)
    if kind is int or kind is str or kind is bytes or kind is float or key is None:
        return key  # type: ignore[no-any-return]
    if kind is tuple:
        return tuple(plain_key(part) for part in key)
    if isinstance(key, (bool, np.bool_)):
        return int(key)
    if isinstance(key, (np.integer, np.floating)) or (isinstance(key, torch.Tensor) and key.dim() == 0):
        return plain_key(key.item())
    for known in (str, bytes, int, float):
        if isinstance(key, known):
            own: Key = known(key)  # type: ignore[arg-type]  # np.str_ and the like
            return own
    raise DataError(
        f"the map function gave the key {_shown(key)}, a {kind.__name__}: keys are whole numbers, floats, strings, bytes, "
        "None, or tuples of them, because they are sorted and written to disk. Nothing was computed; yield such a key."
    )


def encode_key(key: Key) -> bytes:
    kind = type(key)
    if kind is int:
        return _int(key)  # type: ignore[arg-type]
    if kind is str:
        raw = key.encode("utf-8", "surrogatepass")  # type: ignore[union-attr]
        return b"\x06" + (raw.replace(b"\x00", _ZERO) if b"\x00" in raw else raw) + _END
    if kind is bytes:
        return b"\x07" + key.replace(b"\x00", _ZERO) + _END  # type: ignore[union-attr, arg-type, operator]
    if kind is float:
        return _float(key)  # type: ignore[arg-type]
    if key is None:
        return b"\x01"
    return b"\x08" + b"".join(map(encode_key, key)) + b"\x00"  # type: ignore[arg-type]


def decode_key(data: bytes) -> Key:
    return _decode(data, 0)[0]


def partition_of(encoded: bytes, num_partitions: int) -> int:
    """Partition in which a key is reduced: the same in every process and on every host."""
    return zlib.crc32(encoded) % num_partitions


def _int(key: int) -> bytes:
    if _SMALLEST <= key <= _LARGEST:
        return _WORD.pack(_INT, key - _SMALLEST)
    # Wider ones by their number of bytes and then those; below zero both turned around.
    size = (key.bit_length() + 8) // 8
    if key > 0:
        return _LENGTH.pack(_ABOVE, size) + key.to_bytes(size, "big")
    return _LENGTH.pack(_BELOW, 0xFFFFFFFF - size) + key.to_bytes(size, "big", signed=True)


def _float(key: float) -> bytes:
    if key == 0.0:
        key = 0.0  # -0.0 is the same key
    elif math.isnan(key):
        key = math.nan  # there is one of it, and it sorts last
    (bits,) = _BITS.unpack(_DOUBLE.pack(key))
    return _WORD.pack(_FLOAT, bits ^ _ALL if bits & _SIGN else bits | _SIGN)


def _decode(data: bytes, at: int) -> tuple[Key, int]:
    tag = data[at]
    if tag == _NONE:
        return None, at + 1
    if tag == _INT:
        return _WORD.unpack_from(data, at)[1] + _SMALLEST, at + 9
    if tag == _FLOAT:
        bits = _WORD.unpack_from(data, at)[1]
        bits = bits ^ _SIGN if bits & _SIGN else bits ^ _ALL
        return _DOUBLE.unpack(_BITS.pack(bits))[0], at + 9
    if tag in (_ABOVE, _BELOW):
        size = _LENGTH.unpack_from(data, at)[1]
        size = size if tag == _ABOVE else 0xFFFFFFFF - size
        end = at + 5 + size
        return int.from_bytes(data[at + 5 : end], "big", signed=tag == _BELOW), end
    if tag in (_STR, _BYTES):
        end = data.index(_END, at + 1)  # a zero within is followed by 255
        raw = data[at + 1 : end].replace(_ZERO, b"\x00")
        return raw.decode("utf-8", "surrogatepass") if tag == _STR else raw, end + 2
    parts = []
    at += 1
    while data[at]:
        part, at = _decode(data, at)
        parts.append(part)
    return tuple(parts), at + 1


def _shown(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
    """A finished file, open for reading: it stays readable after its name is gone."""

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
        """Records of a file of one partition, from the one at this offset on."""
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

    def read(self, begin: int, num_bytes: int) -> bytes:
        return os.pread(self._file.fileno(), num_bytes, begin)

    def close(self) -> None:
        self._file.close()


def partition_as_file(path: Path, partition: int, offset: int, num_bytes: int) -> tuple[bytes, int]:
    """Bytes of a file with one partition of another file, and how many it has in all. It need not be written."""
    with contextlib.closing(RunFile(path)) as file:
        if not 0 <= partition < len(file.stretches):
            raise _damaged(
                path, f"it has {len(file.stretches)} partitions, and number {partition} was asked for"
            )
        stretch = file.stretches[partition]
        length = stretch.end - stretch.begin
        tail = msgspec.msgpack.encode([Stretch(0, length, stretch.num_records, stretch.checksum)])
        tail += _TAIL.pack(len(tail))
        body = file.read(stretch.begin + offset, min(num_bytes, max(length - offset, 0)))
        rest = tail[max(offset - length, 0) :] if offset + len(body) >= length else b""
        return body + rest[: num_bytes - len(body)], length + len(tail)


class RunWriter:
    """Writes a file of runs: `add` by increasing partition and key. It has its name at the end of the `with`, or none."""

    def __init__(self, path: Path, num_partitions: int) -> None:
        self._path = path
        self._beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # other hosts may write here
        self._file: BinaryIO = open(self._beside, "wb", buffering=0)  # noqa: SIM115  closed in __exit__
        self._num_partitions = num_partitions
        self._stretches: list[Stretch] = []
        self._waiting = bytearray()
        self._begin = self._at = self._num_records = self._checksum = 0

    def add(self, partition: int, key: bytes, value: bytes) -> None:
        while partition > len(self._stretches):
            self._end_stretch()
        waiting = self._waiting
        waiting += _LENGTHS.pack(len(key), len(value))
        waiting += key
        waiting += value
        self._num_records += 1
        if len(waiting) > _WRITE_BYTES:
            self._flush()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._file, contextlib.ExitStack() as unfinished:
            unfinished.callback(self._beside.unlink, missing_ok=True)
            if error is None:
                while len(self._stretches) < self._num_partitions:
                    self._end_stretch()
                tail = msgspec.msgpack.encode(self._stretches)
                self._write(tail + _TAIL.pack(len(tail)))
                os.replace(self._beside, self._path)

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
    return heapq.merge(*runs, key=operator.itemgetter(0))  # values are never compared


def merged_in_memory(runs: Iterable[list[Record]]) -> list[Record]:
    """The same of runs that fit into memory: a sort finds them sorted already, and is four times as fast."""
    return sorted(itertools.chain.from_iterable(runs), key=operator.itemgetter(0))


def record_bytes(key: bytes, value: bytes) -> int:
    return _LENGTHS.size + len(key) + len(value)


def _damaged(path: Path, problem: str) -> DataError:
    return DataError(
        f"the file {path} of a map_reduce is damaged: {problem}. Nothing of it was used; remove its directory, and the "
        "aggregate is computed again."
    )


Combine = Callable[[Key, Any], Any]
"""(key, values) -> value: of a list of values, or in a `reduce` without a `combine` of an iterator over them."""

_MAX_RUNS = 64  # files of one task that are open at once
_KEY_BYTES = 120  # an entry of a dict, a list, and what holds a key


class SpillBuffer:
    """The pairs of one map task, in at most about `max_bytes` of memory."""

    def __init__(
        self, directory: Path, name: str, *, combine: Combine | None, num_partitions: int, max_bytes: int
    ) -> None:
        self._directory, self._name = directory, name
        self._combine, self._num_partitions, self._max_bytes = combine, num_partitions, max_bytes
        # Keys that a dict tells apart as we do are kept as they are; the rest (1.0 is not 1 here) by their bytes.
        self._plain: dict[Key, list[Any]] = {}
        self._encoded: dict[bytes, list[Any]] = {}
        self._num_bytes = 0
        self._runs: list[Path] = []
        self.num_spills = 0

    def add(self, key: Any, value: Any) -> None:
        kind = type(key)
        found: list[Any] | None
        if kind is str or kind is int:
            found = self._plain.get(key)
            if found is None:
                found = self._plain[key] = []
                self._num_bytes += _KEY_BYTES + (len(key) if kind is str else 8)
        else:
            encoded = encode_key(plain_key(key))
            found = self._encoded.get(encoded)
            if found is None:
                found = self._encoded[encoded] = []
                self._num_bytes += _KEY_BYTES + len(encoded)
        found.append(value)
        self._num_bytes += 40 if type(value) is int else 8 + num_bytes(value, per_object=64)
        if self._num_bytes > self._max_bytes:
            self._make_room()

    def write(self, path: Path) -> None:
        """Everything that was added, as one file of runs; the spilled files are gone."""
        try:
            self._write(path, self._runs)
        finally:
            self.discard()

    def discard(self) -> None:
        for run in self._runs:
            run.unlink(missing_ok=True)
        self._runs = []

    def _make_room(self) -> None:
        if self._combine is not None:
            for key, listed in self._plain.items():
                if len(listed) > 1:
                    listed[:] = [combined(self._combine, key, listed)]
            for encoded, listed in self._encoded.items():
                if len(listed) > 1:
                    listed[:] = [combined(self._combine, decode_key(encoded), listed)]
            self._num_bytes = self._measured()
            if self._num_bytes <= self._max_bytes // 2:
                return
        self._spill()

    def _measured(self) -> int:
        total = 0
        for key, listed in itertools.chain(self._plain.items(), self._encoded.items()):
            size = len(key) if isinstance(key, (str, bytes)) else 8
            total += _KEY_BYTES + size + sum(8 + num_bytes(value, per_object=64) for value in listed)
        return total

    def _spill(self) -> None:
        merging = self._runs if len(self._runs) == _MAX_RUNS else []
        self.num_spills += 1
        path = self._directory / f".{self._name}-spill-{self.num_spills}"
        self._write(path, merging)
        if merging:
            self.discard()
        self._runs.append(path)

    def _write(self, path: Path, spilled: list[Path]) -> None:
        """Write these spilled files, then the records in memory, as one file of runs."""
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(contextlib.closing(RunFile(run))) for run in spilled]
            writer = opened.enter_context(RunWriter(path, self._num_partitions))
            for partition, records in enumerate(self._sorted()):
                if files:
                    runs = [file.records(partition) for file in files]
                    records = self._combined(merged([*runs, records]))
                for key, value in records:
                    writer.add(partition, key, value)

    def _sorted(self) -> list[Iterator[Record]]:
        """Take the records out of memory: a sorted run per partition."""
        entries = [(encode_key(key), listed) for key, listed in self._plain.items()]
        entries += self._encoded.items()
        self._plain, self._encoded, self._num_bytes = {}, {}, 0
        entries.sort(key=operator.itemgetter(0))
        parts: list[list[tuple[bytes, list[Any]]]] = [[] for _ in range(self._num_partitions)]
        for entry in entries:
            parts[partition_of(entry[0], self._num_partitions)].append(entry)
        return [self._records(part) for part in parts]

    def _records(self, entries: list[tuple[bytes, list[Any]]]) -> Iterator[Record]:
        for encoded, listed in entries:
            if self._combine is not None and len(listed) > 1:
                listed = [combined(self._combine, decode_key(encoded), listed)]
            for value in listed:
                yield encoded, encode_value(value)

    def _combined(self, records: Iterator[Record]) -> Iterator[Record]:
        if self._combine is None:
            yield from records
            return
        for encoded, group in itertools.groupby(records, key=operator.itemgetter(0)):
            listed = [value for _, value in group]
            if len(listed) == 1:
                yield encoded, listed[0]
            else:
                decoded = [decode(value) for value in listed]
                yield encoded, encode_value(combined(self._combine, decode_key(encoded), decoded))


def combined(combine: Combine, key: Key, listed: Any, *, what: str = "combine") -> Any:
    """Combine a key's values by the user's function; its errors name the key."""
    try:
        return combine(key, listed)
    except Exception as error:
        error.add_note(f"raised by {what}({name_of(combine)}) for the key {key!r}")
        raise


def encode_value(value: Any) -> bytes:
    try:
        return encode(value)
    except NotSerializable as error:
        raise DataError(
            f"the map function gave a value with {error.what} in it: values are numbers, strings, bytes, None, numpy arrays "
            "and tensors of numbers, and lists, tuples and dicts of these, because they are written to disk and read back. "
            "Nothing was computed; yield such a value."
        ) from None
    except UnicodeEncodeError as error:
        raise DataError(
            f"a value of the map function is a string that is no text: {error}. Give it as bytes."
        ) from None
