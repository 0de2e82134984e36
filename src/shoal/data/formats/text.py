"""CSV files and JSON lines as one table, parsed by Arrow.

Types are inferred from the first rows, or given by `schema=`; numbers with a point are float32,
torch's default, and whole ones int64. A block that Arrow refuses is read again value by value, to
name each bad row of it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from shoal.data.arguments import OnError, by_name, flag, skipping
from shoal.data.arguments import names as list_of_names
from shoal.data.files import Where
from shoal.data.formats.arrow import (
    ArrowArray,
    Fill,
    arrow_type,
    as_file,
    as_indices,
    as_torch_means,
    columns_of,
    decoded,
    failing,
    is_unknown,
    readable_type,
    shown,
)
from shoal.data.formats.lines import (
    COMPRESSED,
    LineAddress,
    RowRules,
    TextDecoder,
    TextFiles,
    TextHead,
    TextPlace,
    depth_of,
    rows_of,
)
from shoal.data.formats.table import Address, BadRows, DecodedRows
from shoal.data.formats.table_source import TableSource, check_names, chosen, label_names
from shoal.data.remote.copies import CopiedFiles
from shoal.data.remote.located_files import files_at
from shoal.data.stream import Stream
from shoal.errors import ConfigError, DataError, FileDamaged, SchemasDiffer

MISSING_VALUES = ("", "NA", "N/A", "#N/A", "null", "NULL", "None")
"""Spellings of a missing value in a column of CSV that is not text; "nan" is a float."""

_NUM_TEXTS = 4  # blocks looked at for the type of a column that is empty in those before
_JSON_RULES = RowRules(blanks_are_empty=True)


def _endings(*kinds: str) -> tuple[str, ...]:
    return tuple(f"{kind}{packed}" for kind in kinds for packed in ("", *COMPRESSED))


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
    infos = files.expand(where, _endings(".csv", ".tsv"))
    if delimiter is None:
        delimiter = "\t" if ".tsv" in infos[0].url.rpartition("/")[2].lower() else ","
    parser, urls = CsvParser(delimiter, quote), [info.url for info in infos]
    has_header = names is None if header is None else flag("header=", header)
    text = TextFiles(files, infos, parser.rules, has_header=has_header)
    given = None if names is None else list_of_names("names=", names)
    if has_header:
        named = _names_in_headers(parser, given, urls, text.heads)
    else:
        named = [_names_without_header(parser, given, urls[0], text.first_texts())] * len(urls)
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


def open_jsonl(
    path: Where | CopiedFiles,
    *,
    label: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    schema: Mapping[str, Any] | None = None,
    fill: Mapping[str, Any] | None = None,
    cache: Any = "auto",
    location: str = "shared",
    spread: str = "on-demand",
    on_error: OnError = "raise",
    max_skips: int | None = None,
) -> TableSource | Stream:
    """Lines of JSON files, each an object: a file, a list, a directory, a pattern, or any URL that fsspec opens.

    A sample is a dict of the object's keys, or (dict, label). Types are
    those of the first rows (floats are float32, whole numbers int64, times
    int64 nanoseconds) or what `schema` says, for some keys or all; lists
    may be `"list[int64]"`, padded to the longest of a batch, or
    `"float32[8]"`. A key that is missing or null is an error that names
    row, line and key, or what `fill` says; keys that the first rows do not
    have are left out. All files are read through once to find where lines
    end; compressed ones (.gz) become a stream, without length or split.

        Dataset.from_jsonl("reviews-*.jsonl", columns=["text", "stars"], label="stars")
        Dataset.from_jsonl("users.jsonl", schema={"ids": "list[int64]"}, fill={"ids": []})
    """
    files, where = files_at(path, location, spread)
    on_error, max_skips = skipping("", on_error, max_skips)
    infos = files.expand(where, _endings(".jsonl", ".ndjson", ".json"))
    text = TextFiles(files, infos, _JSON_RULES, has_header=False)
    decoder = JsonDecoder(
        infos[0].url,
        text.first_texts(),
        columns=columns,
        needed=label_names(label),
        schema=schema,
        fill=fill,
    )
    return text.source(
        decoder,
        {"format": "jsonl"},
        {"fill": fill},
        label=label,
        cache=cache,
        on_error=on_error,
        max_skips=max_skips,
    )


class _TypedDecoder(TextDecoder):
    """Text to columns of types that were given or found."""

    _num_looked_at = 0
    """Rows from which types were inferred."""

    def _set_types(
        self,
        types: Mapping[str, pa.DataType],
        given: Mapping[str, pa.DataType],
        fill: Mapping[str, Any] | None,
        url: str,
    ) -> None:
        self._types, self._given = types, given
        self.columns = columns_of(pa.schema(list(types.items())), url)
        self._readable = {name: readable_type(kind) for name, kind in types.items()}
        self._fill = Fill(fill, self.columns)

    def describe(self) -> dict[str, str]:
        return {name: str(kind) for name, kind in self._types.items()}

    def _explain(self, name: str, value: str) -> str:
        """Message about a value that is not of its column's type."""
        names: dict[pa.DataType, str] = {
            pa.float16(): "float16",
            pa.float32(): "float32",
            pa.float64(): "float64",
            pa.string(): "text in UTF-8",
        }
        reason = f"{value} is no {names.get(self._types[name], str(self._types[name]))}"
        if name in self._given:
            return f"{reason}, which schema= says it is"
        other = "bytes" if self._types[name] == pa.string() else "str"
        return (
            f"{reason}, which the first {self._num_looked_at:,} rows have there; if such values are meant, say so with "
            f"schema={{'{name}': '{other}'}} or another type"
        )


