"""Rules of the takeover: who may be head, and until when."""

from __future__ import annotations

import pytest

from shoal.cluster.hosts.takeover import (
    Campaign,
    ClaimHead,
    GiveUp,
    Head,
    HeadLease,
    JobRecord,
    JoinHead,
    LookAgain,
    Seen,
)

RECORD = JobRecord(generation=1, launches=[10.0, 20.0], step=40)
HEAD = Head("job", "node1", "shoal://10.0.0.1:7070", 1)


def campaign(launches: list[float] = [10.0, 20.0], step: int = 40) -> Campaign:  # noqa: B006
    return Campaign(launches=launches, step=step, began_at=100.0, yield_s=3.0, timeout_s=60.0)


def test_a_lease_is_counted_from_when_its_renewal_was_sent() -> None:
    lease = HeadLease(8.0, sent_at=100.0)
    lease.renewed(sent_at=102.0)
    lease.renewed(sent_at=101.0)  # an answer that was overtaken
    assert lease.fenced(107.9) == ""
    assert lease.fenced(108.1) == "its lease was not renewed for 6.1 s"


def test_a_refused_write_fences_at_once_and_for_good() -> None:
    lease = HeadLease(8.0, sent_at=100.0)
    lease.refused("etcd has another head")
    lease.renewed(sent_at=101.0)
    assert lease.fenced(101.0) == "etcd has another head"


def test_a_host_with_the_whole_run_claims_a_job_without_head() -> None:
    assert campaign().decide(Seen(None, RECORD, 7), 100.0) == ClaimHead(7, RECORD)


def test_a_head_is_joined_as_soon_as_it_listens() -> None:
    coming = Head("job", "node2", "", 2)
    assert isinstance(campaign().decide(Seen(coming, RECORD, 7), 100.0), LookAgain)
    assert campaign().decide(Seen(HEAD, RECORD, 7), 100.0) == JoinHead(HEAD)


@pytest.mark.parametrize("launches", [[], [10.0], [10.0, 21.0]])
def test_a_copy_without_the_newest_launch_never_takes_over(launches: list[float]) -> None:
    run = campaign(launches)
    assert isinstance(run.decide(Seen(None, RECORD, 7), 159.0), LookAgain)
    given_up = run.decide(Seen(None, RECORD, 7), 160.0)
    assert isinstance(given_up, GiveUp)
    assert given_up.why.startswith("for 60 s launch 2 of the run is not in the copy here")


def test_a_host_without_the_newest_checkpoint_lets_others_go_first_and_then_takes_over() -> None:
    run, free = campaign(step=20), Seen(None, RECORD, 7)
    assert isinstance(run.decide(Seen(HEAD, RECORD, 7), 100.0), JoinHead)
    assert isinstance(run.decide(free, 104.0), LookAgain)
    assert isinstance(run.decide(free, 106.9), LookAgain)
    assert run.decide(free, 107.0) == ClaimHead(7, RECORD)


@pytest.mark.parametrize("record", [None, JobRecord(1, [10.0, 20.0], 40, is_ended=True)])
def test_a_job_that_has_ended_is_not_taken_over(record: JobRecord | None) -> None:
    assert campaign().decide(Seen(None, record, 7), 100.0) == GiveUp("the job has ended")


def test_a_silent_etcd_and_a_head_that_cannot_be_joined_are_given_up_in_time() -> None:
    assert isinstance(campaign().decide(None, 159.0), LookAgain)
    assert campaign().decide(None, 160.0) == GiveUp("for 60 s etcd does not answer")
    given_up = campaign().decide(Seen(HEAD, RECORD, 7), 160.0)
    assert given_up == GiveUp("the head on node1 (shoal://10.0.0.1:7070) could not be joined for 60 s")
