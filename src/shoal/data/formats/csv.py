"""CSV files as one table, parsed by Arrow.

Types are found in the first rows, or said by `schema=`; numbers with a point
are float32, as torch means floats, and whole ones int64. A block that Arrow
refuses is read again as text, value by value, to name each bad row of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.data.arguments import OnError, by_name, flag, skipping
from shoal.data.arguments import names as list_of_names
from shoal.data.files import Where
from shoal.data.formats.arrow import ArrowArray, BadRows, Fill, as_file, as_indices, decoded, shown
from shoal.data.formats.lines import (
    COMPRESSED,
    LineAddress,
    RowRules,
    TextFiles,
    TextHead,
    TextPlace,
    rows_of,
)
from shoal.data.formats.schema import (
    arrow_type,
    as_torch_means,
    check_names,
    chosen,
    columns_of,
    label_names,
    readable_type,
    wrong_value,
)
from shoal.data.formats.table import DecodedRows
from shoal.data.formats.table_source import TableSource
from shoal.data.remote.copies import CopiedFiles
from shoal.data.remote.located_files import files_at
from shoal.data.stream import Stream
from shoal.errors import ConfigError, FileDamaged, SchemasDiffer

if TYPE_CHECKING:
    import pyarrow as pa

MISSING_VALUES = ("", "NA", "N/A", "#N/A", "null", "NULL", "None")
"""Spellings of a missing value in a column that is not text; "nan" is a float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvConfig:
    """Dialect of the text."""

    delimiter: str = ","
    """Between fields."""

    quote: str | None = '"'
    """Around fields that hold delimiters or line ends; twice within them for itself. None: there are none."""

    has_header: bool = True
    """The first row names the columns."""

    names: tuple[str, ...] | None = None
    """Of the columns, where the header does not say them or says them wrong."""

    def __post_init__(self) -> None:
        for name, value in (("delimiter", self.delimiter), ("quote", self.quote)):
            if value is None:
                continue
            if not isinstance(value, str) or len(value) != 1 or ord(value) > 127 or value in "\r\n":
                raise ConfigError(f"{name}= takes one character, not a line end, got {value!r}")

    @property
    def rules(self) -> RowRules:
        quote = -1 if self.quote is None else ord(self.quote)
        return RowRules(delimiter=ord(self.delimiter), quote=quote, cr_ends=True)


class CsvParser:
    """Arrow's parser with our settings."""

    def __init__(self, config: CsvConfig) -> None:
        self.config = config

    def names_of_files(
        self, urls: Sequence[str], heads: Sequence[TextHead], texts: Iterable[tuple[int, bytes]]
    ) -> list[list[str]]:
        """The columns of each file, in the order in which it has them."""
        given = self.config.names
        if not self.config.has_header:
            first = next((self._row(text, self.config.rules) for _, text in texts), None)
            if given is None:
                given = tuple(f"f{number}" for number in range(len(first or ())))
            elif first is not None and len(first) != len(given):
                raise ConfigError(
                    f"names= gives {len(given)} names, and the first row of {urls[0]} has {len(first)} fields: "
                    f"{', '.join(map(repr, first[:8]))}. Nothing was read; name each column."
                )
            return [list(given)] * len(urls)
        named = [[name.strip() for name in self._row(head.text, self.config.rules)] for head in heads]
        if given is not None:
            for url, names in zip(urls, named, strict=True):
                if len(names) != len(given):
                    raise ConfigError(
                        f"names= gives {len(given)} names, and the header of {url} has {len(names)}: {', '.join(names)}"
                    )
            return [list(given)] * len(urls)
        for url, names in zip(urls, named, strict=True):
            doubled = sorted({name for name in names if names.count(name) > 1})
            if doubled:
                raise ConfigError(
                    f"the header of {url} names {', '.join(repr(name) for name in doubled)} more than once, and a sample is "
                    "a dict. Nothing was read; give all columns names of their own with names=[...]."
                )
        return named

    def parse(
        self, text: bytes, names: Sequence[str], types: Mapping[str, pa.DataType], wanted: Sequence[str]
    ) -> pa.Table:
        """The columns of a text without a header; those without a type as Arrow infers them."""
        import pyarrow.csv

        return pyarrow.csv.read_csv(
            as_file(text),
            read_options=pyarrow.csv.ReadOptions(column_names=list(names)),
            parse_options=self.parse_options(text),
            convert_options=self.convert_options(types, wanted),
        )

    def parse_options(self, text: bytes, invalid_row_handler: Any = None) -> Any:
        import pyarrow.csv

        quote = self.config.quote
        return pyarrow.csv.ParseOptions(
            delimiter=self.config.delimiter,
            quote_char=quote or False,
            newlines_in_values=quote is not None and quote.encode() in text,
            invalid_row_handler=invalid_row_handler,
        )

    def convert_options(self, types: Mapping[str, pa.DataType], wanted: Sequence[str]) -> Any:
        import pyarrow.csv

        return pyarrow.csv.ConvertOptions(
            include_columns=list(wanted),
            column_types=dict(types),
            null_values=list(MISSING_VALUES),
            strings_can_be_null=False,
        )

    def _row(self, text: bytes, rules: RowRules) -> list[str]:
        import pyarrow.csv

        first = rows_of(text, rules)[0]
        text = text[first.begin : first.end]
        table = pyarrow.csv.read_csv(as_file(text), parse_options=self.parse_options(text))
        return list(table.column_names)


