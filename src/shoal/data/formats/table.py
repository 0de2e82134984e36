"""Tables: a schema, blocks of rows, and the columns of one block.

Formats implement `Table`; `TableSource` makes samples of any of them. Nothing
here reads a file. A list of strings is stored as one string of bytes per row:
the number of strings and the length of each, as uint32, then the strings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shoal.data.tree import as_objects
from shoal.errors import BadSample


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a schema. What its rows are in memory follows from it."""

    name: str
    dtype: np.dtype[Any]
    """Type of one element; uint8 for text and bytes, whose rows are ragged."""

    shape: tuple[int, ...] = ()
    """Shape of one row: () a number, (k,) a list of always k numbers; () in a ragged column."""

    is_ragged: bool = False
    """Rows are lists of several lengths, and come as a `Ragged`."""

    kind: Literal["number", "text", "bytes"] = "number"
    """Text is a ragged column of UTF-8; bytes are what they are."""

    is_list: bool = False
    """Whether rows of text or bytes are lists of them, packed by `pack_lists`."""

    @classmethod
    def text(cls, name: str, *, is_list: bool = False) -> Column:
        return cls(name, np.dtype(np.uint8), is_ragged=True, kind="text", is_list=is_list)

    @classmethod
    def binary(cls, name: str, *, is_list: bool = False) -> Column:
        return cls(name, np.dtype(np.uint8), is_ragged=True, kind="bytes", is_list=is_list)

    @classmethod
    def ragged(cls, name: str, dtype: Any) -> Column:
        return cls(name, np.dtype(dtype), is_ragged=True)

    @property
    def type_name(self) -> str:
        """As people say it: float32, str, list of int64."""
        if self.kind != "number":
            name = "str" if self.kind == "text" else "bytes"
            return f"list of {name}" if self.is_list else name
        if self.is_ragged:
            return f"list of {self.dtype}"
        return f"{self.dtype}{list(self.shape)}" if self.shape else str(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory, where rows are of one size."""
        return self.dtype.itemsize * math.prod(self.shape)

    def describe(self) -> dict[str, Any]:
        return {"at": self.name, "dtype": self.type_name, "shape": list(self.shape)}


class Ragged(NamedTuple):
    """Rows of several lengths: row i is values[offsets[i]:offsets[i + 1]]."""

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of(cls, rows: list[Any], dtype: Any) -> Ragged:
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        parts = [np.asarray(row, dtype=dtype) for row in rows]
        values = np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
        return cls(values, offsets)

    @classmethod
    def of_bytes(cls, rows: list[bytes]) -> Ragged:
        """Text as UTF-8, or bytes, from one object per row."""
        return cls.of([np.frombuffer(row, dtype=np.uint8) for row in rows], np.uint8)

    def row(self, number: int) -> NDArray[Any]:
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    def take(self, rows: NDArray[np.int64]) -> Ragged:
        begins = self.offsets[rows]
        lengths = self.offsets[rows + 1] - begins
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # Where each value comes from: its row's beginning, and how far into the row it is.
        at = np.repeat(begins - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Ragged(self.values[at], offsets)


@dataclass(frozen=True, slots=True)
class TableBlock:
    """Rows that are read in one piece: a row group, a span of lines, a range of keys."""

    num_rows: int
    num_bytes: int
    """About, decoded."""

    where: str
    """Place for messages: "clicks-03.parquet, row group 7"."""

    first_row: int = 0
    """Number of its first row in the file, from 0; messages count from 1."""


Address = Callable[[int], dict[str, Any]]
"""Row of a block to the arguments of BadSample that say where it is."""


class BadRows(Mapping[int, BadSample]):
    """Errors of the bad rows of a block, made when they are asked for: there may be many."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._found: dict[int, tuple[str | None, str]] = {}

    def add(self, row: int, column: str | None, reason: str) -> None:
        """Record an error of a row; the first one of a row is the one reported."""
        self._found.setdefault(row, (column, reason))

    def __getitem__(self, row: int) -> BadSample:
        column, reason = self._found[row]
        return BadSample(**self._address(row), column=column, reason=reason)

    def __iter__(self) -> Iterator[int]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, row: object) -> bool:
        return row in self._found


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """The decoded rows of a block. Arrays may be read-only views of what was read."""

    num_rows: int
    columns: dict[str, NDArray[Any] | Ragged]
    """Columns by name, as the schema says: [num_rows, *shape], or a Ragged of num_rows."""

    bad: Mapping[int, BadSample] = field(default_factory=dict)
    """Row within the block to its error; its columns hold placeholder values of the right type."""


