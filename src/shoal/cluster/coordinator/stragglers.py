"""How fast workers are, and which of them is so slow that it is given no more work. Decided from what they finish.

Pure: no clock. A worker that is far slower than the others is drained: what
it holds it may finish, and then it gets one range now and then, as a probe,
by which its recovery shows.

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
"""Of what was measured before, with every range that is finished: the last few count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig:
    """When a worker is given no more."""

    slower_than: float | None = None
    """So many times slower than the median of the others; None: never."""

    probe_every_s: float = 10.0
    """Between two probes of a drained worker, at least."""

    probe_share: float = 0.2
    """Of its time that a drained worker may spend on probes: a range lasts long where it is."""

    min_leases: int = 2
    """So many in a row must each have been that slow: one alone may be a hiccup, and the first one has to warm up."""

    def __post_init__(self) -> None:
        if self.slower_than is not None and not 1 < self.slower_than < math.inf:
            raise ConfigError(f"slower_than must be above 1, got {self.slower_than}")
        if not self.probe_every_s > 0 or not 0 < self.probe_share <= 1 or self.min_leases < 1:
            raise ConfigError(f"probes must be some time apart and take some of it, got {self}")


@dataclass(frozen=True, slots=True)
class PaceFigures:
    """What led to a decision."""

    rank: int
    samples_per_s: float
    others_samples_per_s: float
    """Median of the others that are not drained themselves."""

    @property
    def times_slower(self) -> float:
        """Than the others."""
        return self.others_samples_per_s / self.samples_per_s


@dataclass(frozen=True, slots=True)
class Drained(PaceFigures):
    """From now on it is given probes alone."""


@dataclass(frozen=True, slots=True)
class Readmitted(PaceFigures):
    """It is one of the others again."""


@dataclass(slots=True)
class Pace:
    """Of one worker: samples and seconds, the older ones counting less."""

    samples: float = 0.0
    seconds: float = 0.0
    num_slow: int = 0
    """Ranges in a row, up to the last, that were so slow that it would be drained."""

    @property
    def samples_per_s(self) -> float:
        """So many samples in a second of work."""
        return self.samples / max(self.seconds, 1e-9)


@dataclass(slots=True)
class Stragglers:
    """Every method applies what happened."""

    config: DrainConfig
    paces: dict[int, Pace] = field(default_factory=dict)
    drained: dict[int, float] = field(default_factory=dict)
    """By rank: when it may be probed next."""

    def finished(self, rank: int, num_samples: int, busy_s: float, at: float) -> Drained | Readmitted | None:
        """A worker has run a range in so many seconds of its own; what follows from it."""
        pace = self.paces.setdefault(rank, Pace())
        if rank in self.drained:
            pace.samples = pace.seconds = 0.0  # a probe says how it is now
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
        """Of a worker that is drained."""
        return Drained(rank, self.paces[rank].samples_per_s, self._others(rank) or 0.0)

    def may_take(self, rank: int, at: float) -> bool:
        """Whether a worker may be given a range now."""
        return at >= self.drained.get(rank, at)

    def probed(self, rank: int, at: float) -> None:
        """A worker is given one; the next probe waits for what comes of it."""
        if rank in self.drained:
            self.drained[rank] = at + self.config.probe_every_s

    def replaced(self, rank: int) -> None:
        """Another process runs this rank: what was measured is of no account."""
        self.paces.pop(rank, None)
        self.drained.pop(rank, None)

    def seconds_for(self, rank: int, num_samples: int) -> float | None:
        """How long a worker needs for so many samples, or where it is not known the median of the others; None: who knows."""
        known = [pace.samples_per_s for pace in self.paces.values()]
        if not known:
            return None
        pace = self.paces.get(rank)
        return num_samples / (pace.samples_per_s if pace is not None else statistics.median(known))

    @property
    def samples_per_s(self) -> float:
        """Of all that work, together."""
        return sum(pace.samples_per_s for rank, pace in self.paces.items() if rank not in self.drained)

    def _others(self, rank: int) -> float | None:
        known = [
            pace.samples_per_s
            for other, pace in self.paces.items()
            if other != rank and other not in self.drained
        ]
        return statistics.median(known) if known else None
