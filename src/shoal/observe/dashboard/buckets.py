"""Downsampling: the steps of a run in a bounded number of buckets, with sums and extremes of every column.

Pure. Adding is incremental, and a bucket keeps the smallest and the largest value, so that a spike
of one step among a million is still drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CAPACITY = 1024
"""Buckets at most: about the pixels of a chart."""

RATE_POINTS, RATE_S = 120, 0.5
"""Points of a curve of throughput at most, and seconds of each at least: the time of a single step is mostly noise."""


class _Column:
    """Sums of one column, a row per bucket."""

    __slots__ = ("count", "high", "low", "total")

    def __init__(self, capacity: int) -> None:
        self.count = np.zeros(capacity)
        self.total = np.zeros(capacity)
        self.low = np.full(capacity, np.inf)
        self.high = np.full(capacity, -np.inf)

    def add(self, index: NDArray[np.int64], values: Floats) -> None:
        there = np.isfinite(values)
        index, values = index[there], values[there]
        np.add.at(self.count, index, 1)
        np.add.at(self.total, index, values)
        np.minimum.at(self.low, index, values)
        np.maximum.at(self.high, index, values)

    def halve(self) -> None:
        half = len(self.count) // 2
        for sums in (self.count, self.total):
            sums[:half] = sums.reshape(half, 2).sum(axis=1)
            sums[half:] = 0
        self.low[:half] = self.low.reshape(half, 2).min(axis=1)
        self.low[half:] = np.inf
        self.high[:half] = self.high.reshape(half, 2).max(axis=1)
        self.high[half:] = -np.inf


class Buckets:
    """Steps of one run, in buckets of equal width; the width doubles whenever they would be too many."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 2 or capacity % 2:
            raise ValueError(f"an even number of buckets is needed, got {capacity}")
        self.width = 1
        self._capacity = capacity
        self._columns: dict[str, _Column] = {}

    def add(self, steps: NDArray[np.int64], values: Mapping[str, Floats]) -> None:
        """Add one value per step and column; what is not finite is left out."""
        if not len(steps):
            return
        while int(steps.max()) // self.width >= self._capacity:
            self.width *= 2
            for column in self._columns.values():
                column.halve()
        index = steps // self.width
        for name, given in {"step": steps.astype(np.float64), **values}.items():
            if name not in self._columns:
                self._columns[name] = _Column(self._capacity)
            self._columns[name].add(index, given)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def curve(self, name: str) -> dict[str, list[float]]:
        """A column over the steps: mean, smallest and largest value of each bucket that has any."""
        column = self._columns.get(name)
        if column is None:
            return {"step": [], "mean": [], "low": [], "high": []}
        there = column.count > 0
        # A bucket of several steps is drawn at its last one: a curve ends where the run is.
        steps = self._columns["step"].high[there]
        means = column.total[there] / column.count[there]
        found = {"step": steps, "mean": means, "low": column.low[there], "high": column.high[there]}
        return {key: rounded(values) for key, values in found.items()}

    def step_at(self, time: float) -> float | None:
        """The newest step that was done by then; of a bucket that was not over, its first."""
        times, steps = self._columns.get("time"), self._columns.get("step")
        if times is None or steps is None:
            return None
        begun = np.flatnonzero((times.count > 0) & (times.low <= time))
        if not len(begun):
            return None
        last = begun[-1]
        return float(steps.high[last] if times.high[last] <= time else steps.low[last])

    def rate(self) -> dict[str, list[float]]:
        """Samples per second over the steps, with the seconds since the first line.

        By the step's number and the mean batch: under a relaxed strategy the lines are those of one
        worker, and the steps between them are the others'.
        """
        empty: dict[str, list[float]] = {"step": [], "rate": [], "seconds": [], "steps_per_s": []}
        if not {"time", "samples"} <= self._columns.keys():
            return empty
        time, samples, step = (self._columns[name] for name in ("time", "samples", "step"))
        there = (time.count > 0) & (samples.count > 0)
        if there.sum() < 1:
            return empty
        ends, begun = time.high[there], time.low[there][0]
        width_s = max((ends[-1] - begun) / RATE_POINTS, RATE_S)
        # The last bucket of each stretch, and where the stretch began.
        last = np.flatnonzero(np.diff(np.floor((ends - begun) / width_s), append=np.inf))
        stretches = np.concatenate([[0], last[:-1] + 1])
        batch = np.add.reduceat(samples.total[there], stretches) / np.add.reduceat(
            samples.count[there], stretches
        )
        ends, steps = ends[last], step.high[there][last]
        # The first stretch begins with its own first line; the others where the one before ended.
        begins = np.concatenate([[begun], ends[:-1]])
        first = np.concatenate([step.low[there][:1], steps[:-1]])
        passed, done = ends - begins, steps - first
        known = (passed > 0) & (done > 0)
        speed = np.divide(done, passed, out=np.zeros_like(done), where=known)
        return {
            "step": rounded(steps[known]),
            "rate": rounded((speed * batch)[known]),
            "seconds": rounded((ends - begun)[known]),
            "steps_per_s": rounded(speed[known]),
        }


def rounded(values: NDArray[Any]) -> list[float]:
    """Six digits: a chart has no use for more, and the page is half as long."""
    with np.errstate(divide="ignore", invalid="ignore"):
        digits = np.where(values == 0, 0, 6 - np.ceil(np.log10(np.abs(values))))
        scale = 10.0 ** np.clip(digits, 0, 15)
        found = np.round(values * scale) / scale
    return [float(value) for value in found]