# ---- CSV ----


class CsvParser:
    """Arrow's parser of CSV with our settings."""

    def __init__(self, delimiter: str, quote: str | None) -> None:
        for name, value in (("delimiter", delimiter), ("quote", quote)):
            if value is None:
                continue
            if not isinstance(value, str) or len(value) != 1 or ord(value) > 127 or value in "\r\n":
                raise ConfigError(f"{name}= takes one character, not a line end, got {value!r}")
        self._delimiter, self._quote = delimiter, quote
        self.rules = RowRules(ord(delimiter), -1 if quote is None else ord(quote), cr_ends=True)

    def table(
        self,
        text: Any,
        names: Sequence[str] | None,
        types: Mapping[str, pa.DataType],
        wanted: Sequence[str],
        *,
        odd_row: Any = None,
    ) -> pa.Table:
        """The wanted columns, those without a type as Arrow infers them; without names the first row is a header.

        `odd_row` is called with each row of another number of fields.
        """
        quote = self._quote
        block: dict[str, Any] = {"block_size": _block_bytes(text)}
        if odd_row is not None:
            # In one piece and one thread: only then are rows numbered.
            block = {"use_threads": False, "block_size": len(text) + 1}
        return pyarrow.csv.read_csv(
            as_file(text),
            read_options=pyarrow.csv.ReadOptions(
                column_names=None if names is None else list(names), **block
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=self._delimiter,
                quote_char=quote or False,
                newlines_in_values=quote is not None and quote.encode() in text,
                invalid_row_handler=odd_row,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=list(wanted),
                column_types=dict(types),
                null_values=list(MISSING_VALUES),
                strings_can_be_null=False,
            ),
        )

    def fields(self, text: bytes) -> list[str]:
        """The fields of the first row."""
        first = rows_of(text, self.rules)[0]
        return list(self.table(text[first.begin : first.end], None, {}, ()).column_names)


_COLUMN_PARSER = CsvParser(",", '"')


def _names_without_header(
    parser: CsvParser, given: list[str] | None, url: str, texts: Iterable[tuple[int, bytes]]
) -> list[str]:
    first = next((parser.fields(text) for _, text in texts), None)
    if given is None:
        return [f"f{number}" for number in range(len(first or ()))]
    if first is not None and len(first) != len(given):
        raise ConfigError(
            f"names= gives {len(given)} names, and the first row of {url} has {len(first)} fields: "
            f"{', '.join(map(repr, first[:8]))}. Nothing was read; name each column."
        )
    return given


