"""Which of many positions are kept, in a quarter of a byte each: the k-th of them is found, none is listed."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

_ONES = np.uint64(0x0101010101010101)
_HIGH = np.uint64(0x8080808080808080)
_BITS_OF = ((np.arange(256)[:, None] >> np.arange(8)) & 1).astype(np.uint8)

# Where the k-th set bit of each byte is.
_PLACE = np.zeros((256, 8), dtype=np.int64)
for _byte in range(256):
    _set = np.flatnonzero(_BITS_OF[_byte])
    _PLACE[_byte, : len(_set)] = _set


class Bitmap:
    """A set of positions in [0, n), with the k-th smallest of it at hand.

    One bit per position, and for every 64 of them how many are set up to there.
    """

    def __init__(self, is_kept: NDArray[np.bool_]) -> None:
        packed = np.packbits(is_kept, bitorder="little")
        padded = np.zeros(-(-len(packed) // 8) * 8, dtype=np.uint8)
        padded[: len(packed)] = packed
        self._words = padded.view("<u8").astype(np.uint64, copy=False)
        self._ends = np.cumsum((_counts_up_to(self._words) >> np.uint64(56)).astype(np.int64))
        self.num_kept = int(self._ends[-1]) if len(self._ends) else 0

    def select(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions that are the k-th of those kept, for each k in `numbers`."""
        at = np.searchsorted(self._ends, numbers, side="right")
        words = self._words[at]
        up_to = _counts_up_to(words)
        counts = up_to >> np.uint64(56)
        rest = (numbers - self._ends[at]).view(np.uint64) + counts  # among those of the word
        # Bytes whose count is not above it come before: all eight are compared in one subtraction.
        num_bytes = ((((rest * _ONES) | _HIGH) - up_to) & _HIGH) >> np.uint64(7)
        shift = (num_bytes * _ONES >> np.uint64(56)) << np.uint64(3)
        before = (up_to << np.uint64(8)) >> shift & np.uint64(0xFF)
        byte = words >> shift & np.uint64(0xFF)
        found: NDArray[np.int64] = at * 64 + shift.view(np.int64) + _PLACE[byte, rest - before]
        return found

    @property
    def digest(self) -> str:
        """Differs, but by chance, where another position is kept."""
        return f"{zlib.crc32(self._words.tobytes()):08x}"


def _counts_up_to(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """In each byte, how many bits are set in it and in the lower ones."""
    pairs = words - (words >> np.uint64(1) & np.uint64(0x5555555555555555))
    fours = (pairs & np.uint64(0x3333333333333333)) + (pairs >> np.uint64(2) & np.uint64(0x3333333333333333))
    counts: NDArray[np.uint64] = (fours + (fours >> np.uint64(4)) & np.uint64(0x0F0F0F0F0F0F0F0F)) * _ONES
    return counts
