from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.supervisor.job_lifecycle import (
    EDGES,
    AskToLeave,
    ClockTick,
    CoordinatorDeath,
    CoordinatorExited,
    CoordinatorServes,
    Event,
    HostMissing,
    JobAdvanced,
    JobLifecycle,
    JobPhase,
    KillServers,
    KillWorkers,
    LeaveRequested,
    LeftOnRequest,
    ReplaceServer,
    ReplaceWorker,
    RestartAll,
    RestartConfig,
    RestartCoordinator,
    ResultsDropped,
    RollBack,
    ServerDeath,
    ServerExited,
    ServerStarted,
    ServerSuspected,
    ServerUnplaced,
    StateLost,
    StuckAtExit,
    WorkerCaughtUp,
    WorkerDeath,
    WorkerExited,
    WorkerStarted,
    WorkerSuspected,
    WorkerUnplaced,
)
from shoal.runtime.transport.messages.supervisor import Failed, Finished

RESTART = RestartConfig(grace_s=60.0, blame_s=1.0, settle_s=0.5, exit_s=30.0)


def failed(rank: int, kind: str = "script", error: str = "ValueError", exit_code: int = 1) -> Failed:
    return Failed(rank, kind, error, "", "", exit_code)  # type: ignore[arg-type]


def finished(rank: int) -> Finished:
    return Finished(rank, 0, 0.0, 0, {})


RECOVERING = RestartConfig(
    max_restarts=2, max_coordinator_restarts=2, grace_s=60.0, blame_s=1.0, settle_s=0.5, exit_s=30.0
)


def running(num_workers: int, restart: RestartConfig = RESTART) -> JobLifecycle:
    job = JobLifecycle(num_workers=num_workers, restart=restart)
    for rank in range(num_workers):
        assert job.handle(WorkerStarted(rank), 0.0) == []
    return job


def test_a_job_whose_workers_all_finish_and_exit_ends_well() -> None:
    job = running(2)
    for event in (finished(0), finished(1), WorkerExited(1, 0), WorkerExited(0, 0)):
        assert job.handle(event, 1.0) == []
    assert (job.phase, job.cause, job.exit_code) == (JobPhase.ENDED, None, 0)


def test_a_failure_gives_the_others_a_moment_and_then_kills_them() -> None:
    job = running(3)
    assert job.handle(failed(2), 10.0) == []
    assert job.handle(WorkerExited(2, 1), 10.1) == []
    assert job.deadline == 10.5
    assert job.handle(ClockTick(), 10.4) == []
    assert job.handle(ClockTick(), 10.5) == [KillWorkers((0, 1))]
    assert job.handle(WorkerExited(0, -9), 10.6) == job.handle(WorkerExited(1, -9), 10.6) == []
    assert (job.phase, job.cause, job.exit_code) == (JobPhase.ENDED, failed(2), 1)


def test_a_broken_exchange_waits_for_its_cause() -> None:
    job = running(2)
    job.handle(failed(0, "peer", "PeerLost", 3), 10.0)
    assert job.deadline == 11.0
    job.handle(failed(1), 10.9)
    assert job.cause == failed(1)


def test_a_broken_exchange_waits_for_a_death_too() -> None:
    job = running(2)
    job.handle(failed(0, "peer", "PeerLost", 3), 10.0)
    job.handle(WorkerExited(0, 3), 10.1)
    job.handle(WorkerExited(1, -11), 10.2)
    assert (job.phase, job.cause) == (JobPhase.ENDED, WorkerDeath(1, -11))


def test_a_broken_exchange_without_a_cause_is_the_cause() -> None:
    job = running(3)
    job.handle(failed(0, "peer", "PeerLost", 3), 10.0)
    assert job.handle(ClockTick(), 11.0) == []
    assert (job.cause, job.deadline) == (failed(0, "peer", "PeerLost", 3), 11.5)
    assert job.exit_code == 3


def test_what_follows_from_a_cause_is_not_reported() -> None:
    job = running(3)
    job.handle(WorkerExited(1, -9), 10.0)
    job.handle(failed(0, "peer", "PeerLost", 3), 10.1)
    job.handle(failed(2, "script", "RuntimeError"), 10.1)
    assert job.cause == WorkerDeath(1, -9)


