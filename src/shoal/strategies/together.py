"""One process's place in the group: numbered exchanges that survive the death of a rank.

See docs/adr/0007-recovery.md for the protocol. A strategy runs everything it
does over the group through `exchange`; if that breaks, the view is over: the
group is left, a new one is formed with the replacement in it, whoever is
behind takes the donor's state, and the exchange is run again from what was
contributed. Nobody above this file notices more than a longer wait.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from shoal.cluster import session
from shoal.cluster.rendezvous import form_group, is_broken, leave_group
from shoal.collectives.native import Native
from shoal.core import job as jobs
from shoal.core.errors import CallsDiffer, PeerLost
from shoal.core.failpoints import failpoint
from shoal.strategies import heritage
from shoal.strategies.exchange_log import ExchangeLog
from shoal.strategies.heritage import Heritage, Part

T = TypeVar("T")

_MAX_KEPT = 100_000  # results of reductions between steps, kept for a replacement


class Holder(Protocol):
    """Somebody whose state a replacement needs: a strategy with its model and optimizer."""

    def give(self) -> Part:
        """The state as of the last commit."""

    def take(self, part: Part) -> None:
        """Stand where the giver stood."""


class Together:
    """The group of this process's job, through all its views."""

    def __init__(self) -> None:
        self._job = jobs.current()
        self._view = 0
        self._is_exchanging = False  # or else, when a view is over, it waits at a call for the others
        self._waited_s = 0.0  # for the others, in the exchange that broke
        self._stands = False  # whether it holds state that counts: from view 1 on, or since a donor gave it
        self._native: Native | None = None
        self._log = ExchangeLog()
        self._holders: dict[int, Holder] = {}
        self._call, self._call_is_over = 0, True
        self._anchor: Callable[[], dict[str, Any]] = dict
        self._results: dict[str, Any] = {}
        self._moments: Counter[str] = Counter()
        self.was_given_state = False
        self._unclaimed: dict[int, Part] = {}  # given state whose holder the script has not come to yet
        self._heritage: Heritage | None = None  # until this process stands at the anchor it was given
        session.regroup_through(self.regroup)

    # ---- exchanges ------------------------------------------------------------------------------

    @property
    def native(self) -> Native:
        """The collectives of the present view."""
        if self._native is None:
            self.regroup()  # also the first time somebody may die while the view is formed
        assert self._native is not None
        return self._native

    def exchange(
        self,
        first: Callable[[Native], T],
        again: Callable[[Native], T] | None = None,
        *,
        conclude: Callable[[T], Any] = lambda result: result,
        abandon: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run the next exchange to its end, through however many views; returns what `conclude` made of it.

        `first` may only finish what is already under way; `again` runs all of
        it anew from what this rank contributed. `conclude` changes state, and
        counts as part of the exchange: an exchange whose outcome was taken
        from the donor is not concluded, the donor's state came with it.
        `abandon` drops every reference to the group that broke.
        """
        attempt = first
        _ = self.native
        while True:
            known, result = self._log.recall()
            if known:
                self._caught_up()
                return result
            began_at = time.monotonic()
            try:
                failpoint("worker: exchange begun")
                done = attempt(self.native)
            except PeerLost:
                # Nothing here may keep the exception: it holds the old group, and with it everybody that waits on it.
                pass
            else:
                failpoint("worker: exchange finished, not committed")
                result = conclude(done)
                failpoint("worker: committed, not counted")
                self._log.finish(result)
                return result
            abandon()
            self._is_exchanging, self._waited_s = True, time.monotonic() - began_at
            self.regroup()
            self._is_exchanging, self._waited_s = False, 0.0
            attempt = again or first

    @property
    def next_is_known(self) -> bool:
        """True when the next exchange will be answered from the donor's log: nothing needs to be computed for it."""
        return self._log.is_catching_up

    def remembered(self, moment: str, run: Callable[[], Any]) -> Any:
        """Run something of the script's own between steps, once: a replacement is given the result.

        The same moment may come several times; each is remembered for itself.
        """
        moment = f"call {session.num_calls()}, {moment}"
        self._moments[moment] += 1
        key = f"{moment} #{self._moments[moment]}"
        if self._heritage is not None and key in self._heritage.results:
            return self._heritage.results[key]
        result = run()
        if len(self._results) < _MAX_KEPT:
            self._results[key] = result
        return result

    # ---- anchors and calls ----------------------------------------------------------------------

    def begin_call(self, number: int) -> tuple[bool, Any]:
        """A call begins: whether it is finished already, and with what result."""
        _ = self.native
        if self._heritage is not None:
            given = self._heritage
            finished = number < given.call or (number == given.call and given.call_is_over)
            if finished:
                if number == given.call and not given.anchor:
                    self._stand_at_anchor()
                return True, given.results.get(f"call/{number}")
            if not given.anchor:  # anchored at this call's very begin
                self._stand_at_anchor()
            return False, None
        self._call, self._call_is_over = number, False
        self._note(dict)
        return False, None

    def end_call(self, number: int, result: Any) -> None:
        """A call is over; its result is kept for a replacement."""
        self._call, self._call_is_over = number, True
        self._results[f"call/{number}"] = result
        self._note(dict)
        failpoint("worker: a call ended")

    def anchor(self, state: Callable[[], dict[str, Any]]) -> None:
        """From here a replacement can run the present call forward, given what `state` then answers."""
        if self._heritage is None:
            self._note(state)

    @property
    def anchored_at(self) -> int:
        """Number of the first exchange after the anchor."""
        return self._log.anchored_at

    @property
    def num_finished(self) -> int:
        """How many exchanges this process has run through."""
        return self._log.num_finished

    def inherited_anchor(self) -> dict[str, Any] | None:
        """In a replacement, once: the state noted at the anchor from which it runs on."""
        if self._heritage is None:
            return None
        state = self._heritage.anchor
        self._stand_at_anchor()
        return state

    def waiting_anchor(self) -> dict[str, Any] | None:
        """In a replacement: the state noted at the anchor it is on its way to."""
        return self._heritage.anchor if self._heritage is not None else None

    def waiting_part(self, number: int) -> Part | None:
        """In a replacement: the state that this holder will be given."""
        return self._unclaimed.get(number)

    def hold(self, number: int, holder: Holder) -> None:
        """Take part in what is handed over from now on, and take what waits for this holder."""
        self._holders[number] = holder
        if number in self._unclaimed:
            holder.take(self._unclaimed.pop(number))

    # ---- views ----------------------------------------------------------------------------------

    def regroup(self) -> None:
        """The view is over: form the next one, and let those who are behind catch up."""
        while True:
            self._native = None
            leave_group()
            failpoint("worker: view left")
            try:
                self._enter()
                return
            except PeerLost:
                continue  # somebody died while the view was formed: it is over, too

    def _enter(self) -> None:
        fresh = not self._stands
        # The view is left even by one that was given nothing in it: to be told of the same view again would help nobody.
        formed = session.enter_view(
            view_left=self._view, finished=-1 if fresh else self._log.num_known, waited_s=self._waited_s
        )
        self._view = formed.view
        form_group(self._job, formed.view)
        native = Native(rank=self._job.rank, num_workers=self._job.num_workers, is_broken=is_broken)
        if formed.donor >= 0:
            behind = fresh or self._log.num_known < formed.finished
            self._hand_over(native, formed.donor, behind=behind, fresh=fresh)
        # Only now: a process that was given nothing yet enters the next view as fresh as this one.
        self._stands, self._native = True, native
        if formed.donor < 0:
            session.live()  # nobody has done anything before it

    def _hand_over(self, native: Native, donor: int, *, behind: bool, fresh: bool) -> None:
        # Where a process is that runs towards the state it was given says nothing about where that state is.
        runs_up = fresh or self._heritage is not None or self._log.is_catching_up
        standing = torch.tensor([int(behind), self._log.num_known, int(self._is_exchanging), int(runs_up)])
        everybody = [place.tolist() for place in native.all_gather(standing)]
        self._refuse_different_scripts(everybody)
        needy = [rank for rank, place in enumerate(everybody) if place[0]]
        if self._job.rank == donor:
            given = self._give() if needy else None
            for rank in needy:
                assert given is not None
                heritage.send(native, given, rank)
        elif behind:
            failpoint("worker: before taking state")
            taken = heritage.receive(native, donor)
            failpoint("worker: after taking state")
            if fresh:
                self._stands = self.was_given_state = True
                self._heritage = taken
                self._log.inherit(taken.log, starts_at=taken.anchored_at)
            else:
                self._log.inherit(taken.log)
            # The donor may be past the making of a holder that this process has yet to make.
            self._unclaimed = taken.parts
            for number, holder in self._holders.items():
                self.hold(number, holder)
        with native.during("agreeing that everybody has what it needs"):
            native.all_gather(standing)

    def _refuse_different_scripts(self, everybody: list[list[int]]) -> None:
        """A rank that waits at a call has run all its exchanges: nobody can be in one that it does not know of."""
        furthest = max((known for _, known, _, runs_up in everybody if not runs_up), default=-1)
        there = {rank: place for rank, place in enumerate(everybody) if not place[3] and place[1] == furthest}
        exchanging = {rank for rank, place in there.items() if place[2]}
        if exchanging and exchanging != set(there):
            raise CallsDiffer(
                number=session.num_calls(),
                calls={
                    rank: "waits in an exchange (a step, a reduction)"
                    if rank in exchanging
                    else "went on without it"
                    for rank in there
                },
            )

    def _give(self) -> Heritage:
        parts = {**self._unclaimed, **{number: holder.give() for number, holder in self._holders.items()}}
        if self._heritage is not None:
            # A replacement that has not reached its anchor passes on what it was given.
            return replace(self._heritage, parts=parts)
        return Heritage(
            anchored_at=self._log.anchored_at,
            call=self._call,
            call_is_over=self._call_is_over,
            anchor=self._anchor(),
            log=self._log.legacy(),
            results=self._results,
            parts=parts,
        )

    def _note(self, state: Callable[[], dict[str, Any]]) -> None:
        self._log.anchor()
        self._anchor = state

    def _stand_at_anchor(self) -> None:
        given, self._heritage = self._heritage, None
        assert given is not None
        self._call, self._call_is_over = given.call, given.call_is_over
        self._anchor, self._results = lambda: given.anchor, given.results
        self._caught_up()

    def _caught_up(self) -> None:
        if self._heritage is None and not self._log.is_catching_up:
            session.live()


_together: Together | None = None


def together() -> Together:
    """The one of this process."""
    global _together
    if _together is None:
        _together = Together()
    return _together
