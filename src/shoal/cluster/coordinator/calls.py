"""Barrier at every call into shoal: a state machine over the calls that ranks begin.

Pure: no clock, no socket, no thread. `state.py` feeds events in and carries
out the actions that come back.

    RUNNING ──a rank begins the next call, or ends its script──▶ GATHERING
       ▲                                                            │
       ├──all began the same call: granted to all───────────────────┤
       │                                                            ├──all ended──────────▶ ENDED
       └──no rank waits any more, or a view is being formed─────────┤
                                                                    ├──ranks differ───────▶ REFUSED
                                                                    └──timeout_s is over──▶ EXPIRED

The last three are final: a rank that still asks is answered at once, in the
same sense, so that nobody waits for a job that is over. Where processes can be
replaced (`membership` is given) there is no EXPIRED: a rank that keeps the
others waiting is suspected, and they wait for its replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from shoal.cluster.coordinator.actions import Tick
from shoal.cluster.coordinator.membership import ExpireWait, Membership, ReportSuspect


class CallPhase(StrEnum):
    """State of the barrier."""

    RUNNING = "running"  # all are in the same call, or between two
    GATHERING = "gathering"  # some wait at the next call, or at the script's end, for the rest
    REFUSED = "refused"
    EXPIRED = "expired"
    ENDED = "ended"


EDGES = {
    CallPhase.RUNNING: {CallPhase.GATHERING},
    CallPhase.GATHERING: {CallPhase.RUNNING, CallPhase.REFUSED, CallPhase.EXPIRED, CallPhase.ENDED},
    CallPhase.REFUSED: set(),
    CallPhase.EXPIRED: set(),
    CallPhase.ENDED: set(),
}


@dataclass(frozen=True, slots=True)
class RankConnected:
    """A rank has connected. Only used to describe it while it is missing."""

    rank: int


@dataclass(frozen=True, slots=True)
class CallBegan:
    """A rank waits to make call `number`, counted from 1."""

    rank: int
    number: int
    kind: str
    detail: str
    at: float


@dataclass(frozen=True, slots=True)
class ScriptEndReached:
    """A rank is at the end of its script and waits to leave."""

    rank: int
    num_calls: int
    at: float


@dataclass(frozen=True, slots=True)
class CallerGone:
    """The connection of a rank is closed; it no longer waits."""

    rank: int


@dataclass(frozen=True, slots=True)
class CallsSuspended:
    """A view is being formed: ranks that wait here, or would, must enter it first."""

    view: int  # to be left


@dataclass(frozen=True, slots=True)
class CallsResumed:
    """The view is formed: calls continue."""


Event: TypeAlias = (
    RankConnected | CallBegan | ScriptEndReached | CallerGone | Tick | CallsSuspended | CallsResumed
)


@dataclass(frozen=True, slots=True)
class GrantCall:
    """Tell `rank` to continue with the call."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class RefuseCall:
    """Tell `rank` that the ranks differ, and what each known rank did."""

    rank: int
    number: int
    calls: dict[int, str]


@dataclass(frozen=True, slots=True)
class ReleaseRank:
    """Tell `rank` that it may leave: all ranks are at the script's end."""

    rank: int


@dataclass(frozen=True, slots=True)
class SendToView:
    """Tell `rank` to leave `view`, enter the next one, and ask again."""

    rank: int
    view: int


Action: TypeAlias = GrantCall | RefuseCall | ExpireWait | ReleaseRank | SendToView | ReportSuspect


@dataclass(frozen=True, slots=True)
class _Intent:
    """A rank's next call with its number, or (None) the end of its script."""

    number: int
    call: tuple[str, str] | None

    def __str__(self) -> str:
        if self.call is None:
            num_calls = self.number - 1
            return f"ended its script after {num_calls} call{'' if num_calls == 1 else 's'}"
        return f"called {self.call[0]}({self.call[1]})"

    @property
    def operation(self) -> str:
        return "the end of the script" if self.call is None else f"call {self.number} ({self.call[0]})"


class _CallWaiter(NamedTuple):
    wish: _Intent
    since: float