def test_asked_once_the_workers_are_asked_and_given_their_grace() -> None:
    job = running(2)
    assert job.handle(LeaveRequested(signal.SIGINT), 10.0) == [AskToLeave((0, 1), signal.SIGINT)]
    assert (job.phase, job.deadline) == (JobPhase.LEAVING, 70.0)
    job.handle(failed(1, "shoal", "Interrupted", 130), 11.0)
    job.handle(WorkerExited(1, 130), 11.0)
    assert job.handle(ClockTick(), 30.0) == []  # rank 0 still saves
    job.handle(failed(0, "shoal", "Interrupted", 130), 31.0)
    job.handle(WorkerExited(0, 130), 31.0)
    assert (job.phase, job.cause, job.exit_code) == (JobPhase.ENDED, LeftOnRequest(signal.SIGINT), 130)


def resizing() -> JobLifecycle:
    job = running(2, RECOVERING)
    asked = [AskToLeave((0, 1), signal.SIGINT)]
    assert job.handle(LeaveRequested(signal.SIGINT, to_resize=True), 10.0) == asked
    return job


def test_a_job_that_is_resized_ends_when_all_have_saved_and_left() -> None:
    job = resizing()
    for rank in range(2):
        job.handle(failed(rank, "shoal", "Interrupted", 130), 11.0)
        assert job.phase is not JobPhase.ENDED
        job.handle(WorkerExited(rank, 130), 11.0)
    assert (job.phase, job.is_resizing) == (JobPhase.ENDED, True)


def test_a_job_that_is_interrupted_while_it_is_resized_leaves_for_good_and_saves() -> None:
    job = resizing()
    assert job.handle(LeaveRequested(signal.SIGTERM), 10.5) == []
    assert (job.is_resizing, job.exit_code, job.deadline) == (False, 143, 70.0)


def test_a_script_that_ends_while_it_is_resized_has_ended_well() -> None:
    job = resizing()
    for event in (finished(0), finished(1), WorkerExited(1, 0), WorkerExited(0, 0)):
        assert job.handle(event, 11.0) == []
    assert (job.phase, job.is_resizing, job.exit_code) == (JobPhase.ENDED, False, 0)


def test_a_worker_that_dies_when_others_have_left_to_be_resized_does_not_end_the_job() -> None:
    job = resizing()
    job.handle(failed(0, "shoal", "Interrupted", 130), 11.0)
    assert job.handle(WorkerExited(1, -9), 11.1) == [KillWorkers((0,))]
    job.handle(WorkerExited(0, -9), 11.2)
    assert (job.phase, job.is_resizing) == (JobPhase.ENDED, True)


def test_a_job_with_ranks_without_a_host_is_resized_at_once() -> None:
    job = running(2, RECOVERING)
    job.handle(WorkerExited(1, -9, "host 1 was lost"), 10.0)
    job.handle(WorkerUnplaced(1, 1), 10.0)
    asked = LeaveRequested(signal.SIGINT, to_resize=True)
    assert job.handle(asked, 10.1) == [KillWorkers((0,))]
    job.handle(WorkerExited(0, -9), 10.2)
    assert (job.phase, job.is_resizing) == (JobPhase.ENDED, True)


def test_asked_twice_everybody_is_killed() -> None:
    job = running(2)
    job.handle(LeaveRequested(signal.SIGINT), 10.0)
    assert job.handle(LeaveRequested(signal.SIGINT), 10.2) == [KillWorkers((0, 1))]
    for rank in range(2):
        job.handle(WorkerExited(rank, -9), 10.3)
    assert (job.cause, job.exit_code) == (LeftOnRequest(signal.SIGINT), 130)


def test_who_does_not_leave_in_time_is_killed_and_named() -> None:
    job = running(3)
    job.handle(LeaveRequested(signal.SIGTERM), 0.0)
    job.handle(WorkerExited(1, -signal.SIGTERM), 1.0)  # had no handler yet
    assert job.handle(ClockTick(), 60.0) == [KillWorkers((0, 2))]
    assert (job.cause, job.exit_code) == (LeftOnRequest(signal.SIGTERM, (0, 2)), 143)


