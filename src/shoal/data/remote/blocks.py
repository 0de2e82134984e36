"""Files in blocks: their names and ranges, the ways they are sent, and the cache of a host.

All workers of a host read its cache; only the host's block server writes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.errors import FileLost

BLOCK_BYTES = 4 << 20
"""Bytes of a block, but for the last one of a file. Large enough that a request costs little beside its bytes."""


class FileBlock(NamedTuple):
    """One block of one version of a file."""

    url: str
    stamp: str
    number: int

    @property
    def name(self) -> str:
        """A file name for it, the same at every host."""
        digest = hashlib.blake2b(f"{self.url}\0{self.stamp}".encode(), digest_size=16).hexdigest()
        return f"{digest}-{self.number}"


class BlockRange(NamedTuple):
    """A part of a block: bytes begin..end-1 of it."""

    number: int
    begin: int
    end: int


def num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def pieces(begin: int, end: int) -> Iterator[BlockRange]:
    while begin < end:
        number = begin // BLOCK_BYTES
        first = number * BLOCK_BYTES
        stop = min(end, first + BLOCK_BYTES)
        yield BlockRange(number, begin - first, stop - first)
        begin = stop


def numbers_of(ranges: Iterable[tuple[int, int]]) -> list[int]:
    return sorted({piece.number for begin, end in ranges for piece in pieces(begin, end)})


def routes(how: str, wanted: dict[int, Sequence[int]]) -> Iterator[tuple[int, list[list[int]]]]:
    """Block after block, along which ways the host that has them all sends it: every way is a list of hosts.

    `wanted` are the blocks that each host wants. By `broadcast` the sender
    sends to each; along a `chain` it sends once, and each host gives it on.
    """
    sets = {host: set(numbers) for host, numbers in sorted(wanted.items())}
    for number in sorted(set().union(*sets.values())):
        hosts = [host for host, numbers in sets.items() if number in numbers]
        yield number, [hosts] if how == "chain" else [[host] for host in hosts]


class BlockReader(io.RawIOBase):
    """`read(url, begin, end)` as a file."""

    def __init__(self, read: Callable[[str, int, int], bytes], url: str, num_bytes: int) -> None:
        self._read, self._url, self._num_bytes, self._at = read, url, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any buffer is one
        end = min(self._at + len(buffer), self._num_bytes)
        if end <= self._at:
            return 0
        data = self._read(self._url, self._at, end)
        buffer[: len(data)] = data
        self._at = end
        return len(data)


class HostCache:
    """Blocks in a directory."""

    def __init__(self, directory: Path, *, max_bytes: int | None = None) -> None:
        """Without a limit, blocks may take half of what is free on that disk."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if max_bytes is None:
            disk = os.statvfs(directory)
            max_bytes = disk.f_bavail * disk.f_frsize // 2
        self.max_bytes = max_bytes
        self._sizes: dict[str, int] | None = None  # by name, the one read longest ago first
        self._lock = threading.Lock()

    def has(self, block: FileBlock) -> bool:
        return (self._directory / block.name).exists()

    def read(self, block: FileBlock, begin: int, end: int) -> bytes | None:
        """Bytes begin..end-1 of a block; None where it is not here."""
        try:
            descriptor = os.open(self._directory / block.name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return os.pread(descriptor, end - begin, begin)
        finally:
            os.close(descriptor)

    def read_all(self, block: FileBlock) -> bytes | None:
        """All of a block; None where it is not here."""
        try:
            data = (self._directory / block.name).read_bytes()
        except FileNotFoundError:
            return None
        with self._lock:
            sizes = self._known()
            if block.name in sizes:
                sizes[block.name] = sizes.pop(block.name)
        return data

    def keep(self, block: FileBlock, data: bytes | bytearray | memoryview) -> None:
        """Put a block in. By the host's block server alone."""
        path = self._directory / block.name
        half = path.with_name(f"{block.name}.half-{threading.get_ident()}")
        with self._lock:
            self._make_room(len(data))
        try:
            half.write_bytes(data)
            half.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                half.unlink()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise FileLost(
                url=block.url,
                reason=f"block {block.number} could not be kept at {self._directory}, where the disk is full",
            ) from error
        with self._lock:
            self._known()[block.name] = len(data)

    def _make_room(self, num_bytes: int) -> None:
        sizes = self._known()
        excess = sum(sizes.values()) + num_bytes - self.max_bytes
        for name in list(sizes):
            if excess <= 0:
                return
            excess -= sizes.pop(name)
            # A worker that has it open reads on: the file's bytes live as long as its descriptor.
            with contextlib.suppress(FileNotFoundError):
                (self._directory / name).unlink()

    def _known(self) -> dict[str, int]:
        """Blocks in the cache, listed once: a block server may take over from one that died."""
        if self._sizes is None:
            with os.scandir(self._directory) as entries:
                found = [(entry.stat().st_mtime, entry.name, entry.stat().st_size) for entry in entries]
            whole = sorted(each for each in found if ".half-" not in each[1])
            self._sizes = {name: size for _, name, size in whole}
        return self._sizes
