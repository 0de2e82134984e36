"""Views: a state machine over ranks that leave one view and enter the next.

Pure: no clock, no socket, no thread. `state.py` feeds events in and carries
out the actions that come back.

    FORMED ──a rank enters──▶ GATHERING ──every rank has come, in its newest incarnation──▶ FORMED, view + 1
       ▲                        │  │  │
       └──no rank waits any more┘  │  └──time is over and nobody may be replaced──▶ EXPIRED
                                   └─────survivors are more than one exchange apart──▶ REFUSED

View 0 is the job before its first view. The last two phases are final: a rank
that still enters is answered at once, in the same sense. While recovery is
possible there is no EXPIRED: a rank that keeps the others waiting is suspected,
killed and replaced, again and again; the supervisor decides when to stop
(`job_lifecycle.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from shoal.cluster.coordinator.actions import Tick
from shoal.cluster.coordinator.membership import ExpireWait, Membership, ReportSuspect

MAX_APART = 1
"""Survivors finish the same exchanges in the same order, so one may be ahead of another by one and no more."""


MIN_ARRIVAL_S = 2.0
"""Minimum time for the other ranks to notice and leave, from the first rank's leaving, however long it had waited before."""


class ViewPhase(StrEnum):
    """State of the ranks between two views."""

    FORMED = "formed"  # nobody waits
    GATHERING = "gathering"  # some have left the view and wait for the rest
    REFUSED = "refused"
    EXPIRED = "expired"


EDGES = {
    ViewPhase.FORMED: {ViewPhase.GATHERING},
    ViewPhase.GATHERING: {ViewPhase.FORMED, ViewPhase.REFUSED, ViewPhase.EXPIRED},
    ViewPhase.REFUSED: set(),
    ViewPhase.EXPIRED: set(),
}


@dataclass(frozen=True, slots=True)
class ViewEntered:
    """A rank has left view `view_left` (0: it was in none) and waits for the next one."""

    rank: int
    incarnation: int
    view_left: int
    finished: int  # exchanges; -1: none, and no state either
    call: int
    at: float
    waited_s: float = 0.0  # time spent in the exchange that broke
    waited_in: str = ""  # name of that exchange


@dataclass(frozen=True, slots=True)
class EntererGone:
    """A process no longer waits: its connection closed, or it is dead."""

    rank: int
    incarnation: int


Event: TypeAlias = ViewEntered | EntererGone | Tick


@dataclass(frozen=True, slots=True)
class FormView:
    """A new view. Tell `ranks`: all that wait, or one that asks again."""

    view: int
    donor: int  # lowest rank among those that finished most; -1: no rank has state
    finished: int
    call: int
    incarnations: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RefuseEntry:
    """Tell `rank` that it cannot be in the next view."""

    rank: int
    reason: str


Action: TypeAlias = FormView | RefuseEntry | ReportSuspect | ExpireWait


