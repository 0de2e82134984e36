from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster.coordinator.actions import Tick
from shoal.cluster.coordinator.calls import (
    EDGES,
    Action,
    CallBegan,
    CallerGone,
    CallPhase,
    Calls,
    Event,
    GrantCall,
    RankConnected,
    RefuseCall,
    ReleaseRank,
    ScriptEndReached,
)
from shoal.cluster.coordinator.membership import ExpireWait

calm = settings(deadline=None)


@pytest.fixture
def calls() -> Calls:
    return Calls(num_workers=3, timeout_s=10.0)


def fit(rank: int, number: int = 1, at: float = 0.0) -> CallBegan:
    return CallBegan(rank, number, "fit", "epochs=2", at)


def feed(calls: Calls, *events: Event) -> list[Action]:
    return [action for event in events for action in calls.handle(event)]


def test_a_call_is_granted_to_all_when_the_last_rank_begins_it(calls: Calls) -> None:
    assert feed(calls, fit(2), fit(0)) == []
    assert calls.handle(fit(1)) == [GrantCall(0, 1), GrantCall(1, 1), GrantCall(2, 1)]


def test_one_worker_never_waits() -> None:
    calls = Calls(num_workers=1, timeout_s=10.0)
    assert feed(calls, fit(0), fit(0, 2)) == [GrantCall(0, 1), GrantCall(0, 2)]
    assert calls.handle(ScriptEndReached(0, 2, 0.0)) == [ReleaseRank(0)]


def test_ranks_that_call_different_things_are_all_refused(calls: Calls) -> None:
    calls.handle(fit(0))
    told = {0: "called fit(epochs=2)", 2: "called evaluate(test)"}
    assert calls.handle(CallBegan(2, 1, "evaluate", "test", 1.0)) == [
        RefuseCall(0, 1, told),
        RefuseCall(2, 1, told),
    ]


def test_ranks_that_differ_in_detail_are_refused(calls: Calls) -> None:
    calls.handle(fit(0))
    told = {0: "called fit(epochs=2)", 1: "called fit(epochs=3)"}
    assert calls.handle(CallBegan(1, 1, "fit", "epochs=3", 1.0)) == [
        RefuseCall(0, 1, told),
        RefuseCall(1, 1, told),
    ]


def test_a_rank_that_ended_its_script_is_told_that_another_calls_on(calls: Calls) -> None:
    feed(calls, fit(0), fit(1), fit(2))
    calls.handle(ScriptEndReached(1, 1, 1.0))
    told = {0: "called fit(epochs=2)", 1: "ended its script after 1 call"}
    assert calls.handle(fit(0, 2)) == [RefuseCall(0, 2, told), RefuseCall(1, 2, told)]


def test_a_rank_that_comes_after_the_refusal_is_refused_too(calls: Calls) -> None:
    feed(calls, fit(0), ScriptEndReached(1, 0, 0.0))
    told = {
        0: "called fit(epochs=2)",
        1: "ended its script after 0 calls",
        2: "called fit(epochs=2)",
    }
    assert calls.handle(fit(2)) == [RefuseCall(2, 1, told)]


def test_a_call_out_of_turn_is_refused(calls: Calls) -> None:
    assert calls.handle(fit(0, 3)) == [RefuseCall(0, 1, {0: "called fit(epochs=2)"})]
    assert Calls(num_workers=1, timeout_s=1.0).handle(fit(0, 0)) == [
        RefuseCall(0, 1, {0: "called fit(epochs=2)"})
    ]


def test_nobody_leaves_before_all_reach_the_end_of_the_script(calls: Calls) -> None:
    assert feed(calls, ScriptEndReached(0, 0, 0.0), ScriptEndReached(2, 0, 0.0)) == []
    assert calls.handle(ScriptEndReached(1, 0, 0.0)) == [ReleaseRank(0), ReleaseRank(1), ReleaseRank(2)]
    assert calls.phase is CallPhase.ENDED


