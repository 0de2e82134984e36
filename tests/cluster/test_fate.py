from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster import fate
from shoal.cluster.fate import (
    EDGES,
    Asked,
    AskToLeave,
    CoordinatorDied,
    CoordinatorExited,
    Died,
    Exited,
    Fate,
    Kill,
    Left,
    Patience,
    Phase,
    Started,
    Stuck,
    Tick,
)
from shoal.wire.messages import Failed, Finished

PATIENCE = Patience(grace_s=60.0, blame_s=1.0, settle_s=0.5, exit_s=30.0)


def failed(rank: int, kind: str = "script", error: str = "ValueError", exit_code: int = 1) -> Failed:
    return Failed(rank, kind, error, "", "", exit_code)  # type: ignore[arg-type]


def finished(rank: int) -> Finished:
    return Finished(rank, 0, 0.0, 0, {})


def running(num_workers: int) -> Fate:
    job = Fate(num_workers=num_workers, patience=PATIENCE)
    for rank in range(num_workers):
        assert job.handle(Started(rank), 0.0) == []
    return job


def test_a_job_whose_workers_all_finish_and_exit_ends_well() -> None:
    job = running(2)
    for event in (finished(0), finished(1), Exited(1, 0), Exited(0, 0)):
        assert job.handle(event, 1.0) == []
    assert (job.phase, job.cause, job.exit_code) == (Phase.ENDED, None, 0)


def test_a_failure_gives_the_others_a_moment_and_then_kills_them() -> None:
    job = running(3)
    assert job.handle(failed(2), 10.0) == []
    assert job.handle(Exited(2, 1), 10.1) == []
    assert job.deadline == 10.5
    assert job.handle(Tick(), 10.4) == []
    assert job.handle(Tick(), 10.5) == [Kill((0, 1))]
    assert job.handle(Exited(0, -9), 10.6) == job.handle(Exited(1, -9), 10.6) == []
    assert (job.phase, job.cause, job.exit_code) == (Phase.ENDED, failed(2), 1)


def test_a_broken_exchange_waits_for_its_cause() -> None:
    job = running(2)
    job.handle(failed(0, "peer", "PeerLost", 3), 10.0)
    assert job.deadline == 11.0
    job.handle(failed(1), 10.9)
    assert job.cause == failed(1)


def test_a_broken_exchange_waits_for_a_death_too() -> None:
    job = running(2)
    job.handle(failed(0, "peer", "PeerLost", 3), 10.0)
    job.handle(Exited(0, 3), 10.1)
    job.handle(Exited(1, -11), 10.2)
    assert (job.phase, job.cause) == (Phase.ENDED, Died(1, -11))


def test_a_broken_exchange_without_a_cause_is_the_cause() -> None:
    job = running(3)
    job.handle(failed(0, "peer", "PeerLost", 3), 10.0)
    assert job.handle(Tick(), 11.0) == []
    assert (job.cause, job.deadline) == (failed(0, "peer", "PeerLost", 3), 11.5)
    assert job.exit_code == 3


def test_what_follows_from_a_cause_is_not_reported() -> None:
    job = running(3)
    job.handle(Exited(1, -9), 10.0)
    job.handle(failed(0, "peer", "PeerLost", 3), 10.1)
    job.handle(failed(2, "script", "RuntimeError"), 10.1)
    assert job.cause == Died(1, -9)


def test_asked_once_the_workers_are_asked_and_given_their_grace() -> None:
    job = running(2)
    assert job.handle(Asked(signal.SIGINT), 10.0) == [AskToLeave((0, 1), signal.SIGINT)]
    assert (job.phase, job.deadline) == (Phase.LEAVING, 70.0)
    job.handle(failed(1, "shoal", "Interrupted", 130), 11.0)
    job.handle(Exited(1, 130), 11.0)
    assert job.handle(Tick(), 30.0) == []  # rank 0 still saves
    job.handle(failed(0, "shoal", "Interrupted", 130), 31.0)
    job.handle(Exited(0, 130), 31.0)
    assert (job.phase, job.cause, job.exit_code) == (Phase.ENDED, Left(signal.SIGINT), 130)


def test_asked_twice_everybody_is_killed() -> None:
    job = running(2)
    job.handle(Asked(signal.SIGINT), 10.0)
    assert job.handle(Asked(signal.SIGINT), 10.2) == [Kill((0, 1))]
    for rank in range(2):
        job.handle(Exited(rank, -9), 10.3)
    assert (job.cause, job.exit_code) == (Left(signal.SIGINT), 130)


