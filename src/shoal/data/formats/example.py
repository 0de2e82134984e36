"""`tf.train.Example` in plain Python: the schema of its features, one message at a time, and a TFRecord writer.

Parsing many at once is `example_parser.py`, reading files `tfrecord.py`.
Features are written in the order of their names, so equal rows have equal
bytes.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from shoal.data import arguments
from shoal.data.formats.table import Column, Ragged, pack_lists
from shoal.errors import ConfigError

ListKind = Literal["bytes", "float", "int64"]
"""The three lists a feature can be."""

_NUMBERS = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature of the records in a TFRecord file.

    Feature("float32")                    one number
    Feature("float32", (4,))              always four
    Feature("int64", None)                any number, padded with -1 behind to the longest of a batch
    Feature("str", default="")            text, with what to take where a record has none
    Feature("str", None)                  a list of strings, an array of `str` in each sample
    Feature("uint8", (28, 28), raw=True)  an array that was written as its bytes
    """

    dtype: Any
    """float32 or float64, a whole number or bool, "str" or "bytes"; numpy's and torch's types are taken too."""

    shape: tuple[int, ...] | None = ()
    """Of one record's values: () one, (k,) always k, also of more dimensions; None: any number."""

    default: Any = None
    """Value of a record that lacks the feature: one number, or as many as the shape has. Without it such a record is bad."""

    key: str | None = None
    """Its name in the record, where that is another than the column's."""

    raw: bool = False
    """The values lie in the record as one string of bytes, little-endian, as numpy's `tobytes()` makes it."""


class Wanted(NamedTuple):
    """A feature as it is looked for: checked, with everything that follows from its declaration."""

    column: Column
    key: str
    list_kind: ListKind
    num_values: int | None
    """None where it may be any number."""

    raw: bool
    default: NDArray[Any] | bytes | None

    def describe(self) -> dict[str, Any]:
        """Fit for JSON; what differs here gives other samples."""
        default = self.default.tolist() if isinstance(self.default, np.ndarray) else self.default
        described = {**self.column.describe(), "key": self.key, "raw": self.raw}
        return described if default is None else {**described, "default": str(default)}


def wanted_features(schema: Mapping[str, Any]) -> tuple[Wanted, ...]:
    """The features of a schema: name of a column to a `Feature`, or to a type alone, which is one value."""
    if not isinstance(schema, Mapping) or not schema or not all(isinstance(name, str) for name in schema):
        raise ConfigError(
            "from_tfrecord needs schema={name: feature, ...}: records do not say which features they should have. For "
            'instance schema={"x": Feature("float32", (4,)), "label": "int64"}, with Feature from shoal.data. '
            f"Got {schema!r}; nothing was read."
        )
    return tuple(
        _wanted(str(name), feature if isinstance(feature, Feature) else Feature(feature))
        for name, feature in schema.items()
    )


def _wanted(name: str, feature: Feature) -> Wanted:
    shape = feature.shape
    if shape is not None and not (
        isinstance(shape, tuple) and all(isinstance(size, int) and size >= 1 for size in shape)
    ):
        raise _refused(name, f"shape={shape!r} is no shape; () is one value, (4,) four, None any number")
    key = name if feature.key is None else feature.key
    kind = _text_kind(feature.dtype)
    if kind is not None:
        if feature.raw or (shape is not None and len(shape) > 1):
            raise _refused(
                name,
                f"a feature of {kind} is one string per record, or with shape=None or shape=(k,) a list of them, and "
                f"shape={feature.shape!r}, raw={feature.raw} asks for something else",
            )
        column = (Column.text if kind == "str" else Column.binary)(name, is_list=shape != ())
        if not column.is_list:
            return Wanted(column, key, "bytes", 1, False, _text_default(name, kind, feature.default))
        default = _texts_default(name, kind, feature.default, shape)
        return Wanted(column, key, "bytes", shape[0] if shape else None, False, default)
    dtype = _number_type(name, feature.dtype)
    column = Column.ragged(name, dtype) if shape is None else Column(name, dtype, shape)
    num_values = None if shape is None else math.prod(shape)
    list_kind: ListKind = "bytes" if feature.raw else "float" if dtype.kind == "f" else "int64"
    values = _number_default(name, feature.default, dtype, shape)
    return Wanted(column, key, list_kind, num_values, feature.raw, values)


def _text_kind(dtype: Any) -> Literal["str", "bytes"] | None:
    if dtype in (str, "str", "string"):
        return "str"
    return "bytes" if dtype in (bytes, "bytes") else None


def _number_type(name: str, dtype: Any) -> np.dtype[Any]:
    try:
        if dtype is None:  # which numpy takes for float64
            raise TypeError
        found = np.dtype(str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype)
    except TypeError:
        raise _refused(name, f"{dtype!r} is no type of numbers, nor 'str' or 'bytes'") from None
    if found.name not in _NUMBERS:
        raise _refused(name, f"{found} is none of {', '.join(_NUMBERS)}, 'str' and 'bytes'")
    return found.newbyteorder("=")