def test_a_call_already_granted_is_granted_again_to_whoever_asks_again(calls: Calls) -> None:
    feed(calls, fit(0), fit(1), fit(2), CallerGone(1))
    assert calls.handle(fit(1)) == [GrantCall(1, 1)]


def test_the_end_is_granted_again_and_nothing_comes_after_it(calls: Calls) -> None:
    feed(calls, ScriptEndReached(0, 0, 0.0), ScriptEndReached(1, 0, 0.0), ScriptEndReached(2, 0, 0.0))
    assert calls.handle(ScriptEndReached(1, 0, 0.0)) == [ReleaseRank(1)]
    [refusal] = calls.handle(fit(1))
    assert isinstance(refusal, RefuseCall)
    assert refusal.calls[0] == "ended its script after 0 calls"
    [refusal] = calls.handle(fit(1, 2))
    assert isinstance(refusal, RefuseCall)


def test_a_replacement_that_strays_from_the_record_is_refused_alone(calls: Calls) -> None:
    feed(calls, fit(0), fit(1), fit(2), fit(0, 2))
    told = {0: "called fit(epochs=2)", 1: "called predict()", 2: "called fit(epochs=2)"}
    assert calls.handle(CallBegan(1, 1, "predict", "", 1.0)) == [RefuseCall(1, 1, told)]
    assert feed(calls, fit(1, 2), fit(2, 2)) == [GrantCall(0, 2), GrantCall(1, 2), GrantCall(2, 2)]


def test_asking_again_while_waiting_changes_nothing_and_keeps_the_deadline(calls: Calls) -> None:
    assert feed(calls, fit(0, at=1.0), fit(0, at=5.0)) == []
    assert calls.deadline == 11.0


def test_a_rank_whose_connection_closed_is_waited_for_again(calls: Calls) -> None:
    assert feed(calls, fit(0), fit(1), CallerGone(1), fit(2)) == []
    assert len(calls.handle(fit(1))) == 3


def test_a_wait_that_everybody_left_has_no_deadline(calls: Calls) -> None:
    feed(calls, fit(0), CallerGone(0))
    assert calls.deadline is None
    assert calls.phase is CallPhase.RUNNING


def test_the_deadline_names_who_is_missing_and_what_is_known_of_them() -> None:
    calls = Calls(num_workers=4, timeout_s=10.0)
    feed(
        calls,
        RankConnected(0),
        RankConnected(1),
        RankConnected(2),
        fit(0, at=1.0),
        fit(2, at=3.0),
        CallerGone(2),
    )
    assert calls.handle(Tick(10.9)) == []
    assert calls.handle(Tick(11.5)) == [
        ExpireWait(
            0,
            "call 1 (fit)",
            10.5,
            ("rank 1 (joined)", "rank 2 (its connection closed)", "rank 3 (never joined)"),
        )
    ]


def test_the_deadline_says_where_the_missing_were_last_seen(calls: Calls) -> None:
    feed(calls, fit(0), fit(1), fit(2), ScriptEndReached(0, 1, 5.0), ScriptEndReached(2, 1, 6.0))
    missing = ("rank 1 (last in call 1 (fit))",)
    assert calls.handle(Tick(15.0)) == [
        ExpireWait(0, "the end of the script", 10.0, missing),
        ExpireWait(2, "the end of the script", 9.0, missing),
    ]


def test_a_latecomer_is_told_at_once_that_the_others_gave_up(calls: Calls) -> None:
    feed(calls, fit(0), fit(1), Tick(10.0))
    gave_up = ("rank 0 (gave up after 10.0 s)", "rank 1 (gave up after 10.0 s)")
    assert calls.handle(fit(2, at=11.0)) == [ExpireWait(2, "call 1 (fit)", 0.0, gave_up)]


# ---- random interleavings -------------------------------------------------------------------------

scripts = st.lists(st.sampled_from(["fit", "evaluate", "predict"]), max_size=4)


