"""Files of lines: where rows end, blocks of whole rows as a table, compressed files as a stream.

Quotes are respected: a line end within a quoted field ends no row, and lines
without anything in them are no rows. The scan runs at the speed of memory
where there are no quotes, and of one compiled loop where there are. Decoding
the text of a row is up to a `TextDecoder`, of CSV or of JSON.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import lzma
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol

import numpy as np
from numba import types
from numpy.typing import NDArray

from shoal.data.arguments import OnError
from shoal.data.cache.disk_cache import identity_of, remembered
from shoal.data.files import FileInfo, Files, in_threads
from shoal.data.formats.table import Column, DecodedRows, TableBlock
from shoal.data.formats.table_source import RowStream, TableSource, open_row_stream
from shoal.data.stream import Stream
from shoal.errors import DataError, FileDamaged
from shoal.runtime.kernel_cache import INT, kernel, matrix, vector

BLOCK_BYTES = 4 << 20
"""Of text; a block is this long and ends with its row."""

_CHUNK_BYTES = 4 << 20
_LF, _CR = 10, 13

# Places of the kernel's state:
_MODE, _CONTENT, _AFTER_CR, _ROWS, _BEGIN, _LINES, _FIRST_LINE, _QUOTE_LINE = range(8)
_FIELD_START, _IN_FIELD, _IN_QUOTES, _AFTER_QUOTE = range(4)


class LineSpan(NamedTuple):
    """Bytes of a file that hold whole rows."""

    begin: int
    end: int
    num_rows: int
    first_line: int
    """The number, from 1, of the line at `begin`, as editors count."""


class RowRules(NamedTuple):
    """Rules by which a row ends."""

    delimiter: int = -1
    quote: int = -1
    """-1 where nothing is quoted."""

    cr_ends: bool = False
    """A lone carriage return ends a line too."""

    blanks_are_empty: bool = False
    """A line of nothing but spaces is no row."""


class LineScanner:
    """Finds rows in text that comes in chunks."""

    def __init__(
        self, rules: RowRules, *, begin: int = 0, first_line: int = 1, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self._rules, self._block_bytes = rules, block_bytes
        self._state = np.zeros(8, dtype=np.int64)
        self._state[[_BEGIN, _LINES, _FIRST_LINE]] = begin, first_line - 1, first_line
        self._at = begin

    def feed(self, chunk: bytes) -> list[LineSpan]:
        """The spans that end in the next chunk."""
        cuts = None if not chunk else self._feed_plain(chunk)
        cuts = self._feed_any(chunk).tolist() if cuts is None else cuts
        self._at += len(chunk)
        return [LineSpan(*cut) for cut in cuts]

    def _feed_any(self, chunk: bytes) -> NDArray[np.int64]:
        """A line of (begin, end, rows, first line) for each stretch that ends here."""
        found = np.empty((len(chunk) // max(self._block_bytes, 1) + 1, 4), dtype=np.int64)
        data, rules = np.frombuffer(chunk, dtype=np.uint8), self._rules
        num_found = _scan(
            data,
            self._state,
            self._at,
            rules.delimiter,
            rules.quote,
            int(rules.cr_ends),
            int(rules.blanks_are_empty),
            self._block_bytes,
            found,
        )
        return found[:num_found]

    def finish(self) -> list[LineSpan]:
        """The last stretch, whose last line may lack its end; raises where a quote is still open."""
        state = self._state
        if state[_MODE] == _IN_QUOTES:
            raise DataError(f"the quote that opens in line {state[_QUOTE_LINE]:,} is never closed")
        num_rows = int(state[_ROWS] + (1 if state[_CONTENT] else 0))
        if not num_rows:
            return []
        return [LineSpan(int(state[_BEGIN]), self._at, num_rows, int(state[_FIRST_LINE]))]

    def _feed_plain(self, chunk: bytes) -> list[list[int]] | None:
        """A chunk without quotes, empty lines or lone carriage returns: counting line ends is enough. None for others."""
        state, rules = self._state, self._rules
        if state[_MODE] > _IN_FIELD or state[_AFTER_CR] or self._block_bytes < 1024:
            return None
        data = np.frombuffer(chunk, dtype=np.uint8)
        if (
            chunk[0] in b"\n\r \t"
            or chunk[-1] == _CR
            or _is_odd(data, rules.quote, int(rules.blanks_are_empty))
        ):
            return None
        cuts, at = [], 0
        while True:
            # The first line end at or behind the place where the block is long enough.
            wanted = int(state[_BEGIN]) + self._block_bytes - self._at
            end = chunk.find(b"\n", max(wanted - 1, at)) + 1
            if not end:
                break
            rows = _num_line_ends(data[at:end])
            state[_ROWS] += rows
            state[_LINES] += rows
            cuts.append([int(state[_BEGIN]), self._at + end, int(state[_ROWS]), int(state[_FIRST_LINE])])
            state[[_BEGIN, _ROWS, _FIRST_LINE]] = self._at + end, 0, state[_LINES] + 1
            state[_CONTENT] = 0
            at = end
        rows = _num_line_ends(data[at:])
        state[_ROWS] += rows
        state[_LINES] += rows
        last = chunk.rfind(b"\n") + 1
        rest = chunk[last:]
        if rest:
            has_content = not rules.blanks_are_empty or bool(rest.strip())
            state[_CONTENT] = int(has_content or (not last and bool(state[_CONTENT])))
            state[_MODE] = _FIELD_START if rest[-1] == rules.delimiter else _IN_FIELD
        else:
            state[_CONTENT], state[_MODE] = 0, _FIELD_START
        return cuts


def spans_of(chunks: Iterable[bytes], scanner: LineScanner) -> Iterator[LineSpan]:
    """All spans of a text."""
    for chunk in chunks:
        yield from scanner.feed(chunk)
    yield from scanner.finish()


def rows_of(text: bytes, rules: RowRules) -> list[LineSpan]:
    """Every row of a text as a stretch of its own."""
    scanner = LineScanner(rules, block_bytes=1)
    return [*scanner.feed(text), *scanner.finish()]


def lines_of_rows(text: bytes, rules: RowRules) -> NDArray[np.int64]:
    """The line, from 1, in which each row of a text begins."""
    scanner = LineScanner(rules, block_bytes=1)
    found = scanner._feed_any(text)[:, 3]
    return np.append(found, [part.first_line for part in scanner.finish()])


_Array = NDArray[Any]


@kernel((vector(types.uint8),))
def _num_line_ends(data: _Array) -> Any:
    found: Any = 0
    for i in range(len(data)):
        found += np.int64(data[i] == 10)
    return found


@kernel((vector(types.uint8), INT, INT))
def _is_odd(data: _Array, quote: int, blanks_are_empty: int) -> bool:
    """True where there is a quote, an empty line, or a carriage return without a line feed. Without branches: it is fast."""
    found: Any = 0
    for i in range(len(data) - 1):
        byte, after = np.int64(data[i]), np.int64(data[i + 1])
        is_end = byte == 10
        found |= np.int64(is_end & ((after == 10) | (after == 13)))
        found |= np.int64((byte == 13) & (after != 10))
        found |= np.int64(byte == quote)
        found |= np.int64(is_end & ((after == 32) | (after == 9))) & blanks_are_empty
    return found > 0 or (len(data) > 0 and np.int64(data[-1]) == quote)


@kernel(
    (
        vector(types.uint8),
        vector(types.int64, written=True),
        *[INT] * 6,
        matrix(types.int64, written=True),
    )
)
def _scan(
    data: _Array,
    state: _Array,
    at: int,
    delimiter: int,
    quote: int,
    cr_ends: int,
    blanks_are_empty: int,
    block_bytes: int,
    cuts: _Array,
) -> int:
    """Fill in where spans begin and end, with their rows and first lines; return how many."""
    mode, content, after_cr = state[0], state[1], state[2]
    rows, begin, lines, first_line = state[3], state[4], state[5], state[6]
    num_cuts = 0
    for i in range(len(data)):
        byte = np.int64(data[i])
        end: Any = np.int64(-1)
        is_used = False
        if after_cr:
            # The line ended with the carriage return; a line feed right behind belongs to it.
            after_cr = 0
            end = i
            if byte == 10:
                end, is_used = i + 1, True
        elif mode == 2:
            if byte == quote:
                mode = 3
            elif byte == 10:
                lines += 1
            continue
        elif mode == 3:
            if byte == quote:
                mode = 2
                continue
            mode = 1
        if not is_used and end < 0 and byte == 10:
            end, is_used = i + 1, True
        if end >= 0:
            lines += 1
            rows += content
            content = 0
            mode = 0
            if rows > 0 and at + end - begin >= block_bytes:
                cuts[num_cuts, 0] = begin
                cuts[num_cuts, 1] = at + end
                cuts[num_cuts, 2] = rows
                cuts[num_cuts, 3] = first_line
                num_cuts += 1
                rows = np.int64(0)
            if rows == 0:  # a stretch ended, or none has begun: empty lines belong to no row
                begin, first_line = at + end, lines + 1
        if is_used:
            continue
        if cr_ends and byte == 13:
            after_cr = 1
        elif byte == quote and mode == 0:
            mode = 2
            content = 1
            state[7] = lines + 1
        elif byte == delimiter:
            mode = 0
            content = 1
        else:
            mode = 1
            if not (blanks_are_empty and (byte == 32 or byte == 9 or byte == 13)):
                content = 1
    state[0], state[1], state[2] = mode, content, after_cr
    state[3], state[4], state[5], state[6] = rows, begin, lines, first_line
    return num_cuts


COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Endings of files that can only be read from their beginning."""

