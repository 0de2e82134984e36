from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster.coordinator.actions import Tick
from shoal.cluster.coordinator.leases import (
    Action,
    EndEpoch,
    EndLeases,
    Event,
    FinishLeases,
    HandLeases,
    Lease,
    LeaseConfig,
    LeaseHolder,
    LeaseSnapshot,
    LeaseState,
    LeaseTable,
    RefuseLease,
    WorkerAsked,
    WorkerGaveUp,
    WorkerReplaced,
)
from shoal.cluster.coordinator.stragglers import Drained, Readmitted
from shoal.errors import ConfigError

calm = settings(deadline=None)
A, B, C = LeaseHolder(0, 0), LeaseHolder(1, 0), LeaseHolder(2, 0)


def leases_of(
    num_samples: int = 40, *, num_epochs: int = 1, num_ahead: int = 2, **options: Any
) -> LeaseTable:
    return LeaseTable(
        LeaseConfig(
            num_samples=num_samples,
            samples_per_lease=10,
            num_epochs=num_epochs,
            num_ahead=num_ahead,
            **options,
        )
    )


def ask(by: LeaseHolder, *finished: int, at: float = 0.0, busy_s: float | None = None) -> WorkerAsked:
    return WorkerAsked(by, finished, at, () if busy_s is None else (busy_s,) * len(finished))


def finish(by: LeaseHolder, *leases: int) -> FinishLeases:
    """Of leases of ten samples, in the first epoch."""
    return FinishLeases(by, tuple(Lease(number, 0, 10 * number, 10 * number + 10) for number in leases))


def numbers(actions: list[Action]) -> list[int]:
    (hand,) = [each for each in actions if not isinstance(each, FinishLeases)]
    assert isinstance(hand, HandLeases)
    return [lease.number for lease in hand.leases]


def test_a_worker_gets_leases_ahead_and_more_for_each_it_finishes() -> None:
    leases = leases_of()
    assert numbers(leases.handle(ask(A))) == [0, 1]
    assert numbers(leases.handle(ask(B))) == [2, 3]
    assert numbers(leases.handle(ask(A, 0))) == [1]


def test_asking_again_gives_the_same_leases() -> None:
    leases = leases_of()
    assert leases.handle(ask(A)) == leases.handle(ask(A))
    leases.handle(ask(A, 0))
    assert numbers(leases.handle(ask(A, 0))) == [1, 2]


def test_the_last_lease_of_an_epoch_may_be_short() -> None:
    config = LeaseConfig(num_samples=25, samples_per_lease=10, num_epochs=2)
    assert [config.lease(number) for number in (0, 2, 3)] == [
        Lease(0, 0, 0, 10),
        Lease(2, 0, 20, 25),
        Lease(3, 1, 0, 10),
    ]


def test_a_replaced_workers_leases_go_back_and_are_handed_out_first() -> None:
    leases = leases_of(60)
    leases.handle(ask(A))
    leases.handle(ask(B))
    assert leases.handle(WorkerReplaced(0, 1, 1.0)) == []
    assert leases.state(0) is LeaseState.TODO
    assert numbers(leases.handle(ask(B, 2))) == [0, 3]


def test_a_newer_incarnation_takes_nothing_over_silently() -> None:
    leases = leases_of()
    leases.handle(ask(A, at=0.0))
    assert numbers(leases.handle(ask(LeaseHolder(0, 1)))) == [0, 1]
    assert leases.holders(0) == (LeaseHolder(0, 1),)


def test_a_replaced_incarnation_is_refused_and_changes_nothing() -> None:
    leases = leases_of()
    leases.handle(ask(A))
    leases.handle(WorkerReplaced(0, 1, 1.0))
    (answer,) = leases.handle(ask(A, 0, 1))
    assert isinstance(answer, RefuseLease)
    assert "incarnation 1 is in, this is 0" in answer.reason
    assert leases.state(0) is LeaseState.TODO


def test_nobody_finishes_what_another_holds() -> None:
    leases = leases_of()
    leases.handle(ask(A))
    (answer,) = leases.handle(ask(B, 0))
    assert isinstance(answer, RefuseLease)
    assert leases.state(0) is LeaseState.HELD


