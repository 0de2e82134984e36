"""More workers and more servers: samples/s of the click model, and the CPU time of a step in workers and servers.

    python -m benchmarks scaling [--minutes 9] [--quick] [--part "ddp, 8 workers"]

Figures count on a machine with a core for every process; what a step costs its
processes (CPU time) hardly depends on that. Cases go from the most to the least
important, round after round, until the minutes are over; with $OUT set, lines
are also written to $OUT/scaling.jsonl as they come. `--part`: only cases with these words in their name.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import click_model
from benchmarks.harness import Report
from shoal.cluster.launch.threads import available_cores, threads_per_worker
from shoal.collectives.shm_layout import KERNELS as SHM_KERNELS
from shoal.embedding import fused_updates
from shoal.runtime import kernel_cache, row_kernels

SCRIPT = Path(__file__).parent / "click_train.py"


@dataclass(frozen=True, slots=True)
class Case:
    """One launch. `threads` 0: what shoal gives a worker."""

    strategy: str
    batch: int
    workers: int
    servers: int = 0
    replicas: int = 1
    threads: int = 0

    @property
    def name(self) -> str:
        if self.strategy == "plain":
            return f"plain PyTorch, {self.threads} threads, batch {self.batch}"
        of_servers = f", {self.servers} servers, replicas {self.replicas}" if self.servers else ""
        of_threads = ", 1 thread" if self.threads == 1 and not self.servers else ""
        return f"{self.strategy}, {self.workers} workers{of_servers}{of_threads}, batch {self.batch}"


def cases(cores: int) -> list[Case]:
    """On 16 cores: 8 workers beside what they are compared with."""
    most = max(2, cores // 2)
    threads = threads_per_worker(most, cores=cores, env={}, num_servers=max(1, most // 2))
    found = []
    for batch in (8192, 1024):
        found += [
            Case("plain", batch, 1, threads=most),
            Case("ddp", batch, most),
            Case("ddp", batch, most, threads=1),
            Case("ps", batch, 1, 1, threads=threads),
            Case("ps", batch, 2, 1, threads=threads),
        ]
        found += [Case("ps", batch, most, servers, threads=threads) for servers in (1, 2, 4)]
        found += [
            Case("ps:hybrid", batch, most, 2, threads=threads),
            Case("ps:async", batch, 1, 1, threads=threads),
        ]
        found += [Case("ps:async", batch, most, servers, threads=threads) for servers in (1, 2, 4)]
        found += [Case("ps:async", batch, most, servers, 2, threads=threads) for servers in (2, 4)]
    return found


class ServerTime(threading.Thread):
    """CPU time of the servers of the jobs below this process, by looking at them every now and then."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: dict[int, list[tuple[float, float]]] = {}
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.5):
            for process in psutil.Process().children(recursive=True):
                try:
                    if process.name().startswith("shoal server") or "shoal server" in " ".join(
                        process.cmdline()
                    ):
                        times = process.cpu_times()
                        self.seen.setdefault(process.pid, []).append((time.time(), times.user + times.system))
                except psutil.Error:
                    continue

    def busy(self, seconds: float) -> list[float]:
        """Share of a core that each server took, over the last seconds that were seen of it."""
        self._is_over.set()
        self.join()
        shares = []
        for looks in self.seen.values():
            late = [look for look in looks if look[0] > looks[-1][0] - seconds]
            if len(late) > 1:
                shares.append((late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0]))
        return shares


def measure(case: Case, data: str, *, seconds: float, warm: float) -> dict[str, Any]:
    """One launch's rate, and what a step cost its processes."""
    env = dict(os.environ)
    if case.threads:
        env["OMP_NUM_THREADS"] = str(case.threads)
    times = ["--data", data, "--seconds", str(seconds), "--warm", str(warm), "--batch", str(case.batch)]
    if case.strategy == "plain":
        command = [
            sys.executable,
            "-m",
            "benchmarks.peers.plain_torch",
            *times,
            "--threads",
            str(case.threads),
        ]
        told = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=120)
        return {"samples_per_s": json.loads(told.stdout.splitlines()[-1])["samples_per_s"]}
    with tempfile.TemporaryDirectory() as folder:
        options = ["-n", str(case.workers), "--strategy", case.strategy, "--run-dir", f"{folder}/runs"]
        if case.servers:
            options += ["--servers", str(case.servers), "--replicas", str(case.replicas)]
        servers = ServerTime()
        servers.start()
        job = [sys.executable, "-m", "shoal", "run", *options, str(SCRIPT), *times, "--out", f"{folder}/out"]
        subprocess.run(job, env=env, check=True, stdout=subprocess.DEVNULL, timeout=120)
        busy = servers.busy(seconds)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder, "out").glob("*.json"))]
    return {
        "samples_per_s": round(sum(rank["samples_per_s"] for rank in ranks)),
        "step_ms": round(1e3 * statistics.median(r["seconds"] / max(1, r["steps"]) for r in ranks), 2),
        "worker_cpu_ms_per_step": round(statistics.median(rank["cpu_ms_per_step"] for rank in ranks), 2),
        "servers_busy": [round(share, 2) for share in busy],
        "threads": ranks[0]["threads"],
    }


def main(quick: bool = False, minutes: float | None = None, parts: Sequence[str] = ()) -> None:
    report, until = Report("scaling"), time.monotonic() + 60 * (minutes or 25)
    chosen = [
        case for case in cases(available_cores()) if not parts or any(part in case.name for part in parts)
    ]
    found: dict[str, list[dict[str, Any]]] = {}
    log = Path(os.environ["OUT"], "scaling.jsonl") if os.environ.get("OUT") else None
    with tempfile.TemporaryDirectory() as data:
        click_model.write_data(Path(data))
        for module in (SHM_KERNELS, row_kernels.KERNELS, fused_updates.KERNELS):
            kernel_cache.compile_all(
                module
            )  # a machine's first ddp job compiles them beside itself, and sums without
        for _ in range(1 if quick else 3):
            for case in chosen:
                if time.monotonic() > until:
                    break
                try:
                    values = measure(case, data, seconds=2.0 if quick else 3.0, warm=1.5)
                except subprocess.SubprocessError as error:
                    values = {"failed": str(error)[-300:]}
                found.setdefault(case.name, []).append(values)
                print(json.dumps({"case": case.name, **values}), file=sys.stderr, flush=True)
                if log is not None:
                    with log.open("a") as file:
                        file.write(json.dumps({"case": case.name, **values}) + "\n")
    for case in chosen:
        rounds = [each for each in found.get(case.name, ()) if "failed" not in each]
        if rounds:
            middle = sorted(rounds, key=lambda each: float(each["samples_per_s"]))[len(rounds) // 2]
            report.add(case.name, middle, workers=case.workers, rounds=len(rounds), **click_model.DESCRIPTION)
    report.save()


if __name__ == "__main__":
    main()
