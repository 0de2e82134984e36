"""Memory of a server beside its tables, and whether it grows: sampled from outside, once a second.

Aims: private memory at most 1.15 times parameters and optimizer state, and 10 %
of them for the index; exchange buffers bounded and reported; no growth over 10
minutes. Private is what only this process has (`/proc/PID/smaps_rollup`):
exchange buffers are shared with the workers and counted apart, and rows that workers read in place are its own.

    python -m benchmarks ps_memory                two set-ups, 10 minutes each
    python -m benchmarks ps_memory --minutes 2    each of them so long
    python -m benchmarks ps_memory --quick        20 seconds each; nothing is written down
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.click_model import BATCH, DESCRIPTION, DIM, HIDDEN, NUM_COLUMNS, NUM_ROWS, write_data
from benchmarks.harness import Report

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
START_TIMEOUT_S = 120.0
SETUPS = (("ps", 2, 1), ("ps:async", 2, 2))
"""Strategy, workers, servers. Of two servers each holds everything: one half as primary, the other as replica."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a server."""

    at_s: float
    private: int
    buffers: int
    """Resident of what it shares with its clients."""

    reserved: int
    """Of the same, address space."""


def watch(strategy: str, workers: int, servers: int, *, seconds: float, data: Path) -> dict[str, Any]:
    """Train for so long, and look at every server meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).parent / "shoal"), "run", "-n", str(workers)]
        command += ["--servers", str(servers), "--strategy", strategy, "--run-dir", f"{folder}/runs"]
        command += ["--name", "memory", "benchmarks/click_train.py", "--data", str(data)]
        command += ["--out", f"{folder}/out", "--seconds", str(seconds), "--warm", "1"]
        seen: dict[int, list[Sample]] = {}
        with open(f"{folder}/said", "w+") as said:
            job = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)
            try:
                give_up_at = time.monotonic() + seconds + START_TIMEOUT_S
                while job.poll() is None and time.monotonic() < give_up_at:
                    for server, pid in pids(Path(folder) / "runs" / "memory").items():
                        if (sample := look(pid)) is not None:
                            seen.setdefault(server, []).append(sample)
                    time.sleep(1.0)
            finally:
                if job.poll() is None:
                    job.terminate()
                    job.wait(timeout=60.0)
            said.seek(0)
            if job.returncode:
                raise SystemExit(f"{' '.join(command)} ended with {job.returncode}: {said.read()[-500:]}")
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("out/*.json"))]
        steps = (Path(folder) / "runs" / "memory" / "metrics.jsonl").read_text().splitlines()
        last_step = json.loads(steps[-1])["time"]
    # What is read at the end, to bring the weights home, is no part of training.
    values = [
        figures([each for each in samples if each.at_s <= last_step]) for _, samples in sorted(seen.items())
    ]
    return {
        "private_of_state": max(each["private_of_state"] for each in values),
        "growth_percent_per_10_min": max(each["growth_percent_per_10_min"] for each in values),
        "state_mib": round(state_bytes() / MIB, 1),
        "servers": values,
        "samples_per_s": round(sum(each["samples_per_s"] for each in ranks)),
    }


def figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Of one server."""
    half = samples[len(samples) // 2 :]
    private = statistics.median(each.private for each in half)
    per_s = slope([each.at_s for each in half], [each.private for each in half])
    return {
        "private_of_state": round(private / state_bytes(), 3),
        "private_mib": round(private / MIB, 1),
        "first_seen_mib": round(samples[0].private / MIB, 1),
        "largest_mib": round(max(each.private for each in samples) / MIB, 1),
        "growth_percent_per_10_min": round(100 * 600 * per_s / private, 3),
        "grew_mib": round((half[-1].private - half[0].private) / MIB, 2),
        "buffers_mib": round(max(each.buffers for each in half) / MIB, 1),
        "buffers_reserved_mib": round(max(each.reserved for each in half) / MIB, 1),
        "buffers_grew_mib": round((half[-1].reserved - half[0].reserved) / MIB, 2),
        "looks": len(samples),
    }


def state_bytes() -> int:
    """Parameters and Adagrad's sums of the click model: what a server must hold, in float32."""
    sizes = (NUM_COLUMNS * DIM, *HIDDEN, 1)
    dense = sum((inside + 1) * outside for inside, outside in itertools.pairwise(sizes))
    return 4 * 2 * (NUM_ROWS * DIM + dense)


def pids(run: Path) -> dict[int, int]:
    """Servers of a running job."""
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return {event["server"]: event["pid"] for event in events if event["event"] == "server-started"}


def look(pid: int) -> Sample | None:
    """A process's memory; None where it is gone."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        maps = Path(f"/proc/{pid}/smaps").read_text()
    except OSError:
        return None
    private = sum(int(kib) for kib in re.findall(r"^Private_\w+:\s+(\d+) kB", rollup, re.MULTILINE))
    for rows in re.findall(r"/memfd:shoal-rows.*\n(?:[A-Z]\w+:.*\n)+", maps):
        private += sum(
            int(kib) for kib in re.findall(r"^Shared_(?:Clean|Dirty):\s+(\d+) kB", rows, re.MULTILINE)
        )
    shared = re.findall(r"/memfd:(?!shoal-rows).*\nSize:\s+(\d+) kB\n(?:.*\n)*?Rss:\s+(\d+) kB", maps)
    if not private:  # it is about to end
        return None
    return Sample(
        at_s=time.time(),
        private=1024 * private,
        reserved=1024 * sum(int(size) for size, _ in shared),
        buffers=1024 * sum(int(resident) for _, resident in shared),
    )


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Of the straight line through them; 0 for a single one."""
    if len(set(times)) < 2:
        return 0.0
    return statistics.linear_regression(times, values).slope


def main(quick: bool = False, minutes: float | None = None) -> None:
    seconds = 20.0 if quick else 60.0 * (minutes or 10.0)
    report = Report("ps_memory", keeps_others=True)
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder), num_batches=48 if quick else 384)
        for strategy, workers, servers in SETUPS:
            values = watch(strategy, workers, servers, seconds=seconds, data=Path(folder))
            report.add(
                f"{strategy}, {servers} server{'s' * (servers > 1)}: private memory over parameters and optimizer state",
                values,
                **DESCRIPTION,
                aim="private_of_state <= 1.25, growth_percent_per_10_min < 1",
                workers=workers,
                servers=servers,
                replicas=min(2, servers),
                batch=BATCH,
                seconds=seconds,
            )
            if not quick:
                report.save()


if __name__ == "__main__":
    main()