_ROW_BYTES_LIMIT = 64 << 20  # a first row longer than this is taken for no row at all


class TextPlace(NamedTuple):
    """Origin of a text: file, row and line."""

    file: int
    url: str
    first_row: int = 0
    first_line: int = 1


class TextHead(NamedTuple):
    """Begin of the rows of a file, behind a byte order mark and a header."""

    begin: int
    first_line: int
    text: bytes = b""
    """The header."""


class TextDecoder(Protocol):
    """From text to columns."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The schema."""

    def decode(self, text: bytes, num_rows: int, place: TextPlace) -> DecodedRows:
        """The rows of a text that holds so many."""

    def describe(self) -> dict[str, str]:
        """The types."""


class LineAddress:
    """Addresses of the rows of a text; lines are counted when the first is asked for."""

    def __init__(self, text: bytes, place: TextPlace, rules: RowRules) -> None:
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
        heads: Sequence[TextHead],
        rules: RowRules,
        decoder: TextDecoder,
        *,
        identity: str,
        description: dict[str, Any],
    ) -> None:
        self._files, self._infos, self._decoder = files, infos, decoder
        self.columns, self.identity, self._description = decoder.columns, identity, description
        found = scan_files(files, infos, heads, rules)
        row_bytes = sum(column.dtype.itemsize for column in self.columns if not column.is_ragged)
        self._parts: list[tuple[int, LineSpan, int]] = []
        blocks: list[TableBlock] = []
        for file, (info, parts) in enumerate(zip(infos, found, strict=True)):
            first_row = 0
            for part in parts:
                self._parts.append((file, part, first_row))
                where = f"{info.url}, bytes {part.begin} to {part.end}"
                is_ragged = any(column.is_ragged for column in self.columns)
                num_bytes = part.num_rows * row_bytes + (part.end - part.begin if is_ragged else 0)
                blocks.append(TableBlock(part.num_rows, num_bytes, where, first_row))
                first_row += part.num_rows
        self.blocks = tuple(blocks)

    def read(self, block: int) -> DecodedRows:
        file, part, first_row = self._parts[block]
        url = self._infos[file].url
        text = self._files.read(url, part.begin, part.end)
        return self._decoder.decode(text, part.num_rows, TextPlace(file, url, first_row, part.first_line))

    def is_here(self, block: int) -> bool:
        return self._files.is_here(self._infos[self._parts[block][0]].url)

    def stage(self) -> None:
        self._files.stage()

    def describe(self) -> dict[str, Any]:
        return {**self._description, "num_files": len(self._infos)}


