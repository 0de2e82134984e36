"""The same dataset several times in one epoch, or without end: `repeat`.

Repetition r of epoch e is epoch e·k + r of what is repeated: a shuffle before
it is another one in each repetition, and so is an augmentation. Each repetition
has indices of its own (r·n + index), so whatever comes after can tell them apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.order.order import ENDLESS, Indices, Order, Positions, Shuffled, Stage, as_array, shifted

if TYPE_CHECKING:
    from shoal.data.sources.source import Source

_MASK = (1 << 64) - 1
_MANY = 8  # repetitions whose shuffles are better computed together than one by one


class Repeated(Stage):
    """Another order, k times."""

    name = "repeat"

    def __init__(self, parent: Order, *, times: int | None, source: Source) -> None:
        """A repetition takes as many indices as the source has."""
        super().__init__(parent)
        self.times, self._source = times, source
        self.is_endless = times is None

    def length(self, epoch: int) -> int:
        """All repetitions together."""
        if self.times is None:
            return ENDLESS if self.parent.length(0) else 0
        return self.times * self.parent.length(0)

    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The parent's, each in its own repetition."""
        each = self.parent.length(0)
        if isinstance(positions, range):
            repetition = positions.start // each
            if positions.stop <= (repetition + 1) * each:  # all of them in one
                inside = self.parent.indices(
                    shifted(positions, -repetition * each), self._epoch(epoch, repetition)
                )
                return _moved(inside, repetition * self._source.num_samples)
        repetitions, places = np.divmod(as_array(positions), each)
        if not self.parent.varies:
            return _moved(self.parent.indices(places, epoch), repetitions * self._source.num_samples)
        many = int(repetitions.max() - repetitions.min()) >= _MANY
        if many and isinstance(self.parent, Shuffled) and not self.parent.parent.varies:
            base = np.uint64(self._epoch(epoch, 0) & _MASK)
            inside = self.parent.indices_of(places, repetitions.astype(np.uint64) + base)
            return _moved(inside, repetitions * self._source.num_samples)
        found = np.empty(len(places), dtype=np.int64)
        for repetition in np.unique(repetitions).tolist():
            of = repetitions == repetition
            inside = self.parent.indices(places[of], self._epoch(epoch, repetition))
            found[of] = _moved(inside, repetition * self._source.num_samples)
        return found

    def settings(self) -> dict[str, Any]:
        """How often."""
        return {"times": self.times}

    def _epoch(self, epoch: int, repetition: int) -> int:
        return inner_epoch(epoch, repetition, self.times)


def inner_epoch(epoch: int, repetition: int, times: int | None) -> int:
    """The epoch of what is repeated, in one repetition of an epoch."""
    return epoch * (ENDLESS if times is None else times) + repetition


def _moved(indices: Indices, by: Any) -> Indices:
    if isinstance(indices, range) and isinstance(by, int):
        return shifted(indices, by)
    found: NDArray[np.int64] = np.asarray(indices, dtype=np.int64) + by
    return found
