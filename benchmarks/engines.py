"""The click model and ResNet-18 on engines of this machine against the same job without one, alternated; and hosts killed.

Needs the engines, so it runs in their environment: `.engines/bin/python -m benchmarks engines` after `make test-engines`; in
pieces by `--part kill`, `--part click`, `--part resnet18`, each `--minutes 6` at most (an engine alone: `--part kill:ray`).
Figures: times as fast as local (aim: at least 0.97), seconds from the command to the first committed step beside the
engine's own minimum (an empty actor, task or job step), and seconds from the kill of an actor, executor, slot or job
step to the next commit, with the weights compared with those of an undisturbed run here, bit by bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.click_model import write_data
from benchmarks.harness import Report, timed
from shoal.cluster.hosts.engine_hosts import own_address
from shoal.engines import registry
from shoal.errors import ConfigError

SCRIPT = Path(__file__).parent / "click_train.py"
RECOVERING = Path(__file__).parent / "scripts" / "recovering.py"
WORKERS = 2
RAY_PORT = 26479
WARM = 2.0
NUM_STEPS, KILL_AT = 240, 60
"""Of a run with a kill: its steps, and the one that is committed before the kill."""

MODELS = ("click", "resnet18")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Subject:
    """An engine as it is measured."""

    unit: str
    """What an empty one of is its minimum, and what is killed."""

    minimum: list[str]
    killed: str = ""
    """Words of the command line of the process to kill, among the parents of `shoal join`; empty: the slot itself."""

    kill_on: str = ""
    """What --on says where a slot is killed, if not the engine's name alone."""


ENGINES = {
    "mpi": Subject("slot", ["mpirun", "-n", "1", "true"]),
    "slurm": Subject("job step", ["srun", "-n", "1", "true"]),
    "ray": Subject(
        "actor",
        [
            sys.executable,
            "-c",
            "import ray; ray.init(logging_level='ERROR')\n"
            "@ray.remote\nclass A:\n  def f(self): return 1\n"
            "ray.get(A.remote().f.remote())",
        ],
        killed="ray::",
    ),
    "spark": Subject(
        "executor",
        [
            sys.executable,
            "-c",
            "from pyspark import SparkContext; c = SparkContext('local[1]')\n"
            "c.parallelize([1], 1).map(str).collect(); c.stop()",
        ],
        killed="CoarseGrainedExecutorBackend",
        kill_on="spark:local-cluster[2,1,1024]",
    ),
}


@contextlib.contextmanager
def started(engines: list[str], folder: Path) -> Iterator[dict[str, str]]:
    """Those engines that are daemons, on this machine, and what the commands of all of them need."""
    env = {**os.environ, **AS_ROOT}
    with contextlib.ExitStack() as stack:
        if "slurm" in engines:
            sys.path[:0] = [str(Path("tests").absolute()), str(Path("tests/engines").absolute())]
            from slurm_cluster import SlurmCluster

            (folder / "slurm").mkdir()
            cluster = SlurmCluster(folder / "slurm")
            stack.callback(cluster.close)
            env |= cluster.env
        if "ray" in engines:
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
            head = stack.enter_context(
                subprocess.Popen(
                    [
                        *command,
                        f"--port={RAY_PORT}",
                        f"--ray-client-server-port={RAY_PORT + 1}",
                        "--num-cpus=4",
                        "--include-dashboard=false",
                        "--disable-usage-stats",
                    ],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
            stack.callback(head.terminate)
            env["RAY_ADDRESS"] = f"{own_address()}:{RAY_PORT}"  # another Ray may run here
            for _ in range(300):  # Ray answers seconds after it was started
                with contextlib.suppress(OSError):
                    socket.create_connection((own_address(), RAY_PORT), 1).close()
                    break
                time.sleep(0.2)
        yield env


class Measured(NamedTuple):
    """A job, measured."""

    samples_per_s: float  # of all workers
    first_step_s: float  # from the command to the first committed step
    cpu_ms: float  # of a worker's step: what other work on the machine changes least


def measure(model: str, engine: str, seconds: float, env: dict[str, str], folder: Path) -> Measured:
    out = folder / "out"
    for each in (out, folder / "runs"):
        shutil.rmtree(each, ignore_errors=True)
    began = time.time()
    arguments = ["--model", model, "--data", str(folder / "data"), "--out", str(out)]
    subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "shoal",
                "run",
                "-n",
                str(WORKERS),
                *(["--on", engine] if engine else []),
            ),
            *("--name", "job", "--run-dir", str(folder / "runs"), str(SCRIPT)),
            *(*arguments, "--seconds", str(seconds), "--warm", str(WARM)),
        ],
        env=env,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    told = [json.loads((out / f"{rank}.json").read_text()) for rank in range(WORKERS)]
    return Measured(
        sum(each["samples_per_s"] for each in told),
        _lines(folder / "runs/job/metrics.jsonl")[0]["time"] - began,
        statistics.mean(each["cpu_ms_per_step"] for each in told),
    )


