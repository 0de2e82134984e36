"""Which worker computes which part of a global batch.

Pure: cuts follow from (start, stop, number of workers, epoch), and for
`balanced` from what the samples cost. They are contiguous, so the order of the
ranks is the order of the data; and any cuts give an exact strategy the result
of one process, because sums are added and divided by the global count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from shoal.config import shard as shard_forms
from shoal.config.shard import DRAIN_SLOWER_THAN, HOWS, MEASURED
from shoal.data.order.order import Order
from shoal.data.sharding.balancing import Load, balanced_cuts
from shoal.data.sharding.costs import SampleCosts
from shoal.data.sources.source import Source
from shoal.errors import ConfigError

_NUM_LOOKED_AT = 64
"""Batches by which a fit says how even its cuts are."""


class Sharding(Protocol):
    """One way of cutting batches over workers."""

    @property
    def name(self) -> str:
        """As in `Batches.shard`; "" where nothing was said."""

    def cuts(self, start: int, stop: int, num_workers: int, epoch: int) -> Sequence[int]:
        """`num_workers` + 1 ascending bounds within [0, stop - start], of the batch at these positions."""

    def check(self, num_workers: int) -> None:
        """Refuse a number of workers for which there are no cuts."""

    def describe(self) -> str:
        """In words; the same on ranks that cut alike."""


@dataclass(frozen=True, slots=True)
class Equal:
    """Parts that differ by at most one sample."""

    name: str = "equal"

    def cuts(self, start: int, stop: int, num_workers: int, epoch: int) -> Sequence[int]:
        """Every worker the same."""
        size = stop - start
        return [size * part // num_workers for part in range(num_workers + 1)]

    def check(self, num_workers: int) -> None:
        """Any number will do."""

    def describe(self) -> str:
        """Its name."""
        return "equal"


UNSAID = Equal("")
"""What holds until somebody says otherwise."""


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Relaxed strategies: ranges of the epoch are handed out while it runs. Evaluation, which is exact, cuts equally."""

    drain_slower_than: float | None = DRAIN_SLOWER_THAN
    """How many times slower than the median of the others a worker may be, before it is given no more; None: as slow as it
    likes."""

    backup: bool = True
    """Whether the last ranges of an epoch are handed to a second worker where the first is slow with them."""

    probe_every_s: float = 10.0
    """How often a worker that was given no more gets a range all the same, to see whether it has recovered."""

    name: str = "dynamic"

    def __post_init__(self) -> None:
        if self.drain_slower_than is not None and not _is_between(self.drain_slower_than, 1):
            raise ConfigError(
                f"drain_slower_than is how many times slower than the others a worker may be, a number above 1 or None, got "
                f"{self.drain_slower_than!r}."
            )
        if not _is_between(self.probe_every_s, 0):
            raise ConfigError(
                f"probe_every_s must be a positive number of seconds, got {self.probe_every_s!r}."
            )

    def cuts(self, start: int, stop: int, num_workers: int, epoch: int) -> Sequence[int]:
        """Of a batch that all workers compute together."""
        return UNSAID.cuts(start, stop, num_workers, epoch)

    def check(self, num_workers: int) -> None:
        """Any number will do."""

    def describe(self) -> str:
        """Its name and settings."""
        return f"dynamic, drain_slower_than={self.drain_slower_than}, backup={self.backup}"


@dataclass(frozen=True, slots=True)
class Weighted:
    """Parts in proportion to given weights."""

    weights: tuple[float, ...]
    name: str = "weighted"

    def __post_init__(self) -> None:
        if not self.weights or not all(math.isfinite(each) and each >= 0 for each in self.weights):
            raise ConfigError(
                f"weights are numbers that are not negative, one for each worker, got {list(self.weights)}."
            )
        if not sum(self.weights):
            raise ConfigError("weights are all 0, and somebody has to compute.")

    def cuts(self, start: int, stop: int, num_workers: int, epoch: int) -> Sequence[int]:
        """By the sums of the weights before each worker. One process alone computes all."""
        self.check(num_workers)
        return weighted_cuts(stop - start, self.weights) if num_workers > 1 else [0, stop - start]

    def check(self, num_workers: int) -> None:
        """Refuse another number of workers than there are weights."""
        if num_workers != 1 and len(self.weights) != num_workers:
            raise ConfigError(
                f"shard('weighted', weights={list(self.weights)}) has a weight for each of {len(self.weights)} workers, and this job "
                f"has {num_workers}. Nothing was trained; give {num_workers} weights, or weights='measured'."
            )

    def describe(self) -> str:
        """Its name and weights."""
        return f"weighted by {list(self.weights)}"


class Measured:
    """Parts in proportion to how fast workers have been. Whoever measures sets `weights`, on all ranks alike."""

    name = "weighted"

    def __init__(self) -> None:
        self.weights: tuple[float, ...] = ()
        """Of the workers there are; empty: equal, nothing was measured yet."""

    def cuts(self, start: int, stop: int, num_workers: int, epoch: int) -> Sequence[int]:
        """By what is set; equal for another number of workers."""
        if len(self.weights) != num_workers:
            return UNSAID.cuts(start, stop, num_workers, epoch)
        return weighted_cuts(stop - start, self.weights)

    def check(self, num_workers: int) -> None:
        """Any number will do."""

    def describe(self) -> str:
        """Not the weights: they change."""
        return "weighted by measured speed"


