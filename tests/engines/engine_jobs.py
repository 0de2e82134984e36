"""Jobs on engines: `shoal run --on`, and what came of it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from waiting import wait_until

_numbers = itertools.count()

TRAINING = Path(__file__).parent.parent / "hosts" / "training.py"


class EngineJob:
    """One `shoal run`, or another command of a launcher that runs a script of shoal."""

    def __init__(
        self, folder: Path, args: Sequence[str], env: dict[str, str], program: Sequence[str] = ()
    ) -> None:
        folder.mkdir()
        self.folder, self.name = folder, f"job-{os.getpid()}-{next(_numbers)}"
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*(program or (sys.executable, "-m", "shoal", "run", "--name", self.name)), *args],
                cwd=folder,
                env={**os.environ, **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        """All that was printed, in one line, and what the engine kept."""
        logs = [
            path.read_text(errors="replace")
            for path in self.folder.glob("runs/*/engine/*log*")
            if path.is_file()
        ]
        return " ".join("\n".join([(self.folder / "output").read_text(errors="replace"), *logs]).split())

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = []
        for path in self.folder.glob("runs/*/events.jsonl"):
            found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [each for each in found if each["event"] == kind]

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 180.0) -> None:
        wait_until(lambda: bool(condition()) or self.process.poll() is not None, timeout_s)
        assert condition(), self.output()

    def wait_for_gate(self, out: Path, num_workers: int) -> None:
        self.wait_for(lambda: all((out / f"at-gate-{rank}").exists() for rank in range(num_workers)))

    def wait(self, timeout_s: float = 180.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended: {self.output()}") from None

    def agent(self, host: int) -> psutil.Process:
        """Process of a host of the job."""
        title = f"shoal host-{host} [{self.name}]"
        found = [each for each in psutil.process_iter() if " ".join(_words(each)).strip() == title]
        assert len(found) == 1, f"{title}: {found}"
        return found[0]

    def slot(self, host: int) -> psutil.Process:
        """Process of the engine that has just begun to run `shoal join` for a host."""
        words = (f"{self.folder}/", f"--as-host {host}")
        found: list[psutil.Process] = []

        def is_there() -> bool:
            running = [
                each for each in psutil.process_iter() if all(w in " ".join(_words(each)) for w in words)
            ]
            found[:] = [parent for each in running if (parent := each.parent()) is not None]
            return bool(found)

        self.wait_for(is_there)
        return found[0]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def kill_host(agent: psutil.Process) -> None:
    """As a machine goes down: the agent and all that it started, at once."""
    processes = [agent, *agent.children(recursive=True)]
    for process in processes:
        process.suspend()
    for process in processes:
        process.kill()


def differences(one: Path, other: Path) -> list[str]:
    """Weights in which two runs of `training.py` differ, in any bit."""
    weights, others = torch.load(one / "weights.pt"), torch.load(other / "weights.pt")
    return [name for name in weights if not torch.equal(weights[name], others[name])]


def command_lines() -> str:
    return "\n".join(" ".join(_words(each)) for each in psutil.process_iter())


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


ROUNDS = Path(__file__).parent.parent / "processes" / "scripts" / "rounds.py"
IN_ROUNDS = ("-n", "2", "--strategy", "mapreduce", "--sync-every", "3", "--seed", "0")


def rounds_with_a_kill(start_job: Callable[..., EngineJob], out: Path, *options: str) -> dict[str, Any]:
    """Result of `rounds.py` under mapreduce on an engine, one of whose tasks is killed once."""
    job = start_job(*IN_ROUNDS, *options, str(ROUNDS), str(out), "kill")
    assert job.wait(360) == 0, job.output()
    assert out.with_suffix(".hit").exists()
    found: dict[str, Any] = torch.load(out)
    return found


def aggregate_on(engine: str, folder: Path) -> str:
    """Output of `aggregate_driver.py` on an engine, where all went well."""
    driver = Path(__file__).parent / "aggregate_driver.py"
    env = {"XDG_CACHE_HOME": str(folder / "cache")}
    job = EngineJob(folder, [engine], env, program=[sys.executable, str(driver)])
    try:
        assert job.wait(360) == 0, job.output()
    finally:
        job.close()
    said = job.output()
    assert "equal to the byte" in said
    assert "KeyError: 'txet' raised by map_reduce's map(misspelt) for the sample with index" in said
    assert f"raised by {engine}, at its last attempt, in the task 'map-0000" in said
    assert "cannot pickle '_thread.lock' object. Nothing was started" in said
    assert "gives hosts, and map-reduce runs tasks" in said
    assert "nothing left behind, and the session is there" in said
    return said
