"""Arrow columns as rows in memory, without a copy where the types allow it; files as Arrow reads them.

Values that are missing, or that do not fit their type, make their row a bad
one; `fill` says what stands for a missing value instead.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.files import FileInfo, Files
from shoal.data.formats.schema import storage_type
from shoal.data.formats.table import Column, DecodedRows, Ragged, pack_lists
from shoal.errors import BadSample, ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

ArrowArray = Any
"""An array of any type; Arrow's type hints know each type apart, and here all of them pass."""

Address = Callable[[int], dict[str, Any]]
"""Row of a block to the arguments of BadSample that say where it is."""

_SHOWN = 60  # characters of a row or a value in a message
MISSING = "the value is missing, and fill={'%s': ...} does not say what stands for it"


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


class Fill:
    """Values that stand for missing ones, by column; refuses at birth what a column cannot hold."""

    def __init__(self, values: Mapping[str, Any] | None, columns: Sequence[Column]) -> None:
        import pyarrow as pa

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
    """The rows of an Arrow table that has these columns, of whatever types they were made from.

    Given rows that are known to be bad, instead of an address, it adds to them.
    """
    bad = address if isinstance(address, BadRows) else BadRows(address)
    arrays = {
        column.name: decode_column(_in_one_piece(table.column(column.name)), column, fill, bad)
        for column in columns
    }
    return DecodedRows(table.num_rows, arrays, bad)


def decode_column(array: ArrowArray, column: Column, fill: Fill, bad: BadRows) -> NDArray[Any] | Ragged:
    """One column; what cannot be decoded goes to `bad`."""
    import pyarrow as pa

    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if column.is_list:
        return _text_lists(array, column, fill, bad)
    if pa.types.is_fixed_size_list(array.type):
        return _fixed_lists(array, column, fill, bad)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        ragged = _lists(array, column, fill, bad)
        return _of_one_size(ragged, column, bad) if column.shape else ragged
    if array.null_count and fill.get(column.name) is None:
        for row in _null_rows(array):
            bad.add(row, column.name, MISSING % column.name)
    array = _without_nulls(_cast(array, column, bad, of_row=None), fill.get(column.name))
    return _numbers(array, column) if column.kind == "number" else _bytes(array)


def _in_one_piece(array: ArrowArray) -> ArrowArray:
    import pyarrow as pa

    if not isinstance(array, pa.ChunkedArray):
        return array
    if array.num_chunks == 1:
        return array.chunk(0)
    # Of strings beyond 2 GiB combining would give several pieces again.
    if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
        array = array.cast(pa.large_string() if pa.types.is_string(array.type) else pa.large_binary())
    whole = array.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole


def _null_rows(array: ArrowArray) -> list[int]:
    rows: list[int] = np.flatnonzero(as_numpy(array.is_null(), np.bool_)).tolist()
    return rows


def _without_nulls(array: ArrowArray, scalar: Any) -> ArrowArray:
    """The array with nulls filled by `scalar`, or left with whatever bytes lie there."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if array.null_count == 0:
        return array
    if scalar is not None:
        return pc.fill_null(array, scalar.cast(array.type))
    return pa.Array.from_buffers(
        array.type, len(array), [None, *array.buffers()[1:]], null_count=0, offset=array.offset
    )


def _cast(array: ArrowArray, column: Column, bad: BadRows, of_row: NDArray[np.int64] | None) -> ArrowArray:
    """As the type the column has in memory; values that do not fit are null, and their row (of_row[i], or i) is bad."""
    import pyarrow as pa

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
    for at in _failing(array, through or wanted, 0, len(array)):
        good[at] = False
        reason = f"{array[at].as_py()!r} does not fit into {_target(column, array.type)}"
        bad.add(int(of_row[at]) if of_row is not None else at, column.name, reason)
    array = array.take(as_indices(np.arange(len(array)), good))
    return array.cast(through).cast(wanted) if through else array.cast(wanted)


def _through(kind: pa.DataType) -> pa.DataType | None:
    """Times are counted in nanoseconds before they are numbers."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return pa.timestamp("ns")
    if pa.types.is_time(kind):
        return pa.time64("ns")
    return pa.duration("ns") if pa.types.is_duration(kind) else None


def _target(column: Column, kind: pa.DataType) -> str:
    return f"int64 nanoseconds (it is a {kind})" if _through(kind) else column.type_name


def _failing(array: ArrowArray, kind: pa.DataType, begin: int, end: int) -> Iterator[int]:
    """Values that cannot be cast, found by halving: a few among many take few casts."""
    import pyarrow as pa

    try:
        array.slice(begin, end - begin).cast(kind)
    except pa.ArrowInvalid:
        if end - begin == 1:
            yield begin
            return
        middle = (begin + end) // 2
        yield from _failing(array, kind, begin, middle)
        yield from _failing(array, kind, middle, end)


