"""Files of JSON lines as one table, parsed by Arrow: one object per line, its keys are columns.

Types are found in the first rows, or said by `schema=`; numbers with a point
are float32 and whole ones int64. A block that Arrow refuses is read again line
by line, to name each bad one of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.arguments import OnError, by_name, names, skipping
from shoal.data.files import Where
from shoal.data.formats.arrow import ArrowArray, BadRows, Fill, as_file, decoded, shown
from shoal.data.formats.lines import (
    COMPRESSED,
    LineAddress,
    RowRules,
    TextFiles,
    TextPlace,
)
from shoal.data.formats.schema import (
    arrow_type,
    as_torch_means,
    check_names,
    chosen,
    columns_of,
    is_unknown,
    label_names,
    readable_type,
    wrong_value,
)
from shoal.data.formats.table import DecodedRows
from shoal.data.formats.table_source import TableSource
from shoal.data.remote.copies import CopiedFiles
from shoal.data.remote.located_files import files_at
from shoal.data.stream import Stream
from shoal.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

ENDINGS = tuple(f"{kind}{packed}" for kind in (".jsonl", ".ndjson", ".json") for packed in ("", *COMPRESSED))
RULES = RowRules(blanks_are_empty=True)

_NUM_TEXTS = 4  # blocks looked at for the type of a column that is null in those before


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
    infos = files.expand(where, ENDINGS)
    text = TextFiles(files, infos, RULES, has_header=False)
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


class JsonDecoder:
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
        import pyarrow as pa

        given = {name: arrow_type(name, said) for name, said in by_name("schema=", schema).items()}
        self._num_looked_at = 0
        asked = None if columns is None else [*names("columns=", columns), *needed]
        found = self._find_types(url, given, asked, texts)
        wanted = chosen(list(found), columns, url, needed=needed)
        check_names("fill=", fill, wanted, url)
        self._inferred = found.keys() - given.keys()
        self._spelled = {name for name, kind in given.items() if kind == pa.string()}
        self._types = {name: found[name] for name in wanted}
        self.columns = columns_of(pa.schema(list(self._types.items())), url)
        self._readable = pa.schema([(name, readable_type(kind)) for name, kind in self._types.items()])
        self._fill = Fill(fill, self.columns)

    def decode(self, text: bytes, num_rows: int, place: TextPlace) -> DecodedRows:
        import pyarrow as pa

        bad = BadRows(LineAddress(text, place, RULES))
        try:
            # Arrow takes strings as they are.
            if not text.isascii():
                text.decode()
            table = _parsed(text, self._readable)
            is_whole = table.num_rows == num_rows
        except (pa.ArrowInvalid, UnicodeDecodeError):
            is_whole = False
        if not is_whole:
            table = careful_columns(text, self._readable, bad, self._explain, self._spelled)
        return decoded(table, self.columns, self._fill, bad)

    def describe(self) -> dict[str, str]:
        return {name: str(kind) for name, kind in self._types.items()}

    def _find_types(
        self,
        url: str,
        given: Mapping[str, pa.DataType],
        wanted: Sequence[str] | None,
        texts: Iterable[tuple[int, bytes]],
    ) -> dict[str, pa.DataType]:
        """Types of all columns, or at least of those wanted: the given ones, and those Arrow infers from the first rows."""
        import pyarrow as pa

        found: dict[str, pa.DataType] = {}  # in the order of the file, types that nobody knows yet among them
        for number, (_, text) in enumerate(texts):
            asked = found.keys() | given.keys() if wanted is None else wanted
            known = [name for name in asked if name in given or not is_unknown(found.get(name, pa.null()))]
            if number == _NUM_TEXTS or (number and len(known) == len(asked)):
                break
            try:
                schema = _parsed(text, None).schema
            except pa.ArrowInvalid:
                bad = BadRows(lambda row: {"where": url, "row": row + 1})
                schema = careful_columns(text, None, bad, None).schema
                if number == 0 and not schema.names and len(bad):
                    if text.lstrip().startswith(b"["):
                        raise _one_array(url) from None
                    raise bad[0] from None
            self._num_looked_at += text.count(b"\n") + (not text.endswith(b"\n"))
            for field in schema:
                if is_unknown(found.get(field.name, pa.null())):
                    found[field.name] = as_torch_means(field.type)
        return {name: given.get(name, kind) for name, kind in found.items()} | dict(given)

    def _explain(self, name: str, value: str) -> str:
        looked_at = self._num_looked_at if name in self._inferred else None
        return wrong_value(name, value, self._types[name], looked_at, text="text")


def _one_array(url: str) -> DataError:
    return DataError(
        f"the file {url} is one JSON array, and one object per line is wanted, so that it can be read in pieces. Nothing was "
        f"read; write it so with `jq -c '.[]' {url} > lines.jsonl`, or read it yourself: "
        "Dataset.from_torch(json.load(open(...)))."
    )


def _parsed(text: bytes, schema: pa.Schema | None) -> pa.Table:
    import pyarrow.json

    options = pyarrow.json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
    )
    return pyarrow.json.read_json(as_file(text), parse_options=options)


_KINDS: dict[type, str] = {
    list: "an array",
    str: "a string",
    bool: "true or false",
    type(None): "null",
    int: "a number",
    float: "a number",
}


def careful_columns(
    text: bytes,
    schema: pa.Schema | None,
    bad: BadRows,
    explain: Callable[[str, str], str] | None,
    spelled: Collection[str] = (),
) -> pa.Table:
    """All lines of a text; bad ones are added to `bad` and are null. Without a schema, types are inferred from the good.

    Numbers in columns that are to be `spelled` are taken as their text.
    """
    import pyarrow as pa

    lines = [line for line in text.split(b"\n") if line.strip(b" \t\r")]
    rows = [_object(number, line, bad) for number, line in enumerate(lines)]
    if schema is None:
        names = dict.fromkeys(name for row in rows if row is not None for name in row)
        return pa.table(
            {name: _inferred([row.get(name) for row in rows if row is not None]) for name in names}
        )
    columns = {}
    for field in schema:
        values = [None if row is None else row.get(field.name) for row in rows]
        if field.name in spelled:
            values = [json.dumps(value) if isinstance(value, (int, float)) else value for value in values]
        try:
            column = _array(values, field.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError, ValueError):
            for number, value in enumerate(values):
                if not _fits(value, field.type):
                    values[number] = None
                    bad.add(number, field.name, explain(field.name, shown(value)) if explain else "")
            column = _array(values, field.type)
        columns[field.name] = column
    return pa.table(columns)


def _object(number: int, line: bytes, bad: BadRows) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        bad.add(number, None, f"the line is no text in UTF-8: {shown(line)}")
    except json.JSONDecodeError as error:
        reason = f"the line is no JSON ({error.msg} at character {error.pos + 1}): {shown(line.decode())}"
        bad.add(number, None, reason)
    except RecursionError:
        bad.add(number, None, f"the line is nested too deeply: {shown(line.decode())}")
    else:
        if isinstance(row, dict):
            return row
        bad.add(number, None, f"the line is {_KINDS[type(row)]} and should be an object: {shown(row)}")
    return None


def _inferred(values: list[Any]) -> ArrowArray:
    """A column as Arrow takes it, of the values that are of a kind with the first."""
    import pyarrow.json

    kinds = [
        float if isinstance(value, int) and not isinstance(value, bool) else type(value) for value in values
    ]
    first = next((kind for kind, value in zip(kinds, values, strict=True) if value is not None), None)
    same = [value if kind is first else None for kind, value in zip(kinds, values, strict=True)]
    text = "\n".join(json.dumps({"x": value}) for value in same)
    return pyarrow.json.read_json(as_file(text.encode())).column("x")


def _array(values: list[Any], kind: pa.DataType) -> ArrowArray:
    import pyarrow as pa

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
    """Python takes True for a number and 1.5 for a whole one, and JSON does not."""
    import pyarrow as pa

    if isinstance(value, bool) and not pa.types.is_boolean(kind):
        raise TypeError("a bool is no number")
    if isinstance(value, float) and pa.types.is_integer(kind):
        raise TypeError("a float is no whole number")
    if isinstance(value, list) and pa.types.is_list(kind):
        for item in value:
            _refuse_kin(item, kind.value_type)


def _fits(value: Any, kind: pa.DataType) -> bool:
    import pyarrow as pa

    try:
        _array([value], kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError, ValueError):
        return False
    return True
