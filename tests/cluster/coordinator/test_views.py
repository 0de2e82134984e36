from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster.coordinator.actions import Tick
from shoal.cluster.coordinator.membership import ExpireWait, LateRank, Membership, ReportSuspect
from shoal.cluster.coordinator.views import (
    EDGES,
    Action,
    EntererGone,
    Event,
    FormView,
    RefuseEntry,
    ViewEntered,
    ViewPhase,
    Views,
)
from shoal.runtime.transport.messages.worker_coordinator import Join

calm = settings(deadline=None)


class Rig:
    """Views over a membership, with the joins and deaths that would come from outside."""

    def __init__(
        self, num_workers: int = 3, *, can_recover: bool = True, formed: FormView | None = None
    ) -> None:
        self.membership = Membership(num_workers=num_workers)
        self.views = Views(self.membership, timeout_s=10.0, can_recover=can_recover, formed=formed)
        for rank in range(num_workers):
            self.join(rank, 0, at=0.0)

    def join(self, rank: int, incarnation: int, at: float) -> None:
        assert (
            self.membership.admit(Join(rank, incarnation, 100 * incarnation + rank, self.num_workers), at)
            is None
        )

    @property
    def num_workers(self) -> int:
        return self.membership.num_workers

    def feed(self, *events: Event) -> list[Action]:
        actions = [action for event in events for action in self.views.handle(event)]
        for action in actions:
            if isinstance(action, FormView) and action.view > self.membership.view:
                self.membership.form(action.view, list(action.incarnations))
        return actions

    def replace(self, rank: int, incarnation: int, at: float) -> None:
        self.membership.reaped(rank, incarnation - 1, -9, at)
        self.join(rank, incarnation, at)
        self.feed(EntererGone(rank, incarnation - 1))


def fresh(rank: int, incarnation: int = 0, at: float = 1.0) -> ViewEntered:
    return ViewEntered(rank, incarnation, 0, -1, 0, at)


def left(
    rank: int, view: int, finished: int, *, incarnation: int = 0, call: int = 1, at: float = 2.0
) -> ViewEntered:
    return ViewEntered(rank, incarnation, view, finished, call, at)


@pytest.fixture
def rig() -> Rig:
    """Three ranks in view 1."""
    rig = Rig()
    rig.feed(*(fresh(rank) for rank in range(3)))
    return rig


def test_the_first_view_is_formed_when_all_ranks_have_come() -> None:
    rig = Rig()
    assert rig.feed(fresh(2), fresh(0)) == []
    assert rig.feed(fresh(1)) == [FormView(1, -1, -1, 0, (0, 0, 0), (0, 1, 2))]


def test_one_worker_is_a_view_at_once() -> None:
    assert Rig(1).feed(fresh(0)) == [FormView(1, -1, -1, 0, (0,), (0,))]


def test_the_donor_is_the_lowest_rank_among_those_that_finished_most(rig: Rig) -> None:
    rig.replace(0, 1, at=1.5)
    assert rig.feed(left(2, 1, 8, call=4), left(1, 1, 8, call=3), fresh(0, 1)) == [
        FormView(2, 1, 8, 3, (1, 0, 0), (0, 1, 2))
    ]


def test_a_view_without_a_death_keeps_everybody(rig: Rig) -> None:
    [formed] = rig.feed(left(0, 1, 4), left(1, 1, 5), left(2, 1, 4))
    assert formed == FormView(2, 1, 5, 1, (0, 0, 0), (0, 1, 2))


def test_where_nobody_survived_there_is_no_donor(rig: Rig) -> None:
    for rank in range(3):
        rig.replace(rank, 1, at=1.5)
    assert rig.feed(*(fresh(rank, 1) for rank in range(3))) == [FormView(2, -1, -1, 0, (1, 1, 1), (0, 1, 2))]


