"""CSV that Arrow refuses, read again as text: which rows, which columns, which values.

Slow and exact: values are judged by the converter that refused them. Used for
blocks with something wrong in them only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.data.formats.arrow import ArrowArray, BadRows, as_indices

if TYPE_CHECKING:
    import pyarrow as pa

_SHOWN = 60  # characters of a row or a value in a message


def careful_columns(
    parser: Any,
    text: bytes,
    names: Sequence[str],
    types: Mapping[str, pa.DataType],
    wanted: Sequence[str],
    bad: BadRows,
    explain: Callable[[str, str], str] | None,
) -> pa.Table:
    """All rows of a text; bad ones are told to `bad` and are null. Columns without a type are inferred."""
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
    """Which values are not of a type, by halving."""
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


def as_file(text: Any) -> Any:
    """A text as Arrow's readers take one, without a copy."""
    import pyarrow as pa

    return pa.BufferReader(text)


def shown(value: Any) -> str:
    """A value as it is told, cut short where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...{text[-1]}"