def _numbers(array: ArrowArray, column: Column) -> NDArray[Any]:
    return as_numpy(array, column.dtype)


def as_numpy(array: ArrowArray, dtype: Any) -> NDArray[Any]:
    """The values of an array of numbers that misses none, without a copy but for bits.

    Arrow's own way loads pandas where it is installed, which takes a second.
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
    import pyarrow as pa

    bits: Any = None if is_there is None else np.packbits(is_there, bitorder="little")
    values: Any = np.ascontiguousarray(rows, dtype=np.int64)
    buffers = [None if bits is None else pa.py_buffer(bits), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.int64(), len(rows), buffers)


def _offsets(array: ArrowArray) -> NDArray[np.int64]:
    import pyarrow as pa

    return as_numpy(array, np.int64 if pa.types.is_int64(array.type) else np.int32).astype(np.int64)


def _bytes(array: ArrowArray) -> Ragged:
    import pyarrow as pa

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
    import pyarrow as pa

    num_rows, scalar = len(array), fill.get(column.name)
    missing = as_numpy(array.is_null(), np.bool_) if array.null_count else np.zeros(num_rows, bool)
    values = array
    while pa.types.is_fixed_size_list(values.type):
        size, begin = values.type.list_size, values.offset
        # Not flatten(), which leaves out what belongs to missing lists.
        values = values.values.slice(begin * size, len(values) * size)
    of_row = np.repeat(np.arange(num_rows), int(np.prod(column.shape)))
    numbers = _numbers(_elements(values, column, scalar, bad, of_row, is_known=missing), column)
    numbers = numbers.reshape(num_rows, *column.shape)
    if missing.any() and scalar is not None:
        numbers = numbers.copy()
        numbers[missing] = scalar.as_py()
    for row in np.flatnonzero(missing).tolist() if scalar is None else ():
        bad.add(row, column.name, MISSING % column.name)
    return numbers


def _lists(array: Any, column: Column, fill: Fill, bad: BadRows) -> Ragged:
    offsets, missing = _list_bounds(array, column, fill, bad)
    values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    offsets = offsets - offsets[0]
    scalar = fill.get(column.name)
    of_row = np.repeat(np.arange(len(array)), np.diff(offsets))
    per_element = None if isinstance(scalar, np.ndarray) else scalar
    numbers = _numbers(_elements(values, column, per_element, bad, of_row, is_known=missing), column)
    return _with_whole_lists(Ragged(numbers, offsets), missing, scalar, column)


def _text_lists(array: Any, column: Column, fill: Fill, bad: BadRows) -> Ragged:
    import pyarrow as pa

    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    offsets, missing = _list_bounds(array, column, fill, bad)
    values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    offsets = offsets - offsets[0]
    scalar = fill.get(column.name)
    of_row = np.repeat(np.arange(len(array)), np.diff(offsets))
    per_element = None if isinstance(scalar, np.ndarray) else scalar
    texts = _bytes(_elements(values, column, per_element, bad, of_row, is_known=missing))
    return _with_whole_lists(pack_lists(texts, offsets), missing, scalar, column)


def _list_bounds(
    array: Any, column: Column, fill: Fill, bad: BadRows
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Bounds of the lists in the array's values, and which are missing: bad ones, unless there is a fill."""
    missing = as_numpy(array.is_null(), np.bool_) if array.null_count else np.zeros(len(array), bool)
    if fill.get(column.name) is None:
        for row in np.flatnonzero(missing).tolist():
            bad.add(row, column.name, MISSING % column.name)
    return _offsets(array.offsets), missing


def _with_whole_lists(lists: Ragged, missing: NDArray[np.bool_], scalar: Any, column: Column) -> Ragged:
    """With what `fill` says where a list is missing: a whole list, or where it says an element, none of them."""
    if scalar is None or not missing.any():
        return lists
    whole = scalar if isinstance(scalar, np.ndarray) else np.zeros(0, dtype=column.dtype)
    rows = [
        whole if missing[row] else lists.values[lists.offsets[row] : lists.offsets[row + 1]]
        for row in range(lists.num_rows)
    ]
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
        for row in np.unique(of_row[_null_rows(values)]).tolist():
            if not is_known[row]:
                bad.add(
                    row,
                    column.name,
                    "its list has a missing value, and fill= does not say what stands for it",
                )
    return _without_nulls(_cast(values, column, bad, of_row), scalar)


def file_of(files: Files, info: FileInfo) -> Any:
    """A file that was found, for Arrow, whose hints ask for more than its readers do."""
    return FileRanges(files, info)


class FileRanges(io.RawIOBase):
    """Reads checked to be of the file that was found, wherever it lies; what is read is not copied."""

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
    import pyarrow as pa

    return pa.BufferReader(text)


def shown(value: Any) -> str:
    """A value for a message, cut short where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...{text[-1]}"
