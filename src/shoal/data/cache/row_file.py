"""Rows of one length in an anonymous file, in RAM or on disk, read in any order and shared by the processes of a host.

A file has no name: it is gone when the last process that has it open ends, in any way. The first
process that needs some rows creates the files and writes its pid and descriptors into a directory
that all of them see; later ones open them through /proc/PID/fd and register too. Without /proc each
process makes its own.

All columns of a row are contiguous, so that a row is one stretch of memory or of a file. In RAM the
rows are a matrix. From disk each row is read by a system call (1.1 µs from the kernel's cache,
without counting as this process's memory); a mapping takes longer, with a page fault each, and
touched pages stay until they are released.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal import system


def in_memory(name: str, num_bytes: int) -> int:
    """A file in RAM, of zeros that take no memory until they are written. Its pages are counted as this process's."""
    return _sized(system.anonymous_file(name), num_bytes)


def on_disk(directory: str | os.PathLike[str], num_bytes: int) -> int:
    """A file on the disk of a directory, of zeros that take no room until they are written."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    return _sized(system.temporary_file(directory), num_bytes)


def open_of(pid: int, fd: int, inode: int) -> int | None:
    """Open the file that another process has open as `fd`; None if it is gone."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(opened).st_ino == inode:
        return opened
    os.close(opened)  # the number was reused
    return None


