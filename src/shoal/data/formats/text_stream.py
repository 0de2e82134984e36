"""Compressed files of lines: a stream, because a row in them is found only by unpacking all before it."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from shoal.data.files import FileInfo, Files
from shoal.data.formats.lines import Rules, Scanner
from shoal.data.formats.row_stream import RowStream, open_row_stream
from shoal.data.formats.table import Rows
from shoal.data.formats.text_table import COMPRESSED, Decoder, Head, Place, about, head_of
from shoal.data.stream import Stream
from shoal.errors import DataError, FileDamaged

_CHUNK_BYTES = 1 << 20


def is_compressed(url: str) -> bool:
    """Whether a file can only be read from its beginning."""
    return url.lower().endswith(COMPRESSED)


class UnpackedFiles:
    """Text of files, some of them compressed, from their beginnings."""

    def __init__(self, files: Files, infos: Sequence[FileInfo], rules: Rules, *, has_header: bool) -> None:
        self._files, self.infos, self._rules, self._has_header = files, infos, rules, has_header

    def head(self, file: int) -> Head:
        """Where the rows of a file begin."""
        for head, _ in self._begun(file):
            return head
        raise AssertionError("a head is found, or an error raised")

    def first_texts(self) -> Iterator[tuple[int, bytes]]:
        """(file, text) of whole rows from the beginnings of the files, for guessing types."""
        for file in range(len(self.infos)):
            for text, _, _ in self.texts(file):
                yield file, text

    def texts(self, file: int) -> Iterator[tuple[bytes, int, Place]]:
        """(text, rows in it, where it is) of a file."""
        url = self.infos[file].url
        scanner, held, begin, first_row = None, b"", 0, 0
        for head, chunk in self._begun(file):
            if scanner is None:
                scanner = Scanner(self._rules, begin=head.begin, first_line=head.first_line)
                chunk, begin = chunk[head.begin :], head.begin
            held += chunk
            for part in scanner.feed(chunk):
                yield (
                    held[part.begin - begin : part.end - begin],
                    part.num_rows,
                    Place(file, url, first_row, part.first_line),
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
                Place(file, url, first_row, part.first_line),
            )

    def _begun(self, file: int) -> Iterator[tuple[Head, bytes]]:
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
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
            except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                problem = f"it cannot be unpacked to its end ({error}), so it is only the beginning of a file, or none of that kind"
                raise FileDamaged(url=info.url, problem=problem) from error


class TextStream(RowStream):
    """Rows of files of lines, one file after the other."""

    def __init__(self, files: UnpackedFiles, decoder: Decoder, description: dict[str, Any]) -> None:
        self._files, self._decoder, self._description = files, decoder, description
        self.columns = decoder.columns

    def __iter__(self) -> Iterator[Rows]:
        for file in range(len(self._files.infos)):
            for text, num_rows, place in self._files.texts(file):
                yield self._decoder.decode(text, num_rows, place)

    def describe(self) -> dict[str, Any]:
        """Format, files and columns."""
        columns = [column.describe() for column in self.columns]
        return {
            "source": "stream",
            **self._description,
            "num_files": len(self._files.infos),
            "columns": columns,
        }


def open_text_stream(
    files: UnpackedFiles,
    decoder: Decoder,
    description: dict[str, Any],
    *,
    label: str | Sequence[str] | None,
    on_error: str,
    max_skips: int | None,
) -> Stream:
    """The stream of files of which some are compressed."""
    return open_row_stream(
        TextStream(files, decoder, description),
        format=description["format"],
        files=files.infos,
        is_compressed=lambda info: is_compressed(info.url),
        label=label,
        on_error=on_error,
        max_skips=max_skips,
    )


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
