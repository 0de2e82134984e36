"""Loss of a worker's host to the next commit, and join of a host to its first useful step.

Two namespaced hosts of this machine, which share its cores. For the loss, host
1 loses its power while one worker runs there; the worker starts again at the
head, the host comes back, and the worker is killed so that it goes home. For
the join, both hosts are full: the workers of a lost host wait until it joins
again, and the time is that from `shoal join` to the next commit. Aim: 5 s from
the loss, with the default heartbeat.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.hosts.namespaces import Cluster, unsupported

from benchmarks.harness import Report

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).parent / "scripts" / "with_shoal.py"
PORT = 7070
TIMEOUT_S = 180.0


class Training:
    """A job that trains without an end on the hosts of a cluster."""

    def __init__(self, cluster: Any, folder: Path, workers: int) -> None:
        folder.mkdir()
        self._cluster, self._folder, self._workers = cluster, folder, workers
        self._steps = folder / "steps"
        self._run_dir = folder / "runs" / "job"
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "SHOAL_JOIN_KEY": "a-key-for-benchmarks-0123456789",
        }
        where = ["--hosts", "2", "--bind", f"{cluster[0].address}:{PORT}", "-n", str(workers)]
        named = [
            "--run-dir",
            str(folder / "runs"),
            "--name",
            "job",
            "--exchange",
            "native",
            "--max-restarts",
            "1000",
        ]
        script = [str(SCRIPT), "mlp", "1000000", str(self._steps), "--live"]
        self._head = self._start(0, ["run", *where, *named, *script])
        self._agent = self._start(1, ["join", f"shoal://{cluster[0].address}:{PORT}"])
        self._wait(lambda: len(self._times()) > 2)

    def close(self) -> None:
        for process in (self._head, self._agent):
            process.kill()
            process.wait()

    def lose_host(self) -> float:
        """Seconds from the loss of the host to the next commit, which has its worker's part again."""
        num_before = len(self._events("worker-replaced"))
        self._cluster[1].kill()
        lost_at = time.time()
        self._wait(lambda: len(self._events("worker-replaced")) > num_before)
        replaced = self._events("worker-replaced")[-1]
        self._wait(lambda: self._times()[-1] > replaced["time"])
        found = next(at for at in self._times() if at > replaced["time"]) - lost_at
        self._rejoin()
        for process in self._cluster[0].processes():
            if " ".join(process.cmdline()).startswith(f"shoal worker {replaced['rank']}"):
                process.kill()
        self._wait(lambda: self._events("worker-replaced")[-1]["host"] == 1)
        back_at = self._events("worker-replaced")[-1]["time"]
        self._wait(lambda: self._times()[-1] > back_at)
        return found

    def return_host(self) -> float:
        """Seconds from `shoal join` of a host that was lost to the next commit."""
        num_before = len(self._events("host-lost"))
        self._cluster[1].kill()
        self._wait(lambda: len(self._events("host-lost")) > num_before)
        began_at = time.time()
        self._rejoin()
        self._wait(lambda: self._times()[-1] > began_at)
        return next(at for at in self._times() if at > began_at) - began_at

    def _rejoin(self) -> None:
        num_before = len(self._events("host-joined"))
        self._agent.wait()
        self._cluster[1].start()
        self._agent = self._start(1, ["join", f"shoal://{self._cluster[0].address}:{PORT}"])
        self._wait(lambda: len(self._events("host-joined")) > num_before)

    def _start(self, number: int, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self._folder / f"host-{number}.out", "ab") as output:
            host = self._cluster[number]
            arguments = [sys.executable, "-m", "shoal", *command]
            return host.popen(
                arguments, cwd=self._folder, env=self._environment, stdout=output, stderr=output
            )

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline or self._head.poll() is not None:
                raise RuntimeError((self._folder / "host-0.out").read_text()[-4000:])
            time.sleep(0.02)

    def _times(self) -> list[float]:
        try:
            return [
                float(line)
                for line in self._steps.read_text().splitlines(keepends=True)
                if line.endswith("\n")
            ]
        except FileNotFoundError:
            return []

    def _events(self, kind: str) -> list[dict[str, Any]]:
        try:
            lines = (self._run_dir / "events.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [each for each in found if each["event"] == kind]


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median_s": round(ordered[len(ordered) // 2], 2),
        "p99_s": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 2),
        "slowest_s": round(ordered[-1], 2),
        "count": len(ordered),
    }


def repeat(folder: Path, workers: int, measure: Callable[[Training], float], count: int) -> list[float]:
    """Seconds of so many losses or joins of one job on a cluster of its own."""
    folder.mkdir()
    with Cluster(2, folder / "cluster") as cluster:
        training = Training(cluster, folder / "job", workers)
        try:
            return [measure(training) for _ in range(count)]
        finally:
            training.close()


def main(quick: bool = False, losses: int = 50, joins: int = 20, at_once: int = 1) -> None:
    """`at_once`: jobs side by side, each on its own hosts, which share the losses; for machines with cores to spare."""
    if reason := unsupported():
        print(f"hosts_loss is skipped: {reason}", file=sys.stderr)
        return
    report, cores = Report("hosts_loss", keeps_others=True), len(os.sched_getaffinity(0))
    parts: list[tuple[str, int, Callable[[Training], float], int]] = [
        ("loss of a worker's host to the next commit", 2, Training.lose_host, 2 if quick else losses),
        ("join of a host to its first useful step", 2 * cores, Training.return_host, 2 if quick else joins),
    ]
    # Not in /tmp: that is each host's own.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="shoal-hosts-") as name:
        for number, (figure, workers, measure, count) in enumerate(parts):
            jobs = at_once if measure is Training.lose_host else 1
            with ThreadPoolExecutor(jobs) as pool:
                started = [
                    pool.submit(repeat, Path(name) / f"{number}-{job}", workers, measure, -(-count // jobs))
                    for job in range(jobs if count else 0)
                ]
                seconds = [each for job in started for each in job.result()]
            if not seconds:
                continue
            busy = round(os.getloadavg()[1] / cores, 1)
            report.add(
                figure,
                percentiles(seconds),
                workers=workers,
                hosts=2,
                cores=cores,
                load_per_core=busy,
                at_once=jobs,
            )
            if not quick:
                report.save()


if __name__ == "__main__":
    main()