def write_at(fd: int, offset: int, data: Any) -> None:
    """All of `data` at an offset; OSError where the disk is full."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def read_at(fd: int, offset: int, into: Any) -> None:
    view = memoryview(into).cast("B")
    while view:
        length = os.preadv(fd, [view], offset)
        if not length:
            raise OSError(f"a file ends at byte {offset}, where {len(view)} more were expected")
        view, offset = view[length:], offset + length


def bytes_on_disk(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def close_all(fds: list[int]) -> None:
    """Close descriptors; those that are closed already are left alone."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _sized(fd: int, num_bytes: int) -> int:
    try:
        os.ftruncate(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def share(
    directory: Path, identity: Any, make: Callable[[], tuple[list[int], dict[str, Any]]]
) -> tuple[list[int], dict[str, Any], bool]:
    """Descriptors and facts made by the first process for `identity`; and whether that was this one.

    `identity` and facts are JSON values.
    """
    text = json.dumps(identity, sort_keys=True)
    name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    # A run directory may be shared by hosts, and a process number means nothing on another.
    path = directory / f"{name}-{socket.gethostname()}.json"
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = _read(file.read(), text)
        fds = _open_any(known["holders"])
        is_first = fds is None
        if fds is None:
            fds, known["facts"] = make()
            known["holders"] = []
        inodes = [os.fstat(fd).st_ino for fd in fds]
        known["holders"].append({"pid": os.getpid(), "fds": fds, "inodes": inodes})
        file.seek(0)
        file.truncate()
        json.dump({**known, "identity": text}, file)
    return fds, known["facts"], is_first


def _read(text: str, identity: str) -> dict[str, Any]:
    try:
        known: dict[str, Any] = json.loads(text)
    except ValueError:  # empty, or truncated by a kill
        return {"holders": [], "facts": {}}
    return known if known["identity"] == identity else {"holders": [], "facts": {}}


def _open_any(holders: list[dict[str, Any]]) -> list[int] | None:
    for holder in reversed(holders):
        opened: list[int] = []
        for fd, inode in zip(holder["fds"], holder["inodes"], strict=True):
            found = open_of(holder["pid"], fd, inode)
            if found is None:
                break
            opened.append(found)
        if len(opened) == len(holder["fds"]):
            return opened
        close_all(opened)
    return None


_WORD = 8
_TILE_BYTES = 1 << 20  # packed at once: fits a core's cache
_SMALL_ELEMENTS = 32_767  # copied at once: torch starts threads for more, which is slower on a busy machine


class Field(NamedTuple):
    """One column: the type of its elements, and the shape of one row."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @classmethod
    def of(cls, dtype: np.dtype[Any], shape: tuple[int, ...] = ()) -> Field:
        """From numpy's type, which must have an equivalent in torch."""
        return cls(torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype, shape)


@dataclass(frozen=True, slots=True)
class _ColumnGroup:
    """Columns of plain numbers of one type, next to each other."""

    dtype: torch.dtype
    begin: int
    names: tuple[str, ...]

    @property
    def end(self) -> int:
        return self.begin + self.dtype.itemsize * len(self.names)


class RowLayout:
    """Columns within rows of `row_bytes`. Wide types come first, so that everything is aligned."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self.fields = dict(fields)
        self._groups: list[_ColumnGroup] = []
        self._wide: dict[str, int] = {}  # columns with a shape, and where they begin
        end = 0
        by_size = sorted(self.fields, key=lambda name: -self.fields[name].dtype.itemsize)
        for dtype in dict.fromkeys(self.fields[name].dtype for name in by_size):
            of_type = [name for name in self.fields if self.fields[name].dtype == dtype]
            numbers = tuple(name for name in of_type if not self.fields[name].shape)
            if numbers:
                self._groups.append(_ColumnGroup(dtype, end, numbers))
                end = self._groups[-1].end
            for name in of_type:
                if self.fields[name].shape:
                    self._wide[name] = end
                    end += self.fields[name].num_bytes
        as_packed = [*(name for group in self._groups for name in group.names), *self._wide]
        self._is_in_order = as_packed == list(self.fields)
        widest = max((field.dtype.itemsize for field in self.fields.values()), default=_WORD)
        alignment = max(_WORD, widest)
        self.row_bytes = max(-(-end // alignment) * alignment, _WORD)

    def pack(self, columns: Mapping[str, NDArray[Any]], num_rows: int) -> Iterator[NDArray[np.uint8]]:
        """Rows of some columns, a stretch at a time. A yielded buffer is valid until the next one."""
        most = max((len(group.names) for group in self._groups), default=1)
        tile = max(64, min(_TILE_BYTES // self.row_bytes, _SMALL_ELEMENTS // most))
        buffer = np.zeros((min(tile, num_rows), self.row_bytes), np.uint8)
        rows = torch.from_numpy(buffer)
        for begin in range(0, num_rows, tile):
            length = min(tile, num_rows - begin)
            for group in self._groups:
                joined = np.concatenate([columns[name][begin : begin + length] for name in group.names])
                side_by_side = torch.from_numpy(joined).view(group.dtype).view(len(group.names), length)
                rows[:length, group.begin : group.end].view(group.dtype).copy_(side_by_side.t())
            for name, at in self._wide.items():
                field = self.fields[name]
                part = np.ascontiguousarray(columns[name][begin : begin + length]).reshape(length, -1)
                buffer[:length, at : at + field.num_bytes] = part.view(np.uint8)
            yield buffer[:length]

    def unpack(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The columns of some rows (int64, [n, words of a row]), as tensors of their own."""
        raw = rows.view(torch.uint8)
        found: dict[str, torch.Tensor] = {}
        for group in self._groups:
            # Copied together: a transposition per type costs less than a copy per column.
            columns = raw[:, group.begin : group.end].view(group.dtype).t().contiguous()
            found.update(zip(group.names, columns.unbind(0), strict=True))
        for name, at in self._wide.items():
            field = self.fields[name]
            part = raw[:, at : at + field.num_bytes].view(field.dtype)
            found[name] = part.reshape(len(rows), *field.shape).contiguous()
        return found if self._is_in_order else {name: found[name] for name in self.fields}

    def describe(self) -> list[Any]:
        """Description that two processes compare before they share rows."""
        return [[name, str(field.dtype), list(field.shape)] for name, field in self.fields.items()]


# Slower than this, rows are not in the kernel's cache: then several threads read from the disk at once.
_SLOW_S_PER_ROW = 20e-6
_NUM_THREADS = 16
_AT_ONCE = 1024
_OWN_PAGES_BYTES = 1 << 20
# From here on torch's threads copy faster; below, synchronisation costs more than the copy.
_LARGE_BYTES = 8 << 20


class CachedRows:
    """`num_rows` rows from `offset` on. The descriptor stays its owner's."""

    def __init__(self, fd: int, *, offset: int, num_rows: int, row_bytes: int, is_on_disk: bool) -> None:
        self.num_rows, self.row_bytes = num_rows, row_bytes
        self._fd, self._offset, self._is_on_disk = fd, offset, is_on_disk
        self._is_slow = False
        in_memory = 0 if is_on_disk else num_rows
        mapped = mmap.mmap(fd, in_memory * row_bytes, offset=offset) if in_memory else bytearray(8)
        words = torch.frombuffer(mapped, dtype=torch.int64)
        self._rows = words[: in_memory * row_bytes // 8].view(in_memory, row_bytes // 8)
        self._array = self._rows.numpy()

    def write(self, begin: int, rows: NDArray[np.uint8]) -> None:
        """Write consecutive rows; OSError if the disk is full."""
        write_at(self._fd, self._offset + begin * self.row_bytes, rows)

    def put(self, numbers: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        for number, row in zip(numbers.tolist(), rows, strict=True):
            write_at(self._fd, self._offset + number * self.row_bytes, row)

    def take(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        """Copies of these rows, in this order: int64, [n, words]. In RAM."""
        if len(numbers) * self.row_bytes >= _LARGE_BYTES:
            return self._rows.index_select(0, torch.from_numpy(numbers))
        return torch.from_numpy(self._array.take(numbers, axis=0))

    def take_into(
        self, numbers: NDArray[np.int64], found: NDArray[np.int64], places: NDArray[np.int64]
    ) -> None:
        if self._is_on_disk:
            self._read_into(numbers, found, places)
            return
        for begin in range(0, len(numbers), _AT_ONCE):
            chosen = slice(begin, begin + _AT_ONCE)
            found[places[chosen]] = self._array.take(numbers[chosen], axis=0)

    def take_range(self, begin: int, end: int) -> torch.Tensor:
        if not self._is_on_disk:
            return self._rows[begin:end].clone()
        found = buffer(end - begin, self.row_bytes)
        read_at(self._fd, self._offset + begin * self.row_bytes, found)
        return torch.from_numpy(found)

    def _read_into(
        self, numbers: NDArray[np.int64], found: NDArray[np.int64], places: NDArray[np.int64]
    ) -> None:
        began, length = time.perf_counter(), self.row_bytes
        order = np.argsort(numbers)  # a disk is faster from its beginning to its end
        offsets = (self._offset + numbers[order] * length).tolist()
        targets = (places[order] * length).tolist()
        view = found.data.cast("B")

        def read(begin: int, end: int) -> None:
            for target, offset in zip(targets[begin:end], offsets[begin:end], strict=True):
                if os.preadv(self._fd, (view[target : target + length],), offset) != length:
                    raise OSError(f"it ends before row {(offset - self._offset) // length}")

        if self._is_slow:
            cuts = np.linspace(0, len(numbers), _NUM_THREADS + 1).astype(int).tolist()
            with ThreadPoolExecutor(_NUM_THREADS, "shoal-rows") as threads:
                list(threads.map(read, cuts[:-1], cuts[1:]))
        else:
            read(0, len(numbers))
        if len(numbers) >= 64:
            per_row = (time.perf_counter() - began) / len(numbers)
            self._is_slow = per_row * (_NUM_THREADS if self._is_slow else 1) > _SLOW_S_PER_ROW


def buffer(num_rows: int, row_bytes: int) -> NDArray[np.int64]:
    """Memory for rows, [n, words]. Large buffers go back to the system as soon as they are unused.

    malloc would keep them for the allocating thread, and there are many short-lived threads.
    """
    num_bytes = num_rows * row_bytes
    memory = mmap.mmap(-1, num_bytes) if num_bytes >= _OWN_PAGES_BYTES else bytearray(num_bytes)
    return np.frombuffer(memory, np.int64).reshape(num_rows, row_bytes // 8)


class Heap:
    """Bytes of any length in a file that grows; rows say where theirs begin."""

    def __init__(self, fd: int, *, is_on_disk: bool) -> None:
        self._fd, self._is_on_disk = fd, is_on_disk
        self._view = memoryview(b"")
        self._lock = threading.Lock()

    def write(self, at: int, data: Any) -> None:
        write_at(self._fd, at, data)

    def read(self, at: int, length: int) -> bytes | memoryview:
        """Bytes at a place; in RAM without a copy."""
        if not length:
            return b""
        if self._is_on_disk:
            return os.pread(self._fd, length, at)
        if at + length > len(self._view):
            with self._lock:
                size = os.fstat(self._fd).st_size
                self._view = memoryview(mmap.mmap(self._fd, size))
        return self._view[at : at + length]
