"""File systems by URL, through fsspec, and what its client for HDFS needs to survive forks and servers that are not there."""

from __future__ import annotations

import io
import socket
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from shoal.config.extras import install_command
from shoal.errors import ConfigError

REACH_TIMEOUT_S = 10.0
_BUFFER_BYTES = 1 << 20

_kept: list[Any] = []


def open_file_system(url: str) -> tuple[Any, str]:
    """File system behind a URL or path, and the path on it. ConfigError if its kind is unknown, or it is unreachable."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        if not url.startswith("hdfs://"):
            raise ConfigError(f"{url} cannot be opened: {error}. Nothing was read.") from error
        # Pyarrow, the fallback without hdfs-native, lists every place of a libjvm.
        said = str(error).partition("\n")[0]
        raise ConfigError(
            f"{url} cannot be opened: {said}. Nothing was read; install a client with {install_command('hdfs')}."
        ) from None
    if url.startswith("hdfs://") and all(system is not each for each in _kept):
        _reach(url)
        # A fork empties fsspec's cache of clients, and hdfs-native's threads do not exist in the child: a
        # released client would wait for them for ever.
        _kept.append(system)
    return system, path


def open_to_read(system: Any, path: str) -> BinaryIO:
    """A file to read and seek in, buffered: that of HDFS asks its server at each call, and cannot read into memory that is there."""
    file = system.open(path, "rb")
    buffered = io.BufferedReader(_Raw(file), _BUFFER_BYTES) if isinstance(file, io.RawIOBase) else file
    return cast(BinaryIO, buffered)


class _Raw(io.RawIOBase):
    """A file that only reads and seeks, as one that reads into a buffer."""

    def __init__(self, file: io.RawIOBase) -> None:
        self._file = file

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any buffer is one
        found = self._file.read(len(buffer)) or b""
        buffer[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._file.seek(offset, whence)
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _reach(url: str) -> None:
    """Refuse a NameNode that does not answer: the client itself tries for minutes. A nameservice has no port, and is not tried."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        return
    try:
        socket.create_connection((parts.hostname, parts.port), REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"{url} cannot be opened: nobody answers at {parts.hostname}:{parts.port} ({error.strerror or error}). Nothing was read; "
            "see that the NameNode runs, and that the port is that of its RPC."
        ) from None
