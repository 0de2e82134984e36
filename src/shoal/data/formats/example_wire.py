"""`tf.train.Example` one at a time, in plain Python: to write one, and to say what is in one.

Reading many is `example_parser.py`. Features are written in the order of their
names, so equal rows have equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from shoal.errors import ConfigError

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
        case "i" | "b":
            return _field(3, _packed(b"".join(_varint(int(number)) for number in values.ravel().tolist())))
        case "u":
            if values.size and int(values.max()) >= 1 << 63:
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
    """A field that says its length."""
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
    """What one Example holds under a name, for people."""
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
    """What stands in the fields of this number that say their length."""
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
