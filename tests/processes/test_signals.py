"""Asked once, a job finishes its step, saves and leaves; asked twice, it leaves now; and a killed one leaves nothing."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launched import Launched

from shoal.cluster.launch.api import LaunchConfig, RunResult, launch, resume_config
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.errors import Interrupted
from waiting import wait_until

Launch = Callable[..., Launched]
AtFile = Callable[[Path, Callable[[], object]], None]

ONCE = "finishing the step and saving; Ctrl-C again to leave now"

TRAINING = """
    import pathlib, time, shoal
    from shoal.cluster.worker import session
    from shoal.errors import Interrupted
    session.begin_call("fit", "")
    step = 0
    while session.stop_requested() is None:
        step += 1
        pathlib.Path(f"at-work-{shoal.rank()}").touch()
        time.sleep(0.01)
    session.saved("checkpoints/last", step)
    raise Interrupted(signal_name=session.stop_requested(), step=step, checkpoint="checkpoints/last")
"""

DEAF = """
    import pathlib, time, shoal
    from shoal.cluster.worker import session
    session.begin_call("fit", "")
    pathlib.Path(f"deaf-{shoal.rank()}").touch()
    while len(list(pathlib.Path().glob("deaf-*"))) < 2:  # one that has not begun its call leaves at once
        time.sleep(0.01)
    pathlib.Path("at-work-1").touch()
    while True:
        time.sleep(0.01)
"""


def ask(signum: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_once_a_job_saves_and_leaves(
    launch_script: Launch, at_file: AtFile, tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    before = signal.getsignal(signum)
    at_file(tmp_path / "at-work-1", ask(signum))
    done = launch_script(TRAINING, workers=2)
    assert isinstance(done.error, Interrupted)
    assert (done.exit_code, done.summary["exit"]) == (code, code)
    assert (done.error.signal_name, done.error.checkpoint) == (signum.name, "checkpoints/last")
    assert "Go on with `shoal resume runs/script-1`" in str(done.error)
    assert done.stderr.count(ONCE) == 1
    assert "Traceback" not in done.stderr + str(done.error)
    assert signal.getsignal(signum) is before


def test_asked_twice_a_job_leaves_now(launch_script: Launch, at_file: AtFile, tmp_path: Path) -> None:
    asked_at: list[float] = []

    def ask_twice() -> None:
        asked_at.append(time.monotonic())
        ask(signal.SIGINT)()
        assert wait_until(lambda: "asked-to-leave" in (tmp_path / "runs/script-1/events.jsonl").read_text())
        ask(signal.SIGINT)()

    at_file(tmp_path / "at-work-1", ask_twice)
    done = launch_script(DEAF, workers=2)
    assert done.exit_code == 130
    assert time.monotonic() - asked_at[0] < 50.0  # the grace is 60 s


def test_a_job_that_does_not_leave_in_time_is_killed_and_says_who(
    launch_script: Launch, at_file: AtFile, tmp_path: Path
) -> None:
    at_file(tmp_path / "at-work-1", ask(signal.SIGTERM))
    done = launch_script(DEAF, workers=2, grace_s=0.3)
    assert done.exit_code == 143
    assert "Workers 0, 1 did not leave in time" in str(done.error)


def test_before_its_first_call_a_script_leaves_at_once(
    launch_script: Launch, at_file: AtFile, tmp_path: Path
) -> None:
    at_file(tmp_path / "loading-1", ask(signal.SIGINT))
    done = launch_script(
        """
        import pathlib, time, shoal
        pathlib.Path(f"loading-{shoal.rank()}").touch()
        time.sleep(600)
        """,
        workers=2,
    )
    assert isinstance(done.error, Interrupted)
    assert done.exit_code == 130


def test_a_rank_that_waits_for_another_at_a_call_leaves_at_once(
    launch_script: Launch, at_file: AtFile, tmp_path: Path
) -> None:
    at_file(tmp_path / "loading", ask(signal.SIGINT))
    done = launch_script(
        """
        import pathlib, time, shoal
        from shoal.cluster.worker import session
        if shoal.rank() == 1:
            pathlib.Path("loading").touch()
            time.sleep(600)
        session.begin_call("fit", "")
        """,
        workers=2,
    )
    assert isinstance(done.error, Interrupted)
    assert "did not leave in time" not in str(done.error)


def test_a_rank_that_comes_to_a_call_after_the_others_left_leaves_too(
    launch_script: Launch, at_file: AtFile, tmp_path: Path
) -> None:
    at_file(tmp_path / "between", ask(signal.SIGINT))
    done = launch_script(
        """
        import os, pathlib, time, shoal
        from shoal.cluster.worker import session
        session.begin_call("fit", "")
        if shoal.rank() == 1:
            pathlib.Path("between").touch()
            while session.stop_requested() is None:
                time.sleep(0.01)
            time.sleep(0.5)  # rank 0, which waits, is gone by now
        session.begin_call("evaluate", "")
        """,
        workers=2,
    )
    assert isinstance(done.error, Interrupted)
    assert "did not leave in time" not in str(done.error)


def test_ctrl_c_in_a_terminal_reaches_the_supervisor_alone(
    supervisor_process: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    keyboard, terminal = pty.openpty()
    try:
        process = supervisor_process(TRAINING, workers=2, terminal=terminal)
        assert wait_until((tmp_path / "at-work-1").exists), (tmp_path / "supervisor.log").read_text()
        os.write(keyboard, b"\x03")
        assert process.wait(60.0) == 130
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert (tmp_path / "supervisor.log").read_text().count(ONCE) == 1
    exits = [json.loads(line) for line in (tmp_path / "runs/script-1/events.jsonl").read_text().splitlines()]
    assert [event["code"] for event in exits if event["event"] == "worker-exited"] == [130, 130]


def test_a_worker_asked_by_somebody_else_takes_the_job_with_it(launch_script: Launch) -> None:
    done = launch_script(
        TRAINING.replace("step = 0", "step = 0; import os; shoal.rank() == 1 and os.kill(os.getpid(), 15)"),
        workers=2,
    )
    assert isinstance(done.error, Interrupted)
    assert done.exit_code == 143


def test_an_error_while_leaving_is_not_hidden(launch_script: Launch, at_file: AtFile, tmp_path: Path) -> None:
    at_file(tmp_path / "at-work-1", ask(signal.SIGINT))
    done = launch_script(TRAINING.replace("session.saved", "raise OSError('disk full') #"), workers=2)
    assert done.exit_code == 1
    assert "OSError: disk full" in str(done.error)


def test_ctrl_c_while_torch_is_imported_leaves_at_once(
    supervisor_process: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = supervisor_process("raise AssertionError('never')")
    assert wait_until((tmp_path / "runs/script-1/events.jsonl").exists, 20.0)
    assert wait_until(lambda: bool(psutil.Process(process.pid).children()), 20.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(60.0) == 130


def test_a_killed_supervisor_leaves_no_process(
    supervisor_process: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = supervisor_process(
        """
        import pathlib, subprocess, torch, shoal
        from torch.utils.data import DataLoader
        class AtWork(shoal.callbacks.Callback):
            ranks = "every"
            def on_step_end(self, trainer, logs):
                if logs.step == 3:
                    pathlib.Path(f"at-work-{shoal.rank()}").touch()
        loader = iter(DataLoader(list(range(1000)), num_workers=1))
        next(loader)
        subprocess.Popen(["sleep", "600"])
        x = torch.randn(64, 4)
        data = shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).repeat().batch(8)
        trainer = shoal.Trainer(torch.nn.Linear(4, 1), loss="mse", optimizer="sgd", lr=0.01, callbacks=[AtWork()])
        trainer.fit(data, max_steps=1_000_000_000)
        """,
        workers=2,
        servers=1,
        strategy="ps",
        name="mine",
    )
    for rank in range(2):
        assert wait_until((tmp_path / f"at-work-{rank}").exists), (tmp_path / "supervisor.log").read_text()
    # Without those that compile loops for the next start, which outlive their job.
    everybody = psutil.Process(process.pid).children(recursive=True)
    family = [each for each in everybody if "kernel_cache" not in "".join(each.cmdline())]
    # Warm parent, coordinator, a server, two workers, and of each worker a DataLoader worker and a `sleep`.
    assert len(family) >= 9
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=5.0)
    assert not alive
    again = resume_config(tmp_path / "runs" / "mine", workers=1)
    assert (again.resume, again.workers, again.script) == (True, 1, str(tmp_path / "script.py"))


PRINTS = """
    import time
    for number in range({num_mib}):
        print("x" * (1 << 20))
    time.sleep({then_s})