def _names_in_headers(
    parser: CsvParser, given: list[str] | None, urls: Sequence[str], heads: Sequence[TextHead]
) -> list[list[str]]:
    """The columns of each file, in the order in which it has them."""
    named = [[name.strip() for name in parser.fields(head.text)] for head in heads]
    for url, names in zip(urls, named, strict=True):
        if given is not None and len(names) != len(given):
            raise ConfigError(
                f"names= gives {len(given)} names, and the header of {url} has {len(names)}: {', '.join(names)}"
            )
        doubled = sorted({name for name in names if names.count(name) > 1})
        if given is None and doubled:
            raise ConfigError(
                f"the header of {url} names {', '.join(repr(name) for name in doubled)} more than once, and a sample is "
                "a dict. Nothing was read; give all columns names of their own with names=[...]."
            )
    return named if given is None else [given] * len(urls)


class CsvDecoder(_TypedDecoder):
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
        said = by_name("schema=", schema)
        given = {name: arrow_type(name, said[name]) for name in said if name in self._wanted}
        found = self._find_types(given, urls, texts)
        self._set_types({name: found[name] for name in self._wanted}, given, fill, urls[0])
        lists = [
            column.name
            for column in self.columns
            if column.shape or column.is_list or (column.is_ragged and column.kind == "number")
        ]
        if lists:
            raise ConfigError(
                f"schema= says that {', '.join(lists)} hold lists, which CSV cannot: write JSON lines or Parquet"
            )

    def decode(self, text: bytes, num_rows: int, place: TextPlace) -> DecodedRows:
        names = self._named[place.file]
        bad = BadRows(LineAddress(text, place, self._parser.rules))
        try:
            table = self._parser.table(text, names, self._readable, self._wanted)
        except pa.ArrowInvalid:
            table = self._careful(text, names, self._wanted, self._readable, bad)
        if table.num_rows != num_rows:
            raise FileDamaged(
                url=place.url,
                problem=f"the {len(text)} bytes from line {place.first_line:,} on hold {num_rows} rows by their line ends "
                f"and {table.num_rows} by their fields; a quote stands where none is meant, perhaps: try quote=None",
            )
        return decoded(table, self.columns, self._fill, bad)

    def _check_names(self, urls: Sequence[str], *, is_chosen: bool) -> None:
        first = self._named[0]
        for url, names in zip(urls[1:], self._named[1:], strict=True):
            differences = [f"its header has no column '{name}'" for name in self._wanted if name not in names]
            if not is_chosen:
                more = [name for name in names if name not in first]
                differences += [f"its header has a column '{name}' more" for name in more]
            if differences:
                raise SchemasDiffer(first=urls[0], other=url, differences=differences)

    def _find_types(
        self, given: Mapping[str, pa.DataType], urls: Sequence[str], texts: Iterable[tuple[int, bytes]]
    ) -> dict[str, pa.DataType]:
        """The given types, and those Arrow infers from the first rows that have a value."""
        types = {name: kind for name, kind in given.items() if not pa.types.is_timestamp(kind)}
        unknown = [name for name in self._wanted if name not in types]
        for number, (file, text) in enumerate(texts):
            if not unknown or number == _NUM_TEXTS:
                break
            try:
                found = self._parser.table(text, self._named[file], {}, unknown)
            except pa.ArrowInvalid:
                # A row with another number of fields is reported when it is requested; unless all are such.
                bad = BadRows(lambda row: {"where": urls[0], "row": row + 1})
                found = self._careful(text, self._named[file], unknown, {}, bad)
                if number == 0 and len(bad) == found.num_rows:
                    raise bad[0] from None
            self._num_looked_at += found.num_rows
            types |= {
                # Arrow takes text that is not UTF-8 for bytes, and the whole column with it.
                field.name: pa.string()
                if pa.types.is_binary(field.type)
                else as_torch_means(field.type, given.get(field.name))
                for field in found.schema
                if not pa.types.is_null(field.type)
            }
            unknown = [name for name in unknown if name not in types]
        empty = pa.null() if self._num_looked_at else pa.float32()  # a table without rows may have any types
        return types | {name: given.get(name, empty) for name in unknown}

    def _careful(
        self,
        text: bytes,
        names: Sequence[str],
        wanted: Sequence[str],
        types: Mapping[str, pa.DataType],
        bad: BadRows,
    ) -> pa.Table:
        """All rows of a text that Arrow refuses; bad ones are added to `bad` and are null.

        Slow and exact: values are judged by the converter that refused them. Columns without a type
        are inferred.
        """
        odd: list[int] = []

        def odd_row(row: Any) -> str:
            odd.append(row.number - 1)
            more = "more" if row.actual_columns > row.expected_columns else "fewer"
            fields = f"{row.actual_columns} field{'' if row.actual_columns == 1 else 's'}"
            reason = (
                f"the row has {fields}, {more} than the {row.expected_columns} columns: {shown(row.text)}"
            )
            bad.add(row.number - 1, None, reason)
            return "skip"

        raw_types = {name: pa.binary() for name in wanted}
        table = self._parser.table(text, names, raw_types, wanted, odd_row=odd_row)
        is_even = np.ones(table.num_rows + len(odd), dtype=bool)
        is_even[odd] = False
        row_of = np.flatnonzero(is_even)
        place = as_indices(np.cumsum(is_even) - 1, is_even)
        columns = {}
        for name in wanted:
            raw: ArrowArray = table.column(name).combine_chunks()
            column, wrong, kind = *_as_text(raw), types.get(name)
            if kind is not None and kind != pa.string():
                wrong |= set(failing(column, functools.partial(_converted, kind=kind)))
            for at in sorted(wrong):
                value = raw[at].as_py().decode(errors="backslashreplace")
                bad.add(int(row_of[at]), name, self._explain(name, shown(value)) if types else "")
            if wrong:
                keep = np.ones(len(column), dtype=bool)
                keep[sorted(wrong)] = False
                column = column.take(as_indices(np.arange(len(column)), keep))
            columns[name] = _converted(column, kind).take(place)
        return pa.table(columns)