def _number_default(
    name: str, default: Any, dtype: np.dtype[Any], shape: tuple[int, ...] | None
) -> NDArray[Any] | None:
    if default is None:
        return np.zeros(0, dtype) if shape is None else None  # no values at all are a list too
    try:
        given = np.asarray(default)
        values = given.astype(dtype)
        if given.dtype.kind not in "fiub" or (dtype.kind != "f" and not np.array_equal(values, given)):
            raise ValueError
        return np.atleast_1d(values).ravel() if shape is None else np.broadcast_to(values, shape).copy()
    except (TypeError, ValueError, OverflowError):
        raise _refused(name, f"default={default!r} does not fit into {dtype} of shape {shape}") from None


def _text_default(name: str, kind: str, default: Any) -> bytes | None:
    if isinstance(default, str) and kind == "str":
        return default.encode()
    if default is None or isinstance(default, bytes):
        return default
    raise _refused(name, f"default={default!r} is not of type {kind}")


def _texts_default(
    name: str, kind: str, default: Any, shape: tuple[int, ...] | None
) -> NDArray[np.uint8] | None:
    """A list of strings as a row of its column."""
    if default is None:
        return np.zeros(0, np.uint8) if shape is None else None  # no strings at all are a list too
    is_listed = isinstance(default, (list, tuple)) and None not in default
    strings = [_text_default(name, kind, each) or b"" for each in default] if is_listed else []
    if not is_listed or (shape is not None and len(strings) != shape[0]):
        raise _refused(name, f"default={default!r} is no list of {kind} of shape {shape}")
    return pack_lists(Ragged.of_bytes(strings), np.array([0, len(strings)])).values


def _refused(name: str, problem: str) -> ConfigError:
    return ConfigError(f"the schema's feature '{name}' cannot be meant: {problem}. Nothing was read.")


_LISTS = {1: "bytes", 2: "float", 3: "int64"}
_MOST_NAMES = 20


def example_bytes(row: Mapping[str, Any]) -> bytes:
    """A row as a serialized Example: floats as a float list (of float32), whole numbers and booleans as int64, text and bytes as bytes.

    A value is a number, a string, or an array, tensor or list of them; arrays
    of more dimensions are written flat.
    """
    entries = []
    if not all(isinstance(name, str) for name in row):
        raise ConfigError(
            f"the names of features are strings, got {', '.join(map(repr, row))}. Nothing was written."
        )
    for name in sorted(row):
        feature = _feature(name, row[name])
        entries.append(_field(1, _field(1, name.encode()) + _field(2, feature)))
    return _field(1, b"".join(entries))


def _feature(name: str, value: Any) -> bytes:
    if isinstance(value, (str, bytes)):
        return _field(1, _field(1, value.encode() if isinstance(value, str) else value))
    if isinstance(value, (list, tuple)) and any(isinstance(item, (str, bytes)) for item in value):
        return _field(1, b"".join(_field(1, _as_bytes(name, item)) for item in value))
    values = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    match values.dtype.kind:
        case "f":
            return _field(2, _packed(values.astype("<f4").tobytes()))
        case "i" | "b" | "u":
            if values.dtype.kind == "u" and values.size and int(values.max()) >= 1 << 63:
                raise ConfigError(
                    f"the feature '{name}' holds {values.max()}, which is no int64; write it as bytes"
                )
            return _field(3, _packed(b"".join(_varint(int(number)) for number in values.ravel().tolist())))
        case "U" | "S" | "O":
            return _field(1, b"".join(_field(1, _as_bytes(name, item)) for item in values.ravel().tolist()))
    raise ConfigError(
        f"the feature '{name}' is a {type(value).__name__} of {values.dtype}, which a tf.train.Example cannot hold. Give "
        "numbers, text or bytes, or arrays or lists of them."
    )


def _packed(values: bytes) -> bytes:
    return _field(1, values) if values else b""


def _as_bytes(name: str, item: Any) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, bytes):
        return item
    raise ConfigError(
        f"the feature '{name}' holds a {type(item).__name__} among its values, which a tf.train.Example cannot hold. Give "
        "numbers, text or bytes, or arrays or lists of them."
    )


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1  # of a negative one the two's complement, as protobuf has it
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def list_features(example: bytes) -> str:
    """The features of one Example for people: 'age' (an int64 list of 1 value), ... . It must be whole."""
    found = _features(example)
    listed = [f"'{name}' ({_shape_of(found[name])})" for name in sorted(found)]
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return (", ".join(listed[:_MOST_NAMES]) + more) or "no features at all"


def feature_in(example: bytes, name: str) -> str:
    """The feature that one Example holds under a name, for messages."""
    return _shape_of(_features(example).get(name, b""))


def _features(example: bytes) -> dict[str, bytes]:
    found = {}
    for features in _contents(example, 1):
        for entry in _contents(features, 1):
            name = next(_contents(entry, 1), b"").decode(errors="replace")
            found[name] = next(_contents(entry, 2), b"")
    return found


