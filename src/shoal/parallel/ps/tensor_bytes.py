"""A tensor as bytes and back, for exchanges through the servers."""

from __future__ import annotations

import json

import torch
from torch import Tensor


def raw_bytes(tensor: Tensor) -> bytes:
    """Its elements."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def to_bytes(value: Tensor | None) -> bytes:
    """Dtype, shape and elements; nothing of None."""
    if value is None:
        return b""
    head = json.dumps([str(value.dtype).removeprefix("torch."), list(value.shape)]).encode()
    return len(head).to_bytes(4, "little") + head + (raw_bytes(value) if value.numel() else b"")


def from_bytes(raw: bytes) -> Tensor | None:
    """What `to_bytes` was given."""
    if not raw:
        return None
    start = 4 + int.from_bytes(raw[:4], "little")
    dtype, shape = json.loads(raw[4:start])
    kind = getattr(torch, dtype)
    if len(raw) == start:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8).view(kind).reshape(shape)
