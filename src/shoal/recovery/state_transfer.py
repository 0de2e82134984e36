"""What a donor hands to a rank that is behind: state in parts, the log since the anchor, results of finished calls.

Plain values and tensors, packed side by side and sent over the new group.
Nothing here decides who gives to whom; `together.py` does.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.collectives.reducer import Reducer
from shoal.errors import ClusterError

_DTYPES = {str(dtype): dtype for dtype in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)}  # fmt: skip

_RESULT_TYPES: dict[str, type[Any]] = {}
"""Dataclasses that results of exchanges may hold, by name; filled by `register_result_type`."""

_OVERHEAD_BYTES = 256
"""Of one object among many."""


@dataclass(slots=True)
class Part:
    """One Trainer's (or loop's) share of the heritage."""

    plain: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(slots=True)
class Heritage:
    """Everything a fresh process needs to run forward from the donor's anchor."""

    anchored_at: int
    """Number of the first exchange after the anchor."""

    call: int
    """The call in which the anchor lies; calls below it are finished, and it too if `call_is_over`."""

    call_is_over: bool
    anchor: dict[str, Any]
    """What the running call noted at the anchor."""

    log: dict[int, Any] = field(default_factory=dict)
    """Results of the exchanges since the anchor."""

    results: dict[str, Any] = field(default_factory=dict)
    """Results of finished calls, and of what the script reduced between them."""

    parts: dict[int, Part] = field(default_factory=dict)
    """State by the number of its owner."""


def register_result_type(kind: type[Any]) -> type[Any]:
    """Class decorator: results that hold this dataclass can be handed to a replacement."""
    _RESULT_TYPES[kind.__name__] = kind
    return kind


def send(native: Reducer, heritage: Heritage, rank: int) -> None:
    """Give the heritage to `rank`, which must be in `receive`."""
    fields = {field.name: getattr(heritage, field.name) for field in dataclasses.fields(heritage)}
    fields["parts"] = {
        owner: {"plain": part.plain, "tensors": part.tensors} for owner, part in heritage.parts.items()
    }
    packed, tensors = _pack(fields)
    header = json.dumps(
        {"plain": packed, "tensors": [[str(t.dtype), list(t.shape)] for t in tensors]}
    ).encode()
    with native.during("handing state over"):
        dist.send(torch.tensor([len(header)], dtype=torch.int64), rank)
        dist.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), rank)
        for tensor in tensors:
            if tensor.numel():
                dist.send(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8), rank)


def receive(native: Reducer, donor: int) -> Heritage:
    """Take the heritage that `donor` sends; all of it, or PeerLost."""
    with native.during("taking state over"):
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, donor)
        raw = torch.zeros(int(length), dtype=torch.uint8)
        dist.recv(raw, donor)
        header = json.loads(raw.numpy().tobytes())
        tensors = []
        for dtype, shape in header["tensors"]:
            tensor = torch.empty(shape, dtype=_DTYPES[dtype])
            if tensor.numel():
                flat = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
                dist.recv(flat, donor)
                tensor = flat.view(_DTYPES[dtype]).reshape(shape)
            tensors.append(tensor)
    plain = _unpack(header["plain"], tensors)
    plain["parts"] = {int(owner): Part(**part) for owner, part in plain["parts"].items()}
    plain["log"] = {int(number): result for number, result in plain["log"].items()}
    return Heritage(**plain)


def num_bytes(value: Any) -> int:
    """What a result takes in memory, or a little more."""
    if isinstance(value, Tensor):
        return _OVERHEAD_BYTES + value.numel() * value.element_size()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return _OVERHEAD_BYTES + sum(map(num_bytes, value))
    return _OVERHEAD_BYTES + (len(value) if isinstance(value, (str, bytes)) else 0)


def to_bytes(value: Any) -> bytes:
    """Plain values and tensors in one piece of memory."""
    packed, tensors = _pack(value)
    header = json.dumps(
        {"plain": packed, "tensors": [[str(t.dtype), list(t.shape)] for t in tensors]}
    ).encode()
    raw = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return b"".join([len(header).to_bytes(8, "little"), header, *raw])


def from_bytes(raw: bytes | bytearray | memoryview) -> Any:
    """What `to_bytes` was given."""
    memory = memoryview(raw)
    at = 8 + int.from_bytes(memory[:8], "little")
    header = json.loads(bytes(memory[8:at]))
    tensors = []
    for dtype, shape in header["tensors"]:
        size = math.prod(shape) * _DTYPES[dtype].itemsize
        flat = (
            torch.frombuffer(bytearray(memory[at : at + size]), dtype=torch.uint8) if size else torch.empty(0)
        )
        tensors.append(
            flat.view(_DTYPES[dtype]).reshape(shape) if size else torch.empty(shape, dtype=_DTYPES[dtype])
        )
        at += size
    return _unpack(header["plain"], tensors)


def _pack(value: Any) -> tuple[Any, list[Tensor]]:
    tensors: list[Tensor] = []

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return {"~": "tensor", "at": len(tensors) - 1}
        if type(value) in _RESULT_TYPES.values():
            return {
                "~": "result",
                "type": type(value).__name__,
                "fields": walk({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}),
            }
        if isinstance(value, tuple):
            return {"~": "tuple", "items": [walk(item) for item in value]}
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, dict):
            return {str(key): walk(item) for key, item in value.items()}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise ClusterError(
            f"a result of the script holds a {type(value).__name__}, which cannot be handed to a replaced worker. "
            "Return tensors, numbers, strings, and dicts, lists or tuples of them."
        )

    return walk(value), tensors


def _unpack(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get("~"):
        case "tensor":
            return tensors[value["at"]]
        case "tuple":
            return tuple(_unpack(item, tensors) for item in value["items"])
        case "result":
            return _RESULT_TYPES[value["type"]](**_unpack(value["fields"], tensors))
        case _:
            return {key: _unpack(item, tensors) for key, item in value.items()}