def test_a_replacement_that_was_given_nothing_is_no_donor(rig: Rig) -> None:
    rig.replace(0, 1, at=1.5)
    rig.feed(fresh(0, 1), left(1, 1, 8), left(2, 1, 8))
    rig.replace(1, 1, at=3.0)
    [formed] = rig.feed(left(0, 2, -1, incarnation=1), fresh(1, 1), left(2, 2, 8))
    assert isinstance(formed, FormView)
    assert (formed.donor, formed.finished) == (2, 8)


def test_whoever_lost_the_news_of_a_view_is_told_again_and_alone(rig: Rig) -> None:
    rig.replace(0, 1, at=1.5)
    rig.feed(fresh(0, 1), left(1, 1, 8), left(2, 1, 8))
    for again in (fresh(0, 1, at=9.0), left(1, 1, 8, at=9.0)):
        assert rig.feed(again) == [FormView(2, 1, 8, 1, (1, 0, 0), (again.rank,))]
    assert rig.views.phase is ViewPhase.FORMED


def test_an_outdated_incarnation_is_refused(rig: Rig) -> None:
    rig.replace(1, 1, at=1.5)
    [refused] = rig.feed(left(1, 1, 8))
    assert isinstance(refused, RefuseEntry)
    assert "was replaced: incarnation 1 is in, this is 0" in refused.reason


@pytest.mark.parametrize("view", [1, 4])
def test_whoever_left_an_older_view_or_one_there_never_was_is_refused(rig: Rig, view: int) -> None:
    for number in (1, 2):
        rig.feed(*(left(rank, number, 8) for rank in range(3)))
    [refused] = rig.feed(left(1, view, 8))
    assert isinstance(refused, RefuseEntry)
    assert rig.views.phase is ViewPhase.FORMED


def test_a_newcomer_that_claims_to_have_left_a_view_is_refused(rig: Rig) -> None:
    rig.replace(1, 1, at=1.5)
    [refused] = rig.feed(left(1, 1, 8, incarnation=1))
    assert isinstance(refused, RefuseEntry)


def test_survivors_too_far_apart_are_all_refused_and_so_is_who_comes_later(rig: Rig) -> None:
    told = rig.feed(left(0, 1, 4), left(1, 1, 6), left(2, 1, 6))
    assert [type(action) for action in told] == [RefuseEntry] * 3
    assert "rank 0 4, rank 1 6, rank 2 6 finished" in told[0].reason  # type: ignore[union-attr]
    assert isinstance(rig.feed(left(0, 1, 4))[0], RefuseEntry)
    assert rig.views.phase is ViewPhase.REFUSED


def test_a_rank_that_waits_and_is_replaced_is_waited_for_again(rig: Rig) -> None:
    rig.feed(left(0, 1, 8), left(1, 1, 8))
    rig.replace(1, 1, at=3.0)
    assert rig.feed(left(2, 1, 8)) == []
    assert len(rig.feed(fresh(1, 1))) == 1


def test_a_waiter_that_vanishes_alone_leaves_the_view_as_it_was(rig: Rig) -> None:
    rig.feed(left(0, 1, 8), EntererGone(0, 0))
    assert (rig.views.phase, rig.views.deadline) == (ViewPhase.FORMED, None)


def test_the_news_that_an_older_incarnation_is_gone_does_not_touch_the_newer(rig: Rig) -> None:
    rig.replace(0, 1, at=1.5)
    rig.feed(fresh(0, 1), EntererGone(0, 0))
    assert rig.views.is_gathering


# ---- patience -------------------------------------------------------------------------------------


def test_whoever_keeps_survivors_waiting_is_suspected_by_name(rig: Rig) -> None:
    rig.feed(left(0, 1, 8, at=5.0), left(2, 1, 8, at=6.0))
    assert rig.views.deadline == 15.0
    assert rig.feed(Tick(14.9)) == []
    assert rig.feed(Tick(15.0)) == [
        ReportSuspect(
            LateRank(1, 0, lenient=False), "ranks 0, 2 waited 10.0 s for rank 1 to enter view 2", 10.0
        )
    ]
    assert rig.feed(Tick(20.0)) == []
    assert len(rig.feed(Tick(25.0))) == 1  # they still wait: said again