def test_who_finds_nothing_waits_for_what_comes_back() -> None:
    leases = leases_of(20)
    leases.handle(ask(A))
    assert leases.handle(ask(B)) == []
    assert numbers(leases.handle(WorkerReplaced(0, 1, 5.0))) == [0, 1]


def test_the_next_epoch_begins_when_the_last_lease_is_done() -> None:
    leases = leases_of(20, num_epochs=2)
    leases.handle(ask(A))
    assert leases.handle(ask(B)) == []
    assert numbers(leases.handle(ask(A, 0))) == [1]
    done, ended, handed = leases.handle(ask(A, 1))
    assert done == finish(A, 1)
    assert ended == EndEpoch(0, 0)
    assert isinstance(handed, HandLeases)  # B has waited longer; nothing is left for A
    assert (handed.to, [lease.number for lease in handed.leases]) == (B, [2, 3])


def test_all_are_told_when_there_is_no_more() -> None:
    leases = leases_of(10)
    leases.handle(ask(A))
    assert leases.handle(ask(B)) == []
    assert leases.handle(ask(A, 0)) == [finish(A, 0), EndEpoch(0, 0), EndLeases(B), EndLeases(A)]
    assert leases.handle(ask(B)) == [EndLeases(B)]
    assert leases.handle(ask(LeaseHolder(1, 3))) == [EndLeases(LeaseHolder(1, 3))]


def ending(num_leases: int) -> LeaseTable:
    """Rank 2 has run one lease in a second; A holds the next ones, and nothing is left."""
    config = LeaseConfig(num_samples=10 + 10 * num_leases, samples_per_lease=10, backup=True)
    kept = LeaseSnapshot(
        epoch=0,
        done_below=1,
        done=[],
        held=[(number, *A) for number in range(1, 1 + num_leases)],
        waiting=[],
        incarnations={2: 1},
        counts={},
        began=[(*A, 0.0)],
        paces={2: (10.0, 1.0, 3)},
    )
    return LeaseTable.restore(config, kept)


def test_an_idle_worker_backs_up_one_that_is_overdue_and_it_is_counted() -> None:
    leases = ending(1)
    assert leases.handle(ask(B, at=0.5)) == []
    assert leases.deadline == 2.0  # A should be done after a second, as others are, and B needs one too
    assert leases.handle(Tick(1.9)) == []
    assert numbers(leases.handle(Tick(2.0))) == [1]
    assert leases.holders(1) == (A, B)
    assert leases.handle(ask(C, at=20.0)) == [
        RefuseLease(C, "rank 2 was replaced: incarnation 1 is in, this is 0")
    ]
    assert leases.handle(ask(LeaseHolder(2, 1), at=20.0)) == []  # two are enough
    done = [finish(B, 1), EndEpoch(0, 10), EndLeases(LeaseHolder(2, 1)), EndLeases(B)]
    assert leases.handle(ask(B, 1, at=21.0)) == done
    assert leases.handle(ask(A, 1, at=22.0)) == [EndLeases(A)]
    assert leases.counts == {1: (1, 10)}


def test_of_a_worker_known_to_be_slow_the_last_lease_is_backed_up_at_once() -> None:
    leases = ending(2)
    leases.draining.finished(0, 10, 4.0, 0.0)
    assert numbers(leases.handle(ask(B, at=0.5))) == [2]  # 7.5 s away; and lease 1 is, too
    assert numbers(leases.handle(ask(LeaseHolder(2, 1), at=0.5))) == [1]


def test_nobody_backs_up_one_that_will_be_done_as_soon() -> None:
    leases = ending(1)
    leases.draining.finished(0, 10, 1.2, 0.0)
    assert leases.handle(ask(B, at=0.5)) == []
    assert leases.handle(ask(A, 1, at=1.2))[-2:] == [EndLeases(B), EndLeases(A)]