def _shape_of(feature: bytes) -> str:
    for number, kind in _LISTS.items():
        for values in _contents(feature, number):
            packed = b"".join(_contents(values, 1))
            match kind:
                case "bytes":
                    count = sum(1 for _ in _contents(values, 1))
                case "float":
                    count = len(packed) // 4
                case _:
                    count = sum(byte < 0x80 for byte in packed)
            return f"a {kind} list of {count} value{'' if count == 1 else 's'}"
    return "no list"


def _contents(message: bytes, number: int) -> Iterator[bytes]:
    """Contents of the length-delimited fields of this number."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        match tag & 7:
            case 0:
                _, at = _read_varint(message, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                length, at = _read_varint(message, at)
                if tag >> 3 == number:
                    yield message[at : at + length]
                at += length
            case _:
                return


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, at


Compression = Literal["auto", "gzip"] | None


def frame(data: bytes) -> bytes:
    """A record around its data."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def masked_crc(data: bytes) -> int:
    """CRC-32C, turned and moved by a constant."""
    import google_crc32c

    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class TFRecordWriter:
    """Writes records to one file, a path or any URL that fsspec opens.

    A row is a dict: floats become a float list (of float32), whole numbers
    and booleans an int64 list, strings and bytes a bytes list; a value may be
    one of them, or an array, tensor or list. Bytes instead of a dict are
    written as they are. A name that ends in `.gz` is compressed, and then
    can only be read from its beginning. A local file has its name only once it
    is whole: until then it lies beside it under another, and it is removed
    where writing fails.

        with TFRecordWriter("clicks.tfrecord") as out:
            out.write({"price": 1.5, "ids": [3, 7], "label": 1})
    """

    def __init__(self, path: str | os.PathLike[str], *, compression: Compression = "auto") -> None:
        self._path = arguments.path("a TFRecordWriter", path)
        if compression not in (None, "auto", "gzip"):
            raise ConfigError(f"compression is None, 'gzip' or 'auto' (by the name), got {compression!r}")
        self._is_gzip = compression == "gzip" or (compression == "auto" and self._path.endswith(".gz"))
        self._is_local = "://" not in self._path
        self._unfinished = f"{self._path}.{os.getpid()}.part"
        self._file: BinaryIO | None = None
        self._closing = contextlib.ExitStack()
        self.num_records = 0

    def __enter__(self) -> Self:
        try:
            raw = self._closing.enter_context(self._open())
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error}. Nothing was.") from error
        self._file = raw
        if self._is_gzip:
            # No time in the header: equal rows make equal files.
            packed = gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0)
            self._file = cast(BinaryIO, self._closing.enter_context(packed))
        return self

    def _open(self) -> BinaryIO:
        if self._is_local:
            return open(self._unfinished, "wb")
        import fsspec

        return cast(BinaryIO, fsspec.open(self._path, "wb").open())

    def write(self, row: Mapping[str, Any] | bytes) -> None:
        if self._file is None:
            raise ConfigError(f"a TFRecordWriter writes inside a with statement; {self._path} is not open")
        if not isinstance(row, (Mapping, bytes)):
            raise ConfigError(
                f"record {self.num_records + 1} for {self._path} is a {type(row).__name__}, not a dict of features. For "
                "samples of (inputs, label), say the label's name: write_tfrecord(path, rows, label='y')."
            )
        self._file.write(frame(row if isinstance(row, bytes) else example_bytes(row)))
        self.num_records += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file = None
        is_whole = False
        try:
            self._closing.close()
            is_whole = kind is None
        finally:
            if self._is_local and is_whole:
                os.replace(self._unfinished, self._path)
            elif self._is_local:
                os.unlink(self._unfinished)


def write_tfrecord(
    path: str | os.PathLike[str],
    rows: Iterable[Any],
    *,
    label: str | None = None,
    compression: Compression = "auto",
) -> int:
    """Write rows, dicts of features, to a TFRecord file; how many there were.

    With `label="y"` rows are (inputs, label), as a dataset has them.

        write_tfrecord("train.tfrecord", ({"x": x, "y": y} for x, y in pairs))
        write_tfrecord("train.tfrecord", Dataset.from_csv("train.csv", label="y"), label="y")
    """
    if not isinstance(rows, Iterable):
        raise ConfigError(f"write_tfrecord takes rows, dicts of features, got {rows!r}. Nothing was written.")
    if label is not None and not isinstance(label, str):
        raise ConfigError(f"write_tfrecord(label=) takes the name of a feature, got {label!r}")
    with TFRecordWriter(path, compression=compression) as out:
        for row in rows:
            if label is not None:
                if not isinstance(row, tuple) or len(row) != 2 or not isinstance(row[0], Mapping):
                    raise ConfigError(
                        f"with label={label!r} rows are (dict of features, label), and row {out.num_records + 1} for "
                        f"{path} is a {type(row).__name__}. Nothing was written; take label= out, or give pairs."
                    )
                row = {**row[0], label: row[1]}
            out.write(row)
        return out.num_records
