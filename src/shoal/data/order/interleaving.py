"""Whose turn it is when several datasets take turns: position -> (which, position there). Pure.

Each gives `block` samples, then the next; who has fewer left gives those, and
who has none left is passed over. Rounds differ only where a dataset gives its
last, so there are few kinds of rounds, and a position is found by arithmetic
within its kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Rounds in which each dataset gives as much as in the one before."""

    first_round: int
    first_position: int
    ends: NDArray[np.int64]
    """Within a round, where each dataset's samples end; the last is the size of the round."""


class Interleaving:
    """Round-robin over datasets of these lengths."""

    def __init__(self, lengths: Sequence[int], block: int) -> None:
        self.num_samples, self._block = sum(lengths), block
        # A round is another one than that before it where a dataset gives its last full block, or its last samples.
        cuts = {0} | {edge for length in lengths for edge in (length // block, -(-length // block))}
        edges = sorted(cuts)
        self._stretches: list[_Stretch] = []
        position = 0
        for begin, end in itertools.pairwise(edges):
            sizes = [min(block, max(length - begin * block, 0)) for length in lengths]
            self._stretches.append(_Stretch(begin, position, np.cumsum(sizes, dtype=np.int64)))
            position += sum(sizes) * (end - begin)
        self._begins = np.array([stretch.first_position for stretch in self._stretches], dtype=np.int64)

    def __call__(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which dataset, and which position of it, for each position; they must lie in [0, num_samples)."""
        which = np.empty(len(positions), dtype=np.int64)
        place = np.empty(len(positions), dtype=np.int64)
        kinds = np.searchsorted(self._begins, positions, side="right") - 1
        for kind in np.unique(kinds).tolist():
            stretch, of = self._stretches[kind], np.flatnonzero(kinds == kind)
            rounds, within = np.divmod(positions[of] - stretch.first_position, stretch.ends[-1])
            turn = np.searchsorted(stretch.ends, within, side="right")
            begins = np.concatenate([[0], stretch.ends[:-1]])
            which[of] = turn
            place[of] = (stretch.first_round + rounds) * self._block + within - begins[turn]
        return which, place