def test_without_backup_an_idle_worker_waits() -> None:
    leases = leases_of(20)
    leases.handle(ask(A))
    assert leases.handle(ask(B, at=100.0)) == []
    assert leases.deadline is None
    assert leases.handle(Tick(1000.0)) == []


def test_a_backed_up_lease_stays_held_when_one_of_two_is_replaced() -> None:
    leases = ending(1)
    leases.handle(ask(B, at=5.0))
    assert leases.handle(WorkerReplaced(0, 1, 6.0)) == []
    assert leases.holders(1) == (B,)


def test_towards_the_end_nobody_gets_a_lease_ahead() -> None:
    leases = leases_of(50, num_workers=2)
    assert numbers(leases.handle(ask(A))) == [0, 1]
    assert numbers(leases.handle(ask(B))) == [2, 3]
    assert numbers(leases.handle(ask(A, 0))) == [1]  # one is left, for whoever is through first
    assert numbers(leases.handle(ask(A, 1))) == [4]


def test_a_slow_worker_gets_nothing_ahead_that_it_would_begin_when_the_others_are_through() -> None:
    leases = leases_of(200, num_workers=2, backup=True)
    leases.handle(ask(A, at=0.0))
    leases.handle(ask(B, at=0.0))
    for number, at in ((2, 1.0), (3, 2.0), (4, 3.0), (5, 4.0)):
        leases.handle(ask(B, number, at=at, busy_s=1.0))
    assert not leases.may_be_overtaken(B)
    leases.handle(ask(A, 0, at=4.0, busy_s=8.0))  # twelve left: for B they are eleven seconds, for A an epoch
    assert leases.held_by(A) == [1, 8]
    for number in (6, 7, 9, 10, 11):
        leases.handle(ask(B, number, at=5.0, busy_s=1.0))
    leases.handle(ask(A, 1, at=8.0, busy_s=8.0))
    assert leases.held_by(A) == [8]
    assert leases.may_be_overtaken(A)


def test_a_slow_worker_is_drained_probed_and_readmitted() -> None:
    leases = leases_of(400, num_ahead=1, drain_slower_than=3.0, probe_every_s=10.0)
    for holder in (A, B):
        leases.handle(ask(holder, at=0.0))
    for number in (0, 2):
        leases.handle(ask(A, number, at=1.0, busy_s=1.0))
    leases.handle(ask(B, 1, at=5.0, busy_s=5.0))
    (mine,) = leases.held_by(B)
    done, drained = leases.handle(ask(B, mine, at=10.0, busy_s=5.0))
    assert isinstance(done, FinishLeases)
    assert drained == Drained(1, 2.0, 10.0)
    assert leases.deadline == 20.0
    assert leases.handle(Tick(19.0)) == []
    (probe,) = numbers(leases.handle(Tick(20.0)))
    actions = leases.handle(ask(B, probe, at=21.0, busy_s=1.0))
    assert actions[1] == Readmitted(1, 10.0, 10.0)
    assert isinstance(actions[2], HandLeases)


def test_a_replacement_of_a_drained_worker_is_given_leases() -> None:
    leases = leases_of(400, num_ahead=1, drain_slower_than=3.0)
    leases.handle(ask(A, at=0.0))
    leases.handle(ask(B, at=0.0))
    leases.handle(ask(A, 0, at=1.0, busy_s=1.0))
    leases.handle(ask(B, 1, at=5.0, busy_s=5.0))
    (mine,) = leases.held_by(B)
    leases.handle(ask(B, mine, at=10.0, busy_s=5.0))
    assert leases.draining.drained
    assert len(numbers(leases.handle(ask(LeaseHolder(1, 1), at=11.0)))) == 1


def test_where_shares_are_fixed_nobody_takes_anothers() -> None:
    leases = leases_of(40, shares=(0, 1, 4))
    assert numbers(leases.handle(ask(B))) == [1, 2]
    assert numbers(leases.handle(ask(A))) == [0]
    assert leases.handle(ask(A, 0)) == [finish(A, 0)]
    leases.handle(WorkerReplaced(1, 1, 0.0))
    assert leases.handle(ask(C)) == []
    assert numbers(leases.handle(ask(LeaseHolder(1, 1)))) == [1, 2]