def test_asked_before_anybody_was_started_it_is_over() -> None:
    job = JobLifecycle(num_workers=2, restart=RESTART)
    assert job.handle(LeaveRequested(signal.SIGHUP), 1.0) == []
    assert (job.phase, job.exit_code) == (JobPhase.ENDED, 129)


def test_an_error_while_leaving_is_the_cause() -> None:
    job = running(2)
    job.handle(LeaveRequested(signal.SIGINT), 0.0)
    job.handle(failed(0, "shoal", "CheckpointWriteFailed", 3), 1.0)
    assert job.exit_code == 3


def test_a_job_that_finishes_although_asked_to_leave_says_that_it_was_asked() -> None:
    job = running(1)
    job.handle(LeaveRequested(signal.SIGINT), 0.0)
    job.handle(finished(0), 1.0)
    job.handle(WorkerExited(0, 0), 1.0)
    assert job.exit_code == 130


def test_an_exit_without_a_word_is_a_death() -> None:
    job = running(1)
    job.handle(WorkerExited(0, 0), 1.0)
    assert job.cause == WorkerDeath(0, 0)


def test_a_crash_after_the_last_word_is_a_death() -> None:
    job = running(1)
    job.handle(finished(0), 1.0)
    job.handle(WorkerExited(0, -11), 1.1)
    assert job.cause == WorkerDeath(0, -11, finished=True)


def test_a_process_that_outlives_its_script_is_ended() -> None:
    job = running(2)
    for event in (finished(0), finished(1), WorkerExited(0, 0)):
        job.handle(event, 5.0)
    assert job.handle(ClockTick(), 35.0) == [KillWorkers((1,))]
    assert (job.cause, job.exit_code) == (StuckAtExit((1,)), 3)


def test_the_coordinators_leaving_last_is_nobodys_concern() -> None:
    done = running(1)
    for event in (finished(0), WorkerExited(0, 0), CoordinatorExited(0)):
        assert done.handle(event, 1.0) == []
    assert done.cause is None


# ---- going on -------------------------------------------------------------------------------------


def recovering(num_workers: int = 2) -> JobLifecycle:
    return running(num_workers, RECOVERING)


@pytest.mark.parametrize("code", [-9, -11, 0, 7])
def test_a_worker_that_dies_without_a_word_is_replaced_by_the_next_incarnation(code: int) -> None:
    job = recovering()
    assert job.handle(WorkerExited(1, code), 1.0) == [ReplaceWorker(WorkerDeath(1, code), 1)]
    job.handle(WorkerStarted(1, 1), 1.0)
    assert job.handle(WorkerExited(1, code), 2.0) == [ReplaceWorker(WorkerDeath(1, code, num_times=2), 2)]
    assert (job.phase, job.num_restarts) == (JobPhase.RUNNING, 2)


def test_a_rank_that_dies_once_too_often_without_the_job_getting_ahead_ends_it() -> None:
    job = recovering()
    for incarnation in (1, 2):
        job.handle(WorkerExited(1, -9), 1.0)
        job.handle(WorkerStarted(1, incarnation), 1.0)
    assert job.handle(WorkerExited(1, -9), 2.0) == []
    assert (job.phase, job.cause) == (JobPhase.ENDING, WorkerDeath(1, -9, num_times=3))


def test_deaths_are_forgotten_when_the_job_gets_ahead() -> None:
    job = recovering()
    for incarnation in range(1, 20):
        assert job.handle(WorkerExited(1, -9), 1.0) == [ReplaceWorker(WorkerDeath(1, -9), incarnation)]
        job.handle(WorkerStarted(1, incarnation), 1.0)
        job.handle(JobAdvanced(), 1.0)


def test_all_workers_dead_at_once_are_all_replaced() -> None:
    job = recovering(4)
    for rank in range(4):
        assert job.handle(WorkerExited(rank, -9), 1.0) == [ReplaceWorker(WorkerDeath(rank, -9), 1)]
        job.handle(WorkerStarted(rank, 1), 1.0)
    assert job.phase is JobPhase.RUNNING


def test_the_only_worker_is_replaced_too() -> None:
    job = recovering(1)
    assert job.handle(WorkerExited(0, -9), 1.0) == [ReplaceWorker(WorkerDeath(0, -9), 1)]
    assert job.phase is JobPhase.RUNNING


