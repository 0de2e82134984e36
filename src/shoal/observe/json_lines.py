"""Incremental reader of a file of JSON lines that another process is writing.

A partial last line is read when it is complete; a damaged one is skipped; a file that was replaced
or truncated (a resumed run drops the steps it repeats) is read anew. Links are not followed, and
only regular files are opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shoal.runtime import own_files

T = TypeVar("T")

CHUNK_BYTES = 512 << 10
MAX_LINE_BYTES = 256 << 10
"""A line longer than this is no line of ours: it is passed over."""


class JsonLines:
    """One file, read from where the last read ended."""

    def __init__(self, path: Path, *, tail_bytes: int | None = None) -> None:
        self._path, self._tail_bytes = path, tail_bytes
        self._inode = 0
        self._offset = 0
        self._is_within_line = False
        """Whether the place is within a line that is too long: its rest is passed over."""

        self.size = 0

    @property
    def left_bytes(self) -> int:
        """Bytes seen at the last look and not read yet."""
        return max(0, self.size - self._offset)

    def read(self, max_bytes: int = CHUNK_BYTES) -> tuple[bytes, bool]:
        """Complete lines since the last read, and whether the file was replaced, so that earlier lines are void."""
        try:
            fd = own_files.open_file(self._path, os.O_RDONLY, any_owner=True)
        except OSError:
            was_there, self._inode, self._offset, self.size = self._inode != 0, 0, 0, 0
            return b"", was_there
        try:
            found = os.fstat(fd)
            is_other = self._inode != 0 and (found.st_ino != self._inode or found.st_size < self._offset)
            # Cut and grown again since: the byte before our place is no line's end any more.
            if not is_other and self._offset > 0 and not self._is_within_line:
                is_other = os.pread(fd, 1, self._offset - 1) != b"\n"
            if is_other or self._inode == 0:
                self._inode, self._offset, self._is_within_line = found.st_ino, 0, False
                if self._tail_bytes is not None and found.st_size > self._tail_bytes:
                    self._offset = found.st_size - self._tail_bytes
                    self._is_within_line = os.pread(fd, 1, self._offset - 1) != b"\n"
            self.size = found.st_size
            content = os.pread(fd, max_bytes, self._offset)
        finally:
            os.close(fd)
        whole = content.rfind(b"\n") + 1
        if not whole and (self._is_within_line or len(content) >= min(max_bytes, MAX_LINE_BYTES)):
            self._offset += len(content)
            self._is_within_line = True
            return b"", is_other
        begin = content.find(b"\n") + 1 if self._is_within_line else 0
        self._offset += whole  # nothing, where the last line is torn
        self._is_within_line = False
        return content[begin:whole], is_other

    def samples(self, count: int, each_bytes: int = 4096) -> bytes:
        """Whole lines from `count` places spread evenly over the file. Does not move the reader."""
        try:
            fd = own_files.open_file(self._path, os.O_RDONLY, any_owner=True)
        except OSError:
            return b""
        try:
            size, found = os.fstat(fd).st_size, []
            for k in range(count):
                part = os.pread(fd, each_bytes, max(0, size - each_bytes) * k // max(1, count - 1))
                found.append(part[part.find(b"\n") + 1 : part.rfind(b"\n") + 1])
            return b"".join(found)
        finally:
            os.close(fd)


_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decoded(lines: bytes, decoder: msgspec.json.Decoder[T]) -> list[T]:
    """A value for each line; lines that cannot be decoded (torn by a kill, or just being written) are left out."""
    try:
        return decoder.decode_lines(lines)
    except _UNREADABLE:
        return list(_one_by_one(lines, decoder))


def _one_by_one(lines: bytes, decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
    for line in lines.splitlines():
        try:
            yield decoder.decode(line)
        except _UNREADABLE:
            continue


def objects(lines: bytes) -> list[dict[str, Any]]:
    """The objects in whole lines, without the lines that hold none."""
    return [each for each in decoded(lines, _decoder) if isinstance(each, dict)]