def kill(engine: str, env: dict[str, str], folder: Path) -> tuple[float | None, set[str]]:
    """Seconds from the kill of one of two hosts to the next commit, and the hashes of the weights of all ranks at the end."""
    out, run = folder / "out", folder / "runs/job"
    for each in (out, folder / "runs"):
        shutil.rmtree(each, ignore_errors=True)
    out.mkdir()
    on = ["--on", ENGINES[engine].kill_on or engine, "--hosts", "2"] if engine else []
    job = subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "shoal",
                "run",
                "-n",
                str(WORKERS),
                "--exchange",
                "native",
                "--seed",
                "0",
            ),
            *(*on, "--name", "job", "--run-dir", str(folder / "runs")),
            *(str(RECOVERING), str(NUM_STEPS), str(out), "plain-large"),
        ],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    killed_at = 0.0
    while job.poll() is None:
        if not killed_at and engine and len(_lines(run / "metrics.jsonl")) >= KILL_AT:
            killed_at = time.time()
            _kill_slot(ENGINES[engine].killed)
        time.sleep(0.05)
    if job.returncode:
        raise RuntimeError(f"the job on {engine or 'this machine'} ended with {job.returncode}")
    weights = {json.loads(path.read_text())["weights"] for path in out.glob("*.json")}
    views = [each["time"] for each in _lines(run / "events.jsonl") if each["event"] == "view-formed"]
    formed = next((at for at in views if at > killed_at), None)
    commits = (line["time"] for line in _lines(run / "metrics.jsonl"))
    after = next((at for at in commits if formed is not None and at > formed), None)
    return (after - killed_at if killed_at and after is not None else None), weights


def _kill_slot(words: str) -> None:
    """Kill the slot of host 2, or the process of its engine whose command line has these words."""
    agent = next(each for each in psutil.process_iter() if "shoal host-2 [job]" in _command(each))
    if words:
        next(each for each in agent.parents() if words in _command(each)).kill()
        return
    processes = [agent, *agent.children(recursive=True)]
    for each in processes:
        each.suspend()
    for each in processes:
        each.kill()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _lines(path: Path) -> list[dict[str, Any]]:
    found = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in found if line.endswith("}")]


def kill_hosts(
    report: Report, engines: list[str], env: dict[str, str], folder: Path, *, num_kills: int, deadline: float
) -> None:
    """Kill a slot of each engine; seconds to the next commit, and whether the bits are those of an undisturbed run here."""
    _, calm = kill("", env, folder)
    kills: dict[str, list[tuple[float | None, set[str]]]] = {each: [] for each in engines}
    round_s = 0.0
    for _ in range(num_kills):
        began = time.monotonic()
        if began + round_s > deadline:
            break
        for engine in engines:
            kills[engine].append(kill(engine, env, folder))
        round_s = time.monotonic() - began
    for engine in engines:
        waits = [wait for wait, _ in kills[engine] if wait is not None]
        values = {
            "killed": ENGINES[engine].unit,
            "kills": len(waits),
            "kill_to_commit_s": round(statistics.median(waits), 2) if waits else None,
            "spread": [round(min(waits), 2), round(max(waits), 2)] if waits else None,
            "bits_equal": all(weights == calm and len(weights) == 1 for _, weights in kills[engine]),
            "load_average": round(os.getloadavg()[1], 1),
        }
        report.add(
            f"{engine} kill", values, model="mlp", strategy="ddp", workers=WORKERS, hosts=2, steps=NUM_STEPS
        )
    report.save()


