from __future__ import annotations

import signal

from shoal.cluster.supervisor.failure import last_words
from shoal.cluster.supervisor.job_lifecycle import (
    ClockTick,
    CoordinatorExited,
    JobLifecycle,
    LeaveRequested,
    RestartConfig,
    StateLost,
    WorkerExited,
    WorkerStarted,
    WorkerUnplaced,
)
from shoal.cluster.supervisor.outcome import JobOutcome, error_of, slow_compression, summary_of
from shoal.errors import ClusterError, Interrupted, ShapeDecides, WorkerDied
from shoal.runtime.transport.messages.supervisor import Failed, Finished, Progress, Saved


def outcome(*events: object, num_workers: int = 2) -> JobOutcome:
    lifecycle = JobLifecycle(num_workers=num_workers, restart=RestartConfig())
    for rank in range(num_workers):
        lifecycle.handle(WorkerStarted(rank), 0.0)
    for event in events:
        lifecycle.handle(event, 1.0)  # type: ignore[arg-type]
    return JobOutcome(lifecycle)


def progress(rank: int, step: int) -> Progress:
    return Progress(rank, 1, "fit", 1, 1, step, 100, 0.25, {"accuracy": 0.5}, 640, 320.0, None)


def test_a_death_is_told_with_what_is_known_of_the_worker() -> None:
    seen = outcome(WorkerExited(1, -signal.SIGKILL))
    seen.progress = {0: progress(0, 31), 1: progress(1, 30)}
    seen.checkpoint = seen.lasting = Saved(0, "runs/x/checkpoints/step-20", 20)
    seen.last_lines = {1: ["out of memory"]}
    error = error_of(seen, num_workers=2, run="runs/x")
    assert isinstance(error, WorkerDied)
    assert (error.rank, error.how, error.step, error.log) == (
        1,
        "was killed by SIGKILL",
        30,
        ["out of memory"],
    )
    assert "go on with `shoal resume runs/x`" in str(error)


def test_compression_over_a_link_where_it_was_slower_is_told_with_the_speed_of_the_link() -> None:
    assert "passed 117 MB/s" in slow_compression("int8", 117e6)
    assert slow_compression("bf16", 117e6) == ""
    assert "--compress bf16" in slow_compression("bf16", 9e8)
    # Not measured: the link, topk.
    assert [slow_compression(*each) for each in (("int8", 0.0), ("topk:ratio=0.01", 9e9), ("none", 9e9))] == [
        ""
    ] * 3


def test_an_abort_of_gloos_is_told_with_what_is_likely_behind_it() -> None:
    said = [
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 1048 vs 904. Received data size "
        "doesn't match expected size. Is there a distributed collective mismatch in your code?",
    ]
    stack = [
        "Fatal Python error: Aborted",
        *['  File "x.py", line 1 in f'] * 9,
        '  File "<frozen runpy>", line 88 in _run_code',
    ]
    seen = outcome(WorkerExited(1, -signal.SIGABRT))
    seen.last_lines = {1: last_words(["fit", *said, *stack], 8)}
    error = str(error_of(seen, num_workers=2, run="x"))
    assert (
        "SIGABRT (it was sent 1048 bytes within the model where it waited for 904: most likely a layer"
        in error
    )
    assert "collective mismatch in your code?" in error
    assert "x.py" not in error


def test_an_interruption_is_told_with_the_step_and_checkpoint_of_rank_0() -> None:
    said = Failed(0, "shoal", "Interrupted", "", "", 130, '{"step": 40, "checkpoint": "x/step-40"}')
    other = Failed(1, "shoal", "Interrupted", "", "", 130, '{"step": 40}')
    seen = outcome(LeaveRequested(signal.SIGINT), other, WorkerExited(1, 130), said, WorkerExited(0, 130))
    error = error_of(seen, num_workers=2, run="runs/x")
    assert isinstance(error, Interrupted)
    assert (error.step, error.checkpoint, error.exit_code) == (40, "x/step-40", 130)