def test_where_an_exchange_was_given_up_it_is_named(rig: Rig) -> None:
    rig.feed(ViewEntered(0, 0, 1, 8, 1, at=5.0, waited_in="a sum of step 9"), left(2, 1, 8, at=6.0))
    [suspect] = rig.feed(Tick(15.0))
    assert isinstance(suspect, ReportSuspect)
    assert suspect.why == "ranks 0, 2 waited 10.0 s for rank 1 in a sum of step 9"


def test_time_spent_in_the_broken_exchange_counts_but_leaves_a_moment_to_come(rig: Rig) -> None:
    rig.feed(ViewEntered(0, 0, 1, 8, 1, at=50.0, waited_s=10.0))
    assert rig.views.deadline == 52.0


def test_a_replacement_has_as_long_as_any_rank_was_ever_silent(rig: Rig) -> None:
    rig.membership.spoke(2, 31.0)  # it said nothing for 31 s
    rig.feed(left(0, 1, 8, at=40.0), left(2, 1, 8, at=40.0))
    rig.replace(1, 1, at=45.0)
    [suspect] = rig.feed(Tick(60.0))
    assert isinstance(suspect, ReportSuspect)
    assert suspect.late == LateRank(1, 1, lenient=True)
    [suspect] = rig.feed(Tick(90.0))
    assert isinstance(suspect, ReportSuspect)
    assert suspect.late == LateRank(1, 1, lenient=False)


def test_survivors_at_work_are_suspected_with_leniency_when_only_a_replacement_waits(rig: Rig) -> None:
    rig.replace(0, 1, at=1.5)
    rig.feed(fresh(0, 1, at=2.0))
    suspects = rig.feed(Tick(500.0))
    assert [action.late for action in suspects if isinstance(action, ReportSuspect)] == [
        LateRank(1, 0, lenient=True),
        LateRank(2, 0, lenient=True),
    ]


def test_the_dead_whose_replacement_has_not_joined_is_described_so(rig: Rig) -> None:
    rig.feed(left(0, 1, 8), left(2, 1, 8))
    rig.membership.reaped(1, 0, -9, 3.0)
    [suspect] = rig.feed(Tick(100.0))
    assert isinstance(suspect, ReportSuspect)
    assert suspect.late.incarnation == 1
    assert "rank 1 (was killed by SIGKILL, its replacement has not joined)" in suspect.why


def test_without_recovery_the_wait_ends_and_names_the_missing() -> None:
    rig = Rig(can_recover=False)
    rig.feed(fresh(0, at=1.0), fresh(2, at=3.0))
    assert rig.feed(Tick(11.0)) == [
        ExpireWait(0, "view 1", 10.0, ("rank 1",)),
        ExpireWait(2, "view 1", 8.0, ("rank 1",)),
    ]
    gave_up = ("rank 0 (gave up after 10.0 s)", "rank 2 (gave up after 8.0 s)")
    assert rig.feed(fresh(1, at=12.0)) == [ExpireWait(1, "view 1", 0.0, gave_up)]


def test_after_its_own_restart_nobody_is_suspected_too_soon() -> None:
    formed = FormView(3, -1, -1, 0, (0, 0, 0), ())
    rig = Rig(formed=formed)
    rig.membership.not_before = 100.0
    rig.feed(left(0, 3, 8, at=60.0), left(1, 3, 8, at=60.0))
    assert rig.views.deadline == 110.0
    assert len(rig.feed(left(2, 3, 9, at=80.0))) == 1


def test_every_phase_has_its_edges_and_final_ones_have_none() -> None:
    assert set(EDGES) == set(ViewPhase)
    assert [phase for phase in ViewPhase if not EDGES[phase]] == [ViewPhase.REFUSED, ViewPhase.EXPIRED]


# ---- random interleavings -------------------------------------------------------------------------