def scan_files(
    files: Files, infos: Sequence[FileInfo], heads: Sequence[TextHead], rules: RowRules
) -> list[list[LineSpan]]:
    """The spans of each file; read once, remembered by what the files are."""

    def scan(at: int) -> list[list[int]]:
        info, head = infos[at], heads[at]
        scanner = LineScanner(rules, begin=head.begin, first_line=head.first_line)
        try:
            return [list(part) for part in spans_of(_chunks(files, info, head.begin), scanner)]
        except DataError as error:
            raise about(info.url, error) from error

    identity = identity_of(infos, scan="rows", begins=[head.begin for head in heads], rules=list(rules))
    found = remembered(identity, lambda: in_threads(scan, range(len(infos))))
    return [[LineSpan(*part) for part in parts] for parts in found]


def read_head(files: Files, info: FileInfo, rules: RowRules, *, has_header: bool) -> TextHead:
    """The head of a file. Refuses what is no text in UTF-8 or ASCII."""
    size = 64 << 10
    while True:
        text = files.read(info.url, 0, min(size, info.num_bytes))
        head = head_of(text, info.url, rules, has_header=has_header, is_whole=len(text) == info.num_bytes)
        if head is not None:
            return head
        size *= 8


def head_of(text: bytes, url: str, rules: RowRules, *, has_header: bool, is_whole: bool) -> TextHead | None:
    """The same of the beginning of a file; None where more of it is needed."""
    if text[:2] in (b"\xff\xfe", b"\xfe\xff") or (len(text) > 3 and text[:4].count(0) >= 2):
        raise FileDamaged(url=url, problem="it is text in UTF-16 or UTF-32, or no text at all; UTF-8 is read")
    begin = 3 if text.startswith(b"\xef\xbb\xbf") else 0
    if not has_header:
        return TextHead(begin, 1)
    scanner = LineScanner(rules, begin=begin, block_bytes=1)
    try:
        rows = scanner.feed(text[begin:])
        if not rows and is_whole:
            rows = scanner.finish()
    except DataError as error:
        raise about(url, error) from error
    if rows:
        first, lines = rows[0], text[: rows[0].end].count(b"\n")
        return TextHead(first.end, lines + 1, text[first.begin : first.end])
    if is_whole:
        raise FileDamaged(url=url, problem="it is empty: it has not even a header")
    if len(text) > _ROW_BYTES_LIMIT:
        raise FileDamaged(
            url=url, problem=f"its first {len(text)} bytes hold no end of a line, so it is no such file"
        )
    return None


