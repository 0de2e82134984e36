"""JSON lines that Arrow refuses, read again one by one: which lines, which columns, which values.

Slow and exact. Used for blocks with something wrong in them only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from shoal.data.formats.arrow import ArrowArray, BadRows
from shoal.data.formats.csv_text import as_file, shown

if TYPE_CHECKING:
    import pyarrow as pa

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
    """All lines of a text; bad ones are told to `bad` and are null. Without a schema, types are inferred from the good.

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
