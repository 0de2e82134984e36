"""What is looked at of real runs: sweeps, baselines, profiles, stacks."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched
from typer.testing import CliRunner, Result

from shoal.cli import app
from shoal.cli.inspect.stack import _spy
from waiting import wait_until

Invoke = Callable[..., Result]
Launch = Callable[..., Launched]

pytestmark = pytest.mark.timeout(240)  # each run that is measured is a process that imports torch

SCRIPT = """
import os, sys, time, torch, shoal
from torch import nn

if os.path.exists("refuse"):
    sys.exit("the table is already filled")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
trainer = shoal.Trainer(model, loss=nn.CrossEntropyLoss(), seed=0,
                        optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
data = shoal.Dataset.from_arrays((torch.randn(256, 8), torch.arange(256) % 2))
trainer.fit(data.batch(32), epochs=int(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_sweep_measures_each_number_of_workers_and_draws_it(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    shown = invoke("bench", "scale", "train.py", "-n", "1,2", "--seconds", "1", "--", "10000")
    assert shown.exit_code == 0, shown.output
    folder = tmp_path / "runs" / "train-scale"
    found = json.loads((folder / "scale.json").read_text())
    assert [(line["workers"], line["strategy"]) for line in found["sweep"]] == [(1, "single"), (2, "ddp")]
    assert all(line["samples_per_s"] > 0 for line in found["sweep"])
    first, second = found["sweep"]
    assert second["speedup"] == pytest.approx(second["samples_per_s"] / first["samples_per_s"])
    assert found["advice"] in shown.output
    assert "<svg" in (folder / "scale.html").read_text()
    assert json.loads((folder / "n2" / "config.json").read_text())["args"] == ["10000"]


def test_a_baseline_is_measured_once_and_one_that_fails_leaves_the_run_as_it_was(
    launch_script: Launch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = launch_script(tmp_path / "train.py", args=("60",), workers=2, name="click").run_dir
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    (tmp_path / "refuse").touch()  # as a script does that cannot be run twice
    asked = ["report", str(run), "--baseline", "--baseline-seconds", "1"]
    failed = CliRunner().invoke(app, asked)
    assert failed.exit_code != 0
    said = " ".join(failed.output.split())
    assert "could not be measured with 1 worker" in said
    assert "the table is already filled" in said
    assert before == {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}

    (tmp_path / "refuse").unlink()
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    scaling = json.loads((run / "report.json").read_text())["scaling"]
    assert scaling["baseline"] == "click-baseline"
    assert scaling["speedup"] == pytest.approx(2 * scaling["efficiency"])
    config = json.loads((run.with_name("click-baseline") / "config.json").read_text())
    assert (config["workers"], config["args"]) == (1, ["60"])

    again = CliRunner().invoke(app, asked)
    assert "measuring one worker" not in again.output
    assert json.loads((run / "report.json").read_text())["scaling"] == scaling


def test_a_profile_of_some_steps_of_every_worker_is_in_the_timeline(
    launch_script: Launch, tmp_path: Path
) -> None:
    done = launch_script(SCRIPT, args=("3",), workers=2, profile=4)
    assert done.exit_code == 0, done.stderr
    for rank in range(2):
        with gzip.open(done.run_dir / "trace" / f"worker-{rank}.0.profile.json.gz", "rt") as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert "aten::linear" in names
    traced = CliRunner().invoke(app, ["trace", str(done.run_dir)])
    assert traced.exit_code == 0, traced.output
    events = json.loads((done.run_dir / "trace.json").read_text())["traceEvents"]
    profiled = {event["pid"] for event in events if event.get("name") == "aten::linear"}
    spans = {event["pid"] for event in events if event.get("name") == "compute"}
    assert len(profiled) == len(spans) == 2


HANGS = (
    SCRIPT
    + """

def waits_for_good():
    open(f"here-{shoal.rank()}", "w").close()
    time.sleep(600)

waits_for_good()
"""
)


def test_stacks_of_a_job_that_hangs_name_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := _no_ptrace()) is not None:
        pytest.skip(f"py-spy cannot look at another process here: {reason}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(HANGS)
    command = [
        sys.executable,
        "-m",
        "shoal",
        "run",
        "-n",
        "2",
        "--oversubscribe",
        "--grace",
        "1",
        "--name",
        "hangs",
        "train.py",
        "1",
    ]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: all((tmp_path / f"here-{rank}").exists() for rank in range(2)), 120)
        shown = CliRunner().invoke(app, ["stack", "hangs"])
        assert shown.exit_code == 0, shown.output
        assert shown.output.count("waits_for_good") == 2
        assert "== coordinator, process" in shown.output
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait(90)


def _no_ptrace() -> str | None:
    """Why py-spy cannot attach; None where it can."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        done = subprocess.run(
            [*_spy(), "dump", "--pid", str(child.pid)], capture_output=True, text=True, check=False
        )
        return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    finally:
        child.kill()
        child.communicate()
