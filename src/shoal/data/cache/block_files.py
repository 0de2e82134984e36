"""The disk tier: a file per block, whole or not there at all, and checked when it is read.

A file is written beside its place and renamed into it. Format: magic, length
and checksum of the header, the header, then the arrays, which it says where
to find. The directory goes with the store, or at the latest with the process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import weakref
import zlib
from pathlib import Path

from shoal.data.cache import block_format
from shoal.data.cache.block_format import Tree
from shoal.errors import BlockDamaged
from shoal.runtime import scratch

_MAGIC = b"shoalblk"
_PREAMBLE = struct.Struct(
    "<8sQQII"
)  # magic, header bytes, body bytes, checksum of the header and of the body


class BlockFiles:
    """Blocks in a directory of their own, by number.

    A forked child reads what its parent wrote, and writes and removes only
    what is its own.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """In a new folder of `directory`, or of the job's scratch directory."""
        self._parent = directory
        self._made: tuple[int, Path] | None = None
        self._finalizer: weakref.finalize[..., BlockFiles] | None = None

    def write(self, number: int, tree: Tree) -> Path:
        """Write a block; OSError where the disk does not take it, and then nothing is left of it."""
        header, arrays = block_format.encode(tree)
        checksum, num_bytes = 0, 0
        for array in arrays:
            gap = bytes(block_format.padding(len(array)))
            checksum = zlib.crc32(gap, zlib.crc32(array, checksum))
            num_bytes += len(array) + len(gap)
        preamble = _PREAMBLE.pack(_MAGIC, len(header), num_bytes, zlib.crc32(header), checksum)
        path = self._directory() / f"{number}.block"
        partial = path.with_suffix(".partial")
        try:
            with open(partial, "wb", buffering=0) as file:
                begin = _PREAMBLE.size + len(header)
                _write_all(file.fileno(), preamble + header + bytes(block_format.padding(begin)))
                for array in arrays:
                    _write_all(file.fileno(), array)
                    _write_all(file.fileno(), bytes(block_format.padding(len(array))))
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        return path

    def read(self, path: Path) -> Tree:
        """The block of a file; BlockDamaged where it is not what was written."""
        try:
            with open(path, "rb", buffering=0) as file:
                content = bytearray(os.fstat(file.fileno()).st_size)
                length = file.readinto(content) or 0
                while 0 < length < len(content):
                    more = file.readinto(memoryview(content)[length:]) or 0
                    length = length + more if more else -1
        except OSError as error:
            raise BlockDamaged(path=str(path), problem=f"it cannot be read ({error.strerror})") from None
        if len(content) < _PREAMBLE.size or length != len(content):
            raise BlockDamaged(path=str(path), problem=f"it has only {len(content)} bytes")
        magic, header_bytes, body_bytes, header_sum, body_sum = _PREAMBLE.unpack_from(content)
        begin = _PREAMBLE.size + header_bytes
        begin += block_format.padding(begin)
        if magic != _MAGIC or begin + body_bytes != len(content):
            raise BlockDamaged(path=str(path), problem="it is no block, or was cut off")
        view = memoryview(content)
        header = view[_PREAMBLE.size : _PREAMBLE.size + header_bytes]
        body = view[begin:]
        if zlib.crc32(header) != header_sum or zlib.crc32(body) != body_sum:
            raise BlockDamaged(path=str(path), problem="its checksum is wrong")
        return block_format.decode(header, body)

    def remove(self, path: Path) -> None:
        """Take a file away, if this process wrote it."""
        if self._made is not None and self._made[0] == os.getpid() and path.parent == self._made[1]:
            path.unlink(missing_ok=True)

    @property
    def directory(self) -> Path | None:
        """Where the files are; None before the first."""
        return None if self._made is None else self._made[1]

    def close(self) -> None:
        """Take everything away."""
        if self._made is not None:
            _remove(*self._made)
        if self._finalizer is not None:
            self._finalizer.detach()
        self._made = self._finalizer = None

    def _directory(self) -> Path:
        if self._made is None or self._made[0] != os.getpid():
            parent = scratch.directory("blocks") if self._parent is None else Path(self._parent)
            parent.mkdir(parents=True, exist_ok=True)
            path = parent / f"store-{os.getpid()}-{id(self):x}-{os.urandom(4).hex()}"
            path.mkdir(mode=0o700)
            self._made = os.getpid(), path
            self._finalizer = weakref.finalize(self, _remove, *self._made)  # also runs at exit
        return self._made[1]


def _remove(pid: int, path: Path) -> None:
    # A forked child inherits the finalizer, not the directory.
    if pid == os.getpid():
        shutil.rmtree(path, ignore_errors=True)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
