"""Types of columns: as users name them, as Arrow has them, as rows in memory.

    in a file                       in a sample
    whole numbers, bool, floats     the same; unsigned ones of 16 bits and more as the next wider signed type
    decimal                         float64
    timestamp, date                 int64, nanoseconds since 1970 (UTC)
    time of day, duration           int64, nanoseconds
    string, dictionary of strings   text
    binary                          bytes
    list of numbers                 ragged; of a fixed size k: shape (k,)
    list of strings or binary       text or bytes, a list per row

Anything else (structs, maps, lists of lists) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.data import arguments
from shoal.data.formats.table import Column
from shoal.errors import ConfigError, DataError, NoSuchColumn

if TYPE_CHECKING:
    import pyarrow as pa

_NAMES = {
    "float": "float32",  # as torch means it
    "double": "float64",
    "half": "float16",
    "int": "int64",
    "long": "int64",
    "boolean": "bool",
    "text": "str",
    "string": "str",
    "binary": "bytes",
    "datetime": "timestamp",
}
_SIMPLE = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bool", "str", "bytes", "timestamp", "date"),
)
_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
_LIST = re.compile(r"list\[(?P<item>\w+)\]|(?P<of>\w+)\[(?P<size>\d+)\]")


def arrow_type(name: str, wanted: Any) -> pa.DataType:
    """The type that `schema={name: wanted}` asks for: a name, a Python, numpy, torch or Arrow type."""
    import pyarrow as pa

    if isinstance(wanted, pa.DataType):
        return wanted
    said = _spelled(wanted)
    if found := _LIST.fullmatch(said):
        item = arrow_type(name, found["item"] or found["of"])
        return pa.list_(item, int(found["size"])) if found["size"] else pa.list_(item)
    said = _NAMES.get(said, said)
    if said not in _SIMPLE:
        raise ConfigError(
            f"schema= names the type {wanted!r} for the column '{name}', which there is not. Use one of "
            f"{', '.join(_SIMPLE)}, 'list[int64]' for lists, or 'float32[8]' for lists of 8."
        )
    if said == "timestamp":
        return pa.timestamp("ns")
    if said == "date":
        return pa.date32()
    if said in ("str", "bytes"):
        return pa.string() if said == "str" else pa.binary()
    return pa.bool_() if said == "bool" else pa.from_numpy_dtype(np.dtype(said))


def _spelled(wanted: Any) -> str:
    if isinstance(wanted, str):
        return wanted.strip().lower().replace(" ", "")
    if isinstance(wanted, np.dtype):
        return wanted.name
    if isinstance(wanted, type):
        return wanted.__name__.removesuffix("_")
    return str(wanted).removeprefix("torch.")


def column_of(name: str, kind: pa.DataType, where: str) -> Column:
    """The column that holds values of an Arrow type."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    inside = _item_of(kind)
    is_list, inner = inside is not None, inside or kind
    if _is_text(inner):
        return Column.text(name, is_list=is_list)
    if pa.types.is_binary(inner) or pa.types.is_large_binary(inner) or _is_fixed_or_view_binary(inner):
        return Column.binary(name, is_list=is_list)
    shape: tuple[int, ...] = ()
    item = kind
    while pa.types.is_fixed_size_list(item):
        shape, item = (*shape, item.list_size), item.value_type
    if not shape and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        number = _number(kind.value_type)
        if number is not None:
            # -1 must fit, which stands behind the end of a shorter list.
            return Column.ragged(name, np.int16 if number == np.uint8 else number)
    number = _number(item)
    if number is None:
        cure = (
            f"it is empty in all rows that were looked at; say what it holds: schema={{'{name}': 'float32'}}"
            if is_unknown(kind)
            else "numbers, strings and lists of them can; leave it out with columns=[...], or write it as those"
        )
        raise DataError(
            f"the column '{name}' of {where} is of type {kind}, which cannot be read into tensors: {cure}. Nothing was read."
        )
    return Column(name, number, shape)


def as_torch_means(found: pa.DataType, given: pa.DataType | None = None) -> pa.DataType:
    """A type that was found in text, where nobody says how precise it is meant."""
    import pyarrow as pa

    if given is not None:  # a timestamp, with a zone where the text has one
        return pa.timestamp("ns", tz=found.tz) if pa.types.is_timestamp(found) else given
    if pa.types.is_list(found):
        return pa.list_(as_torch_means(found.value_type))
    return pa.float32() if pa.types.is_float64(found) else found


