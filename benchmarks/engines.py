"""The click model on engines of this machine against the same job without one, alternated.

Needs the engines, so it runs in their environment: `.engines/bin/python -m benchmarks engines` after `make test-engines`.
Figures: times as fast as local (aim: at least 0.97), seconds from the command to the first view of all workers, and
the engine's own minimum, an empty process of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.click_model import write_data
from benchmarks.harness import Report
from shoal.engines import registry
from shoal.errors import ConfigError

SCRIPT = Path(__file__).parent / "click_train.py"
WORKERS = 2
SECONDS, WARM = 5.0, 2.0
MINIMUM = {
    "mpi": ["mpirun", "-n", "1", "true"],
    "slurm": ["srun", "-n", "1", "true"],
    "ray": [
        sys.executable,
        "-c",
        "import ray, sys; ray.init(address='auto', logging_level='ERROR')\n"
        "@ray.remote\nclass A:\n  def f(self): return 1\n"
        "ray.get(A.remote().f.remote())",
    ],
}


@contextlib.contextmanager
def started(engine: str, folder: Path) -> Iterator[dict[str, str]]:
    """The engine, on this machine, and what its commands need."""
    if engine == "slurm":
        sys.path[:0] = [str(Path("tests").absolute()), str(Path("tests/engines").absolute())]
        from slurm_cluster import SlurmCluster

        folder.mkdir()
        cluster = SlurmCluster(folder)
        try:
            yield cluster.env
        finally:
            cluster.close()
    elif engine == "ray":
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=4"]
        with subprocess.Popen(
            [*command, "--port=26379", "--include-dashboard=false", "--disable-usage-stats"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as head:
            try:
                yield {}
            finally:
                head.terminate()
    else:
        yield {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def run(options: list[str], env: dict[str, str], data: Path, folder: Path) -> tuple[float, float]:
    """Samples per second of all workers, and seconds to the first view."""
    out = folder / "out"
    for each in (out, folder / "runs"):
        shutil.rmtree(each, ignore_errors=True)
    began = time.time()
    arguments = ["--data", str(data), "--out", str(out), "--seconds", str(SECONDS), "--warm", str(WARM)]
    subprocess.run(
        [
            *(sys.executable, "-m", "shoal", "run", "-n", str(WORKERS), *options, "--name", "job"),
            *("--run-dir", str(folder / "runs"), str(SCRIPT), *arguments),
        ],
        env={**os.environ, **env},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    rates = [json.loads((out / f"{rank}.json").read_text())["samples_per_s"] for rank in range(WORKERS)]
    events = map(json.loads, (folder / "runs/job/events.jsonl").read_text().splitlines())
    return sum(rates), next(event["time"] for event in events if event["event"] == "view-formed") - began


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(engine: str, rounds: int, folder: Path) -> dict[str, object]:
    data = folder / "data"
    data.mkdir()
    write_data(data)
    ratios, ours, local = [], [], []
    with started(engine, folder / "engine") as env:
        for number in range(rounds):
            for is_ours in (number % 2 == 0, number % 2 == 1):  # who goes first changes
                (ours if is_ours else local).append(
                    run(["--on", engine] if is_ours else [], env, data, folder)
                )
            ratios.append(ours[-1][0] / local[-1][0])
        least = statistics.median(
            seconds(
                lambda: subprocess.run(
                    MINIMUM[engine], env={**os.environ, **env}, check=True, stdout=subprocess.DEVNULL
                )
            )
            for _ in range(3)
        )
    return {
        "times_as_fast": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "samples_per_s": round(statistics.median(rate for rate, _ in ours)),
        "local_samples_per_s": round(statistics.median(rate for rate, _ in local)),
        "first_view_s": round(statistics.median(wait for _, wait in ours), 2),
        "local_first_view_s": round(statistics.median(wait for _, wait in local), 2),
        "engine_minimum_s": round(least, 2),
        "rounds": rounds,
        "load_average": round(os.getloadavg()[1], 1),
    }


def main(quick: bool = False) -> None:
    report = Report("engines", keeps_others=True)
    for engine in MINIMUM:
        try:
            registry.load(engine)
        except ConfigError as error:
            print(f"{engine} is skipped: {error}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            values = measure(engine, 2 if quick else 5, Path(folder))
        report.add(engine, values, model="click", strategy="ddp", workers=WORKERS, hosts=1, seconds=SECONDS)
        report.save()