def test_a_users_exception_is_not_retried() -> None:
    job = recovering()
    job.handle(failed(1), 1.0)
    assert job.handle(WorkerExited(1, 1), 1.0) == []
    assert job.cause == failed(1)


def test_nobody_is_replaced_once_the_job_ends() -> None:
    job = recovering(3)
    job.handle(failed(1), 1.0)
    assert job.handle(WorkerExited(2, -9), 1.0) == []


def test_a_broken_exchange_after_a_death_is_blamed_on_the_death() -> None:
    job = recovering()
    job.handle(WorkerExited(1, -9), 1.0)
    job.handle(WorkerStarted(1, 1), 1.0)
    job.handle(failed(0, "peer", "PeerLost", 3), 1.1)
    job.handle(ClockTick(), 2.1)
    assert job.cause == WorkerDeath(1, -9)


def test_a_suspect_is_killed_and_replaced_and_its_death_says_why() -> None:
    job = recovering()
    assert job.handle(WorkerSuspected(1, 0, "it slept"), 1.0) == [KillWorkers((1,))]
    assert job.handle(WorkerExited(1, -9), 1.1) == [ReplaceWorker(WorkerDeath(1, -9, why="it slept"), 1)]
    job.handle(WorkerStarted(1, 1), 1.1)
    assert job.handle(WorkerSuspected(1, 0, "it slept"), 1.2) == []  # the news is old


def test_killed_after_the_end_of_every_script_is_no_failure() -> None:
    job = recovering()
    job.handle(finished(0), 1.0)
    assert job.handle(WorkerExited(1, -9), 1.0) == job.handle(WorkerExited(0, 0), 1.1) == []
    assert (job.phase, job.exit_code) == (JobPhase.ENDED, 0)


def test_a_crash_after_the_last_word_is_a_death_with_recovery_too() -> None:
    job = recovering(1)
    job.handle(finished(0), 1.0)
    job.handle(WorkerExited(0, -11), 1.1)
    assert job.cause == WorkerDeath(0, -11, finished=True)


def test_asked_to_leave_a_replacement_is_asked_when_it_has_caught_up() -> None:
    job = recovering()
    job.handle(WorkerExited(1, -9), 1.0)
    job.handle(WorkerStarted(1, 1), 1.0)
    assert job.handle(LeaveRequested(signal.SIGINT), 2.0) == [AskToLeave((0,), signal.SIGINT)]
    assert job.handle(WorkerCaughtUp(1), 2.5) == [AskToLeave((1,), signal.SIGINT)]


def test_asked_to_leave_with_nobody_but_replacements_they_are_asked() -> None:
    job = recovering(1)
    job.handle(WorkerExited(0, -9), 1.0)
    job.handle(WorkerStarted(0, 1), 1.0)
    assert job.handle(LeaveRequested(signal.SIGTERM), 2.0) == [AskToLeave((0,), signal.SIGTERM)]


def test_a_death_while_leaving_is_replaced_so_that_the_others_can_finish_their_step() -> None:
    job = recovering()
    job.handle(LeaveRequested(signal.SIGINT), 2.0)
    assert job.handle(WorkerExited(1, -9), 2.1) == [ReplaceWorker(WorkerDeath(1, -9), 1)]


def test_a_killed_coordinator_is_started_again_as_often_as_it_takes() -> None:
    job = recovering()
    for at in range(10, 100, 10):
        job.handle(CoordinatorServes(), float(at))
        job.handle(CoordinatorServes(), at + 5.0)
        assert job.handle(CoordinatorExited(-9), at + 5.0) == [RestartCoordinator()]
    assert job.phase is JobPhase.RUNNING


def test_a_coordinator_that_dies_of_being_started_ends_the_job() -> None:
    job = recovering()
    assert job.handle(CoordinatorExited(1), 1.0) == [RestartCoordinator()]
    assert job.handle(CoordinatorExited(1), 1.1) == [RestartCoordinator()]
    job.handle(CoordinatorServes(), 1.2)
    assert job.handle(CoordinatorExited(1), 1.25) == []
    assert job.cause == CoordinatorDeath(1)