def _as_text(column: ArrowArray) -> tuple[ArrowArray, set[int]]:
    """Strings, "" for what is no UTF-8, and the places of those."""
    try:
        return column.cast(pa.string()), set()
    except pa.ArrowInvalid:
        wrong = set(failing(column, lambda part: part.cast(pa.string())))
        values = ["" if at in wrong else value.decode() for at, value in enumerate(column.to_pylist())]
        return pa.array(values, pa.string()), wrong


def _converted(column: ArrowArray, kind: pa.DataType | None) -> ArrowArray:
    """Strings as the CSV converter of a type takes them, or as it infers the type."""
    if kind == pa.string() or not len(column):
        return column.cast(kind or pa.string())
    buffer = pa.BufferOutputStream()
    written = pa.table({"x": column.fill_null("")})
    options = pyarrow.csv.WriteOptions(include_header=False, quoting_style="all_valid")
    pyarrow.csv.write_csv(written, buffer, write_options=options)
    types = {} if kind is None else {"x": kind}
    return (
        _COLUMN_PARSER.table(buffer.getvalue().to_pybytes(), ["x"], types, ["x"]).column("x").combine_chunks()
    )


# ---- JSON ----


class JsonDecoder(_TypedDecoder):
    """Lines of JSON to columns of known types."""

    def __init__(
        self,
        url: str,
        texts: Iterable[tuple[int, bytes]],
        *,
        columns: Sequence[str] | None,
        needed: Sequence[str],
        schema: Mapping[str, Any] | None,
        fill: Mapping[str, Any] | None,
    ) -> None:
        given = {name: arrow_type(name, said) for name, said in by_name("schema=", schema).items()}
        asked = None if columns is None else [*list_of_names("columns=", columns), *needed]
        found = self._find_types(url, given, asked, texts)
        wanted = chosen(list(found), columns, url, needed=needed)
        check_names("fill=", fill, wanted, url)
        self._set_types({name: found[name] for name in wanted}, given, fill, url)
        self._schema = pa.schema(list(self._readable.items()))
        self.schema = pa.schema(list(self._types.items()))
        """Types of the columns, given or found."""

    def decode(
        self, text: bytes, num_rows: int, place: TextPlace, address: Address | None = None
    ) -> DecodedRows:
        bad = BadRows(address or LineAddress(text, place, _JSON_RULES))
        try:
            # Arrow takes strings as they are.
            if not text.isascii():
                text.decode()
            table = _parsed(text, self._schema)
            is_whole = table.num_rows == num_rows
        except (pa.ArrowInvalid, RecursionError, UnicodeDecodeError):
            is_whole = False
        if not is_whole:
            table = self._careful(_objects(text, bad), bad)
        return decoded(table, self.columns, self._fill, bad)

    def _find_types(
        self,
        url: str,
        given: Mapping[str, pa.DataType],
        wanted: Sequence[str] | None,
        texts: Iterable[tuple[int, bytes]],
    ) -> dict[str, pa.DataType]:
        """Types of all columns, or at least of those wanted: the given ones, and those Arrow infers from the first rows."""
        found: dict[str, pa.DataType] = {}  # in the order of the file, including types not known yet
        for number, (_, text) in enumerate(texts):
            asked = found.keys() | given.keys() if wanted is None else wanted
            known = [name for name in asked if name in given or not is_unknown(found.get(name, pa.null()))]
            if number == _NUM_TEXTS or (number and len(known) == len(asked)):
                break
            try:
                schema = _parsed(text, None).schema
            except (pa.ArrowInvalid, RecursionError):
                bad = BadRows(lambda row: {"where": url, "row": row + 1})
                rows = [row for row in _objects(text, bad) if row is not None]
                names = dict.fromkeys(name for row in rows for name in row)
                schema = pa.schema([(name, _inferred([row.get(name) for row in rows])) for name in names])
                if number == 0 and not names and len(bad):
                    if text.lstrip().startswith(b"["):
                        raise _one_array(url) from None
                    raise bad[0] from None
            self._num_looked_at += text.count(b"\n") + (not text.endswith(b"\n"))
            for field in schema:
                if is_unknown(found.get(field.name, pa.null())):
                    found[field.name] = as_torch_means(field.type)
        return {name: given.get(name, kind) for name, kind in found.items()} | dict(given)

    def _careful(self, rows: Sequence[dict[str, Any] | None], bad: BadRows) -> pa.Table:
        """Rows of a text that Arrow refuses; values that are not of their type are added to `bad` and are null."""
        columns = {}
        for field in self._schema:
            values = [None if row is None else row.get(field.name) for row in rows]
            if self._given.get(field.name) == pa.string():  # numbers are taken as their text
                values = [json.dumps(value) if isinstance(value, (int, float)) else value for value in values]
            try:
                columns[field.name] = _array(values, field.type)
            except _UNFIT:
                for number, value in enumerate(values):
                    try:
                        _array([value], field.type)
                    except _UNFIT:
                        values[number] = None
                        bad.add(number, field.name, self._explain(field.name, shown(value)))
                columns[field.name] = _array(values, field.type)
        return pa.table(columns)


