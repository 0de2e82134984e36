"""Arrow types and columns as rows in memory, without a copy where the types allow it.

    in a file                       in a sample
    whole numbers, bool, floats     the same; unsigned ones of 16 bits and more as the next wider signed type
    decimal                         float64
    timestamp, date                 int64, nanoseconds since 1970 (UTC)
    time of day, duration           int64, nanoseconds
    string, dictionary of strings   text
    binary                          bytes
    list of numbers                 ragged; of a fixed size k: shape (k,)
    list of strings or binary       text or bytes, a list per row

Other types (structs, maps, lists of lists) are refused by name. A missing value, or one that does
not fit its type, makes its row bad; `fill` replaces missing values.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shoal.data.files import FileInfo, Files
from shoal.data.formats.table import Address, BadRows, Column, DecodedRows, Ragged, pack_lists
from shoal.errors import ConfigError, DataError

ArrowArray = Any
"""An array of any type; Arrow's type hints know each type apart, and here all of them pass."""

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
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    inside = _item_of(kind)
    is_list, inner = inside is not None, inside or kind
    if _is_text(inner):
        return Column.text(name, is_list=is_list)
    is_binary = pa.types.is_binary(inner) or pa.types.is_large_binary(inner)
    if is_binary or pa.types.is_fixed_size_binary(inner) or pa.types.is_binary_view(inner):
        return Column.binary(name, is_list=is_list)
    shape: tuple[int, ...] = ()
    item = kind
    while pa.types.is_fixed_size_list(item):
        shape, item = (*shape, item.list_size), item.value_type
    if not shape and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        number = _number(kind.value_type)
        if number is not None:
            # -1 must fit: it pads shorter lists.
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
    """Type for values inferred from text, whose intended precision is unknown."""
    if given is not None:  # a timestamp, with a zone where the text has one
        return pa.timestamp("ns", tz=found.tz) if pa.types.is_timestamp(found) else given
    if pa.types.is_list(found):
        return pa.list_(as_torch_means(found.value_type))
    return pa.float32() if pa.types.is_float64(found) else found


def readable_type(kind: pa.DataType) -> pa.DataType:
    """The nearest type that Arrow reads from text; the rest is done in decoding."""
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind):
        return pa.list_(readable_type(kind.value_type))
    return pa.float32() if pa.types.is_float16(kind) else kind


def is_unknown(kind: pa.DataType) -> bool:
    """A type of which only missing values, or only empty lists, were seen."""
    return bool(pa.types.is_null(kind) or (pa.types.is_list(kind) and is_unknown(kind.value_type)))


def columns_of(schema: pa.Schema, where: str, names: Sequence[str] | None = None) -> tuple[Column, ...]:
    """The columns of a schema, all or those with these names."""
    wanted = schema.names if names is None else names
    return tuple(column_of(name, schema.field(name).type, where) for name in wanted)


def storage_type(column: Column) -> pa.DataType:
    """The Arrow type whose buffers are what the column has in memory, of one element."""
    if column.kind == "number":
        return pa.bool_() if column.dtype == np.bool_ else pa.from_numpy_dtype(column.dtype)
    return pa.large_string() if column.kind == "text" else pa.large_binary()