def test_a_coordinator_that_says_it_cannot_go_on_is_believed() -> None:
    job = recovering()
    job.handle(CoordinatorServes(), 1.0)
    assert job.handle(CoordinatorExited(3, is_final=True), 90.0) == []
    assert job.cause == CoordinatorDeath(3)


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
    st.builds(WorkerExited, st.integers(0, 2), st.sampled_from([0, 1, -9, -15])),
    st.builds(CoordinatorExited, st.just(-9)),
    st.just(CoordinatorServes()),
    st.just(JobAdvanced()),
    st.builds(WorkerCaughtUp, st.integers(0, 2)),
    st.builds(WorkerSuspected, st.integers(0, 2), st.integers(0, 2), st.just("")),
    st.builds(LeaveRequested, st.sampled_from([signal.SIGINT, signal.SIGTERM])),
    st.just(ClockTick()),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 40)), max_size=25), st.sampled_from([RESTART, RECOVERING]))
def test_whatever_happens_phases_follow_the_edges_and_only_the_living_are_acted_on(
    story: list[tuple[Event, float]], restart: RestartConfig
) -> None:
    job, now, alive = running(3, restart), 0.0, {0, 1, 2}
    for event, passed_s in story:
        now += passed_s
        if isinstance(event, WorkerExited | Failed | Finished | WorkerCaughtUp) and event.rank not in alive:
            continue  # the dead do not speak, nor die again
        if isinstance(event, WorkerExited):
            alive.discard(event.rank)
        before, cause = job.phase, job.cause
        actions = job.handle(event, now)
        assert job.phase is before or job.phase in EDGES[before]
        if before is JobPhase.ENDING and not isinstance(cause, LeftOnRequest) and cause is not None:
            assert job.cause == cause  # told once
        for action in actions:
            match action:
                case AskToLeave(ranks) | KillWorkers(ranks):
                    assert set(ranks) <= alive
                case ReplaceWorker(died, incarnation):
                    assert restart is RECOVERING
                    assert died.rank not in alive
                    assert 0 < died.num_times <= restart.max_restarts
                    alive.add(died.rank)
                    assert job.handle(WorkerStarted(died.rank, incarnation), now) == []
    while job.deadline is not None:  # with time alone, and nobody reaped, it comes to its end
        now = job.deadline
        job.handle(ClockTick(), now)
    assert job.phase is JobPhase.ENDED or (job.phase, job.cause) == (JobPhase.RUNNING, None)


# ---- servers --------------------------------------------------------------------------------------


def with_servers(num_workers: int = 2, num_servers: int = 2) -> JobLifecycle:
    job = running(num_workers, RECOVERING)
    for number in range(num_servers):
        assert job.handle(ServerStarted(number), 0.0) == []
    return job


def test_a_server_that_dies_is_replaced_until_it_dies_once_too_often() -> None:
    job = with_servers()
    for num_times in (1, 2):
        replaced = ReplaceServer(ServerDeath(1, -9, "", num_times), num_times)
        assert job.handle(ServerExited(1, -9), 1.0) == [replaced]
        job.handle(ServerStarted(1, num_times), 1.0)
    assert job.handle(ServerExited(1, 3), 2.0) == []
    assert (job.phase, job.cause) == (JobPhase.ENDING, ServerDeath(1, 3, "", 3))


def test_when_the_job_gets_ahead_the_deaths_of_servers_are_forgotten() -> None:
    job = with_servers()
    job.handle(ServerExited(0, -9), 1.0)
    job.handle(ServerStarted(0, 1), 1.0)
    job.handle(JobAdvanced(), 2.0)
    assert job.handle(ServerExited(0, -9), 3.0) == [ReplaceServer(ServerDeath(0, -9), 2)]


def test_a_silent_server_is_killed_and_its_death_says_why() -> None:
    job = with_servers()
    assert job.handle(ServerSuspected(0, 1, "it said nothing"), 1.0) == []  # no such one
    assert job.handle(ServerSuspected(0, 0, "it said nothing"), 1.0) == [KillServers((0,))]
    assert job.handle(ServerExited(0, -9), 1.0) == [ReplaceServer(ServerDeath(0, -9, "it said nothing"), 1)]


def test_a_server_that_was_sent_away_is_not_replaced() -> None:
    job = with_servers()
    assert job.handle(ServerExited(1, -9, is_wanted=False), 1.0) == []
    assert job.phase is JobPhase.RUNNING


