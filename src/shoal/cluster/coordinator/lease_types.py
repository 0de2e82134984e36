"""What is said about leases: how epochs are cut, what a lease is, what happens to it and what must be done about it.

Pure values. `leases.py` decides by them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import msgspec

from shoal.cluster.coordinator.draining import DrainConfig, Drained, Readmitted
from shoal.errors import ConfigError


class LeaseState(StrEnum):
    """Where a lease of the running epoch is."""

    TODO = "todo"
    HELD = "held"  # by one worker; at an epoch's end perhaps by a second one, which is counted
    DONE = "done"  # final: all its pushes are acknowledged


EDGES = {
    LeaseState.TODO: {LeaseState.HELD},
    LeaseState.HELD: {LeaseState.TODO, LeaseState.DONE},
    LeaseState.DONE: set(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """How an epoch is cut and handed out."""

    num_samples: int
    """Samples of an epoch."""

    samples_per_lease: int
    """A multiple of the batch size, so that the last batch of an epoch is the only short one."""

    num_epochs: int = 1
    """Epochs of the call."""

    num_ahead: int = 2
    """Leases a worker holds at once: it works on one and has the next at hand while the coordinator is away."""

    num_workers: int = 0
    """How many there are. Once fewer leases than that are left to hand out, nobody gets one ahead; 0: everybody does."""

    backup: bool = False
    """At an epoch's end an idle worker gets what another will not have finished before it would."""

    drain_slower_than: float | None = None
    """How many times slower than the median of the others a worker is that is given no more; None: nobody is."""

    probe_every_s: float = 10.0
    """How often, at most, such a worker is given a lease all the same, to see whether it has recovered."""

    shares: tuple[int, ...] = ()
    """Leases of an epoch that belong to each rank: rank r's are shares[r]..shares[r+1]-1. Empty: they are anybody's."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "samples_per_lease", "num_epochs", "num_ahead"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        ascends = all(before <= after for before, after in itertools.pairwise(self.shares))
        if self.shares and not (ascends and (self.shares[0], self.shares[-1]) == (0, self.num_leases)):
            raise ConfigError(f"shares must ascend from 0 to {self.num_leases}, got {self.shares}")
        self.drain  # refuses what cannot be  # noqa: B018

    @property
    def drain(self) -> DrainConfig:
        """When a worker is given no more."""
        return DrainConfig(slower_than=self.drain_slower_than, probe_every_s=self.probe_every_s)

    @property
    def num_leases(self) -> int:
        """Leases of one epoch."""
        return -(-self.num_samples // self.samples_per_lease)

    def lease(self, number: int) -> Lease:
        """What a number stands for; the numbers run on through the epochs."""
        epoch, index = divmod(number, self.num_leases)
        start = index * self.samples_per_lease
        return Lease(number, epoch, start, min(start + self.samples_per_lease, self.num_samples))


class Lease(NamedTuple):
    """The samples start..stop-1, in the order of the epoch."""

    number: int
    epoch: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        """How many."""
        return self.stop - self.start


class Holder(NamedTuple):
    """One incarnation of a worker."""

    rank: int
    incarnation: int


class LeaseSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that `Leases` knows, for a journal."""

    epoch: int
    done_below: int
    done: list[int]  # of this epoch, beyond done_below
    held: list[tuple[int, int, int]]  # lease, rank, incarnation
    waiting: list[tuple[int, int]]  # rank, incarnation; the longest first
    incarnations: dict[int, int]
    counts: dict[int, tuple[int, int]]
    num_samples_twice: int = 0
    began: list[tuple[int, int, float]] = []  # rank, incarnation, since when it works on its first lease
    paces: dict[int, tuple[float, float, int]] = {}  # samples, seconds, slow ones in a row
    drained: dict[int, float] = {}  # rank: when it may be probed
    near: dict[int, list[int]] = {}  # by rank, leases of an epoch


# ---- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """A worker has finished these leases (in this incarnation) and asks for more. A repeat is safe."""

    by: Holder
    finished: tuple[int, ...]
    at: float
    busy_s: tuple[float, ...] = ()
    """How long it worked on each of them, without waiting for others; where it does not say, since when it had it."""

    near: tuple[int, ...] = ()
    """Leases of an epoch, counted from 0, whose data its host has: it gets those first. Empty: it does not matter."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """Incarnations of this rank below `incarnation` hold nothing any more, whether or not the next one has come."""

    rank: int
    incarnation: int
    at: float


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A worker that asked waits no longer; what it holds stays with it."""

    by: Holder


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    at: float


Event: TypeAlias = Asked | Replaced | GaveUp | Tick


# ---- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hand:
    """Tell a worker all that it holds: those it had before, and new ones."""

    to: Holder
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class NoMore:
    """Tell a worker that the last epoch is over."""

    to: Holder


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell a process why it is not heard: it was replaced, or speaks of what it does not hold."""

    to: Holder
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """These leases are done, and this worker did them."""

    by: Holder
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """Every sample of the epoch is done; `num_samples_twice` of them were handed to two workers."""

    epoch: int
    num_samples_twice: int


Action: TypeAlias = Hand | NoMore | Refuse | Finish | EndEpoch | Drained | Readmitted