class Views:
    """Forms one view after the other out of all of `num_workers` ranks.

    A view is formed once; a rank that missed the answer gets it again. Its
    members are the newest incarnation of each rank.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        timeout_s: float,
        can_recover: bool,
        formed: FormView | None = None,
    ) -> None:
        """`formed` is the newest view before a restart of the coordinator."""
        self.phase = ViewPhase.FORMED
        self._membership, self._timeout_s, self._can_recover = membership, timeout_s, can_recover
        self._formed = formed or FormView(0, -1, -1, 0, (), ())
        self._waiting: dict[int, ViewEntered] = {}
        self._waiting_since: float | None = None  # the longest wait of these, where it is known
        self._refused = ""
        self._gave_up: tuple[str, ...] = ()

    @property
    def view(self) -> int:
        return self._formed.view

    @property
    def is_gathering(self) -> bool:
        return self.phase is ViewPhase.GATHERING

    @property
    def deadline(self) -> float | None:
        """Time of the next Tick that has an effect."""
        if not self.is_gathering:
            return None
        at_least = self._membership.num_workers - len(self._waiting)
        return self._membership.first_due(
            self._missing, at_least, since=self._since(), timeout_s=self._timeout_s
        )

    def handle(self, event: Event) -> list[Action]:
        """Apply one event; return what must now be done, in order."""
        match event:
            case ViewEntered():
                return self._enter(event)
            case EntererGone(rank, incarnation):
                waiter = self._waiting.get(rank)
                if waiter is not None and waiter.incarnation == incarnation:
                    del self._waiting[rank]
                    self._waiting_since = None
                    if not self._waiting:
                        self._move(ViewPhase.FORMED)
                return []
            case Tick(at):
                deadline = self.deadline
                return self._look_for_the_missing(at) if deadline is not None and at >= deadline else []

    def _enter(self, entered: ViewEntered) -> list[Action]:
        rank = entered.rank
        if self.phase is ViewPhase.REFUSED:
            return [RefuseEntry(rank, self._refused)]
        if self.phase is ViewPhase.EXPIRED:
            return [ExpireWait(rank, self._operation, 0.0, self._gave_up)]
        if (reason := self._why_not(entered)) is not None:
            return [RefuseEntry(rank, reason)]
        if self._is_in(entered) and entered.view_left != self.view:
            # The answer about the view was lost, with a coordinator or a connection.
            return [replace(self._formed, ranks=(rank,))]
        if self.phase is ViewPhase.FORMED:
            self._move(ViewPhase.GATHERING)
        before = self._waiting.get(rank)
        if before is not None and before.incarnation == entered.incarnation:
            entered = replace(entered, at=before.at)  # a repeated request: it waits since the first one
        self._waiting[rank] = entered
        since = self._waiting_since
        self._waiting_since = None if since is None or before else min(since, self._since_of(entered))
        return self._form() if self._is_complete() else []

    def _why_not(self, entered: ViewEntered) -> str | None:
        rank, incarnation, left = entered.rank, entered.incarnation, entered.view_left
        newest = self._membership.newest(rank)
        if incarnation < newest:
            return f"rank {rank} was replaced: incarnation {newest} is in, this is {incarnation}"
        if left > self.view:
            return f"rank {rank} says it left view {left}, and the newest there was is {self.view}"
        is_in = self._is_in(entered)
        if left > 0 and (not is_in or left < self.view - 1):
            return f"rank {rank} left view {left}, and is not one of those that may follow view {self.view}"
        return None

    def _is_in(self, entered: ViewEntered) -> bool:
        return self.view > 0 and self._formed.incarnations[entered.rank] == entered.incarnation

    def _form(self) -> list[Action]:
        waiting = dict(sorted(self._waiting.items()))
        # A replacement whose donor died before the transfer has left the view too, and still has no state.
        survivors = {
            rank: each
            for rank, each in waiting.items()
            if each.finished >= 0 and self.view and each.view_left == self.view
        }
        finished = [each.finished for each in survivors.values()]
        if survivors and max(finished) - min(finished) > MAX_APART:
            told = ", ".join(f"rank {rank} {each.finished}" for rank, each in survivors.items())
            self._refused = (
                f"the ranks that left view {self.view} are more than one exchange apart ({told} finished), "
                "so none of them has what the others lack"
            )
            self._clear()
            self._move(ViewPhase.REFUSED)
            return [RefuseEntry(rank, self._refused) for rank in waiting]
        most = max(finished, default=-1)
        donor = min((rank for rank, each in survivors.items() if each.finished == most), default=-1)
        self._formed = FormView(
            view=self.view + 1,
            donor=donor,
            finished=most,
            call=survivors[donor].call if donor >= 0 else 0,
            incarnations=tuple(each.incarnation for each in waiting.values()),
            ranks=tuple(waiting),
        )
        self._clear()
        self._move(ViewPhase.FORMED)
        return [self._formed]

    def _look_for_the_missing(self, at: float) -> list[Action]:
        missing, since = self._missing(), self._since()
        waited_s = at - since
        if not self._can_recover:
            return self._expire(at, missing)
        # Survivors gave up an exchange, so something hangs. A replacement alone may have joined while the
        # others are busy: they will notice it at their next call or exchange.
        nothing_hangs = self.view > 0 and not any(each.view_left for each in self._waiting.values())
        waiters = _ranks(sorted(self._waiting))
        actions: list[Action] = []
        for rank in missing:
            late = self._membership.late(
                rank, since=since, timeout_s=self._timeout_s, now=at, may_be_busy=nothing_hangs
            )
            if late is not None:
                why = f"{waiters} waited {waited_s:.1f} s for {self._describe(rank)} {self._where}"
                actions.append(ReportSuspect(late, why, waited_s))
        return actions

    def _expire(self, at: float, missing: list[int]) -> list[Action]:
        described = tuple(self._describe(rank) for rank in missing)
        waiters = sorted(self._waiting.items())
        self._gave_up = tuple(f"rank {rank} (gave up after {at - each.at:.1f} s)" for rank, each in waiters)
        self._clear()
        self._move(ViewPhase.EXPIRED)
        return [ExpireWait(rank, self._operation, at - each.at, described) for rank, each in waiters]

    def _is_complete(self) -> bool:
        """Whether every rank waits here, in its newest incarnation. Checked only when enough ranks wait."""
        return len(self._waiting) == self._membership.num_workers and not self._missing()

    def _clear(self) -> None:
        self._waiting.clear()
        self._waiting_since = None

    def _missing(self) -> list[int]:
        """Ranks whose newest incarnation does not wait here."""
        return [
            rank
            for rank in range(self._membership.num_workers)
            if rank not in self._waiting or self._membership.is_fenced(rank, self._waiting[rank].incarnation)
        ]

    def _since(self) -> float:
        """Start of the longest wait. Time spent in a broken exchange counts, up to a margin for the others to arrive."""
        if self._waiting_since is None:
            self._waiting_since = min(self._since_of(each) for each in self._waiting.values())
        return self._waiting_since

    def _since_of(self, waiter: ViewEntered) -> float:
        return waiter.at - min(waiter.waited_s, max(0.0, self._timeout_s - MIN_ARRIVAL_S))

    @property
    def _where(self) -> str:
        """Exchange that the lowest rank gave up, or else the view."""
        broken = [each.waited_in for _, each in sorted(self._waiting.items()) if each.waited_in]
        return f"in {broken[0]}" if broken else f"to enter {self._operation}"

    @property
    def _operation(self) -> str:
        return f"view {self.view + 1}"

    def _describe(self, rank: int) -> str:
        known = self._membership.whereabouts(rank)
        return f"rank {rank} ({known})" if known else f"rank {rank}"

    def _move(self, phase: ViewPhase) -> None:
        assert phase in EDGES[self.phase], f"{self.phase} to {phase}"
        self.phase = phase


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
