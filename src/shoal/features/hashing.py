"""Hashes of strings and whole numbers: 64 bits, the same in every process, on every machine, for ever.

A test pins them: they are part of every model that was trained on hashed ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from shoal.runtime.kernel_cache import kernel, matrix, mixed, vector

Hashes = NDArray[np.uint64]

_START, _STEP = 0xCBF29CE484222325, 0x100000001B3  # FNV-1a's
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def hash_text(texts: NDArray[np.str_], seed: int) -> Hashes:
    """Of strings, by their characters; how wide the array is does not matter."""
    width = texts.dtype.itemsize // 4
    out = np.empty(texts.size, np.uint64)
    codes = np.ascontiguousarray(texts).reshape(-1).view(np.uint32).reshape(texts.size, width)
    _hash_text(codes, np.uint64(seed), out)
    return out.reshape(texts.shape)


def hash_ints(numbers: NDArray[np.int64], seed: int) -> Hashes:
    """Of whole numbers."""
    return _mix(numbers.astype(np.int64).view(np.uint64) + _mix(np.array([seed], np.uint64) + _GOLDEN))


def hash_together(parts: Sequence[Hashes], seed: int) -> Hashes:
    """Of several hashes, in their order."""
    total = np.full_like(parts[0], seed)
    for part in parts:
        total = _mix((total + _GOLDEN) ^ part)
    return total


def bucket_of(hashes: Hashes, buckets: int) -> NDArray[np.int64]:
    """Which of so many buckets."""
    return (hashes % np.uint64(buckets)).astype(np.int64)


def _mix(words: Hashes) -> Hashes:
    """64 bits well mixed, as `shoal.runtime.kernel_cache.mixed`; wraps."""
    words = words ^ (words >> np.uint64(30))
    words = words * np.uint64(0xBF58476D1CE4E5B9)
    words = words ^ (words >> np.uint64(27))
    words = words * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@kernel((matrix(types.uint32), types.uint64, vector(types.uint64, written=True)))
def _hash_text(codes: Any, seed: Any, out: Any) -> None:
    for row in range(codes.shape[0]):
        length = codes.shape[1]
        while length > 0 and codes[row, length - 1] == 0:
            length -= 1
        value = np.uint64(_START) ^ seed
        for at in range(length):
            value = (value ^ np.uint64(codes[row, at])) * np.uint64(_STEP)
        out[row] = mixed(value ^ np.uint64(length))
