"""Files of lines as one table: blocks are stretches of whole rows.

Knows where rows end and nothing of what they say; that is a decoder's, of CSV
or of JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.data.cache.disk_cache import identity_of, remembered
from shoal.data.files import FileInfo, Files, in_threads
from shoal.data.formats.lines import Rules, Scanner, Stretch, lines_of_rows, stretches
from shoal.data.formats.table import Block, Column, Rows
from shoal.errors import DataError, FileDamaged

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Endings of files that can only be read from their beginning."""

_CHUNK_BYTES = 4 << 20
_ROW_BYTES_LIMIT = 64 << 20  # a first row longer than this is taken for no row at all


class Place(NamedTuple):
    """Where a text is from."""

    file: int
    url: str
    first_row: int = 0
    first_line: int = 1


class Head(NamedTuple):
    """Where the rows of a file begin: behind a byte order mark and a header."""

    begin: int
    first_line: int
    text: bytes = b""
    """The header."""


class Decoder(Protocol):
    """From text to columns."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The schema."""

    def decode(self, text: bytes, num_rows: int, place: Place) -> Rows:
        """The rows of a text that holds so many."""


class LineAddress:
    """Where the rows of a text are; their lines are looked for when the first is asked for."""

    def __init__(self, text: bytes, place: Place, rules: Rules) -> None:
        self._text, self._place, self._rules = text, place, rules
        self._lines: NDArray[np.int64] | None = None

    def __call__(self, row: int) -> dict[str, Any]:
        """The arguments of BadSample that say where a row is."""
        if self._lines is None:
            self._lines = lines_of_rows(self._text, self._rules) - 1
        place = self._place
        line = place.first_line + int(self._lines[row]) if row < len(self._lines) else None
        return {"where": place.url, "row": place.first_row + row + 1, "line": line}


class TextTable:
    """Rows of one or several files of lines."""

    def __init__(
        self,
        files: Files,
        infos: Sequence[FileInfo],
        heads: Sequence[Head],
        rules: Rules,
        decoder: Decoder,
        *,
        identity: str,
        description: dict[str, Any],
    ) -> None:
        self._files, self._infos, self._decoder = files, infos, decoder
        self.columns, self.identity, self._description = decoder.columns, identity, description
        found = scan_files(files, infos, heads, rules)
        row_bytes = sum(column.dtype.itemsize for column in self.columns if not column.is_ragged)
        self._parts: list[tuple[int, Stretch, int]] = []
        blocks: list[Block] = []
        for file, (info, parts) in enumerate(zip(infos, found, strict=True)):
            first_row = 0
            for part in parts:
                self._parts.append((file, part, first_row))
                where = f"{info.url}, bytes {part.begin} to {part.end}"
                is_ragged = any(column.is_ragged for column in self.columns)
                num_bytes = part.num_rows * row_bytes + (part.end - part.begin if is_ragged else 0)
                blocks.append(Block(part.num_rows, num_bytes, where, first_row))
                first_row += part.num_rows
        self.blocks = tuple(blocks)

    def read(self, block: int) -> Rows:
        """Decode one stretch of rows."""
        file, part, first_row = self._parts[block]
        url = self._infos[file].url
        text = self._files.read(url, part.begin, part.end)
        return self._decoder.decode(text, part.num_rows, Place(file, url, first_row, part.first_line))

    def is_here(self, block: int) -> bool:
        """Whether this host has the file of a block itself."""
        return self._files.is_here(self._infos[self._parts[block][0]].url)

    def stage(self) -> None:
        """Have all files at this host."""
        self._files.stage()

    def describe(self) -> dict[str, Any]:
        """Format and number of files."""
        return {**self._description, "num_files": len(self._infos)}


def scan_files(
    files: Files, infos: Sequence[FileInfo], heads: Sequence[Head], rules: Rules
) -> list[list[Stretch]]:
    """The stretches of each file; read once, remembered by what the files are."""

    def scan(at: int) -> list[list[int]]:
        info, head = infos[at], heads[at]
        scanner = Scanner(rules, begin=head.begin, first_line=head.first_line)
        try:
            return [list(part) for part in stretches(_chunks(files, info, head.begin), scanner)]
        except DataError as error:
            raise about(info.url, error) from error

    identity = identity_of(infos, scan="rows", begins=[head.begin for head in heads], rules=list(rules))
    found = remembered(identity, lambda: in_threads(scan, range(len(infos))))
    return [[Stretch(*part) for part in parts] for parts in found]


def read_head(files: Files, info: FileInfo, rules: Rules, *, has_header: bool) -> Head:
    """Where the rows of a file begin. Refuses what is no text in UTF-8 or ASCII."""
    size = 64 << 10
    while True:
        text = files.read(info.url, 0, min(size, info.num_bytes))
        head = head_of(text, info.url, rules, has_header=has_header, is_whole=len(text) == info.num_bytes)
        if head is not None:
            return head
        size *= 8


def head_of(text: bytes, url: str, rules: Rules, *, has_header: bool, is_whole: bool) -> Head | None:
    """The same of the beginning of a file; None where more of it is needed."""
    if text[:2] in (b"\xff\xfe", b"\xfe\xff") or (len(text) > 3 and text[:4].count(0) >= 2):
        raise FileDamaged(url=url, problem="it is text in UTF-16 or UTF-32, or no text at all; UTF-8 is read")
    begin = 3 if text.startswith(b"\xef\xbb\xbf") else 0
    if not has_header:
        return Head(begin, 1)
    scanner = Scanner(rules, begin=begin, block_bytes=1)
    try:
        rows = scanner.feed(text[begin:])
        if not rows and is_whole:
            rows = scanner.finish()
    except DataError as error:
        raise about(url, error) from error
    if rows:
        first, lines = rows[0], text[: rows[0].end].count(b"\n")
        return Head(first.end, lines + 1, text[first.begin : first.end])
    if is_whole:
        raise FileDamaged(url=url, problem="it is empty: it has not even a header")
    if len(text) > _ROW_BYTES_LIMIT:
        raise FileDamaged(
            url=url, problem=f"its first {len(text)} bytes hold no end of a line, so it is no such file"
        )
    return None


def first_texts(
    files: Files, infos: Sequence[FileInfo], heads: Sequence[Head], rules: Rules
) -> Iterator[tuple[int, bytes]]:
    """(file, text) of whole rows from the beginnings of the files, for guessing types."""
    for file, (info, head) in enumerate(zip(infos, heads, strict=True)):
        scanner = Scanner(rules, begin=head.begin, first_line=head.first_line)
        try:
            for part in stretches(_chunks(files, info, head.begin), scanner):
                yield file, files.read(info.url, part.begin, part.end)
        except DataError as error:
            raise about(info.url, error) from error


def _chunks(files: Files, info: FileInfo, begin: int) -> Iterator[bytes]:
    for at in range(begin, info.num_bytes, _CHUNK_BYTES):
        yield files.read(info.url, at, min(at + _CHUNK_BYTES, info.num_bytes))


def about(url: str, error: DataError) -> DataError:
    """An error of a scan, which knows no names, as one of this file; others as they are."""
    return FileDamaged(url=url, problem=str(error)) if type(error) is DataError else error