def _item_of(kind: Any) -> pa.DataType | None:
    """Type of the items of a list; None where it is no list."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return None
    item: pa.DataType = kind.value_type
    return item.value_type if pa.types.is_dictionary(item) else item


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _number(kind: pa.DataType) -> np.dtype[Any] | None:
    if pa.types.is_boolean(kind):
        return np.dtype(np.bool_)
    if pa.types.is_decimal(kind):
        return np.dtype(np.float64)
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return np.dtype(np.int64)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.dtype(_WIDER.get(str(kind), kind.to_pandas_dtype()))
    return None


_SHOWN = 60  # characters of a row or a value in a message
MISSING = "the value is missing, and fill={'%s': ...} does not say what stands for it"


class Fill:
    """Replacements for missing values, by column; validated at construction."""

    def __init__(self, values: Mapping[str, Any] | None, columns: Sequence[Column]) -> None:
        self._scalars: dict[str, Any] = {}
        for column in columns:
            if values is None or column.name not in values:
                continue
            value = values[column.name]
            if value is None:
                raise ConfigError(
                    f"fill= gives None for the column '{column.name}', and None is what is missing there. Say what shall "
                    "stand for it, or leave the column out of fill=."
                )
            try:
                is_whole = isinstance(value, (list, tuple, np.ndarray))
                if column.is_list and is_whole:
                    self._scalars[column.name] = _packed_row(value, column)
                elif column.is_ragged and column.kind == "number" and is_whole:
                    self._scalars[column.name] = np.asarray(value, dtype=column.dtype)
                else:
                    self._scalars[column.name] = pa.scalar(value, type=storage_type(column))
            except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"fill= gives {value!r} for the column '{column.name}', which holds {column.type_name}: {error}"
                ) from error

    def get(self, name: str) -> Any:
        """An Arrow scalar, an array for a whole list (of strings: its bytes, packed), or None."""
        return self._scalars.get(name)


def decoded(
    table: pa.Table | pa.RecordBatch, columns: Sequence[Column], fill: Fill, address: Address | BadRows
) -> DecodedRows:
    """Rows of an Arrow table that has these columns, of whatever types they were made from.

    Given known bad rows, instead of an address, it adds to them.
    """
    bad = address if isinstance(address, BadRows) else BadRows(address)
    arrays = {
        column.name: decode_column(_in_one_piece(table.column(column.name)), column, fill, bad)
        for column in columns
    }
    return DecodedRows(table.num_rows, arrays, bad)


def decode_column(array: ArrowArray, column: Column, fill: Fill, bad: BadRows) -> NDArray[Any] | Ragged:
    """One column; what cannot be decoded goes to `bad`."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if column.is_list:
        return _lists(array, column, fill, bad)
    if pa.types.is_fixed_size_list(array.type):
        return _fixed_lists(array, column, fill, bad)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        ragged = _lists(array, column, fill, bad)
        return _of_one_size(ragged, column, bad) if column.shape else ragged
    if array.null_count and fill.get(column.name) is None:
        for row in np.flatnonzero(_missing(array)).tolist():
            bad.add(row, column.name, MISSING % column.name)
    array = _without_nulls(_cast(array, column, bad, of_row=None), fill.get(column.name))
    return as_numpy(array, column.dtype) if column.kind == "number" else _bytes(array)


def _in_one_piece(array: ArrowArray) -> ArrowArray:
    if not isinstance(array, pa.ChunkedArray):
        return array
    if array.num_chunks == 1:
        return array.chunk(0)
    # Of strings beyond 2 GiB combining would give several pieces again.
    if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
        array = array.cast(pa.large_string() if pa.types.is_string(array.type) else pa.large_binary())
    whole = array.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole


def _missing(array: ArrowArray) -> NDArray[np.bool_]:
    return as_numpy(array.is_null(), np.bool_) if array.null_count else np.zeros(len(array), bool)


def _without_nulls(array: ArrowArray, scalar: Any) -> ArrowArray:
    """Array with nulls filled by `scalar`, or with arbitrary bytes in their place."""
    if array.null_count == 0:
        return array
    if scalar is not None:
        return pc.fill_null(array, scalar.cast(array.type))
    return pa.Array.from_buffers(
        array.type, len(array), [None, *array.buffers()[1:]], null_count=0, offset=array.offset
    )