@pytest.mark.parametrize("shares", [(0, 3), (1, 4), (0, 3, 2, 4)])
def test_shares_that_are_not_the_epoch_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="ascend from 0 to 4"):
        leases_of(40, shares=shares)


@pytest.mark.parametrize("setting", ["num_samples", "samples_per_lease", "num_epochs", "num_ahead"])
def test_sizes_below_one_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        LeaseConfig(**({"num_samples": 1, "samples_per_lease": 1} | {setting: 0}))


# ---- any schedule --------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(st.sampled_from(["ask", "finish", "repeat", "replace", "zombie", "tick"]), st.integers(0, 3)),
    max_size=60,
)


class Worker:
    """Runs what it was handed; may be replaced at any time."""

    def __init__(self, rank: int) -> None:
        self.rank, self.incarnation = rank, 0
        self.held: list[int] = []

    @property
    def name(self) -> LeaseHolder:
        return LeaseHolder(self.rank, self.incarnation)


@calm
@given(
    steps,
    st.integers(1, 35),
    st.integers(1, 2),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([None, 2.0]),
)
def test_every_sample_is_done_once_whatever_dies_and_a_journal_gives_the_same_state(
    script: list[tuple[str, int]],
    num_samples: int,
    num_epochs: int,
    num_ahead: int,
    backup: bool,
    slower_than: float | None,
) -> None:
    options: dict[str, Any] = {"num_epochs": num_epochs, "num_ahead": num_ahead, "backup": backup}
    options |= {"drain_slower_than": slower_than, "num_workers": 4}
    leases = leases_of(num_samples, **options)
    workers = [Worker(rank) for rank in range(4)]
    journal: list[Event] = []
    done: Counter[tuple[int, int]] = Counter()
    ended: list[int] = []
    now = 0.0

    def feed(event: Event) -> list[Action]:
        before = {number: leases.state(number) for number in range(num_epochs * leases.config.num_leases)}
        actions = leases.handle(event)
        journal.append(event)
        for action in actions:
            match action:
                case HandLeases(to, handed):
                    assert to == workers[to.rank].name
                    assert 0 < len(handed) <= num_ahead
                    workers[to.rank].held = [lease.number for lease in handed]
                case EndEpoch(epoch, num_twice):
                    assert backup or num_twice == 0
                    ended.append(epoch)
                case EndLeases(to):
                    workers[to.rank].held = []
        for number, old in before.items():
            new = leases.state(number)
            assert len(leases.holders(number)) <= (2 if backup else 1)
            if new is LeaseState.DONE is not old:
                lease = leases.config.lease(number)
                done.update((lease.epoch, sample) for sample in range(lease.start, lease.stop))
            assert old is not LeaseState.DONE or new is LeaseState.DONE
        return actions

    for verb, rank in script:
        worker, now = workers[rank], now + 1.0
        match verb:
            case "ask":
                feed(ask(worker.name, at=now))
            case "finish" | "repeat" if worker.held:
                finished, *worker.held = worker.held
                feed(ask(worker.name, finished, at=now))
                if verb == "repeat":
                    feed(ask(worker.name, finished, at=now))
            case "replace":
                worker.incarnation, worker.held = worker.incarnation + 1, []
                feed(WorkerReplaced(rank, worker.incarnation, now))
            case "zombie" if worker.incarnation:
                (answer,) = feed(ask(LeaseHolder(rank, worker.incarnation - 1), 0, at=now))
                assert isinstance(answer, RefuseLease)
            case "tick":
                feed(Tick(now))

    while len(ended) < num_epochs:  # and then everybody works on
        num_before = sum(done.values())
        for worker in workers * 2:  # the first time it may only be handed something
            now += 1.0
            feed(ask(worker.name, *worker.held, at=now))
        feed(Tick(now := now + 10.0))
        assert sum(done.values()) > num_before, "nobody gets on"

    assert ended == list(range(num_epochs))
    assert done == Counter((epoch, sample) for epoch in range(num_epochs) for sample in range(num_samples))
    again = leases_of(num_samples, **options)
    for event in journal:
        again.handle(event)
    assert vars(again) == vars(leases)


