"""A file as Arrow takes one, whose every read is one range of `Files`."""

from __future__ import annotations

import io
from typing import Any

from shoal.data.files import FileInfo, Files


def file_of(files: Files, info: FileInfo) -> Any:
    """A file that was found, for Arrow, whose hints ask for more than its readers do."""
    return FileRanges(files, info)


class FileRanges(io.RawIOBase):
    """Reads checked to be of the file that was found, wherever it lies; what is read is not copied."""

    def __init__(self, files: Files, info: FileInfo) -> None:
        self._files, self._info, self._at = files, info, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Where the next read begins."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._info.num_bytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes, fewer at the end."""
        left = max(self._info.num_bytes - self._at, 0)
        length = left if size is None or size < 0 else min(size, left)
        data = self._files.read(self._info.url, self._at, self._at + length) if length else b""
        self._at += length
        return data