ENDINGS = tuple(f"{kind}{packed}" for kind in (".csv", ".tsv") for packed in ("", *COMPRESSED))

_NUM_TEXTS = 4  # blocks looked at for the type of a column that is empty in those before


def open_csv(
    path: Where | CopiedFiles,
    *,
    label: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    schema: Mapping[str, Any] | None = None,
    fill: Mapping[str, Any] | None = None,
    delimiter: str | None = None,
    quote: str | None = '"',
    header: bool | None = None,
    names: Sequence[str] | None = None,
    cache: Any = "auto",
    location: str = "shared",
    spread: str = "on-demand",
    on_error: OnError = "raise",
    max_skips: int | None = None,
) -> TableSource | Stream:
    """Rows of CSV files: a file, a list, a directory, a pattern, or any URL that fsspec opens.

    A sample is a dict of columns, or (dict, label). Types are those of the
    first rows (floats are float32, whole numbers int64, times int64
    nanoseconds) or what `schema` says, for some columns or all. Names come
    from the header, or from `names` where there is none. The delimiter is
    a tab for .tsv and else a comma. Empty fields, NA and null are missing
    values in columns of numbers: an error that names row, line and column,
    or what `fill` says. All files are read through once to find where
    rows end; compressed ones (.gz) cannot be read from the middle and
    become a stream: no length, no split, a shuffle within a buffer.

        Dataset.from_csv("clicks-*.csv", label="clicked")
        Dataset.from_csv("clicks.tsv", names=["y", "price", "user"], schema={"user": "str"}, fill={"price": 0})
    """
    files, where = files_at(path, location, spread)
    on_error, max_skips = skipping("", on_error, max_skips)
    infos = files.expand(where, ENDINGS)
    if delimiter is None:
        delimiter = "\t" if ".tsv" in infos[0].url.rpartition("/")[2].lower() else ","
    config = CsvConfig(
        delimiter=delimiter,
        quote=quote,
        has_header=names is None if header is None else flag("header=", header),
        names=None if names is None else tuple(list_of_names("names=", names)),
    )
    parser, urls = CsvParser(config), [info.url for info in infos]
    text = TextFiles(files, infos, config.rules, has_header=config.has_header)
    named = parser.names_of_files(urls, text.heads, text.first_texts())
    decoder = CsvDecoder(
        parser,
        named,
        urls,
        text.first_texts(),
        columns=columns,
        needed=label_names(label),
        schema=schema,
        fill=fill,
    )
    return text.source(
        decoder,
        {"format": "csv", "delimiter": delimiter},
        {"fill": fill, "names": named},
        label=label,
        cache=cache,
        on_error=on_error,
        max_skips=max_skips,
    )