def test_nobody_needs_a_server_once_a_script_has_ended() -> None:
    job = with_servers()
    job.handle(finished(0), 1.0)
    assert job.handle(ServerExited(1, -9), 1.0) == []
    assert job.handle(StateLost((1,)), 1.0) == []
    assert job.cause is None


def test_lost_state_ends_everybody_and_starts_them_anew_when_the_last_is_gone() -> None:
    job = with_servers()
    assert job.handle(StateLost((0,)), 1.0) == [
        RollBack(StateLost((0,), 1)),
        KillWorkers((0, 1)),
        KillServers((0, 1)),
    ]
    gone = (failed(0), WorkerExited(0, -9), CoordinatorExited(-9), ServerExited(1, -9), WorkerExited(1, -9))
    told = [job.handle(event, 1.0) for event in gone]
    assert told == [[], [], [RestartCoordinator()], [], []]
    assert job.handle(ServerExited(0, -9), 1.0) == [RestartAll({0: 1, 1: 1}, {0: 1, 1: 1})]
    assert (job.phase, job.num_restarts) == (JobPhase.RUNNING, 1)


def begun_anew() -> JobLifecycle:
    job = with_servers(1, 1)
    for event in (
        StateLost((0,)),
        WorkerExited(0, -9),
        ServerExited(0, -9),
        WorkerStarted(0, 1),
        ServerStarted(0, 1),
    ):
        job.handle(event, 1.0)
    return job


def test_a_second_loss_ends_the_job_unless_it_got_ahead() -> None:
    job = begun_anew()
    assert job.handle(StateLost((0,)), 2.0) == []
    assert (job.phase, job.cause, job.exit_code) == (JobPhase.ENDING, StateLost((0,), 2), 3)
    job = begun_anew()
    job.handle(JobAdvanced(), 2.0)
    assert isinstance(job.handle(StateLost((0,)), 3.0)[0], RollBack)


def test_asked_to_leave_while_all_begin_anew_a_job_leaves_at_once() -> None:
    job = with_servers()
    job.handle(StateLost((0,)), 1.0)
    assert job.handle(LeaveRequested(signal.SIGINT), 1.0) == [KillWorkers((0, 1))]
    job.handle(WorkerExited(0, -9), 1.0)
    job.handle(WorkerExited(1, -9), 1.0)
    assert (job.phase, job.exit_code) == (JobPhase.ENDED, 130)


def test_a_job_that_has_ended_has_no_deadline() -> None:
    job = running(2)
    story = (failed(0), finished(0), ClockTick(), finished(1), ClockTick())
    for event, at in zip(story, (0.0, 0.0, 1.0, 1.0, 12.0), strict=True):
        job.handle(event, at)
    assert (job.phase, job.deadline) == (JobPhase.ENDED, None)


PARTS = RestartConfig(max_restarts=1, all_hold_parts=True)


def test_where_all_hold_parts_a_death_takes_everybody_back() -> None:
    job = running(3, PARTS)
    lost = StateLost((), 1, 1, holds_parts=True, died=WorkerDeath(1, -9))
    assert job.handle(WorkerExited(1, -9), 1.0) == [RollBack(lost), KillWorkers((0, 2)), KillServers(())]
    assert job.handle(WorkerExited(0, -9), 1.0) == []
    assert job.handle(WorkerExited(2, -9), 1.0) == [RestartAll({0: 1, 1: 1, 2: 1}, {})]
    assert (job.phase, job.num_restarts) == (JobPhase.RUNNING, 1)
    for rank in range(3):
        job.handle(WorkerStarted(rank, 1), 2.0)
    job.handle(WorkerExited(1, -9), 2.0)  # again, and nothing was done in between
    assert (job.phase, job.cause) == (JobPhase.ENDING, WorkerDeath(1, -9, False, "", 2))


def test_alone_it_begins_anew_at_once() -> None:
    job = running(1, PARTS)
    actions = job.handle(WorkerExited(0, -9), 1.0)
    assert actions[-1] == RestartAll({0: 1}, {})


def test_while_leaving_nobody_begins_anew() -> None:
    job = running(2, PARTS)
    job.handle(LeaveRequested(signal.SIGINT), 1.0)
    job.handle(WorkerExited(1, -9), 1.0)
    assert job.phase is JobPhase.ENDING


