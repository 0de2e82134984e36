"""Arrays as raw memory, and several pieces of memory in one."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.errors import WireError


def memory_of(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of an array, not copied unless it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def pack(pieces: Sequence[bytes | memoryview]) -> bytes:
    """How many, their lengths, then they."""
    lengths = [memoryview(piece).nbytes for piece in pieces]
    return struct.pack(f"<{1 + len(lengths)}Q", len(lengths), *lengths) + b"".join(pieces)


def unpack(raw: bytes | memoryview) -> list[bytes]:
    """What `pack` was given; WireError where it cannot have been."""
    memory = memoryview(raw)
    try:
        (count,) = struct.unpack_from("<Q", memory)
        lengths = struct.unpack_from(f"<{count}Q", memory, 8) if count <= len(memory) // 8 else None
    except struct.error:
        lengths = None
    if lengths is None or 8 * (1 + count) + sum(lengths) != len(memory):
        raise WireError(f"{len(memory)} bytes that are not what their head says")
    at, pieces = 8 * (1 + count), []
    for length in lengths:
        pieces.append(bytes(memory[at : at + length]))
        at += length
    return pieces
