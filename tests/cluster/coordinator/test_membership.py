from __future__ import annotations

import pytest

from shoal.cluster.coordinator.membership import LateRank, Member, Membership
from shoal.runtime.transport.messages.worker_coordinator import Join


def join(rank: int, incarnation: int = 0, pid: int = 7, num_workers: int = 2) -> Join:
    return Join(rank, incarnation, pid, num_workers)


@pytest.fixture
def members() -> Membership:
    members = Membership(num_workers=2)
    for rank in range(2):
        assert members.admit(join(rank), 0.0) is None
    return members


def test_a_newer_incarnation_takes_the_place_of_the_older_for_good(members: Membership) -> None:
    assert members.admit(join(1, 2, pid=8), 1.0) is None
    assert members.members[1] == Member(2, 8)
    assert "incarnation 2 is in, this is 1" in str(members.admit(join(1, 1), 2.0))


def test_a_process_may_join_again_and_another_one_under_its_name_may_not(members: Membership) -> None:
    assert members.admit(join(1), 1.0) is None
    assert "already here as process 7, this is process 8" in str(members.admit(join(1, pid=8), 1.0))


@pytest.mark.parametrize("stranger", [join(2), join(0, num_workers=3)])
def test_who_does_not_belong_is_not_admitted(members: Membership, stranger: Join) -> None:
    assert members.admit(stranger, 1.0) is not None


def test_the_dead_are_fenced_before_their_successor_has_joined(members: Membership) -> None:
    assert members.reaped(1, 0, -9, 1.0)
    assert members.is_fenced(1, 0)
    assert members.newest(1) == 1
    assert members.whereabouts(1) == "was killed by SIGKILL, its replacement has not joined"
    assert "was replaced" in str(members.admit(join(1), 1.1))
    assert members.admit(join(1, 1, pid=8), 1.2) is None
    assert members.whereabouts(1) is None


def test_news_of_a_death_that_is_known_changes_nothing(members: Membership) -> None:
    members.admit(join(1, 3), 1.0)
    assert not members.reaped(1, 0, -9, 2.0)
    assert not members.reaped(9, 0, -9, 2.0)
    assert members.newest(1) == 3


def test_whoever_never_joined_is_said_so() -> None:
    assert Membership(num_workers=1).whereabouts(0) == "never joined"


def test_a_rank_is_late_when_patience_is_over_and_again_after_as_long(members: Membership) -> None:
    ask = {"since": 5.0, "timeout_s": 10.0}
    assert members.due(1, **ask) == 15.0
    assert members.late(1, **ask, now=14.9) is None
    assert members.late(1, **ask, now=15.0) == LateRank(1, 0, lenient=False)
    assert members.due(1, **ask) == 25.0


def test_nobody_is_late_before_a_coordinator_has_been_up_for_long_enough() -> None:
    members = Membership(num_workers=2, not_before=100.0)
    assert members.due(1, since=1.0, timeout_s=10.0) == 110.0


def test_a_replacement_is_excused_for_as_long_as_anybody_was_ever_silent(members: Membership) -> None:
    members.spoke(0, 60.0)
    members.spoke(0, 70.0)
    assert members.stretch_s == 60.0
    members.reaped(1, 0, -9, 80.0)
    members.admit(join(1, 1, pid=8), 80.0)
    assert members.late(1, since=80.0, timeout_s=10.0, now=90.0) == LateRank(1, 1, lenient=True)
    assert members.late(1, since=80.0, timeout_s=10.0, now=150.0) == LateRank(1, 1, lenient=False)


def test_a_replacement_that_is_seated_has_no_excuse_any_more(members: Membership) -> None:
    members.spoke(0, 60.0)
    members.admit(join(1, 1, pid=8), 80.0)
    members.form(2, [0, 1])
    assert members.late(1, since=80.0, timeout_s=10.0, now=90.0) == LateRank(1, 1, lenient=False)