def test_once_results_were_let_go_a_death_takes_everybody_back_and_only_until_they_begin_anew() -> None:
    job = running(2, RestartConfig(max_restarts=3))
    assert job.handle(ResultsDropped(0), 0.5) == []
    assert job.handle(ResultsDropped(1), 0.5) == []
    lost = StateLost((), 1, 1, has_dropped_results=True, died=WorkerDeath(1, -9))
    assert job.handle(WorkerExited(1, -9), 1.0) == [RollBack(lost), KillWorkers((0,)), KillServers(())]
    assert job.handle(WorkerExited(0, -9), 1.0) == [RestartAll({0: 1, 1: 1}, {})]
    for rank in range(2):
        job.handle(WorkerStarted(rank, 1), 2.0)
    assert isinstance(job.handle(WorkerExited(1, -9), 3.0)[0], ReplaceWorker)


def test_a_replacement_that_was_started_just_before_results_were_let_go_takes_everybody_back() -> None:
    job = running(2, RestartConfig(max_restarts=3))
    job.handle(WorkerExited(1, -9), 1.0)
    job.handle(WorkerStarted(1, 1), 1.0)
    assert job.handle(ResultsDropped(0), 1.1)[0] == RollBack(StateLost((), rank=1, has_dropped_results=True))


# ---- hosts ---------------------------------------------------------------------------------------

LOST = "host 1 (b, 10.0.0.2) was lost (nothing was heard of it for 3 s)"


def lose_host(job: JobLifecycle, rank: int, at: float) -> list[object]:
    return list(job.handle(WorkerExited(rank, -9, LOST), at))


def test_a_worker_lost_with_its_host_is_replaced_at_no_cost_to_its_rank() -> None:
    job = recovering()
    for incarnation in range(1, 6):  # more often than max_restarts
        assert lose_host(job, 1, 1.0) == [
            ReplaceWorker(WorkerDeath(1, -9, num_times=incarnation, lost_with=LOST), incarnation)
        ]
        job.handle(WorkerStarted(1, incarnation), 1.0)
    assert job.handle(WorkerExited(1, -11), 2.0) == [ReplaceWorker(WorkerDeath(1, -11), 6)]


def test_a_server_lost_with_its_host_is_replaced_at_no_cost_to_it() -> None:
    job = recovering()
    for incarnation in range(5):  # more often than max_restarts
        job.handle(ServerStarted(0, incarnation), 1.0)
        died = ServerDeath(0, -9, num_times=incarnation + 1, lost_with=LOST)
        assert job.handle(ServerExited(0, -9, lost_with=LOST), 1.0) == [ReplaceServer(died, incarnation + 1)]
    job.handle(ServerStarted(0, 5), 2.0)
    assert job.handle(ServerExited(0, -9), 2.0) == [ReplaceServer(ServerDeath(0, -9), 6)]


def test_a_host_that_is_lost_again_and_again_without_the_job_getting_ahead_ends_it() -> None:
    job = running(2, RestartConfig(max_restarts=2, max_host_losses=3))
    for incarnation in range(1, 4):
        assert lose_host(job, 1, 1.0) != []
        job.handle(WorkerStarted(1, incarnation), 1.0)
    assert lose_host(job, 1, 2.0) == []
    assert job.cause == WorkerDeath(1, -9, num_times=4, lost_with=LOST)


def test_losses_of_hosts_are_forgotten_when_the_job_gets_ahead() -> None:
    job = running(2, RestartConfig(max_restarts=2, max_host_losses=1))
    for incarnation in range(1, 6):
        assert lose_host(job, 1, 1.0) != []
        job.handle(WorkerStarted(1, incarnation), 1.0)
        job.handle(JobAdvanced(), 1.0)


def test_without_restarts_a_lost_host_ends_the_job() -> None:
    job = running(2)
    assert lose_host(job, 1, 1.0) == []
    assert job.cause == WorkerDeath(1, -9, lost_with=LOST)


def unplaced(at: float = 10.0) -> JobLifecycle:
    job = running(3, RestartConfig(max_restarts=2, host_timeout_s=60.0, settle_s=0.5))
    lose_host(job, 1, at)
    assert job.handle(WorkerUnplaced(1, 1), at) == []
    return job


