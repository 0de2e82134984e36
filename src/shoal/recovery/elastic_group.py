"""Elastic process group: numbered exchanges that survive the death of a rank.

See docs/adr/0007-recovery.md for the protocol. Everything a strategy does over
the group is an `exchange`. When a peer is lost the view is over: the group is
left, a new one is formed with the replacement in it, ranks that are behind take
the donor's state, and the exchange is retried from what each rank contributed.
Above this file a death is a longer wait.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from shoal.cluster.worker import session, torchrun
from shoal.collectives.exchanges import open_exchange
from shoal.collectives.reducer import Native, Reducer, gather_any, gather_json
from shoal.config import job as jobs
from shoal.config import strategy as strategies
from shoal.errors import CallsDiffer, CollectiveLeftOut, GroupNotFormed, HostsApart, PeerLost, WaitTimedOut
from shoal.recovery import state_transfer
from shoal.recovery.rendezvous import NotConnected, form_group, is_broken, leave_group
from shoal.recovery.replay_log import ReplayLog
from shoal.recovery.state_transfer import RecoveryState
from shoal.runtime import events
from shoal.runtime.failpoints import failpoint

T = TypeVar("T")

KINDS = (
    "an exchange",
    "a step",
    "a sum over the workers",
    "a gathering",
    "a call of shoal.collectives",
    "a sum of gradients",
)
"""Purposes of an exchange: they reveal ranks whose scripts diverged."""


MAX_APART, MAX_UNFORMED = 6, 12
"""Views that the same processes of several hosts enter and cannot form before the job ends, about 11 s each: where hosts do
not reach each other, and for any other reason. The latter is above rendezvous.MAX_STRANGERS, whose error says more.
"""


class WaitHook(Protocol):
    """Hook that runs while an exchange waits for the others."""

    def begin(self, number: int) -> None:
        """Exchange `number` begins, or begins again in another view."""

    def look(self) -> None:
        """Called repeatedly while the exchange waits."""


class ElasticGroup(ReplayLog):
    """Process group of the job's workers, through all its views."""

    def __init__(self) -> None:
        super().__init__()
        self._job = jobs.current()
        self._view = 0
        self._is_exchanging = False  # else, when a view ends, this rank waits at a call for the others
        self._is_between = False  # a wait inside the model's forward, for some of the ranks, was interrupted
        self._waited_s = 0.0  # time spent waiting in the exchange that broke
        self._waited_in = ""  # name of that exchange
        self._kind, self._doing = 0, ""  # purpose of the exchange
        self._num_unformed = 0  # consecutive views that the same processes entered and could not form
        self._unformed_with: list[int] = []
        self._unformed_reason, self._silent = (
            "",
            dict[int, str](),
        )  # of the last one; ranks that were not reached
        self._stands = False  # this rank holds valid state: from view 1 on, or since a donor sent it
        self._reducer: Reducer | None = None
        self._timeout: WaitHook | None = None  # of the running exchange
        session.regroup_through(self.regroup)

    # ---- exchanges ------------------------------------------------------------------------------

    @property
    def reducer(self) -> Reducer:
        if self._reducer is None:
            self.regroup()  # also the first time: a rank may die while the view is formed
        assert self._reducer is not None
        return self._reducer

    @property
    def view(self) -> int:
        """Number of the present view; 0 before the first."""
        return self._view

    def _ensure_joined(self) -> None:
        _ = self.reducer

    def exchange(self, kind: str = KINDS[0], *, timeout: WaitHook | None = None, doing: str = "") -> Exchange:
        """Begin the next numbered exchange. `kind` is one of KINDS, `doing` the same in the words of the script.

        `timeout` ends a wait for ranks that do not come before the job's own time-out.
        """
        self._kind, self._doing = KINDS.index(kind), doing
        self._ensure_joined()
        return Exchange(self, timeout)

    def run(
        self,
        operation: Callable[[Reducer], T],
        kind: str = KINDS[0],
        *,
        timeout: WaitHook | None = None,
        doing: str = "",
    ) -> T:
        """Run a whole exchange whose every attempt is `operation`: a sum, a gather, a broadcast."""
        exchange = self.exchange(kind, timeout=timeout, doing=doing)
        for attempt in exchange.attempts():
            with attempt as reducer:
                result = operation(reducer)
        known: T = exchange.result if exchange.is_replayed else exchange.finish(result)
        return known

    def retries(self) -> Iterator[ExchangeAttempt]:
        """Attempts at a sum over the group within a step's forward, before the step's exchange.

        Not numbered: every rank that has not finished the step's exchange runs it again.
        """
        self._kind, self._doing = KINDS.index("a step"), ""
        self._ensure_joined()
        attempt = ExchangeAttempt(self)
        yield attempt
        while attempt.is_broken:
            self._regroup_after(attempt)
            attempt = ExchangeAttempt(self, is_retry=True)
            yield attempt

    def _regroup_after(self, attempt: ExchangeAttempt) -> None:
        self._is_exchanging, self._waited_s = True, attempt.waited_s
        self.regroup()
        self._is_exchanging, self._waited_s = False, 0.0

    # ---- views ----------------------------------------------------------------------------------

    def regroup(self, broken: str = "", waited_s: float = 0.0) -> None:
        """End the view, form the next one, and transfer state to ranks that are behind.

        `broken` is the error that ended the view outside an exchange, after `waited_s` of waiting.
        """
        self._waited_in, self._waited_s = broken or self._waited_in, waited_s or self._waited_s
        self._is_between = bool(broken)
        while True:
            if self._reducer is not None:
                self._reducer.close()
            self._reducer = None
            leave_group()
            failpoint("worker: view left")
            try:
                self._enter()
                return
            except PeerLost as error:  # a rank died while the view was formed: this view is over, too
                if self._job.rank_hosts and self._num_unformed:
                    self._limit_attempts(error)

    def _limit_attempts(self, error: PeerLost) -> None:
        """End the job after too many views of the same processes that were not formed."""
        silent = error.silent if isinstance(error, NotConnected) else {}
        attempts = self._num_unformed
        self._silent, self._unformed_reason = silent, error.reason.partition("\n")[0]
        if silent and attempts >= MAX_APART:
            raise HostsApart(
                rank=error.rank, silent=silent, num_attempts=attempts, reason=self._unformed_reason
            ) from None
        if attempts >= MAX_UNFORMED:
            raise GroupNotFormed(
                rank=error.rank, num_attempts=attempts, reason=self._unformed_reason
            ) from None

    def _report_unformed(self) -> None:
        """Report why the view before this one was not formed, now that all of its processes are known to live."""
        num_unformed = self._num_unformed - 1
        silent = ", ".join(f"rank {rank} ({address})" for rank, address in self._silent.items())
        if not silent and num_unformed < 2:
            return  # once is no pattern
        events.emit("group-not-formed", view=self._view, silent=silent, reason=self._unformed_reason)
        print(
            f"note: rank {self._job.rank} {f'does not reach {silent}' if silent else 'could not form the group'} "
            f"({self._unformed_reason}); the group is formed again "
            f"({num_unformed} of {MAX_APART if silent else MAX_UNFORMED} times)",
            file=sys.stderr,
            flush=True,
        )

    def _enter(self) -> None:
        fresh = not self._stands
        # A rank that received no state leaves the view as well: entering the same view again would repeat
        # the failure.
        try:
            formed = session.enter_view(
                view_left=self._view,
                finished=-1 if fresh else self._log.num_known,
                waited_s=self._waited_s,
                waited_in=self._missed_in(),
            )
        except WaitTimedOut as error:
            if not self._waited_in:
                raise
            # Name the operation and step as the script calls them, for the report of missing ranks.
            raise WaitTimedOut(
                operation=self._missed_in(),
                waited_s=max(error.waited_s, self._waited_s),
                missing=error.missing,
                setting=f"--step-timeout (now {self._job.liveness.step_timeout_s:g} s)",
            ) from None
        torchrun.close_listener()
        self._view = formed.view
        is_same = formed.incarnations == self._unformed_with
        self._num_unformed, self._unformed_with = (
            self._num_unformed + 1 if is_same else 1,
            formed.incarnations,
        )
        if self._num_unformed > 1 and self._job.rank_hosts:
            self._report_unformed()
        form_group(self._job, formed.view)
        torchs_own = Native(
            rank=self._job.rank,
            num_workers=self._job.num_workers,
            is_broken=self._look_around,
            timeout_s=self._job.liveness.step_timeout_s,
        )
        reducer = open_exchange(self._job, torchs_own)
        self._num_unformed = 0
        if formed.donor >= 0:
            behind = fresh or self._log.num_known < formed.finished
            self._hand_over(reducer, formed.donor, behind=behind, fresh=fresh)
        # Only now: a process without state enters the next view as fresh as it entered this one.
        self._stands, self._reducer, self._waited_in = True, reducer, ""
        if formed.donor < 0:
            session.live()  # no worker has done anything before this point

    def _missed_in(self) -> str:
        """Name of the exchange that broke, and its step; empty if none did."""
        step = max((holder.step for holder in self._holders.values()), default=-1) + 1
        return f"{self._waited_in} of step {step}" if self._waited_in and step else self._waited_in

    def _look_around(self) -> bool:
        """Whether the group is broken; polled several times a second by waiting threads."""
        if is_broken():
            return True
        if self._timeout is not None:
            self._timeout.look()
        return False

    def _hand_over(self, reducer: Reducer, donor: int, *, behind: bool, fresh: bool) -> None:
        # A replacement's position in the script does not say how far its state is. A rank outside exchanges
        # and calls cannot say what it would do next.
        runs_up = fresh or self._recovery_state is not None or self._log.is_catching_up or self._is_between
        standing = torch.tensor(
            [
                int(behind),
                self._log.num_known,
                int(self._is_exchanging),
                int(runs_up),
                self._kind,
                int(fresh),
            ]
        )
        everybody = [place.tolist() for place in reducer.all_gather(standing)]
        self._refuse_different_scripts(reducer, everybody)
        self._refuse_parts_apart(reducer, everybody)
        needy = [rank for rank, place in enumerate(everybody) if place[0]]
        if (
            self._has_dropped_results
            and self._job.rank == donor
            and any(everybody[rank][3] for rank in needy)
        ):
            # The supervisor learns of it through the coordinator, and restarts all ranks from the
            # checkpoint.
            raise PeerLost(
                rank=donor,
                operation="handing state over",
                reason="what was exchanged before is no longer kept",
            )
        if self._job.rank == donor:
            given = self._give() if needy else None
            for rank in needy:
                assert given is not None
                state_transfer.send(reducer, given, rank)
        elif behind:
            failpoint("worker: before taking state")
            taken = state_transfer.receive(reducer, donor)
            failpoint("worker: after taking state")
            if fresh:
                self._stands = self.was_given_state = True
                self._recovery_state = taken
                self._log.inherit(taken.log, starts_at=taken.anchored_at)
            else:
                self._log.inherit(taken.log)
            # The donor may already have created a holder that this process has yet to create.
            self._unclaimed = taken.parts
            for number, holder in self._holders.items():
                self.hold(number, holder)
        with reducer.during("agreeing that everybody has what it needs"):
            reducer.all_gather(standing)

    def _refuse_different_scripts(self, reducer: Reducer, everybody: list[list[int]]) -> None:
        """Refuse ranks whose scripts differ: a rank that waits at a call has run all its exchanges, so
        no other rank can be in one it has not seen.
        """
        furthest = max((place[1] for place in everybody if not place[3]), default=-1)
        there = {rank: place for rank, place in enumerate(everybody) if not place[3] and place[1] == furthest}
        exchanging = {rank for rank, place in there.items() if place[2]}
        kinds = {there[rank][4] for rank in exchanging}
        if not exchanging or (exchanging == set(there) and len(kinds) == 1):
            return
        doing = gather_json(lambda words: gather_any(reducer, words), self._doing)
        raise CallsDiffer(
            number=session.num_calls(),
            calls={
                rank: f"waits in {doing[rank] or KINDS[place[4]]}"
                if rank in exchanging
                else "went on without it"
                for rank, place in there.items()
            },
        )

    def _refuse_parts_apart(self, reducer: Reducer, everybody: list[list[int]]) -> None:
        """Refuse recovery if a rank waits inside a partitioned model for one that is already past that point."""
        behind = [rank for rank, place in enumerate(everybody) if place[0] and not place[5]]
        if not behind or strategies.parse(self._job.strategy).base != "mesh":
            return
        operations = gather_json(lambda words: gather_any(reducer, words), self._missed_in())
        raise CollectiveLeftOut(
            waiting=behind,
            operation=operations[behind[0]] or "an exchange",
            past=[rank for rank in range(len(everybody)) if rank not in behind],
        )

    def _give(self) -> RecoveryState:
        parts = {
            **self._unclaimed,
            **{number: holder.export_state() for number, holder in self._holders.items()},
        }
        if self._recovery_state is not None:
            # A replacement that has not reached its anchor passes on the state it was given.
            return replace(self._recovery_state, parts=parts)
        return RecoveryState(
            anchored_at=self._log.anchored_at,
            call=self._call,
            call_is_over=self._call_is_over,
            anchor=self._anchor(),
            log=self._log.results_since(),
            results=self._results,
            parts=parts,
        )


