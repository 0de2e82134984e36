"""Files of lines: row boundaries, blocks of whole rows as a table, compressed files as a stream.

Quotes are respected: a line end within a quoted field ends no row, and empty lines are no rows. The
scan runs at the speed of memory without quotes, and of one compiled loop with them. Decoding the
text of rows, CSV or JSON, is in `text.py`.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import itertools
import lzma
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.data.arguments import OnError
from shoal.data.files import FileInfo, Files, identity_of, in_threads, remembered
from shoal.data.formats.table import Column, DecodedRows, TableBlock
from shoal.data.formats.table_source import RowStream, TableSource, open_row_stream
from shoal.data.stream import Stream
from shoal.errors import FileDamaged
from shoal.runtime.kernel_cache import INT, kernel, matrix, types, vector

BLOCK_BYTES = 4 << 20
"""Bytes of text in a block, which is this long and ends with its row."""

ROW_BYTES_LIMIT = 64 << 20
"""Longest row. A file without line ends is no file of rows, and would be read into memory as one."""

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


class TextHead(NamedTuple):
    """Begin of the rows of a file, behind a byte order mark and a header."""

    begin: int = 0
    first_line: int = 1
    text: bytes = b""
    """The header."""


_BEGINNING = TextHead()


class LineScanner:
    """Finds rows in text that comes in chunks."""

    def __init__(
        self, rules: RowRules, head: TextHead = _BEGINNING, *, block_bytes: int | None = None, url: str = ""
    ) -> None:
        self._rules, self._block_bytes, self._url = rules, block_bytes or BLOCK_BYTES, url
        self._state = np.zeros(8, dtype=np.int64)
        self._state[[_BEGIN, _LINES, _FIRST_LINE]] = head.begin, head.first_line - 1, head.first_line
        self._at = head.begin

    def feed(self, chunk: bytes) -> list[LineSpan]:
        """The spans that end in the next chunk."""
        cuts = None if not chunk else self._feed_plain(chunk)
        cuts = self._feed_any(chunk).tolist() if cuts is None else cuts
        self._at += len(chunk)
        if not cuts and self._at - int(self._state[_BEGIN]) > ROW_BYTES_LIMIT:
            raise FileDamaged(url=self._url, problem=self._too_long())
        return [LineSpan(*cut) for cut in cuts]

    def _too_long(self) -> str:
        limit = f"{ROW_BYTES_LIMIT >> 20} MiB"
        if self._state[_MODE] == _IN_QUOTES:
            return f"the quote that opens in line {self._state[_QUOTE_LINE]:,} is not closed within {limit}"
        return f"line {self._state[_LINES] + 1:,} is longer than {limit}, the most that a row may have"

    def _feed_any(self, chunk: bytes) -> NDArray[np.int64]:
        """A line of (begin, end, rows, first line) for each stretch that ends here."""
        found = np.empty((len(chunk) // max(self._block_bytes, 1) + 1, 4), dtype=np.int64)
        data, rules = np.frombuffer(chunk, dtype=np.uint8), self._rules
        num_found = _scan(
            data, self._state, self._at, rules.delimiter, rules.quote, int(rules.cr_ends),
            int(rules.blanks_are_empty), self._block_bytes, found,
        )  # fmt: skip
        return found[:num_found]

    def finish(self) -> list[LineSpan]:
        """The last stretch, whose last line may lack its end; raises where a quote is still open."""
        state = self._state
        if state[_MODE] == _IN_QUOTES:
            problem = f"the quote that opens in line {state[_QUOTE_LINE]:,} is never closed"
            raise FileDamaged(url=self._url, problem=problem)
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
    for chunk in chunks:
        yield from scanner.feed(chunk)
    yield from scanner.finish()


def depth_of(text: bytes) -> int:
    """The deepest nesting of a line of JSON; brackets in strings are counted too."""
    return int(_depth(np.frombuffer(text, dtype=np.uint8)))


def rows_of(text: bytes, rules: RowRules) -> list[LineSpan]:
    """Every row of a text as a stretch of its own."""
    scanner = LineScanner(rules, block_bytes=1)
    return [*scanner.feed(text), *scanner.finish()]


_Array = NDArray[Any]


@kernel((vector(types.uint8),))
def _num_line_ends(data: _Array) -> Any:
    found: Any = 0
    for i in range(len(data)):
        found += np.int64(data[i] == 10)
    return found


@kernel((vector(types.uint8),))
def _depth(data: _Array) -> Any:
    deepest: Any = np.int64(0)
    depth: Any = np.int64(0)
    for i in range(len(data)):
        byte = np.int64(data[i])
        kind = byte & 0xDF  # [ and {, ] and } differ by one bit
        depth += np.int64(kind == 0x5B) - np.int64(kind == 0x5D)
        depth *= np.int64(byte != 10)
        deepest = max(deepest, depth)
    return deepest


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
    (vector(types.uint8), vector(types.int64, written=True), *[INT] * 6, matrix(types.int64, written=True))
)
def _scan(
    data: _Array, state: _Array, at: int, delimiter: int, quote: int, cr_ends: int, blanks_are_empty: int,
    block_bytes: int, cuts: _Array,
) -> int:  # fmt: skip
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
                cuts[num_cuts, 0], cuts[num_cuts, 1] = begin, at + end
                cuts[num_cuts, 2], cuts[num_cuts, 3] = rows, first_line
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

_HEAD_BYTES = 64 << 10  # read first: of many files only the header is looked at
_UNPACKED_BYTES = 1 << 20


class TextPlace(NamedTuple):
    """Origin of a text: file, row and line."""

    file: int
    url: str
    first_row: int = 0
    first_line: int = 1


class LineAddress:
    """Addresses of the rows of a text; lines are counted when the first is asked for."""

    def __init__(self, text: bytes, place: TextPlace, rules: RowRules) -> None:
        self._text, self._place, self._rules = text, place, rules

    @functools.cached_property
    def _lines(self) -> NDArray[np.int64]:
        """The line, from 0, in which each row begins."""
        scanner = LineScanner(self._rules, block_bytes=1)
        found = scanner._feed_any(self._text)[:, 3]
        return np.append(found, [part.first_line for part in scanner.finish()]) - 1

    def __call__(self, row: int) -> dict[str, Any]:
        """The arguments of BadSample that say where a row is."""
        place = self._place
        line = place.first_line + int(self._lines[row]) if row < len(self._lines) else None
        return {"where": place.url, "row": place.first_row + row + 1, "line": line}


class TextDecoder(ABC):
    """Decoder of the text of rows into columns."""

    columns: tuple[Column, ...]

    @abstractmethod
    def decode(self, text: bytes, num_rows: int, place: TextPlace) -> DecodedRows:
        """The rows of a text that holds so many."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """The types."""


class TextFiles:
    """Files of lines: plain ones are a table, read by range; any compressed one makes all of them a stream."""

    def __init__(self, files: Files, infos: Sequence[FileInfo], rules: RowRules, *, has_header: bool) -> None:
        self.files, self.infos, self._rules, self._has_header = files, infos, rules, has_header

    @functools.cached_property
    def heads(self) -> list[TextHead]:
        return in_threads(lambda file: next(self._begun(file))[0], range(len(self.infos)))

    def first_texts(self) -> Iterator[tuple[int, bytes]]:
        """(file, text) of whole rows from the beginnings of the files, for guessing types."""
        for file in range(len(self.infos)):
            for text, _, _ in self.texts(file):
                yield file, text

    def texts(self, file: int) -> Iterator[tuple[bytes, int, TextPlace]]:
        """(text, rows in it, where it is) of a file, from its beginning."""
        url = self.infos[file].url
        scanner: LineScanner | None = None
        held, begin, first_row = bytearray(), 0, 0  # a row of many chunks is copied once
        for head, chunk in itertools.chain(self._begun(file), [(None, b"")]):
            if scanner is None and head is not None:
                scanner = LineScanner(self._rules, head, url=url)
                chunk, begin = chunk[head.begin :], head.begin
            assert scanner is not None
            held += chunk
            for part in scanner.feed(chunk) if head is not None else scanner.finish():
                text = bytes(memoryview(held)[part.begin - begin : part.end - begin])
                yield text, part.num_rows, TextPlace(file, url, first_row, part.first_line)
                del held[: part.end - begin]
                begin, first_row = part.end, first_row + part.num_rows

    def spans(self) -> list[list[LineSpan]]:
        """Spans of each plain file; read once, cached by the files' identity."""

        def scan(file: int) -> list[list[int]]:
            info, head = self.infos[file], self.heads[file]
            scanner = LineScanner(self._rules, head, url=info.url)
            return [list(part) for part in spans_of(self._chunks(info, head.begin), scanner)]

        begins = [head.begin for head in self.heads]
        identity = identity_of(self.infos, scan="rows", begins=begins, rules=list(self._rules))
        found = remembered(identity, lambda: in_threads(scan, range(len(self.infos))))
        return [[LineSpan(*part) for part in parts] for parts in found]

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
        if any(is_compressed(info) for info in self.infos):
            return open_row_stream(
                TextStream(self, decoder, description),
                format=description["format"],
                files=self.infos,
                is_compressed=is_compressed,
                label=label,
                on_error=on_error,
                max_skips=max_skips,
            )
        name = identity_of(self.infos, **description, types=decoder.describe(), **identity)
        table = TextTable(self, decoder, identity=name, description=description)
        return TableSource(table, label=label, cache=cache, on_error=on_error, max_skips=max_skips)

    def _begun(self, file: int) -> Iterator[tuple[TextHead, bytes]]:
        """Chunks of a file, the first long enough to show where its rows begin."""
        info, head, first = self.infos[file], None, b""
        for chunk in self._chunks(info):
            if head is not None:
                yield head, chunk
                continue
            first += chunk
            head = self._head(first, info.url, is_whole=False)
            if head is not None:
                yield head, first
        if head is None:
            head = self._head(first, info.url, is_whole=True)
            assert head is not None
            yield head, first

    def _head(self, text: bytes, url: str, *, is_whole: bool) -> TextHead | None:
        """Head at the beginning of a file; None if more of it is needed. Refuses text that is not UTF-8 or ASCII."""
        if text[:2] in (b"\xff\xfe", b"\xfe\xff") or (len(text) > 3 and text[:4].count(0) >= 2):
            raise FileDamaged(
                url=url, problem="it is text in UTF-16 or UTF-32, or no text at all; UTF-8 is read"
            )
        begin = 3 if text.startswith(b"\xef\xbb\xbf") else 0
        if not self._has_header:
            return TextHead(begin)
        scanner = LineScanner(self._rules, TextHead(begin), block_bytes=1, url=url)
        rows = scanner.feed(text[begin:]) or (scanner.finish() if is_whole else [])
        if rows:
            first, lines = rows[0], text[: rows[0].end].count(b"\n")
            return TextHead(first.end, lines + 1, text[first.begin : first.end])
        if is_whole:
            raise FileDamaged(url=url, problem="it is empty: it has not even a header")
        return None

    def _chunks(self, info: FileInfo, begin: int = 0) -> Iterator[bytes]:
        if not is_compressed(info):
            end = begin if begin else min(_HEAD_BYTES, info.num_bytes)
            if end > begin:
                yield self.files.read(info.url, begin, end)
            for at in range(end, info.num_bytes, _CHUNK_BYTES):
                yield self.files.read(info.url, at, min(at + _CHUNK_BYTES, info.num_bytes))
            return
        with self.files.open(info.url) as packed, closing(_unpacked(info.url, packed)) as file:
            try:
                while chunk := file.read(_UNPACKED_BYTES):
                    yield chunk
            except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                problem = f"it cannot be unpacked to its end ({error}), so it is only the beginning of a file, or none of that kind"
                raise FileDamaged(url=info.url, problem=problem) from error


