"""Parquet files as one table: row groups are the blocks.

Footers are read when the table is opened; unselected columns, and row groups that `where=` rules
out by their statistics, are never read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from shoal.data.arguments import OnError, skipping
from shoal.data.files import FileInfo, Files, SharedFiles, Where, identity_of, in_threads, remembered
from shoal.data.formats.arrow import Fill, as_indices, as_numpy, columns_of, decoded, file_of
from shoal.data.formats.table import BadRows, Column, DecodedRows, TableBlock, empty_rows, joined_rows
from shoal.data.formats.table_source import TableSource, check_names, chosen, label_names
from shoal.data.remote.copies import CopiedFiles
from shoal.data.remote.located_files import files_at
from shoal.errors import ConfigError, FileDamaged, NoSuchColumn, SchemasDiffer

OPERATIONS = ("==", "=", "!=", "<", "<=", ">", ">=", "in", "not in")

_FUNCTIONS = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}


class ColumnBounds(NamedTuple):
    """Statistics of a column in a row group, known without reading it."""

    smallest: Any
    largest: Any
    has_nulls: bool
    """True also if they were not counted."""


class Condition(NamedTuple):
    """One comparison of a column with a value, or with several."""

    column: str
    operation: str
    value: Any
    is_exact: bool
    """Of a type whose statistics are its values: no NaN beside them, no long string cut short."""

    def decide(self, known: ColumnBounds | None) -> bool | None:
        """True if all rows satisfy it, False if none does, None if only reading them tells."""
        if known is None:
            return None
        low, high, value = known.smallest, known.largest, self.value
        try:
            match self.operation:
                case "<":
                    holds, fails = high < value, low >= value
                case "<=":
                    holds, fails = high <= value, low > value
                case ">":
                    holds, fails = low > value, high <= value
                case ">=":
                    holds, fails = low >= value, high < value
                case _:
                    values = value if self.operation in ("in", "not in") else [value]
                    holds = self.is_exact and low == high and low in values
                    fails = all(one < low or one > high for one in values)
                    if self.operation in ("!=", "not in"):
                        holds, fails = fails, holds
        except TypeError:
            return None
        if fails:
            return False
        return True if holds and self.is_exact and not known.has_nulls else None

    def mask(self, table: pa.Table) -> NDArray[np.bool_]:
        """Rows that satisfy it."""
        array: Any = table.column(self.column)
        if self.operation in ("in", "not in"):
            found: Any = pc.is_in(array, value_set=pa.array(list(self.value)).cast(array.type))
            if self.operation == "not in":
                found = pc.and_(pc.invert(found), pc.is_valid(array))
        else:
            found = pc.call_function(_FUNCTIONS[self.operation], [array, pa.scalar(self.value)])
        return as_numpy(pc.fill_null(found, False).combine_chunks(), np.bool_)


class Predicate:
    """`where=`: any of several lists of conditions, each list as a whole. A missing value satisfies no condition.

    Statistics are evaluated here and not by pyarrow's own pruning, which drops rows with NaN: `x !=
    5.0` over [5.0, NaN] gives it no row group (26.0).
    """

    def __init__(self, where: Any, types: Mapping[str, pa.DataType], file: str) -> None:
        """`types` are those of the columns that `file` has; refuses values that cannot be compared."""
        self._any_of = [[_condition(one, types, file) for one in group] for group in _normal(where)]
        self.columns = sorted({one.column for group in self._any_of for one in group})

    def decide(self, known: Mapping[str, ColumnBounds]) -> bool | None:
        """True where all rows are kept, False where none is, None where only reading them tells."""
        decisions = []
        for group in self._any_of:
            each = [one.decide(known.get(one.column)) for one in group]
            decisions.append(False if False in each else None if None in each else True)
        return True if True in decisions else None if None in decisions else False

    def mask(self, table: pa.Table) -> NDArray[np.bool_]:
        """The rows of a table with these columns that are kept."""
        kept = np.zeros(table.num_rows, dtype=bool)
        for group in self._any_of:
            kept |= np.logical_and.reduce([one.mask(table) for one in group])
        return kept

    def describe(self) -> list[list[list[Any]]]:
        return [[[one.column, one.operation, _plain(one.value)] for one in group] for group in self._any_of]


def _normal(where: Any) -> list[Sequence[Any]]:
    if isinstance(where, tuple) and len(where) == 3 and isinstance(where[0], str):
        return [[where]]
    if not isinstance(where, (list, tuple)) or not where:
        raise ConfigError(_shape(where))
    if all(isinstance(group, list) and group for group in where):
        return list(where)
    return [list(where)]


def _condition(given: Any, types: Mapping[str, pa.DataType], file: str) -> Condition:
    if not isinstance(given, (tuple, list)) or len(given) != 3 or given[1] not in OPERATIONS:
        raise ConfigError(_shape(given))
    name, operation, value = given
    if name not in types:
        raise NoSuchColumn(asked=[name], there=list(types), where=file, asked_by="where=")
    operation, kind = "==" if operation == "=" else operation, types[name]
    if operation in ("in", "not in"):
        if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
            raise ConfigError(
                f"where= compares '{name}' by '{operation}' with {value!r}: give a list of values"
            )
        if not value or any(each is None for each in value):
            raise ConfigError(
                f"where= compares '{name}' by '{operation}' with {value!r}: give values, at least one"
            )
        value = sorted(value)
    elif value is None:
        raise ConfigError(
            f"where= compares '{name}' with None, and a missing value is neither equal to anything nor above or below it"
        )
    try:
        if operation in ("in", "not in"):
            pa.array(value).cast(kind)
        else:
            value = _converted(value, kind)
            pc.call_function(_FUNCTIONS[operation], [pa.array([None], kind), pa.scalar(value)])
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise ConfigError(
            f"where= compares the column '{name}', of type {kind}, with {value!r}, which cannot be: {error}"
        ) from error
    is_exact = bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_temporal(kind))
    return Condition(name, operation, value, is_exact)


def _converted(value: Any, kind: Any) -> Any:
    """A time may be given as text."""
    if isinstance(value, str) and pa.types.is_temporal(kind):
        return pa.scalar(value).cast(kind).as_py()
    return value


def _shape(given: Any) -> str:
    return (
        f"where= takes conditions like [('price', '>', 3), ('country', 'in', ['de', 'fr'])], all of which must hold, or "
        f"a list of such lists, any of which must; the operations are {', '.join(OPERATIONS)}. Got {given!r}."
    )


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value if isinstance(value, (bool, int, float, str)) else str(value)


ENDINGS = (".parquet", ".pq", ".parq")

_BLOCK_BYTES = 8 << 20  # small row groups are read several at a time, up to this


def open_parquet(
    path: Where | CopiedFiles,
    *,
    label: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    where: Any = None,
    fill: Mapping[str, Any] | None = None,
    cache: Any = "auto",
    location: str = "shared",
    spread: str = "on-demand",
    on_error: OnError = "raise",
    max_skips: int | None = None,
) -> TableSource:
    """Rows of Parquet files: a file, a list, a directory, a pattern, or any URL that fsspec opens.

    A sample is a dict of columns, or (dict, label). `columns` are the only
    ones that are read. `where` keeps the rows that fulfil all of its
    conditions, or with a list of lists those of any list; row groups whose
    statistics rule them out are not read. A missing value is an error that
    names its row, or what `fill` says. Timestamps and dates are int64
    nanoseconds since 1970, decimals float64, lists of several lengths are
    padded to the longest of a batch. With `on_error="skip"` bad rows are
    left out, at most `max_skips` of them.

        Dataset.from_parquet("clicks/*.parquet", label="clicked")
        Dataset.from_parquet("s3://bucket/clicks/", columns=["price", "user"], where=[("price", ">", 3)])
    """
    files, place = files_at(path, location, spread)
    on_error, max_skips = skipping("", on_error, max_skips)
    table = ParquetTable(
        place, columns=columns, needed=label_names(label), where=where, fill=fill, files=files
    )
    return TableSource(table, label=label, cache=cache, on_error=on_error, max_skips=max_skips)


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive row groups of a file that are read at once."""

    file: int
    groups: tuple[int, ...]


class ParquetTable:
    """Row groups of one or several files of one schema."""

    def __init__(
        self,
        path: Where,
        *,
        columns: Sequence[str] | None = None,
        needed: Sequence[str] = (),
        where: Any = None,
        fill: Mapping[str, Any] | None = None,
        files: Files | None = None,
    ) -> None:
        self._files = files or SharedFiles()
        self._infos = self._files.expand(path, ENDINGS)
        self._footers: list[pq.FileMetaData] = in_threads(self._footer, self._infos)
        schema, first = self._footers[0].schema.to_arrow_schema(), self._infos[0].url
        self._names = chosen(schema.names, columns, first, needed=needed)
        check_names("fill=", fill, self._names, first)
        self._predicate: Predicate | None = None
        if where is not None:
            self._predicate = Predicate(where, {field.name: field.type for field in schema}, first)
        compared = self._predicate.columns if self._predicate else ()
        self._read_names = [*self._names, *(name for name in compared if name not in self._names)]
        self._check_schemas(schema)
        self.columns: tuple[Column, ...] = columns_of(schema, first, self._names)
        self._fill = Fill(fill, self.columns)
        kept = self._predicate.describe() if self._predicate else None
        self.identity = identity_of(self._infos, format="parquet", columns=self._names, where=kept, fill=fill)
        self._parts: list[_Part] = []
        self._first_rows: list[list[int]] = []
        self._counts = self._kept_rows()
        self.blocks = self._plan()
        for file, info in enumerate(self._infos):
            self._files.narrow(info.url, self._wanted_ranges(file))

    def read(self, block: int) -> DecodedRows:
        part = self._parts[block]
        try:
            return self._read(part.file, part.groups)
        except (pa.ArrowException, OSError):
            # One of them is damaged; the others may be intact.
            return joined_rows([self._read_or_bad(part.file, group) for group in part.groups])

    def _wanted_ranges(self, file: int) -> list[tuple[int, int]]:
        """Byte ranges of the chosen columns, and the footer: for remote files only these are transferred."""
        footer = self._footers[file]
        tail = footer.serialized_size + (64 << 10)  # some of what stands before it is read with it
        ranges = [(max(self._infos[file].num_bytes - tail, 0), self._infos[file].num_bytes)]
        wanted = set(self._read_names)
        for group in range(footer.num_row_groups):
            for number in range(footer.row_group(group).num_columns):
                column = footer.row_group(group).column(number)
                if _belongs(column.path_in_schema, wanted):
                    begin = min(
                        column.dictionary_page_offset or column.data_page_offset, column.data_page_offset
                    )
                    ranges.append((begin, begin + column.total_compressed_size))
        return ranges

    def _read(self, file: int, groups: Sequence[int]) -> DecodedRows:
        table = self._open(file).read_row_groups(list(groups), columns=self._read_names, use_threads=True)
        kept: NDArray[np.int64] | None = None
        if self._predicate:
            kept = np.flatnonzero(self._predicate.mask(table))
            table = table.take(as_indices(kept))
        url, first = self._infos[file].url, int(self._first_rows[file][groups[0]]) + 1

        def address(row: int) -> dict[str, Any]:
            return {"where": url, "row": first + (row if kept is None else int(kept[row]))}

        return decoded(table, self.columns, self._fill, address)

    def _read_or_bad(self, file: int, group: int) -> DecodedRows:
        """A row group, or one of which each row is a bad sample."""
        try:
            return self._read(file, [group])
        except (pa.ArrowException, OSError) as error:
            where, first = self._where(file, [group]), int(self._first_rows[file][group]) + 1
            bad = BadRows(lambda row: {"where": where, "row": first + row})
            num_rows = self._counts[file][group]
            for row in range(num_rows):
                bad.add(row, None, f"its row group cannot be decoded ({_short(error)})")
            return empty_rows(self.columns, num_rows, bad)

    def is_here(self, block: int) -> bool:
        return self._files.is_here(self._infos[self._parts[block].file].url)

    def stage(self) -> None:
        self._files.stage()

    def describe(self) -> dict[str, Any]:
        said: dict[str, Any] = {"format": "parquet", "num_files": len(self._infos)}
        return {**said, "where": self._predicate.describe()} if self._predicate else said

    def _footer(self, info: FileInfo) -> pq.FileMetaData:
        if info.num_bytes == 0:
            raise FileDamaged(url=info.url, problem="it is empty, and even a table without rows has a footer")
        try:
            return pq.read_metadata(file_of(self._files, info))
        except (pa.ArrowException, OSError) as error:
            problem = f"its {info.num_bytes} bytes do not end in a Parquet footer ({_short(error)}), so it is no Parquet file or only the beginning of one"
            raise FileDamaged(url=info.url, problem=problem) from error

    def _open(self, file: int) -> pq.ParquetFile:
        """One per reader: they are not thread-safe."""
        return pq.ParquetFile(
            file_of(self._files, self._infos[file]),
            metadata=self._footers[file],
            pre_buffer=True,
            page_checksum_verification=True,
        )

    def _check_schemas(self, first: pa.Schema) -> None:
        for info, footer in zip(self._infos[1:], self._footers[1:], strict=True):
            other = footer.schema.to_arrow_schema()
            differences = []
            for name in self._read_names:
                if name not in other.names:
                    differences.append(f"it has no column '{name}'")
                elif other.field(name).type != first.field(name).type:
                    kinds = f"{other.field(name).type}, not {first.field(name).type}"
                    differences.append(f"its column '{name}' is of type {kinds}")
            if len(self._names) == len(first.names):
                more = [name for name in other.names if name not in first.names]
                differences += [f"it has a column '{name}' more" for name in more]
            if differences:
                raise SchemasDiffer(first=self._infos[0].url, other=info.url, differences=differences)

    def _plan(self) -> tuple[TableBlock, ...]:
        """Blocks of the row groups that have rows to give, small ones joined."""
        blocks = []
        for file, footer in enumerate(self._footers):
            infos = [footer.row_group(group) for group in range(footer.num_row_groups)]
            first_rows = np.cumsum([0, *(info.num_rows for info in infos)]).tolist()
            self._first_rows.append(first_rows)
            counts, sizes = self._counts[file], [self._decoded_bytes(info) for info in infos]
            for groups in runs(counts, sizes, _BLOCK_BYTES):
                self._parts.append(_Part(file, groups))
                num_rows = sum(counts[group] for group in groups)
                num_bytes = sum(sizes[group] for group in groups)
                blocks.append(
                    TableBlock(num_rows, num_bytes, self._where(file, groups), first_rows[groups[0]])
                )
        return tuple(blocks)

    def _where(self, file: int, groups: Sequence[int]) -> str:
        number = f"row group {groups[0]}" if len(groups) == 1 else f"row groups {groups[0]} to {groups[-1]}"
        return f"{self._infos[file].url}, {number}"

    def _kept_rows(self) -> list[list[int]]:
        """Rows of each row group of each file that `where=` keeps; reads the groups that statistics do not decide."""
        counts = [
            [footer.row_group(g).num_rows for g in range(footer.num_row_groups)] for footer in self._footers
        ]
        if self._predicate is None:
            return counts
        predicate = self._predicate

        def count() -> list[list[int]]:
            undecided = []
            for file, footer in enumerate(self._footers):
                for group in range(footer.num_row_groups):
                    decision = predicate.decide(_statistics(footer.row_group(group), predicate.columns))
                    if decision is None:
                        undecided.append((file, group))
                    elif not decision:
                        counts[file][group] = 0
            for (file, group), kept in zip(undecided, in_threads(self._count, undecided), strict=True):
                counts[file][group] = kept
            return counts

        kept: list[list[int]] = remembered(f"{self.identity}-rows", count)
        return kept

    def _count(self, at: tuple[int, int]) -> int:
        assert self._predicate
        file, group = at
        try:
            table = self._open(file).read_row_group(group, columns=self._predicate.columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            url = self._infos[file].url
            problem = (
                f"the columns that where= compares cannot be decoded in row group {group} ({_short(error)})"
            )
            raise FileDamaged(url=url, problem=problem) from error
        return int(self._predicate.mask(table).sum())

    def _decoded_bytes(self, group: Any) -> int:
        fixed = sum(column.row_bytes for column in self.columns if not column.is_ragged)
        ragged = {column.name for column in self.columns if column.is_ragged}
        chunks = (group.column(number) for number in range(group.num_columns)) if ragged else ()
        sizes = [chunk.total_uncompressed_size for chunk in chunks if _belongs(chunk.path_in_schema, ragged)]
        return int(group.num_rows * fixed + sum(sizes))


def _belongs(path: str, names: Collection[str]) -> bool:
    """True where a leaf of the file is of one of these columns: lists have theirs below them, and names may have points."""
    return path in names or any(path.startswith(f"{name}.") for name in names)


def runs(counts: Sequence[int], sizes: Sequence[int], most_bytes: int) -> list[tuple[int, ...]]:
    """Neighbours that have rows, joined as long as they stay below a size."""
    found: list[list[int]] = []
    total = 0
    for number, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        if not count:
            continue
        follows = bool(found) and found[-1][-1] == number - 1
        if follows and total + size <= most_bytes:
            found[-1].append(number)
            total += size
        else:
            found.append([number])
            total = size
    return [tuple(run) for run in found]


def _statistics(group: Any, names: Sequence[str]) -> dict[str, ColumnBounds]:
    known = {}
    for number in range(group.num_columns):
        chunk = group.column(number)
        if chunk.path_in_schema in names and chunk.is_stats_set and chunk.statistics.has_min_max:
            found = chunk.statistics
            has_nulls = not found.has_null_count or found.null_count > 0
            known[chunk.path_in_schema] = ColumnBounds(found.min, found.max, has_nulls)
    return known


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text if len(text) < 200 else f"{text[:200]}..."
