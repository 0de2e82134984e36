"""What bends a push before it counts: one small protocol, one class per way.

A filter is asked once per push and slot and says what its gradients are
multiplied with there; 0.0 leaves them out, and the push counts all the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from shoal.errors import ConfigError
from shoal.ps.kernels import slot_of
from shoal.ps.server.applied_seqs import Slots
from shoal.ps.server.contents import Contents
from shoal.ps.server.steps import Staged


@dataclass(slots=True)
class Push:
    """What a filter sees of a push."""

    rank: int
    stream: int
    seq: int
    staleness: int
    """Updates of others between the pull that it was computed from and now."""

    staged: Staged
    contents: Contents
    _squares: dict[int, float] = field(default_factory=dict)

    def square(self, slot: int) -> float:
        """The gradient's sum of squares in one slot."""
        if not self._squares:
            squares = np.zeros(256)
            for table, (keys, values) in self.staged.rows.items():
                wide = values.astype(np.float64)
                np.add.at(squares, slot_of(table, keys), (wide * wide).sum(axis=1))
            for chunk, (gradient, _) in self.staged.dense.items():
                squares[self.contents.chunks[chunk].slot] += self.contents.dense.sum_of_squares(
                    chunk, gradient
                )
            self._squares = dict(enumerate(squares.tolist()))
        return self._squares[slot]

    @property
    def norm(self) -> float:
        """Of all that this server has of the gradient."""
        self.square(0)
        return math.sqrt(math.fsum(self._squares.values()))


class Filter(Protocol):
    """Bends pushes."""

    def before_apply(self, push: Push, slot: int) -> float:
        """What the push's gradients are multiplied with in this slot."""


@dataclass(frozen=True, slots=True)
class NormBound:
    """Shortens a push whose gradient is longer than `bound` to that length, as this server sees it."""

    bound: float

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ConfigError(f"the bound of a gradient's norm must be positive, got {self.bound}")

    def before_apply(self, push: Push, slot: int) -> float:
        """1.0 within the bound; 0.0 where the gradient is not finite."""
        norm = push.norm
        if not math.isfinite(norm):
            return 0.0
        return min(1.0, self.bound / norm) if norm else 1.0


@dataclass(frozen=True, slots=True)
class RateByStaleness:
    """Divides the learning rate by 1 + staleness / `scale`: what was computed long ago counts less."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ConfigError(f"the scale of staleness must be positive, got {self.scale}")

    def before_apply(self, push: Push, slot: int) -> float:
        """The same in every slot."""
        return 1.0 / (1.0 + push.staleness / self.scale)


def bend(filters: Sequence[Filter], push: Push, slots: Slots) -> tuple[float, ...]:
    """What every slot's gradients are multiplied with; empty where nothing is bent."""
    if not filters:
        return ()
    factors = np.ones(len(slots))
    for slot in np.flatnonzero(slots).tolist():
        for each in filters:
            factors[slot] *= each.before_apply(push, slot)
    return () if (factors == 1.0).all() else tuple(factors.tolist())
