"""Keys as bytes that sort as the keys do.

So that runs are sorted and merged by comparing bytes, whatever the keys are,
and a key's partition is the same in every process. Order: None, whole
numbers, floats, strings, bytes, tuples; each among its own kind as Python has
it. A whole number and a float are never the same key, nor are "a" and b"a".
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any, TypeAlias

import numpy as np
import torch

from shoal.errors import DataError

Key: TypeAlias = "int | float | str | bytes | tuple[Any, ...] | None"

_NONE, _BELOW, _INT, _ABOVE, _FLOAT, _STR, _BYTES, _TUPLE = range(1, 9)
_SMALLEST, _LARGEST = -(1 << 63), (1 << 63) - 1
_WORD = struct.Struct(">BQ")
_LENGTH = struct.Struct(">BI")
_BITS = struct.Struct(">Q")
_DOUBLE = struct.Struct(">d")
_SIGN = 1 << 63
_ALL = (1 << 64) - 1
# The end of a text sorts before anything that could follow; a zero within it is marked, so that it does not.
_END, _ZERO = b"\x00\x01", b"\x00\xff"


def plain(key: Any) -> Key:
    """The key as one of Python's own: numpy's and torch's numbers become those, True and False 1 and 0."""
    kind = type(key)
    if kind is int or kind is str or kind is bytes or kind is float or key is None:
        return key  # type: ignore[no-any-return]
    if kind is tuple:
        return tuple(plain(part) for part in key)
    if isinstance(key, (bool, np.bool_)):
        return int(key)
    if isinstance(key, (np.integer, np.floating)) or (isinstance(key, torch.Tensor) and key.dim() == 0):
        return plain(key.item())
    for known in (str, bytes, int, float):
        if isinstance(key, known):
            own: Key = known(key)  # type: ignore[arg-type]  # np.str_ and the like
            return own
    raise DataError(
        f"the map function gave the key {_shown(key)}, a {kind.__name__}: keys are whole numbers, floats, strings, bytes, "
        "None, or tuples of them, because they are sorted and written to disk. Nothing was computed; yield such a key."
    )


def encode(key: Key) -> bytes:
    """The bytes of a plain key."""
    kind = type(key)
    if kind is int:
        return _int(key)  # type: ignore[arg-type]
    if kind is str:
        raw = key.encode("utf-8", "surrogatepass")  # type: ignore[union-attr]
        return b"\x06" + (raw.replace(b"\x00", _ZERO) if b"\x00" in raw else raw) + _END
    if kind is bytes:
        return b"\x07" + key.replace(b"\x00", _ZERO) + _END  # type: ignore[union-attr, arg-type, operator]
    if kind is float:
        return _float(key)  # type: ignore[arg-type]
    if key is None:
        return b"\x01"
    return b"\x08" + b"".join(map(encode, key)) + b"\x00"  # type: ignore[arg-type]


def decode(data: bytes) -> Key:
    """The key of bytes that `encode` gave."""
    return _decode(data, 0)[0]


def partition_of(encoded: bytes, num_partitions: int) -> int:
    """Where a key is reduced: the same in every process and on every host."""
    return zlib.crc32(encoded) % num_partitions


def _int(key: int) -> bytes:
    if _SMALLEST <= key <= _LARGEST:
        return _WORD.pack(_INT, key - _SMALLEST)
    # Wider ones by their number of bytes and then those; below zero both turned around.
    size = (key.bit_length() + 8) // 8
    if key > 0:
        return _LENGTH.pack(_ABOVE, size) + key.to_bytes(size, "big")
    return _LENGTH.pack(_BELOW, 0xFFFFFFFF - size) + key.to_bytes(size, "big", signed=True)


def _float(key: float) -> bytes:
    if key == 0.0:
        key = 0.0  # -0.0 is the same key
    elif math.isnan(key):
        key = math.nan  # there is one of it, and it sorts last
    (bits,) = _BITS.unpack(_DOUBLE.pack(key))
    return _WORD.pack(_FLOAT, bits ^ _ALL if bits & _SIGN else bits | _SIGN)


def _decode(data: bytes, at: int) -> tuple[Key, int]:
    tag = data[at]
    if tag == _NONE:
        return None, at + 1
    if tag == _INT:
        return _WORD.unpack_from(data, at)[1] + _SMALLEST, at + 9
    if tag == _FLOAT:
        bits = _WORD.unpack_from(data, at)[1]
        bits = bits ^ _SIGN if bits & _SIGN else bits ^ _ALL
        return _DOUBLE.unpack(_BITS.pack(bits))[0], at + 9
    if tag in (_ABOVE, _BELOW):
        size = _LENGTH.unpack_from(data, at)[1]
        size = size if tag == _ABOVE else 0xFFFFFFFF - size
        end = at + 5 + size
        return int.from_bytes(data[at + 5 : end], "big", signed=tag == _BELOW), end
    if tag in (_STR, _BYTES):
        end = data.index(_END, at + 1)  # a zero within is followed by 255
        raw = data[at + 1 : end].replace(_ZERO, b"\x00")
        return raw.decode("utf-8", "surrogatepass") if tag == _STR else raw, end + 2
    parts = []
    at += 1
    while data[at]:
        part, at = _decode(data, at)
        parts.append(part)
    return tuple(parts), at + 1


def _shown(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= 60 else f"{text[:57]}..."