class Table(Protocol):
    """Columns in blocks. Reading a block twice gives the same; several threads may read at once."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The schema."""

    @property
    def blocks(self) -> tuple[TableBlock, ...]:
        """Blocks in the order of their rows."""

    @property
    def identity(self) -> str:
        """Changes when the data does (paths, sizes, times, options): the key of caches."""

    def read(self, block: int) -> DecodedRows:
        """Decode one block. A row that cannot be decoded is in `DecodedRows.bad`; what concerns a whole file raises."""

    def describe(self) -> dict[str, Any]:
        """Format, files, sizes and columns, fit for JSON."""


@runtime_checkable
class StagedTable(Protocol):
    """A table of files, which may have to come from elsewhere."""

    def stage(self) -> None:
        """Copy all of them to this host."""

    def is_here(self, block: int) -> bool:
        """True where this host has the file of a block itself."""


@runtime_checkable
class GrowingTable(Protocol):
    """A table whose blocks come while it is read: a stream of records."""

    @property
    def num_rows(self) -> int:
        """Rows of all blocks; ENDLESS where there is no last one."""

    def bounds_to(self, num_rows: int) -> list[int]:
        """The rows at which blocks begin, and the end of the last, of at least so many rows; waits for them.

        The same list, grown, from call to call, unless the blocks are others than before.
        """


def empty_rows(columns: Sequence[Column], num_rows: int, bad: Mapping[int, BadSample]) -> DecodedRows:
    """Placeholder rows of the right types, for a block of which every row is bad."""
    made: dict[str, NDArray[Any] | Ragged] = {}
    for column in columns:
        if column.is_ragged:
            made[column.name] = Ragged(np.zeros(0, column.dtype), np.zeros(num_rows + 1, dtype=np.int64))
        else:
            made[column.name] = np.zeros((num_rows, *column.shape), column.dtype)
    return DecodedRows(num_rows, made, bad)


def joined_rows(parts: Sequence[DecodedRows]) -> DecodedRows:
    """Rows one behind the other."""
    columns: dict[str, NDArray[Any] | Ragged] = {}
    for name in parts[0].columns:
        pieces = [part.columns[name] for part in parts]
        ragged = [piece for piece in pieces if isinstance(piece, Ragged)]
        arrays = [piece for piece in pieces if not isinstance(piece, Ragged)]
        columns[name] = joined_ragged(ragged) if ragged else np.concatenate(arrays)
    bad: dict[int, BadSample] = {}
    num_rows = 0
    for part in parts:
        bad |= {num_rows + row: part.bad[row] for row in part.bad}
        num_rows += part.num_rows
    return DecodedRows(num_rows, columns, bad)


def joined_ragged(pieces: Sequence[Ragged]) -> Ragged:
    """Rows of several lengths one behind the other."""
    lengths = np.concatenate([np.diff(piece.offsets) for piece in pieces])
    values = [piece.values[piece.offsets[0] : piece.offsets[-1]] for piece in pieces]
    return Ragged(np.concatenate(values), np.concatenate(([0], np.cumsum(lengths))))


_WORD = np.dtype("<u4")


def pack_lists(texts: Ragged, offsets: NDArray[np.int64]) -> Ragged:
    """One row for each list: list i holds the strings offsets[i] to offsets[i + 1] - 1 of `texts`."""
    counts, lengths = np.diff(offsets), np.diff(texts.offsets)
    first, last = texts.offsets[offsets[:-1]], texts.offsets[offsets[1:]]
    head_bytes, text_bytes = _WORD.itemsize * (1 + counts), last - first
    begins = np.concatenate(([0], np.cumsum(head_bytes + text_bytes)))
    values = np.empty(int(begins[-1]), np.uint8)
    words = np.insert(lengths[offsets[0] : offsets[-1]], offsets[:-1] - offsets[0], counts).astype(_WORD)
    values[_places(begins[:-1], head_bytes)] = words.view(np.uint8)
    values[_places(begins[:-1] + head_bytes, text_bytes)] = texts.values[
        texts.offsets[offsets[0]] : texts.offsets[offsets[-1]]
    ]
    return Ragged(values, begins)


def unpack_list(row: bytes, *, is_text: bool) -> NDArray[Any]:
    """The strings of one row: an array of str, or one of objects that are bytes. No bytes at all are an empty list."""
    num_strings = int(np.frombuffer(row, _WORD, 1)[0]) if row else 0
    lengths = np.frombuffer(row, _WORD, num_strings, _WORD.itemsize) if num_strings else np.zeros(0, _WORD)
    ends = _WORD.itemsize * (1 + num_strings) + np.cumsum(lengths, dtype=np.int64)
    strings = [row[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
    if is_text:
        return np.array([string.decode() for string in strings], dtype=np.str_)
    return as_objects(strings)


def _places(begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """begins[i], begins[i] + 1, ... of each i, lengths[i] of them, one behind the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(begins - before, lengths) + np.arange(int(lengths.sum()))