class Loads(NamedTuple):
    """How even some cuts are."""

    mine: Load
    equal: Load
    """If the parts were equal."""

    cuts: tuple[tuple[int, ...], ...]
    """The cuts themselves, for ranks to compare."""


class Balanced:
    """Parts whose heaviest is as light as contiguous cuts can make it."""

    name = "balanced"

    def __init__(self, costs: SampleCosts) -> None:
        self._costs = costs

    def cuts(self, start: int, stop: int, num_workers: int, epoch: int) -> Sequence[int]:
        """By the costs of the batch."""
        if num_workers == 1:
            return [0, stop - start]
        return balanced_cuts(self._costs.at(start, stop, epoch), num_workers)

    def check(self, num_workers: int) -> None:
        """Any number will do."""

    def describe(self) -> str:
        """Its name and what it goes by."""
        return f"balanced by {self._costs.identity}"

    @property
    def by(self) -> str:
        """What the costs are, for people."""
        return self._costs.name

    def loads(self, batches: Iterable[tuple[int, int]], num_workers: int, epoch: int) -> Loads:
        """How even the cuts of the first of these batches are."""
        mine, equal = [], []
        for start, stop in itertools.islice(batches, _NUM_LOOKED_AT):
            costs = self._costs.at(start, stop, epoch)
            mine.append((costs, balanced_cuts(costs, num_workers)))
            equal.append((costs, list(UNSAID.cuts(start, stop, num_workers, epoch))))
        return Loads(Load.of(mine), Load.of(equal), tuple(tuple(cuts) for _, cuts in mine))


def _is_between(value: Any, low: float) -> bool:
    return isinstance(value, (int, float)) and low < value < math.inf


def weighted_cuts(num_samples: int, weights: Sequence[float]) -> list[int]:
    """Bounds in proportion to `weights`; with equal ones, those of `Equal`."""
    total, before, cuts = math.fsum(weights), 0.0, [0]
    for weight in weights[:-1]:
        before += weight
        cuts.append(min(max(int(num_samples * before / total), cuts[-1]), num_samples))
    return [*cuts, num_samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """What a user said to `Batches.shard`; a feed makes a Sharding of it."""

    how: str
    """One of HOWS."""

    cost: Any = None
    """Of `balanced`."""

    weights: Any = None
    """Of `weighted`."""

    drain_slower_than: float | None = DRAIN_SLOWER_THAN
    """Of `dynamic`."""

    backup: bool = True
    """Of `dynamic`."""

    probe_every_s: float = 10.0
    """Of `dynamic`."""

    def __post_init__(self) -> None:
        if self.how not in HOWS:
            raise ConfigError(
                f"batches are cut over the workers by one of {', '.join(HOWS)}, got {self.how!r}."
            )
        if (self.cost is None) == (self.how == "balanced"):
            raise ConfigError(
                "shard('balanced') needs to know what a sample costs: cost='length', 'bytes', the name of a column, an array "
                "with a number per sample, or a function of the sample."
                if self.cost is None
                else f"cost= is for shard('balanced'), got it with {self.how!r}."
            )
        if (self.weights is None) == (self.how == "weighted"):
            raise ConfigError(
                "shard('weighted') needs weights: a number for each worker, as in weights=[2, 1, 1], or weights='measured'."
                if self.weights is None
                else f"weights= is for shard('weighted'), got it with {self.how!r}."
            )

    @classmethod
    def parse(cls, text: str) -> ShardPlan:
        """What `--shard` says."""
        words = shard_forms.parse(text)
        return cls(
            how=words.how,
            cost=words.cost,
            weights=words.weights,
            drain_slower_than=words.drain_slower_than,
        )

    def of_stream(self) -> Sharding:
        """For what is read from its beginning: by arithmetic alone."""
        if self.how == "balanced" or self.weights == MEASURED:
            said = "'balanced'" if self.how == "balanced" else "'weighted', weights='measured'"
            raise ConfigError(
                f"shard({said}) needs random access, and this data is a stream, or a loader whose items are batches already. "
                "Nothing was read; use shard('equal') or shard('weighted', weights=[...]), or a source with random access."
            )
        return self._by_arithmetic()

    def of_source(self, source: Source, order: Order) -> Sharding:
        """For samples by index."""
        if self.how == "balanced":
            return Balanced(SampleCosts(self.cost, source, order))
        return self._by_arithmetic()

    def _by_arithmetic(self) -> Sharding:
        match self.how:
            case "equal":
                return Equal()
            case "dynamic":
                return Dynamic(self.drain_slower_than, self.backup, self.probe_every_s)
        if isinstance(self.weights, str):
            if self.weights != MEASURED:
                raise ConfigError(
                    f"weights are numbers, one for each worker, or 'measured'; got {self.weights!r}."
                )
            return Measured()
        try:
            return Weighted(tuple(float(weight) for weight in self.weights))
        except (TypeError, ValueError):
            raise ConfigError(
                f"weights are numbers, one for each worker, or 'measured'; got {self.weights!r}."
            ) from None