class CsvDecoder:
    """Text of CSV to columns of known types."""

    def __init__(
        self,
        parser: CsvParser,
        named: Sequence[Sequence[str]],
        urls: Sequence[str],
        texts: Iterable[tuple[int, bytes]],
        *,
        columns: Sequence[str] | None,
        needed: Sequence[str],
        schema: Mapping[str, Any] | None,
        fill: Mapping[str, Any] | None,
    ) -> None:
        self._parser, self._named = parser, named
        self._wanted = chosen(named[0], columns, urls[0], needed=needed)
        check_names("schema=", schema, named[0], urls[0])
        check_names("fill=", fill, self._wanted, urls[0])
        self._check_names(urls, is_chosen=columns is not None)
        given = {
            name: arrow_type(name, said)
            for name, said in by_name("schema=", schema).items()
            if name in self._wanted
        }
        self._num_looked_at, self._inferred = 0, set(self._wanted) - given.keys()
        found = self._find_types(given, urls, texts)
        import pyarrow as pa

        self.columns = columns_of(pa.schema([(name, found[name]) for name in self._wanted]), urls[0])
        self._types = {name: readable_type(kind) for name, kind in found.items()}
        lists = [
            column.name
            for column in self.columns
            if column.shape or column.is_list or (column.is_ragged and column.kind == "number")
        ]
        if lists:
            raise ConfigError(
                f"schema= says that {', '.join(lists)} hold lists, which CSV cannot: write JSON lines or Parquet"
            )
        self._fill = Fill(fill, self.columns)

    def decode(self, text: bytes, num_rows: int, place: TextPlace) -> DecodedRows:
        import pyarrow as pa

        names = self._named[place.file]
        bad = BadRows(LineAddress(text, place, self._parser.config.rules))
        try:
            table = self._parser.parse(text, names, self._types, self._wanted)
        except pa.ArrowInvalid:
            table = careful_columns(self._parser, text, names, self._types, self._wanted, bad, self._explain)
        if table.num_rows != num_rows:
            raise FileDamaged(
                url=place.url,
                problem=f"the {len(text)} bytes from line {place.first_line:,} on hold {num_rows} rows by their line ends "
                f"and {table.num_rows} by their fields; a quote stands where none is meant, perhaps: try quote=None",
            )
        return decoded(table, self.columns, self._fill, bad)

    def describe(self) -> dict[str, str]:
        return {name: str(self._types[name]) for name in self._wanted}

    def _check_names(self, urls: Sequence[str], *, is_chosen: bool) -> None:
        first = self._named[0]
        for url, names in zip(urls[1:], self._named[1:], strict=True):
            differences = [f"its header has no column '{name}'" for name in self._wanted if name not in names]
            if not is_chosen:
                differences += [
                    f"its header has a column '{name}' more" for name in names if name not in first
                ]
            if differences:
                raise SchemasDiffer(first=urls[0], other=url, differences=differences)

    def _find_types(
        self, given: Mapping[str, pa.DataType], urls: Sequence[str], texts: Iterable[tuple[int, bytes]]
    ) -> dict[str, pa.DataType]:
        """The given types, and those Arrow infers from the first rows that have a value."""
        import pyarrow as pa

        types = {name: kind for name, kind in given.items() if not pa.types.is_timestamp(kind)}
        unknown = [name for name in self._wanted if name not in types]
        for number, (file, text) in enumerate(texts):
            if not unknown or number == _NUM_TEXTS:
                break
            try:
                found = self._parser.parse(text, self._named[file], {}, unknown)
            except pa.ArrowInvalid:
                # A row of another number of fields, which is told when it is asked for; unless all are such.
                names, bad = self._named[file], BadRows(lambda row: {"where": urls[0], "row": row + 1})
                found = careful_columns(self._parser, text, names, {}, unknown, bad, None)
                if number == 0 and len(bad) == found.num_rows:
                    raise bad[0] from None
            self._num_looked_at += found.num_rows
            types |= {
                field.name: as_torch_means(field.type, given.get(field.name))
                for field in found.schema
                if not pa.types.is_null(field.type)
            }
            unknown = [name for name in unknown if name not in types]
        empty = pa.null() if self._num_looked_at else pa.float32()  # a table without rows may have any types
        return types | {name: given.get(name, empty) for name in unknown}

    def _explain(self, name: str, value: str) -> str:
        looked_at = self._num_looked_at if name in self._inferred else None
        return wrong_value(name, value, self._types[name], looked_at)


