"""Quantiles of a column in one pass: a sketch that merges, and that is the same whenever the data is.

Values wait in levels; one at level h stands for 2^h of them. A level that is
full is sorted and every other value moves up, beginning with the first and
the second in turn (Munro and Paterson's, with Manku, Rajagopalan and
Lindsay's weights). Each time, the rank of anything changes by at most 2^h:
`max_error` adds that up, so the bound is proved by what happened, not
expected. Up to `SIZE` values nothing moves and quantiles are exact.

Libraries were looked at: Apache DataSketches draws random bits that cannot be
seeded, and its maintainers mean it so (datasketches-cpp issue 361); t-digests
have no bound at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZE = 4096
"""Values of a level before it is halved: 20 levels of them hold a billion within about 0.1 %."""

Floats = NDArray[np.float64]


class Sketch:
    """The distribution of some numbers."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._levels: list[Floats] = [np.empty(0)]
        self._flips: list[int] = [0]
        self.count = 0
        self.max_error = 0
        """By how much, at most, the rank of any number is wrong."""
        self.low, self.high = np.inf, -np.inf

    def add(self, values: Floats) -> None:
        """Numbers more, none of them NaN."""
        if len(values):
            self.count += len(values)
            self.low, self.high = min(self.low, values.min()), max(self.high, values.max())
            self._levels[0] = np.concatenate([self._levels[0], values])
            self._settle()

    def merge(self, other: Sketch) -> None:
        """All that the other has seen."""
        self.count += other.count
        self.max_error += other.max_error
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        for level, values in enumerate(other._levels):
            self._reach(level)
            self._levels[level] = np.concatenate([self._levels[level], values])
        self._settle()

    def quantiles(self, shares: Floats) -> Floats:
        """For each share of 0 to 1, the smallest value with at least so much of all at or below it."""
        values = np.concatenate(self._levels)
        weights = np.concatenate(
            [np.full(len(level), 1 << height, dtype=np.int64) for height, level in enumerate(self._levels)]
        )
        order = np.argsort(values, kind="stable")
        reached = np.cumsum(weights[order])
        wanted = np.ceil(shares * self.count).clip(1, reached[-1])
        found: Floats = values[order][np.searchsorted(reached, wanted)]
        found[shares <= 0] = self.low
        found[shares >= 1] = self.high
        return found

    def plain(self) -> dict[str, Any]:
        """As numbers and arrays, to be written down."""
        return {
            "size": self._size,
            "levels": self._levels,
            "flips": self._flips,
            "count": self.count,
            "max_error": self.max_error,
            "range": (float(self.low), float(self.high)),
        }

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Sketch:
        """From what `plain` gave."""
        sketch = cls(plain["size"])
        sketch._levels, sketch._flips = list(plain["levels"]), list(plain["flips"])
        sketch.count, sketch.max_error = plain["count"], plain["max_error"]
        sketch.low, sketch.high = plain["range"]
        return sketch

    def _settle(self) -> None:
        level = 0
        while level < len(self._levels):
            values = self._levels[level]
            if len(values) > self._size:
                self._reach(level + 1)
                values = np.sort(values)
                num_moving = len(values) & ~1
                moving = values[self._flips[level] : num_moving : 2]
                self._flips[level] ^= 1
                self._levels[level] = values[num_moving:]
                self._levels[level + 1] = np.concatenate([self._levels[level + 1], moving])
                self.max_error += 1 << level
            level += 1

    def _reach(self, level: int) -> None:
        while len(self._levels) <= level:
            self._levels.append(np.empty(0))
            self._flips.append(0)


def merged(sketches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One of several, in their order."""
    total = Sketch.of(sketches[0])
    for other in sketches[1:]:
        total.merge(Sketch.of(other))
    return total.plain()