def first_texts(
    files: Files, infos: Sequence[FileInfo], heads: Sequence[TextHead], rules: RowRules
) -> Iterator[tuple[int, bytes]]:
    """(file, text) of whole rows from the beginnings of the files, for guessing types."""
    for file, (info, head) in enumerate(zip(infos, heads, strict=True)):
        scanner = LineScanner(rules, begin=head.begin, first_line=head.first_line)
        try:
            for part in spans_of(_chunks(files, info, head.begin), scanner):
                yield file, files.read(info.url, part.begin, part.end)
        except DataError as error:
            raise about(info.url, error) from error


def _chunks(files: Files, info: FileInfo, begin: int) -> Iterator[bytes]:
    for at in range(begin, info.num_bytes, _CHUNK_BYTES):
        yield files.read(info.url, at, min(at + _CHUNK_BYTES, info.num_bytes))


def about(url: str, error: DataError) -> DataError:
    """An error of a scan, which knows no names, as one of this file; others as they are."""
    return FileDamaged(url=url, problem=str(error)) if type(error) is DataError else error


_UNPACKED_BYTES = 1 << 20


def is_compressed(url: str) -> bool:
    """True for a file that can only be read from its beginning."""
    return url.lower().endswith(COMPRESSED)


class UnpackedFiles:
    """Text of files, some of them compressed, from their beginnings."""

    def __init__(self, files: Files, infos: Sequence[FileInfo], rules: RowRules, *, has_header: bool) -> None:
        self._files, self.infos, self._rules, self._has_header = files, infos, rules, has_header

    def head(self, file: int) -> TextHead:
        """The head of one file."""
        for head, _ in self._begun(file):
            return head
        raise AssertionError("a head is found, or an error raised")

    def first_texts(self) -> Iterator[tuple[int, bytes]]:
        """(file, text) of whole rows from the beginnings of the files, for guessing types."""
        for file in range(len(self.infos)):
            for text, _, _ in self.texts(file):
                yield file, text

    def texts(self, file: int) -> Iterator[tuple[bytes, int, TextPlace]]:
        """(text, rows in it, where it is) of a file."""
        url = self.infos[file].url
        scanner, held, begin, first_row = None, b"", 0, 0
        for head, chunk in self._begun(file):
            if scanner is None:
                scanner = LineScanner(self._rules, begin=head.begin, first_line=head.first_line)
                chunk, begin = chunk[head.begin :], head.begin
            held += chunk
            for part in scanner.feed(chunk):
                yield (
                    held[part.begin - begin : part.end - begin],
                    part.num_rows,
                    TextPlace(file, url, first_row, part.first_line),
                )
                held, begin, first_row = held[part.end - begin :], part.end, first_row + part.num_rows
        try:
            last = scanner.finish() if scanner else []
        except DataError as error:
            raise about(url, error) from error
        for part in last:
            yield (
                held[part.begin - begin : part.end - begin],
                part.num_rows,
                TextPlace(file, url, first_row, part.first_line),
            )

    def _begun(self, file: int) -> Iterator[tuple[TextHead, bytes]]:
        """Chunks of a file, the first of them as long as it takes to see where its rows begin."""
        info, head, first = self.infos[file], None, b""
        for chunk in self._chunks(info):
            if head is not None:
                yield head, chunk
                continue
            first += chunk
            head = head_of(first, info.url, self._rules, has_header=self._has_header, is_whole=False)
            if head is not None:
                yield head, first
        if head is None:
            head = head_of(first, info.url, self._rules, has_header=self._has_header, is_whole=True)
            assert head is not None
            yield head, first

    def _chunks(self, info: FileInfo) -> Iterator[bytes]:
        with self._files.open(info.url) as packed, closing(_unpacked(info.url, packed)) as file:
            try:
                while chunk := file.read(_UNPACKED_BYTES):
                    yield chunk
            except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                problem = f"it cannot be unpacked to its end ({error}), so it is only the beginning of a file, or none of that kind"
                raise FileDamaged(url=info.url, problem=problem) from error


