"""Straggler detection: the pace of each worker, from the leases it finishes.

Pure: no clock. A worker that is far slower than the others is drained: it may
finish what it holds, and then gets one lease now and then, as a probe, by which
its recovery shows.

    IN ──twice in a row slower than `slower_than` times the median of the others──▶ DRAINED
     ▲                                                                                │
     └──a probe ran at less than the square root of that, or replaced─────────────────┘
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from shoal.errors import ConfigError

PACE_DECAY = 0.5
"""Weight of earlier measurements at every finished range: the last few dominate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig:
    """Limits beyond which a slow worker is drained, and how often it is probed."""

    slower_than: float | None = None
    """Times slower than the median of the others at which a worker is drained; None: never."""

    probe_every_s: float = 10.0
    """Minimum time between two probes of a drained worker."""

    probe_share: float = 0.2
    """Largest share of its time that a drained worker spends on probes: ranges take long on it."""

    min_leases: int = 2
    """Consecutive ranges that must each have been slow: one alone may be a hiccup, and the first one includes warm-up."""

    def __post_init__(self) -> None:
        if self.slower_than is not None and not 1 < self.slower_than < math.inf:
            raise ConfigError(f"slower_than must be above 1, got {self.slower_than}")
        if not self.probe_every_s > 0 or not 0 < self.probe_share <= 1 or self.min_leases < 1:
            raise ConfigError(f"probes must be some time apart and take some of it, got {self}")


@dataclass(frozen=True, slots=True)
class PaceFigures:
    """Measurements behind a decision."""

    rank: int
    samples_per_s: float
    others_samples_per_s: float
    """Median of the others that are not drained themselves."""

    @property
    def times_slower(self) -> float:
        return self.others_samples_per_s / self.samples_per_s


@dataclass(frozen=True, slots=True)
class Drained(PaceFigures):
    """The worker is drained: it gets only probes."""


@dataclass(frozen=True, slots=True)
class Readmitted(PaceFigures):
    """The worker is no longer drained."""


@dataclass(slots=True)
class Pace:
    """Samples and seconds of one worker, with older ones weighted less."""

    samples: float = 0.0
    seconds: float = 0.0
    num_slow: int = 0
    """Consecutive latest ranges slow enough for draining."""

    @property
    def samples_per_s(self) -> float:
        return self.samples / max(self.seconds, 1e-9)


@dataclass(slots=True)
class Stragglers:
    """Pace of every worker, and the workers that are drained."""

    config: DrainConfig
    paces: dict[int, Pace] = field(default_factory=dict)
    drained: dict[int, float] = field(default_factory=dict)
    """Time of the next probe of each drained rank."""

    def finished(self, rank: int, num_samples: int, busy_s: float, at: float) -> Drained | Readmitted | None:
        """Record the seconds of its own that a worker spent on a lease; returns the decision, if it changed."""
        pace = self.paces.setdefault(rank, Pace())
        if rank in self.drained:
            pace.samples = pace.seconds = 0.0  # a probe measures the present pace alone
        pace.samples = pace.samples * PACE_DECAY + num_samples
        pace.seconds = pace.seconds * PACE_DECAY + busy_s
        limit = self.config.slower_than
        others = self._others(rank)
        if limit is None or others is None:
            return None
        times_slower = others / pace.samples_per_s
        pace.num_slow = pace.num_slow + 1 if busy_s * others > limit * num_samples else 0
        if rank in self.drained:
            if times_slower < math.sqrt(limit):
                del self.drained[rank]
                return Readmitted(rank, pace.samples_per_s, others)
            self.drained[rank] = at + max(self.config.probe_every_s, busy_s / self.config.probe_share)
        elif times_slower > limit and pace.num_slow >= self.config.min_leases:
            self.drained[rank] = at + self.config.probe_every_s
            return Drained(rank, pace.samples_per_s, others)
        return None

    def figures(self, rank: int) -> Drained:
        return Drained(rank, self.paces[rank].samples_per_s, self._others(rank) or 0.0)

    def may_take(self, rank: int, at: float) -> bool:
        return at >= self.drained.get(rank, at)

    def probed(self, rank: int, at: float) -> None:
        """A drained worker was given a lease; the next probe waits for its result."""
        if rank in self.drained:
            self.drained[rank] = at + self.config.probe_every_s

    def replaced(self, rank: int) -> None:
        """Another process runs this rank: forget its pace."""
        self.paces.pop(rank, None)
        self.drained.pop(rank, None)

    def seconds_for(self, rank: int, num_samples: int) -> float | None:
        """Expected time of a worker for this many samples, by the median of the others if its pace is unknown."""
        known = [pace.samples_per_s for pace in self.paces.values()]
        if not known:
            return None
        pace = self.paces.get(rank)
        return num_samples / (pace.samples_per_s if pace is not None else statistics.median(known))

    @property
    def samples_per_s(self) -> float:
        """Pace of all workers that are not drained, together."""
        return sum(pace.samples_per_s for rank, pace in self.paces.items() if rank not in self.drained)

    def _others(self, rank: int) -> float | None:
        known = [
            pace.samples_per_s
            for other, pace in self.paces.items()
            if other != rank and other not in self.drained
        ]
        return statistics.median(known) if known else None
