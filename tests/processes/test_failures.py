"""Whatever goes wrong in a job is told once, by its first cause, and nothing of the job is left."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launched import Launched

from shoal.cluster.launch.api import LaunchConfig, launch
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.errors import (
    CallsDiffer,
    ClusterError,
    NonFiniteLoss,
    PeerLost,
    RunDirectoryError,
    ScriptFailed,
    ScriptNotFound,
    UnknownStrategy,
    WorkerDied,
)

Launch = Callable[..., Launched]
AtFile = Callable[[Path, Callable[[], object]], None]

WAIT = "import time\ntime.sleep(600)\n"


def test_a_missing_script_is_refused_before_anything_starts(launch_script: Launch, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(ScriptNotFound, match=r"Did you mean '.*train\.py'") as refused:
        launch_script(tmp_path / "tarin.py")
    assert refused.value.guess == str(tmp_path / "train.py")
    assert not (tmp_path / "runs").exists()


def test_an_unknown_strategy_is_refused_with_a_guess(launch_script: Launch, tmp_path: Path) -> None:
    with pytest.raises(UnknownStrategy, match="Did you mean 'ddp'"):
        launch_script("", workers=2, strategy="ddpp")
    assert not (tmp_path / "runs").exists()


def test_the_users_traceback_begins_at_the_users_script(launch_script: Launch, tmp_path: Path) -> None:
    done = launch_script("def f():\n    raise ValueError('mine')\nf()\n", workers=2)
    assert done.exit_code == 1
    assert isinstance(done.error, ScriptFailed)
    script = tmp_path / "script.py"
    assert done.error.traceback == (
        "Traceback (most recent call last):\n"
        f'  File "{script}", line 3, in <module>\n    f()\n'
        f"  File \"{script}\", line 2, in f\n    raise ValueError('mine')\n"
        "ValueError: mine\n"
    )
    assert "ValueError: mine" in done.log(done.error.rank)
    assert "Traceback" not in done.stdout + done.stderr  # whoever launched shows it, once


def test_a_syntax_error_shows_its_line_and_nothing_of_the_launcher(
    launch_script: Launch, tmp_path: Path
) -> None:
    with pytest.raises(ScriptFailed) as failed:
        launch_script("def f(:\n", workers=2)
    assert failed.value.exit_code == 1
    assert failed.value.traceback.startswith(f'  File "{tmp_path / "script.py"}", line 1\n')
    assert failed.value.traceback.endswith("SyntaxError: invalid syntax\n")
    assert not (tmp_path / "runs").exists()


def test_a_failure_on_one_rank_ends_the_others_wherever_they_wait(launch_script: Launch) -> None:
    done = launch_script(
        """
        import shoal
        from shoal.cluster.worker import session
        if shoal.rank() == 2:
            raise RuntimeError("only here")
        session.begin_call("fit", "")
        """,
        workers=3,
    )
    assert isinstance(done.error, ScriptFailed)
    assert done.error.rank == 2
    assert "RuntimeError: only here" in str(done.error)
    assert done.exit_code == 1


def test_an_error_of_shoals_is_a_paragraph_with_its_facts(launch_script: Launch) -> None:
    done = launch_script(
        """
        from shoal.errors import NonFiniteLoss
        raise NonFiniteLoss(rank=1, step=7, value=float("inf"), samples=[3, 4], checkpoint=None)
        """,
        workers=2,
    )
    assert isinstance(done.error, NonFiniteLoss)
    assert (done.error.step, done.error.samples, done.exit_code) == (7, [3, 4], 3)
    assert "Traceback" not in str(done.error)
    assert "Traceback" in done.log(0)


def test_the_first_cause_beats_the_broken_exchange_it_leads_to(launch_script: Launch) -> None:
    done = launch_script(
        """
        import pathlib, time, shoal
        from shoal.errors import PeerLost
        if shoal.rank() == 0:
            pathlib.Path("broken").touch()
            try:
                raise PeerLost(rank=0, operation="the exchange of step 3", reason="connection reset")
            except PeerLost as lost:
                raise RuntimeError("training failed") from lost
        while not pathlib.Path("broken").exists():
            pass
        time.sleep(0.3)
        raise KeyError("the cause")
        """,
        workers=2,
    )
    assert isinstance(done.error, ScriptFailed)
    assert "KeyError: 'the cause'" in str(done.error)


def test_a_broken_exchange_nobody_explains_is_reported_itself(launch_script: Launch) -> None:
    done = launch_script(
        """
        from shoal.errors import PeerLost
        raise PeerLost(rank=0, operation="the exchange of step 3", reason="connection reset")
        """
    )
    assert isinstance(done.error, PeerLost)
    assert done.exit_code == 3


def test_a_killed_worker_is_named_with_its_step_and_last_words(launch_script: Launch) -> None:
    done = launch_script(
        """
        import os, signal, time, shoal
        from shoal.cluster.worker import session
        session.begin_call("fit", "")
        session.report(phase="fit", epoch=1, num_epochs=1, step=30, num_steps=99, loss=0.5, metrics={}, samples=30,
                       samples_per_s=1.0, eta_s=None)
        session.saved("runs/x/step-20", 20)
        if shoal.rank() == 1:
            print("last words")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """,
        workers=2,
        max_restarts=0,
    )
    assert isinstance(done.error, WorkerDied)
    assert (done.error.rank, done.error.how, done.error.step) == (1, "was killed by SIGKILL", 30)
    assert (done.error.checkpoint, done.error.log) == ("runs/x/step-20", ["last words"])
    assert "shoal resume" in str(done.error)
    assert (done.exit_code, done.summary["exit"], done.summary["steps"]) == (3, 3, 30)


@pytest.mark.parametrize("code", [0, 9])
def test_a_worker_that_steals_away_is_a_worker_that_died(launch_script: Launch, code: int) -> None:
    done = launch_script(f"import os\nos._exit({code})", workers=2)
    assert isinstance(done.error, WorkerDied)
    assert f"ended with exit code {code} before the end of its script" in str(done.error)


def test_a_script_that_crashes_python_shows_where(launch_script: Launch) -> None:
    done = launch_script("import ctypes\nctypes.string_at(0)\n")
    assert isinstance(done.error, WorkerDied)
    assert "SIGSEGV" in done.error.how
    assert any("script.py" in line for line in done.error.log)


def test_ranks_that_call_in_different_order_hear_who_called_what(launch_script: Launch) -> None:
    done = launch_script(
        """
        import shoal
        from shoal.cluster.worker import session
        session.begin_call("fit" if shoal.rank() == 0 else "evaluate", "")
        """,
        workers=2,
    )
    assert isinstance(done.error, CallsDiffer)
    assert "rank 0" in str(done.error)
    assert "evaluate" in str(done.error)


def test_a_coordinator_that_cannot_stay_alive_ends_the_job_by_its_name(launch_script: Launch) -> None:
    done = launch_script(
        """
        import contextlib, psutil
        while True:
            for process in psutil.Process().parent().children():
                with contextlib.suppress(psutil.Error):
                    if "".join(process.cmdline()).startswith("shoal coordinator"):
                        process.kill()
        """
    )
    assert isinstance(done.error, ClusterError)
    assert "the coordinator was killed by SIGKILL" in str(done.error)


def test_a_killed_warm_parent_takes_its_children_and_is_named(tmp_path: Path, at_file: AtFile) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'now')!r}).touch()\n{WAIT}")
    # In a thread that ends: the kernel tells a child of that as if its parent had died.
    started: list[WarmParent] = []
    thread = threading.Thread(target=lambda: started.append(WarmParent()))
    thread.start()
    thread.join()
    with started[0] as warm:
        at_file(tmp_path / "now", lambda: os.kill(warm.pid, signal.SIGKILL))
        config = LaunchConfig(script=str(script), workers=2, run_dir=str(tmp_path / "runs"), quiet=True)
        result = launch(config, warm=warm)
        assert not psutil.pid_exists(warm.pid)
    assert isinstance(result.error, ClusterError)
    assert "was killed by SIGKILL" in str(result.error)
    assert result.summary["exit"] == 3


def test_a_run_directory_of_another_job_or_of_a_live_one_is_refused(
    launch_script: Launch, tmp_path: Path
) -> None:
    other = tmp_path / "other.py"
    other.touch()
    assert launch_script("print('mine')", name="mine").exit_code == 0
    with pytest.raises(RunDirectoryError, match="there is a run"):
        launch_script(other, name="mine")
    with pytest.raises(RunDirectoryError, match="another job"):
        launch_script(other, name="mine", resume=True)
    assert launch_script("print('mine again')", name="mine", again=True).stdout == "mine again\n"
    inner = launch_script(
        """
        import sys
        from shoal.cluster.launch.api import LaunchConfig, launch
        from shoal.errors import RunDirectoryError
        try:
            launch(LaunchConfig(script="script.py", name="mine"))
        except RunDirectoryError as error:
            print(error)
        """,
        name="mine",
        overwrite=True,
    )
    assert "is still alive" in inner.stdout


def test_a_death_by_a_real_time_signal_is_named_and_the_worker_replaced(launch_script: Launch) -> None:
    done = launch_script(
        """
        import os, shoal
        from pathlib import Path
        if shoal.rank() == 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), 40)
        """,
        workers=3,
    )
    assert done.exit_code == 0, done.error
    assert "worker 1 was killed by SIGRTMIN+6" in done.stderr


def test_a_run_directory_removed_under_a_job_restarts_nothing_while_it_ends(
    launch_script: Launch, tmp_path: Path
) -> None:
    done = launch_script(
        """
        import os, shoal, shutil, signal
        from pathlib import Path
        with open("started", "a") as file:
            print(shoal.rank(), file=file)
        if shoal.rank() == 1:
            shutil.rmtree("runs", ignore_errors=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        workers=3,
        max_restarts=2,
    )
    assert isinstance(done.error, WorkerDied)
    assert done.exit_code == 3
    assert "3 times without the job getting ahead" in str(done.error)
    assert (tmp_path / "started").read_text().split().count("1") == 3
    assert "Traceback" not in done.stderr