@calm
@given(
    st.integers(1, 12),
    st.integers(1, 3),
    st.lists(
        st.tuples(st.sampled_from(["ask", "replace", "give up"]), st.integers(0, 2), st.booleans()),
        max_size=40,
    ),
    st.integers(0, 40),
)
def test_from_a_snapshot_everything_goes_on_alike(
    num_leases: int, num_epochs: int, story: list[tuple[str, int, bool]], cut: int
) -> None:
    leases = leases_of(10 * num_leases, num_epochs=num_epochs)
    again = leases
    incarnations = [0, 0, 0]
    for index, (what, rank, is_done) in enumerate(story):
        if index == cut:
            kept = msgspec.json.decode(msgspec.json.encode(leases.snapshot()), type=LeaseSnapshot)
            again = LeaseTable.restore(leases.config, kept)
        me = LeaseHolder(rank, incarnations[rank])
        held = [number for number, *by in leases.snapshot().held if LeaseHolder(*by) == me]
        if what == "replace":
            incarnations[rank] += 1
            event: Event = WorkerReplaced(rank, incarnations[rank], 0.0)
        elif what == "give up":
            event = WorkerGaveUp(me)
        else:
            event = ask(me, *(held[:1] if is_done else ()))
        if again is leases:
            leases.handle(event)
        else:
            assert leases.handle(event) == again.handle(event)
    assert again.snapshot() == leases.snapshot()


def test_a_checkpoint_begins_in_the_middle_of_an_epoch() -> None:
    leases = LeaseTable(LeaseConfig(num_samples=40, samples_per_lease=10, num_epochs=2), epoch=1, done=[4, 6])
    assert leases.done_below == 5
    assert numbers(leases.handle(ask(A))) == [5, 7]
    assert leases.handle(ask(A, 5, 7))[1:] == [EndEpoch(1, 0), EndLeases(A)]
    assert leases.counts == {0: (2, 20)}


def test_a_checkpoint_of_a_finished_epoch_begins_with_the_next() -> None:
    leases = LeaseTable(LeaseConfig(num_samples=20, samples_per_lease=10, num_epochs=2), epoch=0, done=[0, 1])
    assert numbers(leases.handle(ask(A))) == [2, 3]
    assert leases.done_below == 2


def test_done_below_stops_at_the_first_that_is_not_done() -> None:
    leases = leases_of()
    leases.handle(ask(A))
    leases.handle(ask(B))
    leases.handle(ask(B, 2, 3))
    assert leases.done_below == 0
    leases.handle(ask(A, 0, 1))
    assert leases.done_below == 4


def test_what_lies_at_a_workers_host_is_its_first() -> None:
    leases = LeaseTable(LeaseConfig(num_samples=60, samples_per_lease=10, num_ahead=1))
    first, second, third = LeaseHolder(0, 0), LeaseHolder(1, 0), LeaseHolder(2, 0)
    handed = [
        leases.handle(WorkerAsked(by, (), 0.0, near=near))
        for by, near in ((first, (4, 5)), (second, (0, 1)), (third, ()))
    ]
    assert [each.leases[0].number for [each] in handed] == [4, 0, 2]
    again = LeaseTable.restore(leases.config, leases.snapshot())
    for each in (leases, again):
        [handed_on] = [
            act for act in each.handle(WorkerAsked(first, (4,), 1.0)) if isinstance(act, HandLeases)
        ]
        assert [lease.number for lease in handed_on.leases] == [5]
        [handed_on] = [
            act for act in each.handle(WorkerAsked(first, (5,), 1.0)) if isinstance(act, HandLeases)
        ]
        assert [lease.number for lease in handed_on.leases] == [3]  # nobody's
        [handed_on] = [
            act for act in each.handle(WorkerAsked(first, (3,), 1.0)) if isinstance(act, HandLeases)
        ]
        assert [lease.number for lease in handed_on.leases] == [1]  # another's, rather than none
