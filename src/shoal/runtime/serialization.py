"""Serialization of nested plain values, tensors and arrays, without pickle: reading cannot execute code.

Two forms. JSON, for the readable part of checkpoints (`to_plain`): JSON has no tuple, no infinity
and no integer keys, so they are written as one-entry objects whose key starts with "$". Msgpack,
for values with tensors and arrays: small ones in one piece (`encode`), or a header with the arrays
beside it, to be sent one by one (`pack`) or concatenated (`dumps`). A value that could not be
restored exactly is refused by name. Loads neither torch nor numpy by itself.
"""

from __future__ import annotations

import math
import struct
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from shoal.errors import ConfigError


def to_plain(value: Any, where: str) -> Any:
    """`value` as something JSON holds; `where` names it in the refusal."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)  # an IntEnum is its number
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [to_plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [to_plain(item, f"{where}[{number}]") for number, item in enumerate(value)]}
    if isinstance(value, dict):
        return _dict_to_plain(value, where)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor) and value.dim() == 0:
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$tensor": [dtype, to_plain(value.detach().item(), where)]}
    if numpy is not None and isinstance(value, numpy.generic):
        return to_plain(value.item(), where)
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: it is read without running code, so a "
        "state may be made of numbers, strings, None, lists, tuples, dicts and tensors of one number. Nothing was "
        "saved; leave that value out of state_dict(), or turn it into one of these."
    )


def from_plain(value: Any) -> Any:
    """Inverse of `to_plain`."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, inner), *_ = value.items()
        if tag.startswith("$"):
            return _FROM_TAG[tag](inner)
    return {key: from_plain(item) for key, item in value.items()}


def unlike(saved: Any, own: Any, where: str, *, may_be_none: bool = False) -> str | None:
    """First value of `saved` of another kind than its counterpart in `own`; None if there is none.

    Anything matches None (and None matches anything if it `may_be_none`), a whole number or a
    tensor of one number matches any number, and a key may be in only one of two dicts.
    """
    saved, own = (value.item() if hasattr(value, "item") else value for value in (saved, own))
    if own is None or (saved is None and may_be_none):
        return None
    if isinstance(saved, int) and abs(saved) >= 1 << 63:
        return f"{where} is {saved}, which no tensor holds"
    kinds: list[Any] = [bool, (int, float), str, (list, tuple), dict]
    for kind in kinds:
        if isinstance(own, kind) != isinstance(saved, kind):
            return f"{where} is {saved!r}, which should be like {own!r}"
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(own, dict):
        pairs = [(f"{where}.{key}", saved[key], own[key]) for key in own if key in saved]
    elif isinstance(own, (list, tuple)):
        if own and len(own) != len(saved):
            return f"{where} holds {len(saved)} values, which should be {len(own)}"
        pairs = [(f"{where}[{n}]", mine, its) for n, (mine, its) in enumerate(zip(saved, own, strict=False))]
    for name, theirs, ours in pairs:
        if found := unlike(theirs, ours, name, may_be_none=may_be_none):
            return found
    return None


def _dict_to_plain(value: dict[Any, Any], where: str) -> Any:
    if isinstance(value, Counter):
        return {"$counter": _pairs(value, where)}
    if all(type(key) is str for key in value) and not any(key.startswith("$") for key in value):
        return {key: to_plain(item, f"{where}.{key}") for key, item in value.items()}
    return {"$dict": _pairs(value, where)}


def _pairs(value: dict[Any, Any], where: str) -> list[Any]:
    return [
        [to_plain(key, f"a key of {where}"), to_plain(item, f"{where}[{key!r}]")]
        for key, item in value.items()
    ]


def _tensor(inner: list[Any]) -> Any:
    import torch

    dtype, number = inner
    return torch.tensor(from_plain(number), dtype=getattr(torch, dtype))


_FROM_TAG: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda inner: tuple(from_plain(inner)),
    "$dict": lambda inner: {from_plain(key): from_plain(item) for key, item in inner},
    "$counter": lambda inner: Counter({from_plain(key): from_plain(item) for key, item in inner}),
    "$tensor": _tensor,
}


# ---- tensors, arrays and plain values as bytes -------------------------------------------------------
# Msgpack, with extension codes for what it does not know. Numbers of the codes are in files of map_reduce.

_TUPLE, _BIG, _ARRAY, _SCALAR, _TENSOR, _PAIRS, _LEAF, _HOOKED, _RAW_TENSOR = range(1, 10)
_ALIGNMENT = 64
_LARGE_BYTES = 64  # bytes of this length are worth a place beside the header
_EXACT = frozenset({type(None), bool, float, str, bytes})
_BASES: tuple[Any, ...] = (int, float, str, bytes, tuple, list, dict)
_HEAD, _SIZE = struct.Struct("<BB"), struct.Struct("<q")
_encoder = msgspec.msgpack.Encoder()

Hook = Callable[[Any], "tuple[str, Any] | None"]
"""Returns the tag and the parts of a value of a foreign type, or None to let the codec try."""

Unhook = Callable[[str, Any], Any]
"""Makes the value of a tag and its parts again."""


