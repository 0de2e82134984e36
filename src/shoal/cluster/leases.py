"""Which worker runs which samples in the relaxed strategies, decided from what workers ask for and finish.

Pure: no clock, no socket. The coordinator feeds events in and carries out the
actions that come back. It writes every event into its journal before it
carries them out (a Tick only where it led to something): fed with the same
events again, a new `Leases` stands where the old one stood.

    TODO ──handed to a worker──▶ HELD ──it says so──▶ DONE
      ▲                           │
      └──its holder was replaced──┘

A lease is named by its number alone, and so are the pushes made from it
(lease, batch). Whoever runs it again makes the same pushes, and servers apply
only those they have not seen.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import msgspec

from shoal.core.errors import ConfigError


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

    backup_after_s: float | None = None
    """At an epoch's end an idle worker gets what another has held for so long; None: it waits."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "samples_per_lease", "num_epochs", "num_ahead"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.backup_after_s is not None and not self.backup_after_s > 0:
            raise ConfigError(f"backup_after_s must be positive, got {self.backup_after_s}")

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


# ---- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """A worker has finished these leases (in this incarnation) and asks for more. A repeat is safe."""

    by: Holder
    finished: tuple[int, ...]
    at: float


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
class EndEpoch:
    """Every sample of the epoch is done; `num_samples_twice` of them were handed to two workers."""

    epoch: int
    num_samples_twice: int


Action: TypeAlias = Hand | NoMore | Refuse | EndEpoch


