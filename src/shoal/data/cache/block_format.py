"""A block as bytes: tensors, arrays and plain values in any nesting of dicts, tuples and lists.

No pickle: a header that says what lies where, then the raw bytes of the
arrays. Used for files of the disk tier and for samples in a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from shoal.errors import ConfigError

Tree = Any

_ALIGNMENT = 64
_TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_PLAIN = (bool, int, float, str, bytes, type(None))
_SIZE_OF_PLAIN = 32  # about, of a Python object


class _Node(msgspec.Struct, array_like=True):
    """One node of a tree. `kind` says what the rest means."""

    kind: str
    value: Any = None  # a plain value, or the names of a dict
    parts: list[_Node] = []
    dtype: str = ""
    shape: list[int] = []
    begin: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Node)


def num_bytes(tree: Tree) -> int:
    """What a tree takes in memory, about; exactly for its arrays."""
    match tree:
        case torch.Tensor():
            return max(tree.nbytes, 1)
        case np.ndarray() | np.generic():
            return max(tree.nbytes, 1)
        case dict():
            return _SIZE_OF_PLAIN + sum(num_bytes(part) for part in tree.values())
        case tuple() | list():
            return _SIZE_OF_PLAIN + sum(num_bytes(part) for part in tree)
        case str() | bytes() | bytearray() | memoryview():
            return _SIZE_OF_PLAIN + len(tree)
    return _SIZE_OF_PLAIN


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
    """The same tree with `fn` of each tensor."""
    match tree:
        case torch.Tensor():
            return fn(tree)
        case dict():
            return {key: map_tensors(fn, part) for key, part in tree.items()}
        case tuple() | list():
            parts = [map_tensors(fn, part) for part in tree]
            return parts if isinstance(tree, list) else tuple(parts)
    return tree


def encode(tree: Tree) -> tuple[bytes, list[memoryview]]:
    """Header and the arrays' bytes, each to be written at the next multiple of 64 after the one before."""
    arrays: list[memoryview] = []
    header = _encoder.encode(_Encoding(arrays).node(tree))
    return header, arrays


def check(tree: Tree) -> None:
    """Raise what `encode` would, without looking at the contents of arrays."""
    _Encoding([]).node(_hollow(tree))


def _hollow(tree: Tree) -> Tree:
    match tree:
        case torch.Tensor():
            return torch.empty(0, dtype=tree.dtype)
        case np.ndarray():
            return np.empty(0, tree.dtype)
        case bytes() | bytearray() | memoryview():
            return b""
        case dict():
            return {key: _hollow(part) for key, part in tree.items()}
        case tuple() | list() if not hasattr(tree, "_fields"):
            return [_hollow(part) for part in tree]
    return tree


def joined(tree: Tree) -> tuple[bytes, bytes]:
    """Header and body of a tree, each in one piece."""
    header, arrays = encode(tree)
    parts: list[bytes | memoryview] = []
    for array in arrays:
        parts += [array, bytes(padding(len(array)))]
    return header, b"".join(parts)


def decode(header: bytes | memoryview, body: Any) -> Tree:
    """The tree again; its arrays are views of `body`, which may be written if that may."""
    return _decoded(_decoder.decode(header), body)


def padding(length: int) -> int:
    """Bytes from the end of something of this length to where the next array begins."""
    return -length % _ALIGNMENT


class _Encoding:
    def __init__(self, arrays: list[memoryview]) -> None:
        self._arrays, self._end = arrays, 0

    def node(self, tree: Tree) -> _Node:
        match tree:
            case torch.Tensor():
                flat = tree.detach().cpu().contiguous()
                name = str(flat.dtype).removeprefix("torch.")
                raw = flat.reshape(-1).view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
                return _Node("tensor", dtype=name, shape=list(flat.shape), begin=self._keep(raw))
            case np.ndarray() if tree.dtype.kind in "biufcSUmM":
                raw = (
                    np.ascontiguousarray(tree).reshape(-1).view(np.uint8)
                    if tree.size
                    else np.empty(0, np.uint8)
                )
                return _Node("array", dtype=tree.dtype.str, shape=list(tree.shape), begin=self._keep(raw))
            case np.generic():
                node = self.node(np.asarray(tree))
                node.kind = "number"
                return node
            case bytes() | bytearray() | memoryview() if len(tree) > _ALIGNMENT:
                raw = np.frombuffer(tree, np.uint8)
                return _Node("bytes", shape=[len(tree)], begin=self._keep(raw))
            case bytearray() | memoryview():
                return _Node("plain", bytes(tree))
            case dict():
                names, parts = list(tree), [self.node(part) for part in tree.values()]
                if all(isinstance(name, (str, int)) and not isinstance(name, bool) for name in names):
                    return _Node("dict", names, parts)
            case tuple() | list() if not hasattr(tree, "_fields"):
                return _Node(
                    "list" if isinstance(tree, list) else "tuple", None, [self.node(part) for part in tree]
                )
            case _ if isinstance(tree, _PLAIN):
                if not isinstance(tree, int) or -(1 << 63) <= tree < 1 << 63:
                    return _Node("plain", tree)
        what = f"an array of {tree.dtype}" if isinstance(tree, np.ndarray) else f"a {type(tree).__qualname__}"
        raise ConfigError(
            f"{what} cannot be kept in a store or cache, which holds tensors, arrays of numbers or text, strings, bytes and "
            "plain numbers, in dicts by name, tuples and lists: so nothing it reads back could run as code. Nothing was "
            "kept; give one of those."
        )

    def _keep(self, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
        begin = self._end
        self._arrays.append(raw.data)
        self._end += len(raw) + padding(len(raw))
        return begin


def _decoded(node: _Node, body: Any) -> Tree:
    count = math.prod(node.shape)
    match node.kind:
        case "tensor":
            dtype = _TORCH_DTYPES[node.dtype]
            if not count:
                return torch.empty(node.shape, dtype=dtype)
            return torch.frombuffer(body, dtype=dtype, count=count, offset=node.begin).reshape(node.shape)
        case "array" | "number":
            array = np.frombuffer(body, np.dtype(node.dtype), count, node.begin).reshape(node.shape)
            return array[()] if node.kind == "number" else array
        case "bytes":
            return bytes(memoryview(body)[node.begin : node.begin + count])
        case "dict":
            return {name: _decoded(part, body) for name, part in zip(node.value, node.parts, strict=True)}
        case "tuple":
            return tuple(_decoded(part, body) for part in node.parts)
        case "list":
            return [_decoded(part, body) for part in node.parts]
    return node.value