class Calls:
    """Barrier of `num_workers` ranks at every call and at the end of the script.

    Granted calls stay on record and are granted again on request: to a worker whose answer was
    lost, or to its replacement on its way through the script.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        timeout_s: float,
        membership: Membership | None = None,
        record: Sequence[tuple[str, str] | None] = (),
    ) -> None:
        """`record` holds the calls granted before a restart of the coordinator; None is the end of the script."""
        self.num_workers, self.timeout_s = num_workers, timeout_s
        self._membership = membership
        self._record = [_Intent(number, call) for number, call in enumerate(record, start=1)]
        self.phase = CallPhase.ENDED if self._record and self._record[-1].call is None else CallPhase.RUNNING
        self._recalled_from: int | None = None  # view that all ranks must leave first
        self._waiting: dict[int, _CallWaiter] = {}
        self._connected: dict[int, bool] = {}
        self._refused = RefuseCall(-1, 0, {})  # answer for every rank in REFUSED
        self._gave_up: tuple[str, ...] = ()  # ranks that were missing at expiry, for latecomers in EXPIRED

    @property
    def record(self) -> list[tuple[str, str] | None]:
        """Granted calls in order: (kind, detail) each, None for the end of the script."""
        return self.granted_since(0)

    def granted_since(self, num_known: int) -> list[tuple[str, str] | None]:
        """The record without its first `num_known` calls."""
        return [wish.call for wish in self._record[num_known:]]

    @property
    def deadline(self) -> float | None:
        """Time of the next Tick with an effect."""
        if not self._waiting:
            return None
        if self._membership is None:
            return self._since + self.timeout_s
        at_least = self.num_workers - len(self._waiting)
        return self._membership.first_due(
            self._missing, at_least, since=self._since, timeout_s=self.timeout_s
        )

    def handle(self, event: Event) -> list[Action]:
        """Apply one event; return what must now be done, in order."""
        match event:
            case RankConnected(rank):
                self._connected[rank] = True
                return []
            case CallBegan(rank, number, kind, detail, at):
                return self._ask(rank, _Intent(number, (kind, detail)), at)
            case ScriptEndReached(rank, num_calls, at):
                return self._ask(rank, _Intent(num_calls + 1, None), at)
            case CallerGone(rank):
                self._connected[rank] = False
                if self._waiting.pop(rank, None) and not self._waiting:
                    self._move(CallPhase.RUNNING)
                return []
            case Tick(at):
                deadline = self.deadline
                if deadline is None or at < deadline:
                    return []
                return self._expire(at) if self._membership is None else self._suspect(self._membership, at)
            case CallsSuspended(view):
                self._recalled_from = view
                waiting = sorted(self._waiting)
                if waiting:
                    self._waiting.clear()
                    self._move(CallPhase.RUNNING)
                return [SendToView(rank, view) for rank in waiting]
            case CallsResumed():
                self._recalled_from = None
                return []

    def _ask(self, rank: int, wish: _Intent, at: float) -> list[Action]:
        self._connected[rank] = True
        if self.phase is CallPhase.REFUSED:
            self._refused.calls[rank] = str(wish)
            return [replace(self._refused, rank=rank, calls=dict(self._refused.calls))]
        if self.phase is CallPhase.EXPIRED:
            return [ExpireWait(rank, wish.operation, 0.0, self._gave_up)]
        if 1 <= wish.number <= len(self._record):
            return [self._from_record(rank, wish)]
        if self.phase is CallPhase.ENDED:
            return [RefuseCall(rank, wish.number, self._all_did(self._record[-1]) | {rank: str(wish)})]

        if self._recalled_from is not None:
            return [SendToView(rank, self._recalled_from)]

        if self.phase is CallPhase.RUNNING:
            self._move(CallPhase.GATHERING)
        since = self._waiting[rank].since if rank in self._waiting else at
        self._waiting[rank] = _CallWaiter(wish, since)
        # All ranks that wait here agree, else they would have been refused; so any of them can represent
        # the others.
        theirs = next((each.wish for other, each in self._waiting.items() if other != rank), wish)
        if wish != theirs or wish.number != len(self._record) + 1:
            return self._refuse_all()
        return self._grant_all(wish) if len(self._waiting) == self.num_workers else []

    def _from_record(self, rank: int, wish: _Intent) -> Action:
        # Only this rank departs from the record, so only this rank is refused.
        recorded = self._record[wish.number - 1]
        if wish != recorded:
            return RefuseCall(rank, wish.number, self._all_did(recorded) | {rank: str(wish)})
        return ReleaseRank(rank) if wish.call is None else GrantCall(rank, wish.number)

    def _grant_all(self, wish: _Intent) -> list[Action]:
        self._record.append(wish)
        self._waiting.clear()
        self._move(CallPhase.ENDED if wish.call is None else CallPhase.RUNNING)
        return [self._from_record(rank, wish) for rank in range(self.num_workers)]

    def _refuse_all(self) -> list[Action]:
        calls = {rank: str(waiter.wish) for rank, waiter in sorted(self._waiting.items())}
        self._refused = RefuseCall(-1, len(self._record) + 1, calls)
        self._waiting.clear()
        self._move(CallPhase.REFUSED)
        return [replace(self._refused, rank=rank, calls=dict(calls)) for rank in calls]

    def _suspect(self, membership: Membership, at: float) -> list[Action]:
        since = self._since
        operation = next(iter(self._waiting.values())).wish.operation
        actions: list[Action] = []
        for rank in self._missing():
            late = membership.late(rank, since=since, timeout_s=self.timeout_s, now=at)
            if late is not None:
                why = f"the others waited {at - since:.1f} s for {self._describe(rank)} at {operation}"
                actions.append(ReportSuspect(late, why, at - since))
        return actions

    @property
    def _since(self) -> float:
        """Start of the longest wait: the first entry, since they are kept in order of arrival."""
        return next(iter(self._waiting.values())).since

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.num_workers) if rank not in self._waiting]

    def _expire(self, at: float) -> list[Action]:
        missing = tuple(self._describe(rank) for rank in self._missing())
        waiters = sorted(self._waiting.items())
        self._gave_up = tuple(
            f"rank {rank} (gave up after {at - waiter.since:.1f} s)" for rank, waiter in waiters
        )
        self._waiting.clear()
        self._move(CallPhase.EXPIRED)
        return [
            ExpireWait(rank, waiter.wish.operation, at - waiter.since, missing) for rank, waiter in waiters
        ]

    def _describe(self, rank: int) -> str:
        if self._membership is not None and (known := self._membership.whereabouts(rank)):
            return f"rank {rank} ({known})"
        if rank not in self._connected:
            return f"rank {rank} (never joined)"
        if not self._connected[rank]:
            return f"rank {rank} (its connection closed)"
        return (
            f"rank {rank} (last in {self._record[-1].operation})" if self._record else f"rank {rank} (joined)"
        )

    def _all_did(self, wish: _Intent) -> dict[int, str]:
        return dict.fromkeys(range(self.num_workers), str(wish))

    def _move(self, phase: CallPhase) -> None:
        assert phase in EDGES[self.phase], f"{self.phase} to {phase}"
        self.phase = phase
