"""Real processes die and a job goes on: what supervisor and coordinator do for that, without any training."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from launched import Launched

from shoal.cluster.launch.api import launch, resume_config
from shoal.cluster.supervisor.supervisor import Supervisor
from shoal.config.faults import Faults
from shoal.config.launch import LaunchConfig
from shoal.config.liveness import LivenessConfig
from shoal.errors import ClusterError, Interrupted, RunDirectoryError, ScriptFailed, WaitTimedOut, WorkerDied
from waiting import wait_until
from whole_matrix import matrix_only

Launch = Callable[..., Launched]

HEAD = """
import json, os, pathlib, signal, time
import psutil, shoal
from shoal.cluster.worker import session
from shoal.config import job as jobs

job = jobs.share()
first = job.incarnation == 0

def die(signum=signal.SIGKILL):
    os.kill(os.getpid(), signum)

def coordinator():
    for process in psutil.Process().parent().children():
        if "".join(process.cmdline()).startswith("shoal coordinator"):
            return process

def kill_coordinator():
    victim = coordinator()
    victim.kill()
    while not is_out(victim.pid):
        time.sleep(0.001)

def is_out(pid):
    try:
        return psutil.Process(pid).status() in ("stopped", "zombie")
    except psutil.NoSuchProcess:
        return True

def tell(**facts):
    pathlib.Path(f"told-{job.rank}-{job.incarnation}").write_text(json.dumps(facts))

view = 0
def enter(finished):
    global view
    formed = session.enter_view(view_left=view, finished=finished)
    view = formed.view
    return formed