def _cast(array: ArrowArray, column: Column, bad: BadRows, of_row: NDArray[np.int64] | None) -> ArrowArray:
    """Cast to the column's type in memory; values that do not fit are null, and their row (of_row[i], or i) is bad."""
    wanted = storage_type(column)
    if array.type == wanted or (
        column.kind != "number" and (pa.types.is_string(array.type) or pa.types.is_binary(array.type))
    ):
        return array
    through = _through(array.type)
    try:
        return array.cast(through).cast(wanted) if through else array.cast(wanted)
    except pa.ArrowInvalid:
        pass
    good = np.ones(len(array), dtype=bool)
    for at in failing(array, lambda part: part.cast(through or wanted)):
        good[at] = False
        reason = f"{array[at].as_py()!r} does not fit into {_target(column, array.type)}"
        bad.add(int(of_row[at]) if of_row is not None else at, column.name, reason)
    array = array.take(as_indices(np.arange(len(array)), good))
    return array.cast(through).cast(wanted) if through else array.cast(wanted)


def _through(kind: pa.DataType) -> pa.DataType | None:
    """Times are counted in nanoseconds before they are numbers."""
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return pa.timestamp("ns")
    if pa.types.is_time(kind):
        return pa.time64("ns")
    return pa.duration("ns") if pa.types.is_duration(kind) else None


def _target(column: Column, kind: pa.DataType) -> str:
    return f"int64 nanoseconds (it is a {kind})" if _through(kind) else column.type_name


def failing(array: ArrowArray, convert: Callable[[ArrowArray], Any], begin: int = 0) -> Iterator[int]:
    """Values that cannot be converted, found by bisection: a few among many take few conversions."""
    if not len(array):
        return
    try:
        convert(array)
    except pa.ArrowInvalid:
        if len(array) == 1:
            yield begin
            return
        middle = len(array) // 2
        yield from failing(array.slice(0, middle), convert, begin)
        yield from failing(array.slice(middle), convert, begin + middle)