class NotSerializable(Exception):
    """Internal: `what` names a value that the codec does not support; the caller adds advice."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def encode(value: Any) -> bytes:
    """A value in one piece. Of exactly these types only, for nothing may come back as another."""
    return _encoder.encode(_in_one_piece.word(value))


def decode(data: bytes | memoryview) -> Any:
    """Inverse of `encode`; arrays in memory of their own, to be written to."""
    return _decoder.decode(data)


def pack(value: Any, hook: Hook | None = None) -> tuple[bytes, list[Any]]:
    """A header, and the value's leaves as they are: tensors, arrays, long bytes. Subclasses become what they derive from."""
    leaves: list[Any] = []
    return _encoder.encode(_Packing(leaves, hook, is_exact=False).word(value)), leaves


def unpack(header: bytes | memoryview, leaves: Sequence[Any], unhook: Unhook | None = None) -> Any:
    """Inverse of `pack`, with these leaves."""
    rest = iter(leaves)
    return _unpacked(header, lambda spec: next(rest), unhook)


def leaf_specs(header: bytes | memoryview) -> list[LeafSpec]:
    """Dtypes and shapes of the leaves that belong to a header, in their order."""
    found: list[LeafSpec] = []
    _unpacked(header, found.append, lambda tag, parts: None)
    return found


def dumps(value: Any, hook: Hook | None = None) -> bytes:
    """Header and aligned leaves in one piece, for `loads`."""
    header, leaves = pack(value, hook)
    head = len(header).to_bytes(8, "little") + header
    parts: list[bytes | memoryview] = [head, bytes(padding(len(head)))]
    for leaf in map(raw_bytes, leaves):
        parts += [leaf, bytes(padding(len(leaf)))]
    return b"".join(parts)


def loads(data: bytes | bytearray | memoryview, unhook: Unhook | None = None) -> Any:
    """Inverse of `dumps`, in memory of its own: tensors and arrays may be written."""
    content = memoryview(bytearray(data))  # writable, and aligned from its beginning on
    begin = 8 + int.from_bytes(content[:8], "little")
    at = begin + padding(begin)

    def next_leaf(spec: LeafSpec) -> Any:
        nonlocal at
        first, at = at, at + spec.num_bytes + padding(spec.num_bytes)
        return spec.leaf(content[first : first + spec.num_bytes])

    return _unpacked(content[8:begin], next_leaf, unhook)


def padding(length: int) -> int:
    """Bytes from the end of something of this length to where the next leaf begins."""
    return -length % _ALIGNMENT


def raw_bytes(leaf: Any) -> memoryview:
    """The elements of a tensor or array, or bytes, without a copy where they lie in one piece on the CPU."""
    if isinstance(leaf, (bytes, bytearray, memoryview)):
        return memoryview(leaf).cast("B")
    import numpy as np

    if isinstance(leaf, np.ndarray):
        flat = np.ascontiguousarray(leaf).reshape(-1)
        return flat.view(np.uint8).data if flat.size else memoryview(b"")
    import torch

    tensor = leaf.detach().cpu().contiguous().reshape(-1)
    raw: memoryview = tensor.view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
    return raw


def num_bytes(value: Any, *, per_object: int = 32) -> int:
    """Memory that a value takes, about; exactly for its arrays."""
    if isinstance(value, dict):
        return per_object + sum(num_bytes(part, per_object=per_object) for part in value.values())
    if isinstance(value, (list, tuple)):
        return per_object + sum(num_bytes(part, per_object=per_object) for part in value)
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        return per_object + len(value)
    size = getattr(value, "nbytes", None)
    return per_object if size is None else max(int(size), 1)


class LeafSpec(msgspec.Struct, frozen=True, array_like=True):
    """A leaf as the header describes it."""

    kind: str  # tensor, array or bytes
    dtype: str
    shape: list[int]

    @property
    def num_bytes(self) -> int:
        import numpy as np

        size = (
            dtype_of(self.dtype).itemsize
            if self.kind == "tensor"
            else np.dtype(self.dtype).itemsize
            if self.kind == "array"
            else 1
        )
        return size * math.prod(self.shape)

    def leaf(self, raw: memoryview) -> Any:
        """The leaf over these bytes."""
        if self.kind == "bytes":
            return bytes(raw)
        if self.kind == "array":
            import numpy as np

            return np.frombuffer(raw, np.dtype(self.dtype)).reshape(self.shape)
        import torch

        dtype = dtype_of(self.dtype)
        if not raw:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(raw, dtype=dtype).reshape(self.shape)