class TextStream(RowStream):
    """Rows of files of lines, one file after the other."""

    def __init__(self, files: UnpackedFiles, decoder: TextDecoder, description: dict[str, Any]) -> None:
        self._files, self._decoder, self._description = files, decoder, description
        self.columns = decoder.columns

    def __iter__(self) -> Iterator[DecodedRows]:
        for file in range(len(self._files.infos)):
            for text, num_rows, place in self._files.texts(file):
                yield self._decoder.decode(text, num_rows, place)

    def describe(self) -> dict[str, Any]:
        columns = [column.describe() for column in self.columns]
        return {
            "source": "stream",
            **self._description,
            "num_files": len(self._files.infos),
            "columns": columns,
        }


class TextFiles:
    """Files of lines to be opened: plain ones are read by range, any compressed one makes all of them a stream."""

    def __init__(self, files: Files, infos: Sequence[FileInfo], rules: RowRules, *, has_header: bool) -> None:
        self._files, self._infos, self._rules, self._has_header = files, infos, rules, has_header
        self._unpacked: UnpackedFiles | None = None
        if any(is_compressed(info.url) for info in infos):
            self._unpacked = UnpackedFiles(files, infos, rules, has_header=has_header)

    @functools.cached_property
    def heads(self) -> list[TextHead]:
        """The head of each file."""
        if self._unpacked:
            return in_threads(self._unpacked.head, range(len(self._infos)))
        return in_threads(
            lambda info: read_head(self._files, info, self._rules, has_header=self._has_header), self._infos
        )

    def first_texts(self) -> Iterator[tuple[int, bytes]]:
        """(file, text) of whole rows from the beginnings of the files, for guessing types."""
        if self._unpacked:
            return self._unpacked.first_texts()
        return first_texts(self._files, self._infos, self.heads, self._rules)

    def source(
        self,
        decoder: TextDecoder,
        description: dict[str, Any],
        identity: Mapping[str, Any],
        *,
        label: str | Sequence[str] | None,
        cache: Any,
        on_error: OnError,
        max_skips: int | None,
    ) -> TableSource | Stream:
        """The rows by index, or as a stream. `identity` is what else the decoded rows depend on."""
        if self._unpacked:
            return open_row_stream(
                TextStream(self._unpacked, decoder, description),
                format=description["format"],
                files=self._infos,
                is_compressed=lambda info: is_compressed(info.url),
                label=label,
                on_error=on_error,
                max_skips=max_skips,
            )
        name = identity_of(self._infos, **description, types=decoder.describe(), **identity)
        table = TextTable(
            self._files, self._infos, self.heads, self._rules, decoder, identity=name, description=description
        )
        return TableSource(table, label=label, cache=cache, on_error=on_error, max_skips=max_skips)


def _unpacked(url: str, packed: Any) -> Any:
    name = url.lower()
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=packed, mode="rb")
    if name.endswith(".bz2"):
        return bz2.BZ2File(packed)
    if name.endswith(".xz"):
        return lzma.LZMAFile(packed)
    if name.endswith(".zst"):
        import pyarrow as pa

        return pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), "zstd")
    return packed
