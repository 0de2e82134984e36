"""Cluster membership: incarnations by rank, fencing, and ranks that others have waited for too long.

Pure: no clock, no socket. Only the supervisor reports deaths (`reaped`): a silent process is slow,
not dead. This module decides when its silence has lasted too long for the ranks that wait, and
whether it has an excuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shoal.runtime.signal_names import signal_name
from shoal.runtime.transport.messages.worker_coordinator import Join

MAX_AHEAD = 100
"""Incarnations of a rank that may have died before the coordinator received word of any."""


class Member(NamedTuple):
    """The process of a rank."""

    incarnation: int
    pid: int


class LateRank(NamedTuple):
    """A process that others have waited for too long."""

    rank: int
    incarnation: int
    lenient: bool
    """The process may be at work: it counts as late only if it was stopped."""


@dataclass(frozen=True, slots=True)
class ReportSuspect:
    """Action: others have waited too long for this process; it must be killed so that a replacement can join."""

    late: LateRank
    why: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class ExpireWait:
    """Action: end the wait of `rank` and name the ranks it waited for."""

    rank: int
    operation: str
    waited_s: float
    missing: tuple[str, ...]


class Membership:
    """Members by rank. An incarnation is only ever replaced by a newer one.

    A replacement runs the script from its top, so it may take as long as the longest silence of any
    rank so far. Ranks that were in the present view, or were there from the beginning, have no such
    excuse.
    """

    def __init__(self, *, num_workers: int, not_before: float = -math.inf) -> None:
        """Before `not_before` no rank is late: a restarted coordinator has not heard from any yet."""
        self.num_workers, self.not_before = num_workers, not_before
        self.members: dict[int, Member] = {}
        self.view = 0
        self.seated: dict[int, int] = {}  # rank -> incarnation, in the present view
        self.stretch_s = 0.0  # longest time between two messages of a rank
        self._newest: dict[int, int] = {}
        # Rank -> exit status of its last process, until the next one joins.
        self._killed_by: dict[int, int] = {}
        self._spoke_at: dict[int, float] = {}
        self._asked_at: dict[int, float] = {}  # rank -> time it was last found late

    def admit(self, join: Join, at: float) -> str | None:
        """Admit a process, or return the reason for refusing it."""
        if join.num_workers != self.num_workers:
            return f"it belongs to a job of {join.num_workers} workers, this one has {self.num_workers}"
        if join.rank >= self.num_workers:
            return f"there is no rank {join.rank} among {self.num_workers} workers"
        if self.is_fenced(join.rank, join.incarnation):
            return f"rank {join.rank} was replaced: incarnation {self.newest(join.rank)} is in, this is {join.incarnation}"
        if join.incarnation > self.newest(join.rank) + MAX_AHEAD:
            return f"it says it is incarnation {join.incarnation} of rank {join.rank}, where {self.newest(join.rank)} is expected"
        present = self.members.get(join.rank)
        if present is not None and join.incarnation == present.incarnation:
            if join.pid != present.pid:
                return (
                    f"rank {join.rank} is already here as process {present.pid}, this is process {join.pid}"
                )
            return None
        self.members[join.rank] = Member(join.incarnation, join.pid)
        self._renew(join.rank, join.incarnation, at)
        self._killed_by.pop(join.rank, None)
        return None

    def reaped(self, rank: int, incarnation: int, code: int, at: float) -> bool:
        """Fence a dead process. False where its death was known."""
        if rank >= self.num_workers or self.is_fenced(rank, incarnation):
            return False
        self._renew(rank, incarnation + 1, at)
        self._killed_by[rank] = code
        return True

    def form(self, view: int, incarnations: list[int]) -> None:
        self.view, self.seated = view, dict(enumerate(incarnations))

    def newest(self, rank: int) -> int:
        """Incarnation that counts: the newest that joined, or the successor of one that died."""
        return self._newest.get(rank, 0)

    def is_fenced(self, rank: int, incarnation: int) -> bool:
        return incarnation < self.newest(rank)

    def spoke(self, rank: int, at: float) -> None:
        before = self._spoke_at.get(rank)
        if before is not None:
            self.stretch_s = max(self.stretch_s, at - before)
        self._spoke_at[rank] = at

    def due(self, rank: int, *, since: float, timeout_s: float) -> float:
        """Time at which ranks that wait for `rank` since `since` may report it, for the first time or again."""
        return max(since, self.not_before, self._asked_at.get(rank, -math.inf)) + timeout_s

    def first_due(
        self, missing: Callable[[], list[int]], at_least: int, *, since: float, timeout_s: float
    ) -> float:
        """Earliest `due` among missing ranks, of which there are at least `num_missing`.

        Ranks are checked one by one only where each may have been reported before: thousands wait
        for few.
        """
        if at_least > len(self._asked_at):
            return max(since, self.not_before) + timeout_s
        return min(self.due(rank, since=since, timeout_s=timeout_s) for rank in missing())

    def late(
        self, rank: int, *, since: float, timeout_s: float, now: float, may_be_busy: bool = False
    ) -> LateRank | None:
        """`rank` if it is overdue for ranks waiting since `since`. `may_be_busy`: no rank is blocked by it yet."""
        if now < self.due(rank, since=since, timeout_s=timeout_s):
            return None
        self._asked_at[rank] = now
        incarnation = self.newest(rank)
        is_catching_up = incarnation > 0 and self.seated.get(rank) != incarnation
        excused_until = max(since, self._spoke_at.get(rank, -math.inf)) + timeout_s + self.stretch_s
        return LateRank(rank, incarnation, may_be_busy or (is_catching_up and now < excused_until))

    def whereabouts(self, rank: int) -> str | None:
        """State of a rank that does not come, as a phrase; None where it is connected."""
        if rank in self._killed_by:
            code = self._killed_by[rank]
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
            return f"{how}, its replacement has not joined"
        return None if rank in self.members else "never joined"

    def _renew(self, rank: int, incarnation: int, at: float) -> None:
        self._newest[rank] = max(self.newest(rank), incarnation)
        self._spoke_at[rank] = at  # start of its next silence
        self._asked_at.pop(rank, None)