def dtype_of(name: str) -> Any:
    """torch's dtype of a name from a file or message; NotSerializable for anything else."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise NotSerializable(f"a tensor of '{name}'")
    return dtype


class _Packing:
    """One walk over a value. Without `leaves`, arrays are written into the header."""

    def __init__(self, leaves: list[Any] | None, hook: Hook | None, *, is_exact: bool) -> None:
        self._leaves, self._hook, self._is_exact = leaves, hook, is_exact

    def word(self, value: Any) -> Any:
        kind = type(value)
        if kind is int:
            return value if -(1 << 63) <= value < (1 << 64) else Ext(_BIG, str(value).encode())
        if kind in _EXACT:
            if kind is bytes and self._leaves is not None and len(value) > _LARGE_BYTES:
                return self._leaf(value, LeafSpec("bytes", "", [len(value)]))
            return value
        if self._hook is not None:
            hooked = self._hook(value)
            if hooked is not None:
                tag, parts = hooked
                return Ext(_HOOKED, _encoder.encode([tag, self.word(parts)]))
        if kind is tuple:
            return Ext(_TUPLE, _encoder.encode([self.word(part) for part in value]))
        if kind is list:
            return [self.word(part) for part in value]
        if kind is dict:
            if all(type(key) is str for key in value):
                return {key: self.word(part) for key, part in value.items()}
            pairs = [[self.word(key), self.word(part)] for key, part in value.items()]
            return Ext(_PAIRS, _encoder.encode(pairs))
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and isinstance(value, numpy.generic):
            return Ext(_SCALAR, _array_bytes(numpy.asarray(value)))
        if numpy is not None and isinstance(value, numpy.ndarray):
            return self._array(value)
        if torch is not None and isinstance(value, torch.Tensor):
            return self._tensor(value)
        if not self._is_exact:
            if isinstance(value, (bytearray, memoryview)):
                return self.word(bytes(value))
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                raise NotSerializable(f"a {kind.__qualname__}")
            for base in _BASES:
                if isinstance(value, base):
                    return self.word(base(value))
        raise NotSerializable(f"a {kind.__qualname__}")

    def _array(self, array: Any) -> Any:
        _check_array(array)
        if self._leaves is None:
            return Ext(_ARRAY, _array_bytes(array))
        return self._leaf(array, LeafSpec("array", array.dtype.str, list(array.shape)))

    def _tensor(self, tensor: Any) -> Any:
        if str(tensor.layout) != "torch.strided":
            raise NotSerializable(f"a tensor laid out as {tensor.layout}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if self._leaves is not None:
            return self._leaf(tensor, LeafSpec("tensor", dtype, list(tensor.shape)))
        try:
            return Ext(_TENSOR, _array_bytes(tensor.detach().cpu().numpy()))
        except TypeError:  # a dtype that numpy has not
            parts = [dtype, list(tensor.shape), bytes(raw_bytes(tensor))]
            return Ext(_RAW_TENSOR, _encoder.encode(parts))

    def _leaf(self, leaf: Any, spec: LeafSpec) -> Ext:
        assert self._leaves is not None
        self._leaves.append(leaf)
        return Ext(_LEAF, _encoder.encode(spec))


def _unpacked(header: bytes | memoryview, next_leaf: Callable[[LeafSpec], Any], unhook: Unhook | None) -> Any:
    def inner(data: memoryview) -> Any:
        return msgspec.msgpack.decode(data, ext_hook=from_word)

    def from_word(code: int, data: memoryview) -> Any:
        if code == _LEAF:
            return next_leaf(msgspec.msgpack.decode(data, type=LeafSpec))
        if code == _HOOKED and unhook is not None:
            return unhook(*inner(data))
        return _from_word(code, data, inner)

    return msgspec.msgpack.decode(header, ext_hook=from_word)


def _from_word(code: int, data: memoryview, inner: Callable[[memoryview], Any]) -> Any:
    match code:
        case 1:  # _TUPLE
            return tuple(inner(data))
        case 2:  # _BIG
            return int(bytes(data))
        case 3:  # _ARRAY
            return _to_array(data)
        case 4:  # _SCALAR
            return _to_array(data)[()]
        case 5:  # _TENSOR
            import torch

            return torch.from_numpy(_to_array(data))
        case 6:  # _PAIRS
            return dict(inner(data))
        case 9:  # _RAW_TENSOR
            dtype, shape, raw = inner(data)
            return LeafSpec("tensor", dtype, shape).leaf(memoryview(bytearray(raw)))
    raise NotSerializable(f"extension {code}")


def _check_array(array: Any) -> None:
    if array.dtype.hasobject or array.dtype.names:
        raise NotSerializable(f"an array of {array.dtype}")


def _array_bytes(array: Any) -> bytes:
    _check_array(array)
    kind: bytes = array.dtype.str.encode()
    sizes = b"".join(_SIZE.pack(size) for size in array.shape)
    return b"".join([_HEAD.pack(len(kind), array.ndim), kind, sizes, array.tobytes()])


def _to_array(data: memoryview) -> Any:
    import numpy as np

    kind_bytes, ndim = _HEAD.unpack_from(data)
    at = _HEAD.size + kind_bytes
    dtype = np.dtype(bytes(data[_HEAD.size : at]).decode())
    shape = [_SIZE.unpack_from(data, at + 8 * number)[0] for number in range(ndim)]
    # A copy: a caller that combines values may add into the first of them.
    return np.frombuffer(bytearray(data[at + 8 * ndim :]), dtype=dtype).reshape(shape)


_in_one_piece = _Packing(None, None, is_exact=True)
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    ext_hook=lambda code, data: _from_word(code, data, _decoder.decode)
)