def readable_type(kind: pa.DataType) -> pa.DataType:
    """The nearest type that Arrow reads from text; the rest is done in decoding."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind):
        return pa.list_(readable_type(kind.value_type))
    return pa.float32() if pa.types.is_float16(kind) else kind


def wrong_value(
    name: str, value: str, kind: pa.DataType, num_looked_at: int | None, *, text: str = "text in UTF-8"
) -> str:
    """Message about a value that is not of its column's type, inferred from so many rows or given by the user."""
    import pyarrow as pa

    names = {
        pa.float32(): "float32",
        pa.float64(): "float64",
        pa.float16(): "float16",
        pa.string(): text,
    }
    reason = f"{value} is no {names.get(kind, str(kind))}"
    if num_looked_at is None:
        return f"{reason}, which schema= says it is"
    return (
        f"{reason}, which the first {num_looked_at:,} rows have there; if such values are meant, say so with "
        f"schema={{'{name}': 'str'}} or another type"
    )


def is_unknown(kind: pa.DataType) -> bool:
    """A type of which only missing values, or only empty lists, were seen."""
    import pyarrow as pa

    return bool(pa.types.is_null(kind) or (pa.types.is_list(kind) and is_unknown(kind.value_type)))


def columns_of(schema: pa.Schema, where: str) -> tuple[Column, ...]:
    """The columns of a schema."""
    return tuple(column_of(field.name, field.type, where) for field in schema)


def storage_type(column: Column) -> pa.DataType:
    """The Arrow type whose buffers are what the column has in memory, of one element."""
    import pyarrow as pa

    if column.kind == "number":
        return pa.bool_() if column.dtype == np.bool_ else pa.from_numpy_dtype(column.dtype)
    return pa.large_string() if column.kind == "text" else pa.large_binary()


def chosen(
    there: Sequence[str], columns: Sequence[str] | None, where: str, *, needed: Sequence[str] = ()
) -> list[str]:
    """The names to read: `columns=` and what else is needed, in the order asked for, or all there are."""
    if isinstance(columns, (list, tuple)) and not columns:
        raise ConfigError(f"columns=[] leaves nothing to read; {where} has {', '.join(there)}")
    names = list(there) if columns is None else arguments.names("columns=", columns)
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        asked_by = "columns= names" if columns is not None else f"{where} names"
        raise ConfigError(
            f"{asked_by} {', '.join(doubled)} twice, and a sample is a dict. Give each column its own name."
        )
    names += [name for name in needed if name not in names]
    missing = [name for name in names if name not in there]
    if missing:
        by_columns = columns is not None and any(name in columns for name in missing)
        asked_by = "columns=" if by_columns else "label="
        raise NoSuchColumn(asked=missing, there=there, where=where, asked_by=asked_by)
    return names


def label_names(label: str | Sequence[str] | None) -> list[str]:
    """The columns that are the label."""
    if label is None or (isinstance(label, str) and label):
        return [] if label is None else [label]
    if not isinstance(label, Sequence) or isinstance(label, str):
        raise ConfigError(f"label= takes the name of a column, or a list of names, got {label!r}")
    return arguments.names("label=", label)


def split_label(columns: dict[str, Any], label: str | Sequence[str] | None) -> Any:
    """The columns as they are, or (inputs, label)."""
    if label is None:
        return columns
    target = columns.pop(label) if isinstance(label, str) else {name: columns.pop(name) for name in label}
    return columns, target


def check_names(asked_by: str, asked: Mapping[str, Any] | None, there: Sequence[str], where: str) -> None:
    """Refuse keys of `schema=` or `fill=` that are no columns."""
    missing = [name for name in arguments.by_name(asked_by, asked) if name not in there]
    if missing:
        raise NoSuchColumn(asked=missing, there=there, where=where, asked_by=asked_by)


def _item_of(kind: Any) -> pa.DataType | None:
    """Type of the items of a list; None where it is no list."""
    import pyarrow as pa

    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return None
    item: pa.DataType = kind.value_type
    return item.value_type if pa.types.is_dictionary(item) else item


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_fixed_or_view_binary(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_fixed_size_binary(kind) or pa.types.is_binary_view(kind))


def _number(kind: pa.DataType) -> np.dtype[Any] | None:
    import pyarrow as pa

    if pa.types.is_boolean(kind):
        return np.dtype(np.bool_)
    if pa.types.is_decimal(kind):
        return np.dtype(np.float64)
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return np.dtype(np.int64)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.dtype(_WIDER.get(str(kind), kind.to_pandas_dtype()))
    return None