class Job:
    """Ranks that run exchanges, break, die, are replaced, ask twice, and lose their answers."""

    def __init__(self, num_workers: int) -> None:
        self.rig, self.now = Rig(num_workers), 0.0
        self.incarnation = dict.fromkeys(range(num_workers), 0)
        self.view = dict.fromkeys(range(num_workers), 0)
        self.finished = dict.fromkeys(range(num_workers), -1)
        self.waiting: set[int] = set()
        self.formed: dict[int, FormView] = {}

    def entering(self, rank: int) -> ViewEntered:
        view, finished = self.view[rank], self.finished[rank]
        return ViewEntered(rank, self.incarnation[rank], view, finished, 0, self.now)

    def feed(self, event: Event) -> list[Action]:
        before = self.rig.views.phase
        actions = self.rig.feed(event)
        assert self.rig.views.phase in {before, *EDGES[before]} | {
            last for mid in EDGES[before] for last in EDGES[mid]
        }
        for action in actions:
            if isinstance(action, FormView):
                self.check(action)
        return actions

    def check(self, formed: FormView) -> None:
        known = self.formed.setdefault(formed.view, formed)
        assert (known.donor, known.finished, known.incarnations) == (
            formed.donor,
            formed.finished,
            formed.incarnations,
        ), "a view was formed twice"
        if known is formed:
            assert formed.view == len(self.formed)
            assert list(formed.incarnations) == list(self.incarnation.values())
            assert set(formed.ranks) == set(self.incarnation)
            able = [rank for rank in formed.ranks if self.view[rank] and self.finished[rank] >= 0]
            most = max((self.finished[rank] for rank in able), default=-1)
            expected = next((rank for rank in able if self.finished[rank] == most), -1)
            assert (formed.donor, formed.finished) == (expected, most)
        for rank in formed.ranks:
            assert rank in self.waiting
            self.waiting.discard(rank)
            self.view[rank], self.finished[rank] = formed.view, max(0, formed.finished)

    def stands_together(self) -> bool:
        return len(set(self.view.values())) == len(set(self.finished.values())) == 1 and self.view[0] > 0

    def die(self, rank: int) -> None:
        self.rig.replace(rank, self.incarnation[rank] + 1, self.now)
        self.incarnation[rank] += 1
        self.view[rank], self.finished[rank] = 0, -1
        self.waiting.discard(rank)


@calm
@given(st.integers(1, 4), st.data())
def test_in_any_order_one_view_follows_the_other_with_the_newest_of_each_rank_and_nobody_waits_for_ever(
    num_workers: int, data: st.DataObject
) -> None:
    job = Job(num_workers)
    ranks = st.integers(0, num_workers - 1)
    for _ in range(data.draw(st.integers(0, 40))):
        job.now += data.draw(st.floats(0.0, 4.0))
        match data.draw(
            st.sampled_from(["enter", "enter", "enter", "again", "finish", "die", "late", "tick"])
        ):
            case "enter":
                rank = data.draw(ranks)
                job.waiting.add(rank)
                job.feed(job.entering(rank))
            case "again" if job.waiting:
                job.feed(job.entering(data.draw(st.sampled_from(sorted(job.waiting)))))
            case "finish" if not job.waiting and job.stands_together():
                for rank in data.draw(st.sets(ranks)):
                    job.finished[rank] += 1
            case "die":
                job.die(data.draw(ranks))
            case "late" if job.incarnation[rank := data.draw(ranks)]:
                stale = ViewEntered(rank, job.incarnation[rank] - 1, 0, -1, 0, job.now)
                [refused] = job.feed(stale)
                assert isinstance(refused, RefuseEntry)
            case "tick":
                job.feed(Tick(job.now))
    # Time alone brings whoever does not come to the attention of those who can kill it.
    missing = set(job.incarnation) - job.waiting
    if job.rig.views.is_gathering:
        deadline = job.rig.views.deadline
        assert deadline is not None
        suspects = job.feed(Tick(max(deadline, job.now) + 1000.0))
        assert {action.late.rank for action in suspects if isinstance(action, ReportSuspect)} == missing
        for rank in sorted(missing):
            job.die(rank)
            job.waiting.add(rank)
            job.feed(job.entering(rank))
    assert not job.waiting
    assert job.rig.views.phase is ViewPhase.FORMED