class Leases:
    """The leases of one call: every lease is done once, and held by one worker at a time.

    A dead worker's leases go back and are handed out first. A worker that has
    nothing to do waits for what comes back or for the next epoch.
    """

    def __init__(self, config: LeaseConfig, *, epoch: int = 0, done: Iterable[int] = ()) -> None:
        """`epoch` and `done`, leases of it, are where a checkpoint begins."""
        self.config = config
        self.epoch = epoch
        self.num_samples_twice = 0  # in this epoch
        self.counts: dict[int, tuple[int, int]] = {}  # rank: leases and samples it has finished
        self._begin_epoch()
        self._incarnations: dict[int, int] = {}  # rank: the newest heard of
        self._waiting: dict[Holder, float] = {}
        self._is_over = epoch >= config.num_epochs
        self._pass_over(done)
        self._end_epoch()

    def snapshot(self) -> LeaseSnapshot:
        """Everything as it stands, in plain values."""
        below = self.done_below
        return LeaseSnapshot(
            epoch=self.epoch,
            done_below=below,
            done=sorted(number for number in self._done if number >= below),
            held=[(number, *by) for number, holders in sorted(self._holders.items()) for by in holders],
            waiting=[(by.rank, by.incarnation) for by in self._waiting],
            incarnations=dict(self._incarnations),
            counts=dict(self.counts),
            num_samples_twice=self.num_samples_twice,
        )

    @classmethod
    def restore(cls, config: LeaseConfig, kept: LeaseSnapshot) -> Leases:
        """Leases that stand where `kept` was taken. Times begin anew."""
        first = kept.epoch * config.num_leases
        leases = cls(config, epoch=kept.epoch, done={*range(first, kept.done_below), *kept.done})
        for number, rank, incarnation in kept.held:
            leases._holders.setdefault(number, {})[Holder(rank, incarnation)] = 0.0
        leases._todo = [number for number in leases._todo if number not in leases._holders]
        leases._waiting = {Holder(*by): 0.0 for by in kept.waiting}
        leases._incarnations, leases.counts = dict(kept.incarnations), dict(kept.counts)
        leases.num_samples_twice = kept.num_samples_twice
        return leases

    @property
    def done_below(self) -> int:
        """Every lease below this is done."""
        while self._below in self._done:
            self._below += 1
        return self._below

    @property
    def deadline(self) -> float | None:
        """When a Tick will have something to do, if nothing happens before."""
        after_s = self.config.backup_after_s
        if after_s is None or not self._waiting or self._todo:
            return None
        return min((since + after_s for since, _ in self._alone()), default=None)

    def state(self, number: int) -> LeaseState:
        """Where a lease is; those of epochs to come are TODO."""
        if number // self.config.num_leases < self.epoch or number in self._done:
            return LeaseState.DONE
        return LeaseState.HELD if self._holders.get(number) else LeaseState.TODO

    def holders(self, number: int) -> tuple[Holder, ...]:
        """Who holds a lease at present."""
        return tuple(self._holders.get(number, ()))

    def handle(self, event: Event) -> list[Action]:
        """Apply one event; return what must now be done, in order."""
        match event:
            case Asked(by, finished, at):
                return self._ask(by, finished, at)
            case Replaced(rank, incarnation, at):
                self._fence(rank, incarnation)
                return self._serve(at)
            case GaveUp(by):
                self._waiting.pop(by, None)
                return []
            case Tick(at):
                return self._serve(at)

    def _ask(self, by: Holder, finished: tuple[int, ...], at: float) -> list[Action]:
        newest = self._incarnations.get(by.rank, 0)
        if by.incarnation < newest:
            return [
                Refuse(
                    by, f"rank {by.rank} was replaced: incarnation {newest} is in, this is {by.incarnation}"
                )
            ]
        self._fence(by.rank, by.incarnation)
        strange = [
            each
            for each in finished
            if self.state(each) is not LeaseState.DONE and by not in self.holders(each)
        ]
        if strange:
            return [Refuse(by, f"rank {by.rank} has finished leases {strange}, which it does not hold")]
        for number in finished:
            if self.state(number) is LeaseState.HELD:
                self._move(number, LeaseState.DONE)
                _, _, start, stop = self.config.lease(number)
                num_leases, num_samples = self.counts.get(by.rank, (0, 0))
                self.counts[by.rank] = (num_leases + 1, num_samples + stop - start)
        actions = self._end_epoch()
        self._waiting[by] = at
        return actions + self._serve(at)

    def _fence(self, rank: int, incarnation: int) -> None:
        self._incarnations[rank] = max(incarnation, self._incarnations.get(rank, 0))
        for number, holders in list(self._holders.items()):
            for holder in list(holders):
                if holder.rank == rank and holder.incarnation < incarnation:
                    del holders[holder]
                    if not holders:
                        self._move(number, LeaseState.TODO)
        for holder in [
            each for each in self._waiting if each.rank == rank and each.incarnation < incarnation
        ]:
            del self._waiting[holder]

    def _serve(self, at: float) -> list[Action]:
        """Answer those that wait and can be answered, the longest waiting first."""
        actions: list[Action] = []
        for holder in list(self._waiting):
            if self._is_over:
                actions.append(NoMore(holder))
            else:
                self._top_up(holder, at)
                held = [number for number, holders in self._holders.items() if holder in holders]
                if not held:
                    continue
                actions.append(Hand(holder, tuple(self.config.lease(number) for number in sorted(held))))
            del self._waiting[holder]
        return actions

    def _top_up(self, holder: Holder, at: float) -> None:
        num_held = sum(holder in holders for holders in self._holders.values())
        while num_held < self.config.num_ahead and self._todo:
            self._move(self._todo[0], LeaseState.HELD, holder, at)
            num_held += 1
        after_s = self.config.backup_after_s
        if not num_held and after_s is not None:
            late = [(since, number) for since, number in self._alone() if at >= since + after_s]
            if late:
                _, number = min(late)
                self._holders[number][holder] = at
                lease = self.config.lease(number)
                self.num_samples_twice += lease.stop - lease.start

    def _alone(self) -> list[tuple[float, int]]:
        """(since when, number) of the leases that one worker holds: only those may be handed out once more."""
        return [
            (since, number)
            for number, holders in self._holders.items()
            if len(holders) == 1
            for since in holders.values()
        ]

    def _move(self, number: int, state: LeaseState, holder: Holder | None = None, at: float = 0.0) -> None:
        before = LeaseState.HELD if number in self._holders else self.state(number)
        assert state in EDGES[before], f"lease {number}: {before} to {state}"
        match state:
            case LeaseState.HELD:
                assert holder is not None
                assert heapq.heappop(self._todo) == number
                self._holders[number] = {holder: at}
            case LeaseState.TODO:
                del self._holders[number]
                heapq.heappush(self._todo, number)
            case LeaseState.DONE:
                del self._holders[number]
                self._done.add(number)

    def _begin_epoch(self) -> None:
        first = self.epoch * self.config.num_leases
        self._below = first
        self._todo: list[int] = list(
            range(first, first + self.config.num_leases)
        )  # what comes back goes first
        self._holders: dict[int, dict[Holder, float]] = {}
        self._done: set[int] = set()

    def _pass_over(self, done: Iterable[int]) -> None:
        ahead = set(self._todo)
        self._done |= ahead & set(done)
        self._todo = sorted(ahead - self._done)

    def _end_epoch(self) -> list[Action]:
        if self._is_over or len(self._done) < self.config.num_leases:
            return []
        ended = EndEpoch(self.epoch, self.num_samples_twice)
        self.epoch, self.num_samples_twice = self.epoch + 1, 0
        self._is_over = self.epoch == self.config.num_epochs
        self._begin_epoch()
        return [ended]