"""


def script(body: str) -> str:
    return HEAD + textwrap.dedent(body)


def told(folder: Path, rank: int, incarnation: int = 0) -> dict[str, Any]:
    return dict(json.loads((folder / f"told-{rank}-{incarnation}").read_text()))


def of_kind(done: Launched, kind: str) -> list[dict[str, Any]]:
    return [event for event in done.events if event["event"] == kind]


def killed_for_it(done: Launched) -> list[dict[str, Any]]:
    """Suspects that were stopped. On a busy machine others are suspected too, of being slow, and let be."""
    return [event for event in of_kind(done, "suspect") if event["killed"]]


def succeeded(done: Launched) -> bool:
    assert done.error is None, f"{done.error}\n{done.events}"
    return done.exit_code == 0


# ---- workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3, *matrix_only(2)])
def test_a_killed_worker_is_replaced_and_makes_its_calls_again(launch_script: Launch, workers: int) -> None:
    done = launch_script(
        script("""
        session.begin_call("fit", "")
        if first and job.rank == job.num_workers - 1:
            die()
        session.begin_call("save", "")
        """),
        workers=workers,
    )
    assert succeeded(done)
    assert done.summary["restarts"] == 1
    assert [(e["rank"], e["incarnation"]) for e in of_kind(done, "worker-replaced")] == [(workers - 1, 1)]
    assert f"worker {workers - 1} was killed by SIGKILL" in done.stderr
    assert [e["incarnation"] for e in of_kind(done, "worker-live")] == [1]


def test_a_replacement_is_silent_until_it_has_caught_up(launch_script: Launch) -> None:
    done = launch_script(
        script("""
        import sys
        print("one")
        print("trouble", file=sys.stderr)
        session.report(phase="fit", epoch=1, num_epochs=1, step=1 if first else 2, num_steps=9, loss=0.5, metrics={},
                       samples=1, samples_per_s=1.0, eta_s=None)
        if first:
            die()
        print("still old", end="")
        session.live()
        print("two")
        """)
    )
    assert succeeded(done)
    assert done.stdout == "one\ntwo\n"
    assert done.stderr.count("trouble") == 1
    assert "step 2" not in done.stderr
    assert done.log(0).count("trouble") == 2
    assert "still old" in done.log(0)


def test_survivors_that_wait_at_a_call_are_fetched_to_the_view_a_replacement_waits_for(
    launch_script: Launch, tmp_path: Path
) -> None:
    done = launch_script(
        script("""
        session.begin_call("fit", "")
        formed = enter(-1)
        finished = 7 - (job.rank == 0)
        def regroup():
            again = enter(finished)
            tell(view=again.view, donor=again.donor, finished=again.finished, call=again.call,
                 incarnations=again.incarnations)
        session.regroup_through(regroup)
        if first and job.rank == 2:
            die()
        if not first:
            tell(view=formed.view, donor=formed.donor, finished=formed.finished, call=formed.call,
                 incarnations=formed.incarnations)
        session.begin_call("save", "")
        """),
        workers=4,
    )
    assert succeeded(done)
    expected = {"view": 2, "donor": 1, "finished": 7, "call": 1, "incarnations": [0, 0, 1, 0]}
    assert [told(tmp_path, rank, int(rank == 2)) for rank in range(4)] == [expected] * 4
    assert [(e["view"], e["donor"]) for e in of_kind(done, "view-formed")] == [(1, -1), (2, 1)]


def test_a_rank_that_waits_at_the_end_of_its_script_is_fetched_too(launch_script: Launch) -> None:
    done = launch_script(
        script("""
        session.begin_call("fit", "")
        enter(-1)
        session.regroup_through(lambda: enter(3))
        if first and job.rank == 1:
            die()
        """),
        workers=2,
    )
    assert succeeded(done)
    assert [e["donor"] for e in of_kind(done, "view-formed")] == [-1, 0]


def test_all_workers_killed_at_once_come_back_to_a_view_without_a_donor(
    launch_script: Launch, tmp_path: Path
) -> None:
    done = launch_script(
        script("""
        session.begin_call("fit", "")
        formed = enter(-1)
        tell(view=formed.view, donor=formed.donor, finished=formed.finished)
        if first:
            pathlib.Path(f"here-{job.rank}").touch()
            while len(list(pathlib.Path(".").glob("here-*"))) < 2:
                time.sleep(0.01)
            die()
        """),
        workers=2,
    )
    assert succeeded(done)
    assert told(tmp_path, 0, 1) == told(tmp_path, 1, 1) == {"view": 2, "donor": -1, "finished": -1}
    assert done.summary["restarts"] == 2


def test_a_stopped_worker_is_killed_when_its_time_at_a_call_is_over_and_replaced(
    launch_script: Launch,
) -> None:
    done = launch_script(
        script("""
        session.begin_call("fit", "")
        if first and job.rank == 1:
            die(signal.SIGSTOP)
        session.begin_call("save", "")
        """),
        workers=2,
        join_timeout_s=2.0,
        step_timeout_s=2.0,
    )
    assert succeeded(done)
    [suspect] = killed_for_it(done)
    assert (suspect["rank"], suspect["incarnation"]) == (1, 0)
    assert suspect["waited_s"] >= 4.0
    assert "at call 2 (save)" in suspect["why"]


def test_a_stopped_worker_is_killed_when_the_others_have_left_its_view(launch_script: Launch) -> None:
    done = launch_script(
        script("""
        session.begin_call("fit", "")
        enter(-1)
        if first and job.rank == 1:
            die(signal.SIGSTOP)
        if first:
            enter(5)  # its exchange took too long
        session.regroup_through(lambda: enter(5))
        """),
        workers=3,
        step_timeout_s=3.0,
    )
    assert succeeded(done)
    [suspect] = killed_for_it(done)
    assert suspect["rank"] == 1
    assert "to enter view 2" in suspect["why"]


def test_a_survivor_that_is_at_work_is_not_killed_because_a_replacement_waits_for_it(
    launch_script: Launch,
) -> None:
    done = launch_script(
        script("""
        session.begin_call("fit", "")
        enter(-1)
        session.regroup_through(lambda: enter(0))
        if first and job.rank == 1:
            die()
        if job.rank == 0:
            time.sleep(2.0)  # between two calls: work of its own
        session.begin_call("save", "")
        """),
        workers=2,
        step_timeout_s=0.5,
    )
    assert succeeded(done)
    assert done.summary["restarts"] == 1
    suspects = of_kind(done, "suspect")
    assert suspects
    assert not any(event["killed"] for event in suspects)


def test_without_restarts_a_worker_that_does_not_come_ends_the_wait_by_name(launch_script: Launch) -> None:
    done = launch_script(
        script("""
        if job.rank == 1:
            print("about to sleep")
            time.sleep(600)
        session.begin_call("fit", "")
        """),
        workers=2,
        join_timeout_s=3.0,
        max_restarts=0,
    )
    assert isinstance(done.error, WaitTimedOut)
    assert str(done.error).endswith("\nLast lines of rank 1:\n  about to sleep")


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_rank_that_never_joins_is_named_or_replaced(launch_script: Launch, max_restarts: int) -> None:
    done = launch_script(
        script("session.begin_call('fit', '')"),
        workers=2,
        join_timeout_s=3.0,
        step_timeout_s=3.0,
        max_restarts=max_restarts,
        faults=Faults().pause("worker-1", at="worker: not joined"),
    )
    if max_restarts:
        assert succeeded(done)
        assert of_kind(done, "suspect")[0]["why"].endswith("for rank 1 (never joined) at call 1 (fit)")
    else:
        assert isinstance(done.error, WaitTimedOut)
        assert done.error.missing == ["rank 1 (never joined)"]


def test_asked_to_leave_while_a_replacement_catches_up_all_leave_together(
    launch_script: Launch, at_file: Callable[[Path, Callable[[], object]], None], tmp_path: Path
) -> None:
    at_file(tmp_path / "replaced", lambda: os.kill(os.getpid(), signal.SIGINT))
    done = launch_script(
        script("""
        session.begin_call("fit", "")
        if job.rank == 1:
            if first:
                die()
            pathlib.Path("replaced").touch()
            while not pathlib.Path("asked").exists():
                time.sleep(0.01)
            assert session.stop_requested() is None  # it would only have broken off
            session.live()
        while session.stop_requested() is None:
            time.sleep(0.01)
        pathlib.Path("asked").touch()
        raise KeyboardInterrupt
        """),
        workers=2,
        grace_s=30.0,
    )
    assert isinstance(done.error, Interrupted)
    assert "did not leave in time" not in str(done.error)
    assert done.exit_code == 130


def test_a_script_that_is_too_slow_again_and_again_ends_the_job_with_the_setting_to_raise(
    launch_script: Launch,
) -> None:
    done = launch_script(
        script("""
        if job.rank == 1:
            time.sleep(600)
        session.begin_call("fit", "")
        """),
        workers=2,
        join_timeout_s=0.2,
        step_timeout_s=0.2,
        max_restarts=1,
    )
    assert isinstance(done.error, WorkerDied)
    assert "2 times" in str(done.error)
    assert "raise --step-timeout, or join_timeout_s of shoal.run" in str(done.error)


def test_a_crash_loop_ends_the_job_and_says_how_often_it_died(launch_script: Launch) -> None:
    done = launch_script("import os\nos.abort()\n", workers=2, max_restarts=2)
    assert isinstance(done.error, WorkerDied)
    assert "SIGABRT 3 times without the job getting ahead" in str(done.error)


def test_deaths_are_forgiven_as_long_as_the_job_gets_ahead(launch_script: Launch) -> None:
    done = launch_script(
        script("""
        session.live()
        step = job.incarnation + 1
        session.report(phase="fit", epoch=1, num_epochs=1, step=step, num_steps=9, loss=None, metrics={}, samples=1,
                       samples_per_s=1.0, eta_s=None)
        if job.incarnation < 6:
            die()
        """),
        max_restarts=1,
    )
    assert succeeded(done)
    assert done.summary["restarts"] == 6


def test_a_users_exception_is_not_retried(launch_script: Launch) -> None:
    done = launch_script("raise ValueError('mine')", workers=2)
    assert isinstance(done.error, ScriptFailed)
    assert done.summary["restarts"] == 0


@pytest.mark.parametrize("before_its_last_word", [True, False])
def test_killed_after_the_end_of_every_script_a_job_has_ended_well(
    launch_script: Launch, before_its_last_word: bool
) -> None:
    done = launch_script(
        script(f"""
        import atexit
        if first and job.rank == 1:
            if {before_its_last_word}:
                session.finished = die
            else:
                atexit.register(die)
        """),
        workers=2,
    )
    assert succeeded(done)


# ---- the coordinator ------------------------------------------------------------------------------

MOMENTS = {
    "between calls": """
        session.begin_call("fit", "")
        if job.rank == 0:
            kill_coordinator()
        session.begin_call("save", "")
        """,
    "while the others wait at a call": """
        session.begin_call("fit", "")
        if job.rank == 0:
            time.sleep(0.2)
            kill_coordinator()
        session.begin_call("save", "")
        """,
    "while nobody asks anything": """
        session.begin_call("fit", "")
        if job.rank == 0:
            kill_coordinator()
            time.sleep(0.5)
        """,
    "again and again": """
        for number in range(8):
            session.begin_call("fit", str(number))
            if job.rank == number % 3:
                kill_coordinator()
            time.sleep(0.2 if job.rank == 0 else 0)
        """,
    "while the others wait for a view": """
        session.begin_call("fit", "")
        if job.rank == 0:
            time.sleep(0.2)
            kill_coordinator()
        assert enter(-1).view == 1
        """,
    "while a group is formed": """
        from shoal.recovery import rendezvous
        import torch
        session.begin_call("fit", "")
        formed = enter(-1)
        if job.rank == 0:
            time.sleep(0.2)  # the others wait for it
            kill_coordinator()
        rendezvous.form_group(job, formed.view)
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        assert value.item() == 3
        rendezvous.leave_group()
        """,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_coordinator_comes_back_and_no_worker_notices(launch_script: Launch, moment: str) -> None:
    done = launch_script(script(MOMENTS[moment]), workers=3)
    assert succeeded(done)
    assert done.summary["restarts"] == 0
    assert of_kind(done, "coordinator-restarted")
    assert all(event["after_s"] < 20.0 for event in of_kind(done, "coordinator-serves-again"))


def test_a_coordinator_killed_before_anybody_has_joined_comes_back(
    launch_script: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker = Supervisor._start_worker

    def kill_coordinator_first(supervisor: Supervisor, rank: int, incarnation: int = 0) -> None:
        if rank == 0:
            coordinator = psutil.Process(supervisor._coordinator.pid)
            coordinator.kill()
            assert wait_until(lambda: not coordinator.is_running())
        start_worker(supervisor, rank, incarnation)

    monkeypatch.setattr(Supervisor, "_start_worker", kill_coordinator_first)
    done = launch_script(script("session.begin_call('fit', '')"), workers=2)
    assert succeeded(done)
    assert len(of_kind(done, "coordinator-restarted")) == 1


def test_what_was_granted_before_the_coordinator_died_is_granted_to_a_replacement_after(
    launch_script: Launch,
) -> None:
    done = launch_script(
        script("""
        for number in range(5):
            session.begin_call("fit", str(number))
        if first and job.rank == 1:
            kill_coordinator()
            die()
        session.begin_call("save", "")
        """),
        workers=2,
    )
    assert succeeded(done)
    assert done.summary["restarts"] == 1


def test_a_stopped_coordinator_is_replaced(launch_script: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    liveness = LivenessConfig(heartbeat_interval_s=0.1, coordinator_dead_after_s=1.0)
    monkeypatch.setattr(LaunchConfig, "liveness", liveness)
    done = launch_script(
        script("""
        session.begin_call("fit", "")
        if job.rank == 0:
            coordinator().suspend()
        session.begin_call("save", "")
        """),
        workers=2,
    )
    assert succeeded(done)
    assert len(of_kind(done, "coordinator-restarted")) == 1


NOISE = {
    "noise": repr(random.Random(3).randbytes(4000)),
    "a header of four gigabytes": "struct.pack('<4sHHII', b'SHOL', 1, 0, 2**32 - 1, 0)",
    "a frame of 2**63 bytes": "struct.pack('<4sHHIIQ', b'SHOL', 1, 1, 10, 0, 2**63)",
    "another protocol": "b'GET / HTTP/1.1\\r\\n\\r\\n'",
    "an order that is not a worker's to give": "b''.join(codec.encode(Watch()))",
    "a death that a worker reports": "b''.join(codec.encode(Reaped(0, 0, -9)))",
}


def test_bytes_that_are_no_message_close_their_own_connection_while_the_job_runs(
    launch_script: Launch,
) -> None:
    done = launch_script(
        script(f"""
        import struct
        from shoal.runtime.transport import framing as codec; from shoal.runtime.transport import unix
        from shoal.runtime.transport.messages.supervisor import Reaped, Watch
        session.begin_call("fit", "")
        if job.rank == 0:
            for noise in [{", ".join(NOISE.values())}]:
                for _ in range(20):
                    with unix.connect(job.coordinator, timeout_s=5.0) as sock:
                        sock.sendall(noise)
                        try:
                            assert sock.recv(1) == b"", noise[:100]
                        except ConnectionResetError:
                            pass
        session.begin_call("save", "")
        """),
        workers=2,
    )
    assert succeeded(done)
    assert len(of_kind(done, "coordinator-exited")) == 1  # at the end, and of itself


def test_a_journal_that_takes_no_more_ends_the_job_in_one_paragraph(launch_script: Launch) -> None:
    done = launch_script(
        script("""
        session.begin_call("fit", "")
        if job.rank == 0:
            # As a full disk: the file cannot grow any more.
            coordinator().rlimit(psutil.RLIMIT_FSIZE, (16384, 16384))
        for number in range(1000):
            session.begin_call("fit", f"{number} " + 100 * "x")
        """),
        workers=2,
    )
    assert isinstance(done.error, ClusterError)
    assert "the coordinator cannot go on with its journal" in str(done.error)
    assert "Checkpoints written so far are whole" in str(done.error)
    assert done.exit_code == 3


def test_a_journal_that_is_damaged_while_the_coordinator_is_down_ends_the_job_in_one_paragraph(
    launch_script: Launch,
) -> None:
    done = launch_script(
        script("""
        session.begin_call("fit", "")
        if job.rank == 0:
            os.kill(psutil.Process().ppid(), signal.SIGSTOP)  # nobody starts it again yet
            kill_coordinator()
            for path in job.run_dir.glob("journal.sqlite*"):
                path.write_bytes(b"nothing of the kind" * 1000)
            os.kill(psutil.Process().ppid(), signal.SIGCONT)
        session.begin_call("save", "")
        """),
        workers=2,
    )
    assert isinstance(done.error, ClusterError)
    assert "the coordinator cannot go on with its journal" in str(done.error)


# ---- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [3, *matrix_only(2, 4)])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_group_is_left_at_once_whatever_became_of_the_others(
    launch_script: Launch, tmp_path: Path, workers: int, signum: signal.Signals
) -> None:
    done = launch_script(
        script(f"""
        import torch
        import torch.distributed as dist
        from shoal.recovery import rendezvous
        if not first:
            time.sleep(600)
        session.begin_call("fit", "")
        rendezvous.group()
        dist.all_reduce(torch.ones(1 << 16))
        pathlib.Path(f"through-{{job.rank}}").touch()
        if job.rank == 1:
            while len(list(pathlib.Path(".").glob("through-*"))) < job.num_workers:
                time.sleep(0.001)
            pathlib.Path("victim.new").write_text(str(os.getpid()))
            os.rename("victim.new", "victim")
            die({int(signum)})
        while not pathlib.Path("victim").exists():
            time.sleep(0.001)
        victim = int(pathlib.Path("victim").read_text())
        while not is_out(victim):
            time.sleep(0.001)
        works = [dist.all_reduce(torch.ones(1 << 16), async_op=True) for _ in range(4)]  # wait for nobody yet
        began = time.monotonic()
        rendezvous.leave_group()
        tell(seconds=time.monotonic() - began)
        while len(list(pathlib.Path(".").glob("told-*"))) < job.num_workers - 1:
            time.sleep(0.01)
        raise RuntimeError("measured")
        """),
        workers=workers,
        max_restarts=0 if signum == signal.SIGSTOP else 1,
        step_timeout_s=60.0,
    )
    assert "measured" in str(done.error)
    times = [told(tmp_path, rank)["seconds"] for rank in range(workers) if rank != 1]
    assert max(times) < 30.0  # milliseconds; and the time-out is 60 s


def test_a_rank_that_dies_while_a_group_is_formed_costs_no_time_out(launch_script: Launch) -> None:
    done = launch_script(
        script("""
        import torch
        from shoal.recovery import rendezvous
        from shoal.errors import PeerLost
        session.begin_call("fit", "")
        while True:
            formed = enter(-1)
            if first and job.rank == 1:
                rendezvous._open_store(job, formed.view)  # the others see it come
                die()
            try:
                rendezvous.form_group(job, formed.view)
                break
            except PeerLost:
                pass
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        assert value.item() == 3
        rendezvous.leave_group()
        """),
        workers=3,
        step_timeout_s=60.0,
    )
    assert succeeded(done)
    assert [event["view"] for event in of_kind(done, "view-formed")] == [1, 2]
    assert done.events[-1]["monotonic"] - of_kind(done, "worker-replaced")[0]["monotonic"] < 50.0


# ---- the supervisor -------------------------------------------------------------------------------


def test_a_damaged_journal_of_an_ended_run_is_refused_before_anything_starts(
    launch_script: Launch, tmp_path: Path
) -> None:
    done = launch_script("", name="mine")
    (done.run_dir / "journal.sqlite").write_bytes(b"no database" * 500)
    summary = done.summary
    with pytest.raises(RunDirectoryError, match="move it away and go on with `shoal resume`"):
        launch_script("", name="mine", resume=True)
    assert done.summary == summary
    (done.run_dir / "journal.sqlite").unlink()
    assert launch_script("", name="mine", resume=True).exit_code == 0


def test_a_job_whose_supervisor_was_killed_goes_on_from_its_newest_checkpoint_to_the_same_bits(
    launch_script: Launch, supervisor_process: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    source = """
    import pathlib, sys, time
    import torch, shoal
    from torch import nn
    torch.manual_seed(0)
    x = torch.randn(96, 4)
    data = shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True)))
    class Wait(shoal.callbacks.Callback):
        def on_step_end(self, trainer, *rest):
            if trainer.step == 9 and pathlib.Path("wait").exists():
                pathlib.Path("now").touch()
                time.sleep(600)
    trainer = shoal.Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)), loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
        callbacks=[shoal.callbacks.ModelCheckpoint(every_steps=4), Wait()], seed=0,
    )
    trainer.fit(data.shuffle(seed=0).batch(16), epochs=3)
    if shoal.rank() == 0:
        weights = {name: value.tolist() for name, value in trainer.model.state_dict().items()}
        pathlib.Path(sys.argv[1]).write_text(repr(weights))
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(source))
    whole = launch_script(tmp_path / "script.py", workers=2, args=("whole",), name="whole")
    assert succeeded(whole)
    (tmp_path / "wait").touch()
    supervisor = supervisor_process(
        tmp_path / "script.py", workers=2, args=("cut",), name="cut", seed=0, quiet=True
    )
    assert wait_until((tmp_path / "now").exists)
    children = psutil.Process(supervisor.pid).children(recursive=True)
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    assert wait_until(lambda: not any(child.is_running() for child in children))
    (tmp_path / "wait").unlink()
    config = resume_config(tmp_path / "runs" / "cut")
    done = launch_script(
        Path(config.script), workers=2, args=config.args, name="cut", resume=True, seed=config.seed
    )
    assert succeeded(done)
    assert "step 8," in done.stderr
    assert (tmp_path / "cut").read_text() == (tmp_path / "whole").read_text()


def test_two_supervisors_on_one_run_directory_are_one_too_many(
    launch_script: Launch, supervisor_process: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    supervisor_process(
        f"import pathlib, time\npathlib.Path({str(tmp_path / 'now')!r}).touch()\ntime.sleep(600)", name="mine"
    )
    assert wait_until((tmp_path / "now").exists)
    with pytest.raises(RunDirectoryError, match="is still alive"):
        launch(resume_config(tmp_path / "runs" / "mine"))