def as_numpy(array: ArrowArray, dtype: Any) -> NDArray[Any]:
    """Values of a numeric array without nulls, without a copy except for bits.

    Arrow's own conversion loads pandas if it is installed, which takes a second.
    """
    begin, end, data = array.offset, array.offset + len(array), array.buffers()[1]
    if data is None:
        return np.zeros(0, dtype)
    if np.dtype(dtype) == np.bool_:
        first = begin // 8
        bits = np.frombuffer(data, dtype=np.uint8)[first : -(-end // 8)]
        return np.unpackbits(bits, bitorder="little")[begin - first * 8 : end - first * 8].view(np.bool_)
    values: NDArray[Any] = np.frombuffer(data, dtype=dtype)[begin:end]
    return values


def as_indices(rows: NDArray[np.int64], is_there: NDArray[np.bool_] | None = None) -> ArrowArray:
    """Rows to take, null where nothing `is_there`; without loading pandas, as above."""
    bits: Any = None if is_there is None else np.packbits(is_there, bitorder="little")
    values: Any = np.ascontiguousarray(rows, dtype=np.int64)
    buffers = [None if bits is None else pa.py_buffer(bits), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.int64(), len(rows), buffers)


def _bytes(array: ArrowArray) -> Ragged:
    is_large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    ends: Any
    data: Any
    _, ends, data = array.buffers()
    offsets = np.zeros(1, dtype=np.int64)
    if ends is not None and len(array):
        all_ends = np.frombuffer(ends, dtype=np.int64 if is_large else np.int32)
        offsets = all_ends[array.offset : array.offset + len(array) + 1].astype(np.int64)
    values = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, dtype=np.uint8)
    return Ragged(values[offsets[0] : offsets[-1]], offsets - offsets[0])


def _fixed_lists(array: Any, column: Column, fill: Fill, bad: BadRows) -> NDArray[Any]:
    num_rows, scalar, missing = len(array), fill.get(column.name), _missing(array)
    values = array
    while pa.types.is_fixed_size_list(values.type):
        size, begin = values.type.list_size, values.offset
        # Not flatten(), which drops the elements of missing lists.
        values = values.values.slice(begin * size, len(values) * size)
    of_row = np.repeat(np.arange(num_rows), int(np.prod(column.shape)))
    numbers = as_numpy(_elements(values, column, scalar, bad, of_row, is_known=missing), column.dtype)
    numbers = numbers.reshape(num_rows, *column.shape)
    if missing.any() and scalar is not None:
        numbers = numbers.copy()
        numbers[missing] = scalar.as_py()
    for row in np.flatnonzero(missing).tolist() if scalar is None else ():
        bad.add(row, column.name, MISSING % column.name)
    return numbers


def _lists(array: Any, column: Column, fill: Fill, bad: BadRows) -> Ragged:
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    scalar = fill.get(column.name)
    missing = _missing(array)
    if scalar is None:
        for row in np.flatnonzero(missing).tolist():
            bad.add(row, column.name, MISSING % column.name)
    kind = np.int64 if pa.types.is_int64(array.offsets.type) else np.int32
    offsets = as_numpy(array.offsets, kind).astype(np.int64)
    values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    offsets = offsets - offsets[0]
    of_row = np.repeat(np.arange(len(array)), np.diff(offsets))
    per_element = None if isinstance(scalar, np.ndarray) else scalar
    elements = _elements(values, column, per_element, bad, of_row, is_known=missing)
    if column.is_list:
        lists = pack_lists(_bytes(elements), offsets)
    else:
        lists = Ragged(as_numpy(elements, column.dtype), offsets)
    if scalar is None or not missing.any():
        return lists
    # For a missing list: the whole list that `fill` gives, or, if it gives an element, an empty one.
    whole = scalar if isinstance(scalar, np.ndarray) else np.zeros(0, dtype=column.dtype)
    rows = [whole if missing[row] else lists.row(row) for row in range(lists.num_rows)]
    return Ragged.of(rows, column.dtype)


def _packed_row(strings: Any, column: Column) -> NDArray[np.uint8]:
    wanted = str if column.kind == "text" else bytes
    if not all(isinstance(string, wanted) for string in strings):
        raise TypeError(f"a list of {wanted.__name__} is wanted")
    texts = Ragged.of_bytes([string.encode() if wanted is str else string for string in strings])
    return pack_lists(texts, np.array([0, len(strings)])).values


def _of_one_size(lists: Ragged, column: Column, bad: BadRows) -> NDArray[Any]:
    """Lists that should all have the size that the column says."""
    [size] = column.shape
    lengths = np.diff(lists.offsets)
    if (lengths == size).all():
        return lists.values.reshape(-1, size)
    numbers = np.zeros((lists.num_rows, size), column.dtype)
    fits = lengths == size
    numbers[fits] = lists.take(np.flatnonzero(fits)).values.reshape(-1, size)
    for row in np.flatnonzero(~fits).tolist():
        bad.add(row, column.name, f"its list has {lengths[row]} values, and the column holds lists of {size}")
    return numbers


def _elements(
    values: ArrowArray,
    column: Column,
    scalar: Any,
    bad: BadRows,
    of_row: NDArray[np.int64],
    *,
    is_known: NDArray[np.bool_],
) -> ArrowArray:
    """Elements of lists in the column's type, none missing; element i belongs to row of_row[i]."""
    if values.null_count and scalar is None:
        for row in np.unique(of_row[_missing(values)]).tolist():
            if not is_known[row]:
                reason = "its list has a missing value, and fill= does not say what stands for it"
                bad.add(row, column.name, reason)
    return _without_nulls(_cast(values, column, bad, of_row), scalar)


def file_of(files: Files, info: FileInfo) -> Any:
    """A file that was found, for Arrow, whose hints ask for more than its readers do."""
    return FileRanges(files, info)


class FileRanges(io.RawIOBase):
    """File reads, checked to be of the file that was found; without a copy."""

    def __init__(self, files: Files, info: FileInfo) -> None:
        self._files, self._info, self._at = files, info, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._info.num_bytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._info.num_bytes - self._at, 0)
        length = left if size is None or size < 0 else min(size, left)
        data = self._files.read(self._info.url, self._at, self._at + length) if length else b""
        self._at += length
        return data


def as_file(text: Any) -> Any:
    """A text as Arrow's readers take one, without a copy."""
    return pa.BufferReader(text)


def shown(value: Any) -> str:
    """A value for a message, cut short where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...{text[-1]}"