def careful_columns(
    parser: Any,
    text: bytes,
    names: Sequence[str],
    types: Mapping[str, pa.DataType],
    wanted: Sequence[str],
    bad: BadRows,
    explain: Callable[[str, str], str] | None,
) -> pa.Table:
    """All rows of a text that Arrow refuses; bad ones are added to `bad` and are null.

    Slow and exact: values are judged by the converter that refused them.
    Columns without a type are inferred.
    """
    import pyarrow as pa
    import pyarrow.csv

    odd: list[int] = []

    def note(row: Any) -> str:
        odd.append(row.number - 1)
        more = "more" if row.actual_columns > row.expected_columns else "fewer"
        bad.add(
            row.number - 1,
            None,
            f"the row has {row.actual_columns} field{'' if row.actual_columns == 1 else 's'}, {more} than the {row.expected_columns} columns: {shown(row.text)}",
        )
        return "skip"

    table = pyarrow.csv.read_csv(
        as_file(text),
        # In one piece and one thread: only then are rows numbered.
        read_options=pyarrow.csv.ReadOptions(
            column_names=list(names), use_threads=False, block_size=len(text) + 1
        ),
        parse_options=parser.parse_options(text, note),
        convert_options=parser.convert_options({name: pa.binary() for name in wanted}, wanted),
    )
    num_rows = table.num_rows + len(odd)
    is_even = np.ones(num_rows, dtype=bool)
    is_even[odd] = False
    row_of = np.flatnonzero(is_even)
    place = as_indices(np.cumsum(is_even) - 1, is_even)
    columns = {}
    for name in wanted:
        column: ArrowArray = table.column(name).combine_chunks()
        column, is_text = _as_text(column)
        failing = set(np.flatnonzero(~is_text).tolist())
        kind = types.get(name)
        if kind is not None and kind != pa.string():
            failing |= set(_failing(parser, column, kind, 0, len(column)))
        for at in sorted(failing):
            value = table.column(name)[at].as_py().decode(errors="backslashreplace")
            bad.add(int(row_of[at]), name, explain(name, shown(value)) if explain else "")
        if failing:
            keep = np.ones(len(column), dtype=bool)
            keep[sorted(failing)] = False
            column = column.take(as_indices(np.arange(len(column)), keep))
        columns[name] = _converted(parser, column, kind).take(place)
    return pa.table(columns)


def _as_text(column: ArrowArray) -> tuple[ArrowArray, Any]:
    """As strings, with "" for what is no UTF-8, and which rows are."""
    import pyarrow as pa

    is_text = np.ones(len(column), dtype=bool)
    try:
        return column.cast(pa.string()), is_text
    except pa.ArrowInvalid:
        texts: list[str] = []
        for at, value in enumerate(column.to_pylist()):
            try:
                texts.append(value.decode())
            except UnicodeDecodeError:
                texts.append("")
                is_text[at] = False
        return pa.array(texts, pa.string()), is_text


def _failing(parser: Any, column: ArrowArray, kind: pa.DataType, begin: int, end: int) -> Iterator[int]:
    """Values that are not of a type, found by halving."""
    import pyarrow as pa

    if begin == end:
        return
    try:
        _converted(parser, column.slice(begin, end - begin), kind)
    except pa.ArrowInvalid:
        if end - begin == 1:
            yield begin
            return
        middle = (begin + end) // 2
        yield from _failing(parser, column, kind, begin, middle)
        yield from _failing(parser, column, kind, middle, end)


def _converted(parser: Any, column: ArrowArray, kind: pa.DataType | None) -> ArrowArray:
    """Strings as the CSV converter of a type takes them, or as it infers the type."""
    import pyarrow as pa
    import pyarrow.csv

    if kind == pa.string() or not len(column):
        return column.cast(kind or pa.string())
    buffer = pa.BufferOutputStream()
    written = pa.table({"x": column.fill_null("")})
    options = pyarrow.csv.WriteOptions(include_header=False, quoting_style="all_valid")
    pyarrow.csv.write_csv(written, buffer, write_options=options)
    read = pyarrow.csv.read_csv(
        as_file(buffer.getvalue()),
        read_options=pyarrow.csv.ReadOptions(column_names=["x"], use_threads=False),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=parser.convert_options({} if kind is None else {"x": kind}, ["x"]),
    )
    return read.column("x").combine_chunks()
