"""Which of many positions are kept, in a quarter of a byte each: the k-th of them is found, none is listed."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

_BITS_OF = ((np.arange(256)[:, None] >> np.arange(8)) & 1).astype(np.uint8)
_COUNT = _BITS_OF.sum(1).astype(np.uint8)

# Where the k-th set bit of each byte is.
_PLACE = np.zeros((256, 8), dtype=np.uint8)
for _byte in range(256):
    _set = np.flatnonzero(_BITS_OF[_byte])
    _PLACE[_byte, : len(_set)] = _set


class Bitmap:
    """A set of positions in [0, n), with the k-th smallest of it at hand.

    One bit per position, and for every 64 of them how many are set before.
    """

    def __init__(self, is_kept: NDArray[np.bool_]) -> None:
        packed = np.packbits(is_kept, bitorder="little")
        padded = np.zeros(-(-len(packed) // 8) * 8, dtype=np.uint8)
        padded[: len(packed)] = packed
        self._bytes = padded.reshape(-1, 8)
        counts = _COUNT[self._bytes].sum(1, dtype=np.int64)
        self._ends = np.cumsum(counts)
        self._begins = self._ends - counts
        self.num_kept = int(self._ends[-1]) if len(self._ends) else 0

    def select(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions that are the k-th of those kept, for each k in `numbers`."""
        words = np.searchsorted(self._ends, numbers, side="right")
        rest = numbers - self._begins[words]
        in_word = self._bytes[words]
        ends = np.cumsum(_COUNT[in_word], axis=1, dtype=np.int64)
        byte = (ends <= rest[:, None]).sum(1)
        rows = np.arange(len(words))
        before = np.where(byte > 0, ends[rows, byte - 1], 0)
        found: NDArray[np.int64] = words * 64 + byte * 8 + _PLACE[in_word[rows, byte], rest - before]
        return found

    @property
    def digest(self) -> str:
        """Differs, but by chance, where another position is kept."""
        return f"{zlib.crc32(self._bytes.tobytes()):08x}"
