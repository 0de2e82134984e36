"""`shoal jobs` for real: a killed runner finds its jobs again, a killed job goes on, a cancelled one leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from waiting import wait_until

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch import nn
import shoal
from shoal.train.calls import asked_to_leave

class Gate(shoal.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        while trainer.step > 4 and not Path(sys.argv[1]).exists() and asked_to_leave() is None:
            time.sleep(0.05)

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
trainer = shoal.Trainer(
    lambda: nn.Linear(4, 1), loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    callbacks=[Gate(), shoal.callbacks.ModelCheckpoint(every_steps=2)],
)
trainer.fit(shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).batch(8), max_steps=8)
print("weights", trainer.model.weight.tolist())
"""


class JobQueue:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)
        self.runners: list[subprocess.Popen[bytes]] = []

    def ask(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "shoal", "jobs", *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    def start_runner(self, *options: str) -> subprocess.Popen[bytes]:
        with (self.folder / "runner.log").open("ab") as log:
            runner = subprocess.Popen(
                [sys.executable, "-m", "shoal", "jobs", "run", *options], cwd=self.folder, stderr=log
            )
        self.runners.append(runner)
        return runner

    def said(self) -> str:
        logs = [self.folder / "runner.log", *sorted((self.folder / "runs/queue/logs").glob("*"))]
        return "\n".join(path.read_text() for path in logs if path.exists())

    def jobs(self) -> dict[int, dict[str, Any]]:
        _, found = self.ask("list", "--json")
        return {job["id"]: job for job in json.loads(found)}

    def supervisor(self, id: int) -> psutil.Process | None:
        title = f"shoal supervisor [job-{id}]"
        found = [each for each in psutil.process_iter() if title in " ".join(_words(each))]
        return found[0] if found else None

    def at_gate(self, id: int) -> bool:
        lines = self.folder / f"runs/queue/runs/job-{id}/metrics.jsonl"
        return lines.exists() and len(lines.read_text().splitlines()) >= 4

    def wait_for(self, condition: Any) -> None:
        assert wait_until(condition, 120), self.said()


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobQueue]:
    queue = JobQueue(tmp_path)
    yield queue
    for runner in queue.runners:
        if runner.poll() is None:
            runner.kill()
        runner.wait()
    for id in range(1, 5):
        if (supervisor := queue.supervisor(id)) is not None:
            supervisor.kill()


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.mark.timeout(300)
def test_jobs_outlive_a_killed_runner_and_a_killed_job_goes_on(queue: JobQueue) -> None:
    assert queue.ask("submit", "--", "none.py")[1].startswith("error: there is no script none.py")
    code, said = queue.ask("submit", "--cores", "640", "--", "train.py", "open")
    assert code == 2
    assert "it asks for 640 cores, and the queue has" in said
    for args in (("open",), ("open",), ("never",), ("open", "--bad")):
        assert queue.ask("submit", "--cores", "1", "--", "train.py", *args)[0] == 0
    runner = queue.start_runner("--cores", "3")
    queue.wait_for(lambda: all(queue.at_gate(id) for id in (1, 2, 3)))
    assert queue.jobs()[4]["note"] == "waits for 1 core to be free"
    code, said = queue.ask("run")
    assert code == 2
    assert f"has a runner already, process {runner.pid}" in said
    runner.kill()
    runner.wait()
    second = queue.supervisor(2)
    assert second is not None
    second.kill()  # with the runner gone, nobody sees it
    runner = queue.start_runner("--cores", "3", "--until-empty")
    queue.wait_for(lambda: "job 1 runs: found again" in queue.said() and "job 2 goes on" in queue.said())
    assert queue.ask("cancel", "3")[0] == 0
    (queue.folder / "open").touch()
    assert runner.wait(120) == 0, queue.said()
    states = {id: job["state"] for id, job in queue.jobs().items()}
    assert states == {1: "finished", 2: "finished", 3: "cancelled", 4: "finished"}, queue.said()
    weights = [
        line for line in queue.said().splitlines() if "weights" in line
    ]  # of jobs 1, 2 and 4: killed or not, the same bits
    assert len(weights) == 3
    assert len(set(weights)) == 1
    assert queue.ask("cancel", "1") == (2, "error: job 1 is over: finished. Nothing was changed.")
    assert os.listdir(queue.folder / "runs/queue/runs")