def test_processes_that_outlive_their_script_are_named() -> None:
    seen = outcome(Finished(0, 0, 0.0, 0, {}), Finished(1, 0, 0.0, 0, {}), WorkerExited(0, 0))
    seen.lifecycle.handle(ClockTick(), 1000.0)
    error = error_of(seen, num_workers=2, run="x")
    assert isinstance(error, ClusterError)
    assert "worker 1 did not exit" in str(error)


def test_a_step_lost_with_a_worker_and_a_server_is_told_without_advice_that_would_not_help() -> None:
    error = str(error_of(outcome(StateLost((), rank=1)), num_workers=2, run="x"))
    assert error.startswith("worker 1 and a server died in the same step")
    assert "--replicas" not in error


def test_a_batch_that_no_stage_was_cut_for_is_told_with_the_checkpoint_that_is_safe() -> None:
    refused = ShapeDecides(seen=False, value=True, line=" (line 12 of train.py)")
    seen = outcome(Failed(1, "shoal", "ShapeDecides", str(refused), "", 3))
    seen.checkpoint = seen.lasting = Saved(0, "runs/x/checkpoints/step-20", 20)
    error = error_of(seen, num_workers=2, run="runs/x")
    assert isinstance(error, ShapeDecides)
    for words in (
        "line 12 of train.py",
        "was False",
        "is True",
        "not applied",
        "step-20",
        "`shoal resume runs/x`",
    ):
        assert words in str(error)


def test_the_coordinators_end_is_told() -> None:
    seen = outcome(*[CoordinatorExited(-11)] * 4)
    assert str(error_of(seen, num_workers=2, run="x")).startswith("the coordinator was killed by SIGSEGV")
    seen.coordinator_last_lines = ["the disk is full."]
    assert "its last words: the disk is full. " in str(error_of(seen, num_workers=2, run="x"))


def test_a_summary_has_the_totals_of_a_finished_run() -> None:
    seen = outcome(Finished(0, 1000, 4.0, 10, {"loss": 0.1}))
    seen.progress = {0: progress(0, 9)}
    summary = summary_of(seen, started=1.0, ended=9.0, exit=0)
    assert summary["samples_per_s"] == 250.0
    assert (summary["steps"], summary["metrics"], summary["exit"], summary["restarts"]) == (
        10,
        {"loss": 0.1},
        0,
        0,
    )


def test_a_summary_of_an_unfinished_run_says_how_far_it_came() -> None:
    seen = outcome()
    seen.progress = {0: progress(0, 9)}
    summary = summary_of(seen, started=1.0, ended=9.0)
    assert (summary["steps"], summary["samples"], summary["seconds"]) == (9, 640, 2.0)
    assert summary["metrics"] == {"accuracy": 0.5, "loss": 0.25}


def test_a_summary_of_a_run_that_never_stepped_is_all_zeros() -> None:
    summary = summary_of(outcome(), started=1.0, ended=9.0)
    assert (summary["steps"], summary["samples"], summary["samples_per_s"]) == (0, 0, 0.0)


def test_ranks_without_a_host_are_told_with_the_host_they_lost_and_the_checkpoint() -> None:
    lifecycle = JobLifecycle(num_workers=2, restart=RestartConfig(max_restarts=1, host_timeout_s=60.0))
    lost = "host 1 (b, 10.0.0.2) was lost (nothing was heard of it for 3 s)"
    for event in (WorkerStarted(0), WorkerStarted(1), WorkerExited(1, -9, lost), WorkerUnplaced(1, 1)):
        lifecycle.handle(event, 1.0)
    lifecycle.handle(ClockTick(), 61.0)
    seen = JobOutcome(lifecycle)
    seen.lasting = Saved(0, "runs/x/checkpoints/step-20", 20)
    assert str(error_of(seen, num_workers=2, run="runs/x")).startswith(
        f"worker 1 had no host for 60 s: {lost}, and no other host has room; so the job was stopped. The newest "
        "checkpoint is runs/x/checkpoints/step-20; go on with `shoal resume runs/x`."
    )