def test_a_rank_without_a_host_ends_the_job_at_its_deadline_and_is_named() -> None:
    job = unplaced()
    lose_host(job, 2, 20.0)
    job.handle(WorkerUnplaced(2, 1), 20.0)
    assert job.deadline == 70.0
    assert job.handle(ClockTick(), 69.9) == []
    assert job.handle(ClockTick(), 70.0) == []
    assert (job.cause, job.exit_code) == (HostMissing((1, 2), 60.0, LOST), 3)
    assert job.handle(ClockTick(), 70.5) == [KillWorkers((0,))]
    job.handle(WorkerExited(0, -9), 70.6)
    assert job.phase is JobPhase.ENDED


def test_a_host_in_time_lifts_the_deadline() -> None:
    job = unplaced()
    job.handle(WorkerStarted(1, 1), 60.0)
    assert job.deadline is None


def test_a_job_of_which_no_worker_has_a_host_ends_at_its_deadline_too() -> None:
    job = running(2, RestartConfig(max_restarts=2, host_timeout_s=60.0))
    for rank in (0, 1):
        lose_host(job, rank, 10.0)
        job.handle(WorkerUnplaced(rank, 1), 10.0)
    job.handle(ClockTick(), 70.0)
    assert (job.phase, job.cause) == (JobPhase.ENDED, HostMissing((0, 1), 60.0, LOST))


def test_a_server_without_its_service_ends_the_job_at_its_deadline_unless_it_comes() -> None:
    job = running(2, RestartConfig(max_restarts=2, host_timeout_s=60.0))
    job.handle(ServerStarted(0), 0.0)
    job.handle(ServerExited(0, -9, lost_with=LOST), 10.0)
    assert job.handle(ServerUnplaced(0, 1), 10.0) == []
    assert job.deadline == 70.0
    job.handle(ServerStarted(0, 1), 60.0)
    assert job.deadline is None
    job.handle(ServerExited(0, -9, lost_with=LOST), 80.0)
    job.handle(ServerUnplaced(0, 2), 80.0)
    job.handle(ClockTick(), 140.0)
    assert (job.cause, job.exit_code) == (HostMissing((), 60.0, LOST, servers=(0,)), 3)


def test_a_server_that_waits_for_its_service_is_started_anew_with_all_others() -> None:
    job = running(2, RestartConfig(max_restarts=2))
    job.handle(ServerStarted(0), 0.0)
    job.handle(ServerExited(0, -9, lost_with=LOST), 10.0)
    job.handle(ServerUnplaced(0, 1), 10.0)
    assert KillWorkers((0, 1)) in job.handle(StateLost((0,)), 10.1)
    job.handle(WorkerExited(0, -9), 10.2)
    assert job.handle(WorkerExited(1, -9), 10.3) == [RestartAll({0: 1, 1: 1}, {0: 1})]


def test_asked_to_leave_while_a_rank_has_no_host_all_go_at_once() -> None:
    job = unplaced()
    assert job.handle(LeaveRequested(signal.SIGINT), 11.0) == [KillWorkers((0, 2))]
    assert job.cause == LeftOnRequest(signal.SIGINT)


def test_a_rank_that_loses_its_host_while_the_job_leaves_is_not_waited_for() -> None:
    job = running(3, RestartConfig(max_restarts=2))
    job.handle(LeaveRequested(signal.SIGINT), 5.0)
    assert lose_host(job, 1, 6.0) != []
    assert job.handle(WorkerUnplaced(1, 1), 6.0) == [KillWorkers((0, 2))]


def test_where_all_begin_anew_the_rank_without_a_host_keeps_its_incarnation() -> None:
    job = running(2, RestartConfig(max_restarts=2, all_hold_parts=True))
    assert [type(each) for each in lose_host(job, 1, 1.0)] == [RollBack, KillWorkers, KillServers]
    assert job.handle(WorkerExited(0, -9), 1.1) == [RestartAll({0: 1, 1: 1}, {})]
    job.handle(WorkerStarted(0, 1), 1.2)
    job.handle(WorkerUnplaced(1, 1), 1.2)
    job.handle(WorkerExited(0, -11), 1.3)  # the next death, before a host came
    job.handle(WorkerStarted(0, 2), 1.4)
    job.handle(WorkerStarted(1, 1), 1.5)
    assert job.deadline is None
