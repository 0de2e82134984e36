"""Leases of sample ranges in the relaxed strategies: a state machine over requests, completions and deaths.

Pure: no clock, no socket. `lease_service.py` feeds events in and carries out
the actions that come back. Every event is in the journal before they are
carried out (a Tick only where it led to something): replaying the events gives
the same table.

    TODO ──handed to a worker──▶ HELD ──its holder reports it──▶ DONE
      ▲                           │
      └──its holder was replaced──┘

A lease is named by its number alone, and so are the pushes made from it
(lease, batch). A worker that runs it again makes the same pushes, and servers
apply only those they have not seen: a retry is idempotent. So a lease may have
two holders, too: where nothing is left to hand out, an idle worker gets a
backup of one that another is slow with.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import msgspec

from shoal.cluster.coordinator.actions import Tick
from shoal.cluster.coordinator.stragglers import DrainConfig, Drained, Pace, Readmitted, Stragglers
from shoal.errors import ConfigError


class LeaseState(StrEnum):
    """State of a lease of the running epoch."""

    TODO = "todo"
    HELD = "held"  # by one worker; at an epoch's end possibly by a second one as backup
    DONE = "done"  # final: all its pushes are acknowledged


EDGES = {
    LeaseState.TODO: {LeaseState.HELD},
    LeaseState.HELD: {LeaseState.TODO, LeaseState.DONE},
    LeaseState.DONE: set(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """Cut of an epoch into leases, and the rules by which they are handed out."""

    num_samples: int
    """Samples of an epoch."""

    samples_per_lease: int
    """A multiple of the batch size, so that the last batch of an epoch is the only short one."""

    num_epochs: int = 1
    """Epochs of the call."""

    num_ahead: int = 2
    """Leases a worker holds at once: it works on one, and keeps the next for when the coordinator is away."""

    num_workers: int = 0
    """Number of workers. Once fewer leases than this are left, nobody gets one ahead; 0: everybody does."""

    backup: bool = False
    """At an epoch's end an idle worker gets a backup of a lease that its holder would finish later than itself."""

    drain_slower_than: float | None = None
    """How many times slower than the median of the others a worker must be to be drained; None: never."""

    probe_every_s: float = 10.0
    """Minimum interval between leases given to a drained worker, as probes whether it has recovered."""

    shares: tuple[int, ...] = ()
    """Leases of an epoch reserved for each rank: rank r's are shares[r]..shares[r+1]-1. Empty: no reservation."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "samples_per_lease", "num_epochs", "num_ahead"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        ascends = all(before <= after for before, after in itertools.pairwise(self.shares))
        if self.shares and not (ascends and (self.shares[0], self.shares[-1]) == (0, self.num_leases)):
            raise ConfigError(f"shares must ascend from 0 to {self.num_leases}, got {self.shares}")
        self.drain  # validates  # noqa: B018

    @property
    def drain(self) -> DrainConfig:
        return DrainConfig(slower_than=self.drain_slower_than, probe_every_s=self.probe_every_s)

    @property
    def num_leases(self) -> int:
        """Leases of one epoch."""
        return -(-self.num_samples // self.samples_per_lease)

    def lease(self, number: int) -> Lease:
        """Range of a lease number; the numbers run on through the epochs."""
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
        return self.stop - self.start


class LeaseHolder(NamedTuple):
    """One incarnation of a worker."""

    rank: int
    incarnation: int


class LeaseSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Complete state of a `LeaseTable`, for the journal."""

    epoch: int
    done_below: int
    done: list[int]  # of this epoch, beyond done_below
    held: list[tuple[int, int, int]]  # lease, rank, incarnation
    waiting: list[tuple[int, int]]  # rank, incarnation; longest wait first
    incarnations: dict[int, int]
    counts: dict[int, tuple[int, int]]
    num_samples_twice: int = 0
    began: list[tuple[int, int, float]] = []  # rank, incarnation, start of work on its first lease
    paces: dict[int, tuple[float, float, int]] = {}  # samples, seconds, slow ones in a row
    drained: dict[int, float] = {}  # rank: when it may be probed
    near: dict[int, list[int]] = {}  # by rank, leases of an epoch


# ---- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerAsked:
    """A worker has finished these leases (in this incarnation) and asks for more. A repeat is safe."""

    by: LeaseHolder
    finished: tuple[int, ...]
    at: float
    busy_s: tuple[float, ...] = ()
    """Seconds of its own work on each of them, without waits; if absent, the time since it got the lease."""

    near: tuple[int, ...] = ()
    """Leases of an epoch, counted from 0, whose data is on its host; handed out first. Empty: no preference."""


@dataclass(frozen=True, slots=True)
class WorkerReplaced:
    """Incarnations of this rank below `incarnation` lose their leases, whether or not the next one has joined."""

    rank: int
    incarnation: int
    at: float