"""


def launch_into(stdout: int, warm_parent: WarmParent, folder: Path, script: str) -> RunResult:
    (folder / "script.py").write_text(textwrap.dedent(script))
    config = LaunchConfig(script=str(folder / "script.py"), run_dir=str(folder / "runs"), quiet=True)
    with open(stdout, "wb") as stream:
        return launch(config, warm=warm_parent, stdout=stream, stderr=io.BytesIO())


def has_read(folder: Path, num_mib: int) -> bool:
    """Whether the supervisor has read so much from its worker."""
    return wait_until(lambda: (folder / "runs/script-1/logs/worker-0.log").stat().st_size >= num_mib << 20)


@pytest.mark.parametrize(("num_mib", "num_read"), [(1, 1), (40, 16)])
def test_a_stdout_that_nobody_reads_does_not_keep_a_job_from_leaving(
    warm_parent: WarmParent,
    at_file: AtFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_mib: int,
    num_read: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    unread, stdout = os.pipe()

    def ask() -> None:
        if has_read(tmp_path, num_read):
            os.kill(os.getpid(), signal.SIGTERM)

    at_file(tmp_path / "runs/script-1/logs/worker-0.log", ask)
    try:
        done = launch_into(stdout, warm_parent, tmp_path, PRINTS.format(num_mib=num_mib, then_s=600))
    finally:
        os.close(unread)
    assert done.exit_code == 143, done.error


def test_a_stdout_that_is_read_late_loses_nothing(
    warm_parent: WarmParent, at_file: AtFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    late, stdout = os.pipe()
    received: list[bytes] = []

    def read_late() -> None:
        has_read(tmp_path, 16)
        with open(late, "rb") as stream:
            received.append(stream.read())

    at_file(tmp_path / "runs/script-1/logs/worker-0.log", read_late)
    done = launch_into(stdout, warm_parent, tmp_path, PRINTS.format(num_mib=40, then_s=0))
    assert done.exit_code == 0, done.error
    assert wait_until(lambda: bool(received))
    assert received[0] == (b"x" * (1 << 20) + b"\n") * 40
