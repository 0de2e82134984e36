"""Samples drawn at random, by weight: `sample`.

With replacement a draw is a hash of (seed, epoch, position), so any position
can be asked first. Without, the order of an epoch follows from one random key
per sample (Efraimidis and Spirakis: the smallest of -ln(u)/w come first),
which has to be sorted once per epoch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.order.order import Indices, Order, Positions, Stage, as_array
from shoal.data.values import Values
from shoal.errors import ConfigError
from shoal.runtime.seeds import mix

_DRAW = 0x44524157  # keeps sample(seed=0) and shuffle(seed=0) apart
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def uniform(numbers: NDArray[np.int64], key: int) -> NDArray[np.float64]:
    """A number in (0, 1) for each of `numbers`, by hash (splitmix64): never 0, never 1."""
    state = numbers.astype(np.uint64) * _STEP + np.uint64(key)
    state = (state ^ (state >> _SHIFTS[0])) * _MULTIPLIERS[0]
    state = (state ^ (state >> _SHIFTS[1])) * _MULTIPLIERS[1]
    state ^= state >> _SHIFTS[2]
    return ((state >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


class Sampled(Stage):
    """Positions of another order drawn with replacement."""

    name = "sample"

    def __init__(self, parent: Order, *, num_samples: int | None, weights: Values | None, seed: int) -> None:
        super().__init__(parent)
        self._num_samples, self._weights, self._seed = num_samples, weights, seed
        self.seed, self.is_computed = seed, True
        self.varies = self.changes_set = True
        self.is_endless = False
        self._ends: NDArray[np.float64] | None = None

    def length(self, epoch: int) -> int:
        """As many as are to be drawn."""
        return self.parent.length(epoch) if self._num_samples is None else self._num_samples

    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The parent's, at drawn positions."""
        drawn = uniform(as_array(positions), mix(_DRAW, self._seed, epoch))
        num_there = self.parent.length(epoch)
        if self._weights is None:
            places = (drawn * num_there).astype(np.int64)
        else:
            if self._ends is None:
                self._ends = np.cumsum(checked_weights(self._weights))
            by_size = np.argsort(drawn)  # looked up in order they are found six times as fast
            places = np.empty(len(drawn), dtype=np.int64)
            places[by_size] = np.searchsorted(self._ends, drawn[by_size] * self._ends[-1], side="right")
        return self.parent.indices(np.minimum(places, num_there - 1), epoch)

    def settings(self) -> dict[str, Any]:
        """Number, weights and seed."""
        weights = None if self._weights is None else self._weights.describe()
        return {"num_samples": self._num_samples, "weights": weights, "seed": self._seed}


class SampledOnce(Sampled):
    """Positions of another order drawn by weight without replacement, in the order in which they are drawn."""

    def __init__(self, parent: Order, *, num_samples: int | None, weights: Values, seed: int) -> None:
        super().__init__(parent, num_samples=num_samples, weights=weights, seed=seed)
        self._values = weights
        self._drawn: tuple[int, NDArray[np.int64]] | None = None

    @property
    def is_counted(self) -> bool:  # type: ignore[override]  # a property may stand for a plain attribute
        """Whether it is known how many have a weight."""
        return self.parent.is_counted and (self._num_samples is not None or self._values.is_read)

    def length(self, epoch: int) -> int:
        """As many as are to be drawn, or all that have a weight."""
        if self._num_samples is not None:
            return self._num_samples
        return int(np.count_nonzero(checked_weights(self._values)))

    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The parent's, at drawn positions."""
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self._draw(epoch)
        return self.parent.indices(self._drawn[1][as_array(positions)], epoch)

    def settings(self) -> dict[str, Any]:
        """Number, weights and seed."""
        return {**super().settings(), "replacement": False}

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        weights = checked_weights(self._values)
        there = np.flatnonzero(weights)
        num_samples = self.length(epoch)
        if num_samples > len(there):
            raise ConfigError(
                f"sample(num_samples={num_samples}, replacement=False) has {len(there)} samples with a weight above 0 to "
                "draw from. Draw fewer, or with replacement=True."
            )
        keys = -np.log(uniform(there, mix(_DRAW, self._seed, epoch))) / weights[there]
        first = (
            np.argpartition(keys, num_samples - 1)[:num_samples]
            if num_samples < len(keys)
            else np.arange(len(keys))
        )
        return there[first[np.argsort(keys[first], kind="stable")]]


def checked_weights(values: Values) -> NDArray[np.float64]:
    """Finite, none below 0, some above."""
    found = values.array()
    if found.dtype.kind not in "fiub":
        raise ConfigError(f"the weights of {values.caller} must be numbers, got values of type {found.dtype}")
    weights = found.astype(np.float64, copy=False)
    if values.is_bad is not None and values.is_bad.any():
        weights = np.where(values.is_bad, 0.0, weights)  # what cannot be read is not drawn
    if weights.ndim != 1 or not np.all(np.isfinite(weights)) or np.any(weights < 0):
        wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)).reshape(len(weights), -1).all(1))
        at = (
            f"; that of sample {wrong[0]} is {weights[wrong[0]]}"
            if len(wrong)
            else f", of shape {weights.shape}"
        )
        raise ConfigError(
            f"the weights of {values.caller} must be one finite number of 0 or more per sample{at}"
        )
    if not weights.any():
        raise ConfigError(f"the weights of {values.caller} are all 0: there is nothing to draw or to count")
    return weights