class ExchangeAttempt:
    """One attempt at an exchange, in one view. A lost peer ends the attempt, not the exchange."""

    def __init__(
        self,
        group: ElasticGroup,
        *,
        is_retry: bool = False,
        is_numbered: bool = False,
        timeout: WaitHook | None = None,
    ) -> None:
        self.is_retry, self.is_broken, self.waited_s = is_retry, False, 0.0
        self._group, self._is_numbered, self._timeout = group, is_numbered, timeout

    def __enter__(self) -> Reducer:
        self._began_at = time.monotonic()
        if self._is_numbered:
            failpoint("worker: exchange begun")
        if self._timeout is not None:
            self._timeout.begin(self._group._log.num_finished)
        self._group._timeout = self._timeout
        return self._group.reducer

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self._group._timeout = None
        if isinstance(error, PeerLost):
            # Nothing here may keep the exception: it refers to the old group, and so keeps alive every
            # thread that waits on it.
            self.is_broken, self.waited_s = True, time.monotonic() - self._began_at
            self._group._waited_in = error.operation
            return True
        if error is None and self._is_numbered:
            failpoint("worker: exchange finished, not committed")
        return False


class Exchange:
    """One numbered exchange, through however many views it takes.

        for attempt in exchange.attempts():
            with attempt as reducer:        # PeerLost ends the attempt; the next one is in the next view
                sums = ...
            if attempt.is_broken:
                ...                         # drop every reference to the group that broke
        return exchange.result if exchange.is_replayed else exchange.finish(update(sums))

    What follows the last attempt changes state and counts as part of the
    exchange. A replayed one was finished by a donor, whose state came with the
    result: nothing is left to do for it.
    """

    def __init__(self, group: ElasticGroup, timeout: WaitHook | None) -> None:
        self._group, self._timeout = group, timeout
        self.is_replayed = False
        self.result: Any = None

    def attempts(self) -> Iterator[ExchangeAttempt]:
        """Attempts until one succeeds, or until the result is known from a donor."""
        is_retry = False
        while True:
            self.is_replayed, self.result = self._group._log.recall()
            if self.is_replayed:
                self._group._caught_up()
                return
            attempt = ExchangeAttempt(self._group, is_retry=is_retry, is_numbered=True, timeout=self._timeout)
            yield attempt
            if not attempt.is_broken:
                return
            self._group._regroup_after(attempt)
            is_retry = True

    def finish(self, result: T) -> T:
        """Count the exchange, and log its result for replay."""
        failpoint("worker: committed, not counted")
        self._group._log.finish(result)
        return result


_group: ElasticGroup | None = None


def elastic_group() -> ElasticGroup:
    global _group
    if _group is None:
        _group = ElasticGroup()
    return _group
