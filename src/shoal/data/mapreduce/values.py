"""Values as bytes, and back exactly as they were.

Msgpack, with words of our own for what it does not know: tuples, numpy's
arrays and numbers, tensors, whole numbers of more than 64 bits. What would
come back as something else is refused, so that a result does not depend on
whether its values went over the disk.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from shoal.errors import DataError

_TUPLE, _BIG, _ARRAY, _SCALAR, _TENSOR, _PAIRS = range(1, 7)
_AS_THEY_ARE = frozenset({type(None), bool, float, str, bytes})
_HEAD = struct.Struct("<BB")
_SIZE = struct.Struct("<q")


def encode(value: Any) -> bytes:
    """The bytes of a value."""
    try:
        return _encoder.encode(_words(value))
    except UnicodeEncodeError as error:
        raise DataError(
            f"a value of the map function is a string that is no text: {error}. Give it as bytes."
        ) from None


def decode(data: bytes | memoryview) -> Any:
    """The value of bytes that `encode` gave; arrays in memory of their own."""
    return _decoder.decode(data)


def num_bytes(value: Any) -> int:
    """About what a value takes in memory."""
    kind = type(value)
    if kind is int or kind is float or kind is bool or value is None:
        return 32
    if kind is str or kind is bytes:
        return 56 + len(value)
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return 128 + value.nbytes
    if kind is tuple or kind is list:
        return 64 + sum(8 + num_bytes(part) for part in value)
    if kind is dict:
        return 128 + sum(64 + num_bytes(key) + num_bytes(part) for key, part in value.items())
    return 64


def _words(value: Any) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < (1 << 64) else Ext(_BIG, str(value).encode())
    if kind is tuple:
        return Ext(_TUPLE, _encoder.encode([_words(part) for part in value]))
    if kind is list:
        return [_words(part) for part in value]
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: _words(part) for key, part in value.items()}
        return Ext(_PAIRS, _encoder.encode([[_words(key), _words(part)] for key, part in value.items()]))
    if isinstance(value, np.ndarray):
        return Ext(_ARRAY, _array(value))
    if isinstance(value, np.generic):
        return Ext(_SCALAR, _array(np.asarray(value)))
    if isinstance(value, torch.Tensor):
        try:
            return Ext(_TENSOR, _array(value.detach().cpu().numpy()))
        except TypeError:
            pass  # a dtype that numpy has not
    raise DataError(
        f"the map function gave a value with a {kind.__name__} in it: values are numbers, strings, bytes, None, numpy arrays "
        "and tensors of numbers, and lists, tuples and dicts of these, because they are written to disk and read back. "
        "Nothing was computed; yield such a value."
    )


def _array(array: NDArray[Any]) -> bytes:
    if array.dtype.hasobject or array.dtype.names:
        raise DataError(
            f"the map function gave an array of {array.dtype}: values that are arrays hold numbers or fixed strings, "
            "because they are written to disk. Nothing was computed; convert it first."
        )
    kind: bytes = array.dtype.str.encode()
    sizes = b"".join(_SIZE.pack(size) for size in array.shape)
    return _HEAD.pack(len(kind), array.ndim) + kind + sizes + array.tobytes()


def _to_array(data: memoryview) -> NDArray[Any]:
    kind_bytes, ndim = _HEAD.unpack_from(data)
    at = _HEAD.size + kind_bytes
    dtype = np.dtype(bytes(data[_HEAD.size : at]).decode())
    shape = [_SIZE.unpack_from(data, at + 8 * number)[0] for number in range(ndim)]
    # A copy: whoever combines values may add into the first of them.
    return np.frombuffer(bytearray(data[at + 8 * ndim :]), dtype=dtype).reshape(shape)


def _from_word(code: int, data: memoryview) -> Any:
    match code:
        case 1:  # _TUPLE
            return tuple(_decoder.decode(data))
        case 2:  # _BIG
            return int(bytes(data))
        case 3:  # _ARRAY
            return _to_array(data)
        case 4:  # _SCALAR
            return _to_array(data)[()]
        case 5:  # _TENSOR
            return torch.from_numpy(_to_array(data))
        case _:  # _PAIRS
            return dict(_decoder.decode(data))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ext_hook=_from_word)