_UNFIT = (OverflowError, TypeError, ValueError)
"""Errors of Arrow for a value that is not of a type; its own are a ValueError and a TypeError."""


def _one_array(url: str) -> DataError:
    return DataError(
        f"the file {url} is one JSON array, and one object per line is wanted, so that it can be read in pieces. Nothing was "
        f"read; write it so with `jq -c '.[]' {url} > lines.jsonl`, or read it yourself: "
        "Dataset.from_torch(json.load(open(...)))."
    )


_ARROW_BLOCK_BYTES = 1 << 20  # Arrow's own default; a row that is longer is refused
_NULL_LINE = re.compile(rb"^[ \t\r]*null", re.MULTILINE)
_DEEPEST = 500  # levels; Arrow's parser recurses for each, and crashes at some 10,000


def _block_bytes(text: bytes) -> int:
    """Bytes that Arrow parses at once: more than the longest row if the text has several blocks."""
    longest = max(map(len, text.split(b"\n")), default=0) if len(text) > _ARROW_BLOCK_BYTES else 0
    return _ARROW_BLOCK_BYTES if longest < _ARROW_BLOCK_BYTES else len(text) + 1


def _parsed(text: bytes, schema: pa.Schema | None) -> pa.Table:
    """Parse by Arrow; RecursionError for nesting that would crash its parser."""
    if depth_of(text) > _DEEPEST:
        raise RecursionError
    # Arrow takes a line that is null for a row of nulls, and crashes if it is the first.
    if b"null" in text and _NULL_LINE.search(text):
        raise pa.ArrowInvalid("a line is null")
    options = pyarrow.json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
    )
    read = pyarrow.json.ReadOptions(block_size=_block_bytes(text))
    return pyarrow.json.read_json(as_file(text), read_options=read, parse_options=options)


