"""The click model and ResNet-18 on engines of this machine against the same job without one, alternated; and hosts killed.

Needs the engines, so it runs in their environment: `.engines/bin/python -m benchmarks engines` after `make test-engines`; in
pieces by `--part kill`, `--part click`, `--part resnet18`, each `--minutes 6` at most (an engine alone: `--part kill:ray`).
Figures: times as fast as local (aim: at least 0.97), seconds from the command to the first committed step beside the
engine's own minimum (an empty actor, task or job step), and seconds from the kill of an actor, executor, slot or job
step to the news of it, to the replacement's joining and to the next commit, with the weights compared with those of an
undisturbed run here, bit by bit. Every job does the same steps, and an engine is compared with the local jobs right
before and after it: a rate over seconds counts the Trainer's checks at steps 8, 16, 32 on one side only.
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
from benchmarks.harness import Report
from shoal.cluster.hosts.engine_hosts import own_address
from shoal.engines import registry
from shoal.errors import ConfigError

SCRIPT = Path(__file__).parent / "click_train.py"
RECOVERING = Path(__file__).parent / "scripts" / "recovering.py"
WORKERS = 2
RAY_PORT = 26479
NUM_MEASURED = {"click": 1000, "resnet18": 22}
"""Steps that are measured, of each model: 8 s on two quiet cores. One check of the loss is among those of ResNet-18, at step 16."""

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
    # With it every interpreter compiles torch again: twice the time of a start.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
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


def measure(model: str, engine: str, num_steps: int, env: dict[str, str], folder: Path) -> Measured:
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
            *(*arguments, "--steps", str(num_steps)),
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


class Killed(NamedTuple):
    """A job of which one of two hosts was killed."""

    waits: dict[str, float]  # seconds from the kill to host-lost, host-joined and the next commit
    weights: set[str]  # hashes of all ranks at the end


def kill(engine: str, env: dict[str, str], folder: Path) -> Killed:
    """Kill one of two hosts; none without an engine."""
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
    if not engine:
        return Killed({}, weights)
    events = _lines(run / "events.jsonl")
    formed = next(
        each["time"] for each in events if each["event"] == "view-formed" and each["time"] > killed_at
    )
    seen = {"commit": next(line["time"] for line in _lines(run / "metrics.jsonl") if line["time"] > formed)}
    for name in ("host-lost", "host-joined"):
        seen[name] = next(
            each["time"] for each in events if each["event"] == name and each["time"] > killed_at
        )
    return Killed({name: at - killed_at for name, at in seen.items()}, weights)


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
    calm = kill("", env, folder).weights
    kills: dict[str, list[Killed]] = {each: [] for each in engines}
    round_s = 0.0
    for _ in range(num_kills):
        began = time.monotonic()
        if round_s and began + round_s > deadline:
            break
        for engine in engines:
            kills[engine].append(kill(engine, env, folder))
        round_s = time.monotonic() - began
    for engine in engines:
        waits = {name: [each.waits[name] for each in kills[engine]] for name in kills[engine][0].waits}
        values = {
            "killed": ENGINES[engine].unit,
            "kills": len(kills[engine]),
            "kill_to_commit_s": round(statistics.median(waits["commit"]), 2),
            "spread": [round(min(waits["commit"]), 2), round(max(waits["commit"]), 2)],
            "kill_to_news_s": round(statistics.median(waits["host-lost"]), 2),
            "kill_to_join_s": round(statistics.median(waits["host-joined"]), 2),
            "bits_equal": all(each.weights == calm and len(calm) == 1 for each in kills[engine]),
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
    """Alternate local and engines, round by round until the deadline; at least one round.

    A local job before every second engine and at the end: an engine is compared with those before and after it.
    """
    rounds, num_steps = 1 if quick else 9, NUM_MEASURED[model] // (3 if quick else 1)
    found: dict[str, list[Measured]] = {each: [] for each in engines}
    beside: dict[str, list[tuple[Measured, Measured]]] = {each: [] for each in engines}
    minimum: dict[str, list[float]] = {each: [] for each in engines}
    locals_ = [measure(model, "", num_steps, env, folder)]
    round_s, num_rounds = 0.0, 0
    while not num_rounds or (num_rounds < rounds and time.monotonic() + round_s < deadline):
        began, first = time.monotonic(), num_rounds % len(engines)
        order = engines[first:] + engines[:first]  # who goes first changes
        for pair in (order[at : at + 2] for at in range(0, len(order), 2)):
            for engine in pair:
                found[engine].append(measure(model, engine, num_steps, env, folder))
                minimum[engine].append(_seconds_of(ENGINES[engine].minimum, env))
            locals_.append(measure(model, "", num_steps, env, folder))
            for engine in pair:
                beside[engine].append((locals_[-2], locals_[-1]))
        round_s, num_rounds = time.monotonic() - began, num_rounds + 1
    for engine in engines:
        pairs = list(zip(found[engine], beside[engine], strict=True))
        ratios = [
            ours.samples_per_s / statistics.mean(each.samples_per_s for each in near) for ours, near in pairs
        ]
        cpu = [ours.cpu_ms / statistics.mean(each.cpu_ms for each in near) for ours, near in pairs]
        values = {
            "times_as_fast": round(statistics.median(ratios), 3),
            "spread": [round(min(ratios), 3), round(max(ratios), 3)],
            "cpu_of_a_step": round(statistics.median(cpu), 3),
            "cpu_spread": [round(min(cpu), 3), round(max(cpu), 3)],
            "samples_per_s": round(statistics.median(each.samples_per_s for each in found[engine])),
            "local_samples_per_s": round(statistics.median(each.samples_per_s for each in locals_)),
            "first_step_s": round(statistics.median(each.first_step_s for each in found[engine]), 2),
            "local_first_step_s": round(statistics.median(each.first_step_s for each in locals_), 2),
            "engine_minimum_s": round(statistics.median(minimum[engine]), 2),
            "minimum_is_an_empty": ENGINES[engine].unit,
            "rounds": len(ratios),
            "load_average": round(os.getloadavg()[1], 1),
        }
        report.add(engine, values, model=model, strategy="ddp", workers=WORKERS, hosts=1, steps=num_steps)
    report.save()


def _seconds_of(command: list[str], env: dict[str, str]) -> float:
    began = time.monotonic()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - began


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