class TextTable:
    """Rows of one or several plain files of lines."""

    def __init__(
        self, text: TextFiles, decoder: TextDecoder, *, identity: str, description: dict[str, Any]
    ) -> None:
        self._files, self._infos, self._decoder = text.files, text.infos, decoder
        self.columns, self.identity, self._description = decoder.columns, identity, description
        row_bytes = sum(column.dtype.itemsize for column in self.columns if not column.is_ragged)
        is_ragged = any(column.is_ragged for column in self.columns)
        self._parts: list[tuple[LineSpan, TextPlace]] = []
        blocks: list[TableBlock] = []
        for file, (info, parts) in enumerate(zip(text.infos, text.spans(), strict=True)):
            first_row = 0
            for part in parts:
                self._parts.append((part, TextPlace(file, info.url, first_row, part.first_line)))
                where = f"{info.url}, bytes {part.begin} to {part.end}"
                num_bytes = part.num_rows * row_bytes + (part.end - part.begin if is_ragged else 0)
                blocks.append(TableBlock(part.num_rows, num_bytes, where, first_row))
                first_row += part.num_rows
        self.blocks = tuple(blocks)

    def read(self, block: int) -> DecodedRows:
        part, place = self._parts[block]
        text = self._files.read(place.url, part.begin, part.end)
        return self._decoder.decode(text, part.num_rows, place)

    def is_here(self, block: int) -> bool:
        return self._files.is_here(self._parts[block][1].url)

    def stage(self) -> None:
        self._files.stage()

    def describe(self) -> dict[str, Any]:
        return {**self._description, "num_files": len(self._infos)}


class TextStream(RowStream):
    """Rows of files of lines, one file after the other."""

    def __init__(self, text: TextFiles, decoder: TextDecoder, description: dict[str, Any]) -> None:
        self._text, self._decoder, self._description = text, decoder, description
        self.columns = decoder.columns

    def __iter__(self) -> Iterator[DecodedRows]:
        for file in range(len(self._text.infos)):
            for text, num_rows, place in self._text.texts(file):
                yield self._decoder.decode(text, num_rows, place)

    def describe(self) -> dict[str, Any]:
        columns = [column.describe() for column in self.columns]
        num_files = len(self._text.infos)
        return {"source": "stream", **self._description, "num_files": num_files, "columns": columns}


def is_compressed(info: FileInfo) -> bool:
    """True for a file that can only be read from its beginning."""
    return info.url.lower().endswith(COMPRESSED)


def _unpacked(url: str, packed: Any) -> Any:
    name = url.lower()
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=packed, mode="rb")
    if name.endswith(".bz2"):
        return bz2.BZ2File(packed)
    if name.endswith(".xz"):
        return lzma.LZMAFile(packed)
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), "zstd")
