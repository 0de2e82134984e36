"""A file object over anything that reads ranges of bytes, for libraries that want one."""

from __future__ import annotations

import io
from collections.abc import Callable


class BlockFile(io.RawIOBase):
    """`read(url, begin, end)` as a file."""

    def __init__(self, read: Callable[[str, int, int], bytes], url: str, num_bytes: int) -> None:
        self._read, self._url, self._num_bytes, self._at = read, url, num_bytes, 0

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """It has a position."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go there."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def tell(self) -> int:
        """Where we are."""
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any buffer is one
        """Read as much as fits, or to the end."""
        end = min(self._at + len(buffer), self._num_bytes)
        if end <= self._at:
            return 0
        data = self._read(self._url, self._at, end)
        buffer[: len(data)] = data
        self._at = end
        return len(data)