class Ranks:
    """Ranks that run their scripts: each asks, waits for its answer, and asks the next."""

    def __init__(self, scripts: list[list[str]]) -> None:
        self.scripts = scripts
        self.calls = Calls(num_workers=len(scripts), timeout_s=10.0)
        self.now = 0.0
        self.asked = dict.fromkeys(range(len(scripts)), 0)  # how many questions each has had answered well
        self.waiting: set[int] = set()
        self.told: dict[int, Action] = {}  # the answer after which a rank says no more
        self.granted: dict[int, list[str]] = {rank: [] for rank in range(len(scripts))}

    def question(self, rank: int) -> Event:
        number, script = self.asked[rank], self.scripts[rank]
        if number < len(script):
            return CallBegan(rank, number + 1, script[number], "", self.now)
        return ScriptEndReached(rank, len(script), self.now)

    def can_ask(self, rank: int) -> bool:
        return rank not in self.waiting and rank not in self.told

    def ask(self, rank: int) -> None:
        self.waiting.add(rank)
        self.feed(self.question(rank))

    def feed(self, event: Event) -> None:
        before = self.calls.phase
        actions = self.calls.handle(event)
        # Within one event a barrier may gather and let go: two edges at most.
        assert self.calls.phase in {before, *EDGES[before]} | {
            last for mid in EDGES[before] for last in EDGES[mid]
        }
        if any(isinstance(action, (GrantCall, ReleaseRank)) for action in actions):
            assert self.waiting == set(range(len(self.scripts))), "granted although somebody had not come"
            assert len({str(self.question(rank)).split("rank=")[1][3:] for rank in self.waiting}) == 1
        for action in actions:
            self.waiting.remove(action.rank)  # nobody is answered who did not ask
            if isinstance(action, GrantCall):
                self.granted[action.rank].append(self.scripts[action.rank][self.asked[action.rank]])
                self.asked[action.rank] += 1
            else:
                self.told[action.rank] = action


@calm
@given(st.lists(scripts, min_size=1, max_size=4), st.booleans(), st.data())
def test_in_any_order_only_what_all_agree_on_is_granted_and_nobody_waits_for_ever(
    scripts: list[list[str]], alike: bool, data: st.DataObject
) -> None:
    if alike:
        scripts = [scripts[0]] * len(scripts)
    ranks = Ranks(scripts)
    while free := [rank for rank in range(len(scripts)) if ranks.can_ask(rank)]:
        ranks.now += data.draw(st.floats(0.0, 3.0))
        ranks.ask(data.draw(st.sampled_from(free)))
        assert len({tuple(made) for made in ranks.granted.values()}) == 1
    if all(script == scripts[0] for script in scripts):
        assert all(isinstance(answer, ReleaseRank) for answer in ranks.told.values())
        assert all(made == scripts[0] for made in ranks.granted.values())
    else:
        assert not any(isinstance(answer, ReleaseRank) for answer in ranks.told.values())
        assert any(isinstance(answer, RefuseCall) for answer in ranks.told.values())
    assert not ranks.waiting


@calm
@given(st.lists(scripts, min_size=2, max_size=4), st.integers(0, 30), st.data())
def test_at_the_deadline_everyone_who_waits_is_answered_whoever_vanished_before(
    scripts: list[list[str]], num_events: int, data: st.DataObject
) -> None:
    ranks = Ranks(scripts)
    for _ in range(num_events):
        free = [rank for rank in range(len(scripts)) if ranks.can_ask(rank)]
        if free and data.draw(st.booleans()):
            ranks.ask(data.draw(st.sampled_from(free)))
        elif ranks.waiting:
            vanished = data.draw(st.sampled_from(sorted(ranks.waiting)))
            ranks.feed(CallerGone(vanished))
            ranks.waiting.remove(vanished)
    assert (ranks.calls.deadline is None) == (not ranks.waiting)
    ranks.feed(Tick(ranks.now + 10.0))
    assert not ranks.waiting
    assert ranks.calls.deadline is None


def test_every_phase_has_its_edges_and_final_ones_have_none() -> None:
    assert set(EDGES) == set(CallPhase)
    assert [phase for phase in CallPhase if not EDGES[phase]] == [
        CallPhase.REFUSED,
        CallPhase.EXPIRED,
        CallPhase.ENDED,
    ]