@dataclass(frozen=True, slots=True)
class WorkerGaveUp:
    """A worker that asked no longer waits; it keeps the leases it holds."""

    by: LeaseHolder


Event: TypeAlias = WorkerAsked | WorkerReplaced | WorkerGaveUp | Tick


# ---- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HandLeases:
    """Send a worker all leases it holds: those it had before, and new ones."""

    to: LeaseHolder
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class EndLeases:
    """Tell a worker that the last epoch is over."""

    to: LeaseHolder


@dataclass(frozen=True, slots=True)
class RefuseLease:
    """Refuse a request: the process was replaced, or reports leases it does not hold."""

    to: LeaseHolder
    reason: str


@dataclass(frozen=True, slots=True)
class FinishLeases:
    """These leases are done, by this worker."""

    by: LeaseHolder
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """Every sample of the epoch is done; `num_samples_twice` of them were handed to two workers."""

    epoch: int
    num_samples_twice: int


Action: TypeAlias = HandLeases | EndLeases | RefuseLease | FinishLeases | EndEpoch | Drained | Readmitted


class LeaseTable:
    """Leases of one call: each is done once, and held by one worker at a time, or by two at an epoch's end.

    A dead worker's leases go back and are handed out first. An idle worker waits for a returned
    lease or for the next epoch.
    """

    def __init__(self, config: LeaseConfig, *, epoch: int = 0, done: Iterable[int] = ()) -> None:
        """`epoch` and `done` (finished leases of it and of later ones) are the position of a checkpoint."""
        self.config = config
        self.epoch = epoch
        self.num_samples_twice = 0  # in this epoch
        self.counts: dict[int, tuple[int, int]] = {}  # rank: leases and samples it has finished
        self.draining = Stragglers(config.drain)
        self._begin_epoch()
        self.incarnations: dict[int, int] = {}  # rank: newest known incarnation
        self._waiting: dict[LeaseHolder, float] = {}
        self._near: dict[int, frozenset[int]] = {}  # by rank, leases of an epoch whose data is on its host
        self._began: dict[LeaseHolder, float] = {}  # start of work on the first lease it holds
        self._is_over = epoch >= config.num_epochs
        done = set(done)
        self._pass_over(done)
        while self._end_epoch():
            self._pass_over(done)

    def snapshot(self) -> LeaseSnapshot:
        below = self.done_below
        return LeaseSnapshot(
            epoch=self.epoch,
            done_below=below,
            done=sorted(number for number in self._done if number >= below),
            held=[(number, *by) for number, holders in sorted(self._holders.items()) for by in holders],
            waiting=[(by.rank, by.incarnation) for by in self._waiting],
            incarnations=dict(self.incarnations),
            counts=dict(self.counts),
            num_samples_twice=self.num_samples_twice,
            began=[(*by, at) for by, at in sorted(self._began.items())],
            paces={
                rank: (pace.samples, pace.seconds, pace.num_slow)
                for rank, pace in self.draining.paces.items()
            },
            drained=dict(self.draining.drained),
            near={rank: sorted(near) for rank, near in self._near.items()},
        )

    @classmethod
    def restore(cls, config: LeaseConfig, kept: LeaseSnapshot) -> LeaseTable:
        first = kept.epoch * config.num_leases
        leases = cls(config, epoch=kept.epoch, done={*range(first, kept.done_below), *kept.done})
        for number, rank, incarnation in kept.held:
            leases._holders.setdefault(number, []).append(LeaseHolder(rank, incarnation))
        leases._todo = [number for number in leases._todo if number not in leases._holders]
        leases._waiting = {LeaseHolder(*by): 0.0 for by in kept.waiting}
        leases.incarnations, leases.counts = dict(kept.incarnations), dict(kept.counts)
        leases.num_samples_twice = kept.num_samples_twice
        leases._began = {LeaseHolder(rank, incarnation): at for rank, incarnation, at in kept.began}
        leases.draining.paces = {rank: Pace(*pace) for rank, pace in kept.paces.items()}
        leases.draining.drained = dict(kept.drained)
        leases._near = {rank: frozenset(near) for rank, near in kept.near.items()}
        return leases

    @property
    def done_below(self) -> int:
        """Every lease below this number is done."""
        while self._below in self._done:
            self._below += 1
        return self._below

    @property
    def is_ending(self) -> bool:
        return self.config.backup and not self._todo

    def may_be_overtaken(self, holder: LeaseHolder) -> bool:
        """True where other workers may finish this worker's leases first, so it should check now and then."""
        if not self.config.backup or self.config.shares:
            return False
        held = sum(self.config.lease(number).num_samples for number in self.held_by(holder))
        held_s = self.draining.seconds_for(holder.rank, held)
        return not self._todo or (held_s is not None and held_s > self._seconds_left)

    @property
    def num_todo(self) -> int:
        """Leases of the epoch that were not handed out yet, or came back."""
        return len(self._todo)

    @property
    def deadline(self) -> float | None:
        """Time of the next Tick that has an effect."""
        times: list[float] = []
        for holder in self._waiting:
            if holder.rank in self.draining.drained:
                times += [self.draining.drained[holder.rank]] if self._todo else []
            elif self.is_ending:
                times += [expected + own_s for expected, own_s, _ in self._prospects(holder)]
        return min(times, default=None)

    def state(self, number: int) -> LeaseState:
        """State of a lease; those of later epochs are TODO."""
        if number // self.config.num_leases < self.epoch or number in self._done:
            return LeaseState.DONE
        return LeaseState.HELD if self._holders.get(number) else LeaseState.TODO

    def holders(self, number: int) -> tuple[LeaseHolder, ...]:
        return tuple(self._holders.get(number, ()))

    def held_by(self, holder: LeaseHolder) -> list[int]:
        """Leases of a worker, in the order in which it runs them."""
        return sorted(number for number, holders in self._holders.items() if holder in holders)

    def handle(self, event: Event) -> list[Action]:
        """Apply one event; return what must now be done, in order."""
        match event:
            case WorkerAsked():
                return self._ask(event)
            case WorkerReplaced(rank, incarnation, at):
                self._fence(rank, incarnation)
                return self._serve(at)
            case WorkerGaveUp(by):
                self._waiting.pop(by, None)
                return []
            case Tick(at):
                return self._serve(at)

    def _ask(self, asked: WorkerAsked) -> list[Action]:
        by, at = asked.by, asked.at
        newest = self.incarnations.get(by.rank, 0)
        if by.incarnation < newest:
            return [
                RefuseLease(
                    by, f"rank {by.rank} was replaced: incarnation {newest} is in, this is {by.incarnation}"
                )
            ]
        self._fence(by.rank, by.incarnation)
        if asked.near:
            self._near[by.rank] = frozenset(asked.near)
        strange = [
            each
            for each in asked.finished
            if self.state(each) is not LeaseState.DONE and by not in self.holders(each)
        ]
        if strange:
            return [RefuseLease(by, f"rank {by.rank} has finished leases {strange}, which it does not hold")]
        actions = [*self._finish(asked), *self._end_epoch()]
        self._waiting[by] = at
        return actions + self._serve(at)

    def _finish(self, asked: WorkerAsked) -> list[Action]:
        by, done, judged = asked.by, list[Lease](), list[Drained | Readmitted | None]()
        for index, number in enumerate(asked.finished):
            if self.state(number) is not LeaseState.HELD:
                continue  # reported before, or another worker was faster
            self._move(number, LeaseState.DONE)
            lease = self.config.lease(number)
            done.append(lease)
            num_leases, num_samples = self.counts.get(by.rank, (0, 0))
            self.counts[by.rank] = (num_leases + 1, num_samples + lease.num_samples)
            busy_s = (
                asked.busy_s[index] if index < len(asked.busy_s) else asked.at - self._began.get(by, asked.at)
            )
            judged.append(self.draining.finished(by.rank, lease.num_samples, busy_s, asked.at))
            self._began[by] = asked.at
        said = [each for each in judged if each is not None]
        return [*([FinishLeases(by, tuple(done))] if done else []), *said]

    def _fence(self, rank: int, incarnation: int) -> None:
        if incarnation > self.incarnations.get(rank, 0):
            self.draining.replaced(rank)
        self.incarnations[rank] = max(incarnation, self.incarnations.get(rank, 0))
        for number, holders in list(self._holders.items()):
            for holder in list(holders):
                if holder.rank == rank and holder.incarnation < incarnation:
                    holders.remove(holder)
                    if not holders:
                        self._move(number, LeaseState.TODO)
        for known in (self._waiting, self._began):
            for holder in [each for each in known if each.rank == rank and each.incarnation < incarnation]:
                del known[holder]

    def _serve(self, at: float) -> list[Action]:
        """Answer the waiting workers that can be answered, the longest waiting first."""
        actions: list[Action] = []
        for holder in list(self._waiting):
            if self._is_over:
                actions.append(EndLeases(holder))
            else:
                self._top_up(holder, at)
                held = self.held_by(holder)
                if not held:
                    continue
                actions.append(HandLeases(holder, tuple(self.config.lease(number) for number in held)))
            del self._waiting[holder]
        return actions

    def _top_up(self, holder: LeaseHolder, at: float) -> None:
        num_held = len(self.held_by(holder))
        while num_held < self._num_allowed(holder, at):
            number = self._next_for(holder)
            if number is None:
                break
            self._move(number, LeaseState.HELD, holder)
            self._hold(holder, num_held, at)
            num_held += 1
        if not num_held and self.is_ending and holder.rank not in self.draining.drained:
            due = [
                (expected, number)
                for expected, own_s, number in self._prospects(holder)
                if expected - at > own_s or at >= expected + own_s
            ]
            if due:
                _, number = max(due)
                self._holders[number].append(holder)
                self._hold(holder, 0, at)
                self.num_samples_twice += self.config.lease(number).num_samples

    def _hold(self, holder: LeaseHolder, num_held: int, at: float) -> None:
        if not num_held:
            self._began[holder] = at
        self.draining.probed(holder.rank, at)

    def _num_allowed(self, holder: LeaseHolder, at: float) -> int:
        if not self.draining.may_take(holder.rank, at):
            return 0
        if self.config.shares:
            return self.config.num_ahead
        # A slow worker would only begin with it after the others are done.
        own_s = self.draining.seconds_for(holder.rank, self.config.samples_per_lease)
        is_late = own_s is not None and self.config.num_workers > 0 and own_s > self._seconds_left
        is_last = is_late or len(self._todo) < self.config.num_workers
        return 1 if is_last or holder.rank in self.draining.drained else self.config.num_ahead

    @property
    def _seconds_left(self) -> float:
        """Seconds until all workers together have begun every lease that is left; infinite where no pace is known."""
        if not self._todo:
            return 0.0
        samples_per_s = self.draining.samples_per_s
        return len(self._todo) * self.config.samples_per_lease / samples_per_s if samples_per_s else math.inf

    def _next_for(self, holder: LeaseHolder) -> int | None:
        shares, first = self.config.shares, self.epoch * self.config.num_leases
        if not shares:
            return self._nearest(holder.rank, first)
        if holder.rank + 1 >= len(shares):
            return None
        begin, end = (first + share for share in shares[holder.rank : holder.rank + 2])
        return min((number for number in self._todo if begin <= number < end), default=None)

    def _nearest(self, rank: int, first: int) -> int | None:
        """First the leases whose data is at the worker's host, then those whose data is at no host, then any."""
        if not self._near or not self._todo:
            return self._todo[0] if self._todo else None
        mine = self._near.get(rank, frozenset())
        others = frozenset().union(*(near for each, near in self._near.items() if each != rank))

        def distance(number: int) -> int:
            return 0 if number - first in mine else 2 if number - first in others else 1

        return min(self._todo, key=lambda number: (distance(number), number))

    def _prospects(self, holder: LeaseHolder) -> list[tuple[float, float, int]]:
        """(expected finish by its only holder, time this worker would need, number) of every lease with one holder.

        An overdue lease is estimated to need as long again as it is late.
        """
        found: list[tuple[float, float, int]] = []
        for number, (only, *more) in self._holders.items():
            if more or only == holder:
                continue
            num_samples = self.config.lease(number).num_samples
            own_s = self.draining.seconds_for(holder.rank, num_samples)
            num_before = sum(
                self.config.lease(each).num_samples for each in self.held_by(only) if each <= number
            )
            theirs_s = self.draining.seconds_for(only.rank, num_before)
            if own_s is not None and theirs_s is not None:
                found.append((self._began.get(only, 0.0) + theirs_s, own_s, number))
        return found

    def _move(self, number: int, state: LeaseState, holder: LeaseHolder | None = None) -> None:
        before = LeaseState.HELD if number in self._holders else self.state(number)
        assert state in EDGES[before], f"lease {number}: {before} to {state}"
        match state:
            case LeaseState.HELD:
                assert holder is not None
                if self._todo[0] == number:
                    heapq.heappop(self._todo)
                else:
                    self._todo.remove(number)
                    heapq.heapify(self._todo)
                self._holders[number] = [holder]
            case LeaseState.TODO:
                del self._holders[number]
                heapq.heappush(self._todo, number)
            case LeaseState.DONE:
                del self._holders[number]
                self._done.add(number)

    def _begin_epoch(self) -> None:
        first = self.epoch * self.config.num_leases
        self._below = first
        # Returned leases go first.
        self._todo: list[int] = list(range(first, first + self.config.num_leases))
        self._holders: dict[int, list[LeaseHolder]] = {}
        self._done: set[int] = set()

    def _pass_over(self, done: set[int]) -> None:
        ahead = set(self._todo)
        self._done |= ahead & done
        self._todo = sorted(ahead - self._done)

    def _end_epoch(self) -> list[Action]:
        if self._is_over or len(self._done) < self.config.num_leases:
            return []
        ended = EndEpoch(self.epoch, self.num_samples_twice)
        self.epoch, self.num_samples_twice = self.epoch + 1, 0
        self._is_over = self.epoch == self.config.num_epochs
        self._begin_epoch()
        return [ended]