def test_who_does_not_leave_in_time_is_killed_and_named() -> None:
    job = running(3)
    job.handle(Asked(signal.SIGTERM), 0.0)
    job.handle(Exited(1, -signal.SIGTERM), 1.0)  # had no handler yet
    assert job.handle(Tick(), 60.0) == [Kill((0, 2))]
    assert (job.cause, job.exit_code) == (Left(signal.SIGTERM, (0, 2)), 143)


def test_asked_before_anybody_was_started_it_is_over() -> None:
    job = Fate(num_workers=2, patience=PATIENCE)
    assert job.handle(Asked(signal.SIGHUP), 1.0) == []
    assert (job.phase, job.exit_code) == (Phase.ENDED, 129)


def test_an_error_while_leaving_is_the_cause() -> None:
    job = running(2)
    job.handle(Asked(signal.SIGINT), 0.0)
    job.handle(failed(0, "shoal", "CheckpointWriteFailed", 3), 1.0)
    assert job.exit_code == 3


def test_a_job_that_finishes_although_asked_to_leave_says_that_it_was_asked() -> None:
    job = running(1)
    job.handle(Asked(signal.SIGINT), 0.0)
    job.handle(finished(0), 1.0)
    job.handle(Exited(0, 0), 1.0)
    assert job.exit_code == 130


def test_an_exit_without_a_word_is_a_death() -> None:
    job = running(1)
    job.handle(Exited(0, 0), 1.0)
    assert job.cause == Died(0, 0)


def test_a_crash_after_the_last_word_is_a_death() -> None:
    job = running(1)
    job.handle(finished(0), 1.0)
    job.handle(Exited(0, -11), 1.1)
    assert job.cause == Died(0, -11, finished=True)


def test_a_process_that_outlives_its_script_is_ended() -> None:
    job = running(2)
    for event in (finished(0), finished(1), Exited(0, 0)):
        job.handle(event, 5.0)
    assert job.handle(Tick(), 35.0) == [Kill((1,))]
    assert (job.cause, job.exit_code) == (Stuck((1,)), 3)


def test_the_coordinators_death_ends_the_job_and_its_leaving_last_does_not() -> None:
    job = running(1)
    job.handle(failed(0, "peer", "CoordinatorLost", 3), 1.0)
    job.handle(CoordinatorExited(-9), 1.1)
    assert job.cause == CoordinatorDied(-9)
    done = running(1)
    for event in (finished(0), Exited(0, 0), CoordinatorExited(0)):
        done.handle(event, 1.0)
    assert done.cause is None


@pytest.mark.parametrize("first", [0, 1])
def test_of_several_exit_codes_of_a_script_rank_0s_counts(first: int) -> None:
    job = running(2)
    for rank in (first, 1 - first):
        job.handle(failed(rank, "script", "SystemExit", 7 + rank), 1.0)
    assert job.exit_code == 7


EVENTS = st.one_of(
    st.builds(failed, st.integers(0, 2), st.sampled_from(["script", "shoal", "peer"])),
    st.builds(
        failed, st.integers(0, 2), st.just("shoal"), st.just("Interrupted"), st.sampled_from([130, 143])
    ),
    st.builds(finished, st.integers(0, 2)),
    st.builds(Exited, st.integers(0, 2), st.sampled_from([0, 1, -9, -15])),
    st.builds(CoordinatorExited, st.just(-9)),
    st.builds(Asked, st.sampled_from([signal.SIGINT, signal.SIGTERM])),
    st.just(Tick()),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 40)), max_size=25))
def test_whatever_happens_phases_follow_the_edges_and_only_the_living_are_acted_on(
    story: list[tuple[fate.Event, float]],
) -> None:
    job, now, alive = running(3), 0.0, {0, 1, 2}
    for event, passed_s in story:
        now += passed_s
        if isinstance(event, Exited | Failed | Finished) and event.rank not in alive:
            continue  # the dead do not speak, nor die again
        if isinstance(event, Exited):
            alive.discard(event.rank)
        before, cause = job.phase, job.cause
        actions = job.handle(event, now)
        assert job.phase is before or job.phase in EDGES[before]
        if before is Phase.ENDING and not isinstance(cause, Left) and cause is not None:
            assert job.cause == cause  # told once
        for action in actions:
            assert set(action.ranks) <= alive
    while job.deadline is not None:  # with time alone, and nobody reaped, it comes to its end
        now = job.deadline
        job.handle(Tick(), now)
    assert job.phase is Phase.ENDED or (job.phase, job.cause) == (Phase.RUNNING, None)