_JSON_KINDS: dict[type, str] = {
    list: "an array",
    str: "a string",
    bool: "true or false",
    type(None): "null",
    int: "a number",
    float: "a number",
}


def _objects(text: bytes, bad: BadRows) -> list[dict[str, Any] | None]:
    """The object of each line; None, and a reason in `bad`, where it is none."""
    rows: list[dict[str, Any] | None] = []
    for number, line in enumerate(line for line in text.split(b"\n") if line.strip(b" \t\r")):
        row, reason = None, ""
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            reason = f"the line is no text in UTF-8: {shown(line)}"
        except json.JSONDecodeError as error:
            reason = f"the line is no JSON ({error.msg} at character {error.pos + 1}): {shown(line.decode())}"
        except RecursionError:
            reason = f"the line is nested too deeply: {shown(line.decode())}"
        else:
            if not isinstance(row, dict):
                reason = f"the line is {_JSON_KINDS[type(row)]} and should be an object: {shown(row)}"
        if reason:
            bad.add(number, None, reason)
        rows.append(None if reason else row)
    return rows


def _inferred(values: list[Any]) -> pa.DataType:
    """The type that Arrow gives to the values that are of a kind with the first."""
    kinds = [
        float if isinstance(value, int) and not isinstance(value, bool) else type(value) for value in values
    ]
    first = next((kind for kind, value in zip(kinds, values, strict=True) if value is not None), None)
    same = [value if kind is first else None for kind, value in zip(kinds, values, strict=True)]
    text = "\n".join(json.dumps({"x": value}) for value in same)
    found: pa.DataType = _parsed(text.encode(), None).schema.field("x").type
    return found


def _array(values: list[Any], kind: pa.DataType) -> ArrowArray:
    for value in values:
        _refuse_kin(value, kind)
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        texts: ArrowArray = pa.array(values, pa.string())
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            if not pa.types.is_timestamp(kind):
                raise
            return texts.cast(pa.timestamp("ns", tz="UTC")).cast(kind)
    return pa.array(values, kind)


def _refuse_kin(value: Any, kind: Any) -> None:
    """Refuse values that only Python accepts: True for a number, 1.5 for a whole one."""
    if isinstance(value, bool) and not pa.types.is_boolean(kind):
        raise TypeError("a bool is no number")
    if isinstance(value, float) and pa.types.is_integer(kind):
        raise TypeError("a float is no whole number")
    if isinstance(value, list) and pa.types.is_list(kind):
        for item in value:
            _refuse_kin(item, kind.value_type)