def measure_model(
    report: Report,
    model: str,
    engines: list[str],
    env: dict[str, str],
    folder: Path,
    *,
    quick: bool,
    deadline: float,
) -> None:
    """Alternate local and engines, round by round until the deadline; at least one round."""
    rounds, seconds = 1 if quick else 9, 3.0 if quick else 8.0
    found: dict[str, list[Measured]] = {each: [] for each in ("", *engines)}
    minimum: dict[str, list[float]] = {each: [] for each in engines}
    round_s = 0.0
    while len(found[""]) < rounds and time.monotonic() + round_s < deadline:
        began, order, first = time.monotonic(), list(found), len(found[""]) % len(found)
        for engine in order[first:] + order[:first]:  # who goes first changes
            found[engine].append(measure(model, engine, seconds, env, folder))
            if engine:
                minimum[engine].append(
                    timed(lambda command=ENGINES[engine].minimum: _run_quietly(command, env))
                )  # type: ignore[misc]
        round_s = time.monotonic() - began
    for engine in engines:
        pairs = list(zip(found[engine], found[""], strict=True))
        ratios = [ours.samples_per_s / local.samples_per_s for ours, local in pairs]
        cpu = [ours.cpu_ms / local.cpu_ms for ours, local in pairs]
        values = {
            "times_as_fast": round(statistics.median(ratios), 3),
            "spread": [round(min(ratios), 3), round(max(ratios), 3)],
            "cpu_of_a_step": round(statistics.median(cpu), 3),
            "cpu_spread": [round(min(cpu), 3), round(max(cpu), 3)],
            "samples_per_s": round(statistics.median(each.samples_per_s for each in found[engine])),
            "local_samples_per_s": round(statistics.median(each.samples_per_s for each in found[""])),
            "first_step_s": round(statistics.median(each.first_step_s for each in found[engine]), 2),
            "local_first_step_s": round(statistics.median(each.first_step_s for each in found[""]), 2),
            "engine_minimum_s": round(statistics.median(minimum[engine]), 2),
            "minimum_is_an_empty": ENGINES[engine].unit,
            "rounds": len(ratios),
            "load_average": round(os.getloadavg()[1], 1),
        }
        report.add(engine, values, model=model, strategy="ddp", workers=WORKERS, hosts=1, seconds=seconds)
    report.save()


def _run_quietly(command: list[str], env: dict[str, str]) -> None:
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(quick: bool = False, parts: Sequence[str] = (), minutes: float | None = None) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the engines end with it
    deadline = time.monotonic() + 60 * (minutes or 60)
    installed = []
    for engine in ENGINES:
        try:
            registry.load(engine)
            installed.append(engine)
        except ConfigError as error:
            print(f"{engine} is skipped: {error}", file=sys.stderr)
    report = Report("engines", keeps_others=True)
    for part in parts or ("kill", *MODELS):
        name, _, engine = part.partition(":")
        engines = [each for each in installed if engine in ("", each)]
        if name not in ("kill", *MODELS) or not engines:
            raise SystemExit(f"no part '{part}'; there are kill, {', '.join(MODELS)}, each also with :ENGINE")
        with tempfile.TemporaryDirectory() as temporary, started(engines, folder := Path(temporary)) as env:
            if name == "kill":
                kill_hosts(report, engines, env, folder, num_kills=1 if quick else 3, deadline=deadline)
                continue
            (folder / "data").mkdir()
            write_data(folder / "data")
            measure_model(report, name, engines, env, folder, quick=quick, deadline=deadline)
