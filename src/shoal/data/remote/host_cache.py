"""A host's copies of blocks that lie elsewhere, as files that all its workers read.

Whoever has the directory can read; only the host's keeper writes. A block
appears by renaming, so there is never half of one. What was read longest ago
leaves when the limit is passed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

from shoal.data.remote.blocks import Block
from shoal.errors import FileLost


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

    def has(self, block: Block) -> bool:
        """Whether it is here now."""
        return (self._directory / block.name).exists()

    def read(self, block: Block, begin: int, end: int) -> bytes | None:
        """Bytes begin..end-1 of a block; None where it is not here."""
        try:
            descriptor = os.open(self._directory / block.name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return os.pread(descriptor, end - begin, begin)
        finally:
            os.close(descriptor)

    def read_all(self, block: Block) -> bytes | None:
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

    def keep(self, block: Block, data: bytes | bytearray | memoryview) -> None:
        """Put a block in. By the host's keeper alone."""
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
        """What is here, found once: a keeper may take over from one that died."""
        if self._sizes is None:
            with os.scandir(self._directory) as entries:
                found = [(entry.stat().st_mtime, entry.name, entry.stat().st_size) for entry in entries]
            whole = sorted(each for each in found if ".half-" not in each[1])
            self._sizes = {name: size for _, name, size in whole}
        return self._sizes
