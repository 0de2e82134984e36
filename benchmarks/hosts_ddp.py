"""Training over two namespaced hosts against torchrun's DDP over gloo: per step, and from launch to first step.

Two network, PID and mount namespaces of this machine, joined by a bridge that
passes 100 Mbit/s, 1 Gbit/s, or all it can; the hosts share its cores, so
between unlimited hosts the figure is mostly the processor's. Aims: at least
as fast as torchrun's DDP, and 1.3 times where fewer bytes are sent
(compression, several workers per host, sparse rows). Sides take turns, a
whole launch each, during which the link changes; a step is the mean of those
from the third after a change, and counts for one batch of all workers. The
processor time of a step is that of all processes of both hosts: on cores that
others use too it says more than seconds do. Kernels are compiled beforehand,
as they are after a machine's first job.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import Report
from shoal.collectives.shm_layout import KERNELS as SHM_KERNELS
from shoal.embedding import fused_updates
from shoal.runtime import kernel_cache, row_kernels

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "scripts"
RATES = {"unlimited": None, "1gbit": "1gbit", "100mbit": "100mbit"}
SECONDS = {"unlimited": 4.0, "1gbit": 4.0, "100mbit": 8.0}
LAUNCH = "launch to first step"
NUM_WARM = 2
"""Steps after a change of the link, or after the launch, that do not count."""

LAUNCH_TIMEOUT_S = 180.0


class Side(NamedTuple):
    name: str
    workers: int
    """In all, over the two hosts."""

    options: tuple[str, ...] | None = None
    """Of `shoal run`; None: torchrun."""

    kind: str = "mlp"

    has_whole_batches: bool = False
    """Every worker trains batches of its own: in the time of a step there are as many batches as workers."""


def torchrun(workers: int, kind: str = "mlp") -> Side:
    return Side("torchrun", workers, None, kind)


GROUPS: dict[str, list[Side]] = {
    "mlp of 8.4 MB, 2 hosts x 1": [
        torchrun(2),
        Side("ddp", 2, ()),
        Side("ddp, int8", 2, ("--compress", "int8")),
        Side("ps", 2, ("--strategy", "ps", "--servers", "2", "--replicas", "1")),
    ],
    "mlp of 8.4 MB, 2 hosts x 2": [
        torchrun(4),
        Side("ddp", 4, ()),
        Side("ddp, native", 4, ("--exchange", "native")),
        Side("ddp, bf16", 4, ("--compress", "bf16")),
        Side("ddp, int8", 4, ("--compress", "int8")),
    ],
    "click model, 2 hosts x 1": [
        torchrun(2, "click"),
        Side("ps", 2, ("--strategy", "ps", "--servers", "2", "--replicas", "1"), "click"),
        Side("ps:async", 2, ("--strategy", "ps:async", "--servers", "2", "--replicas", "1"), "click", True),
    ],
}
"""Of each group the first side is what the others are compared with."""


class Bench:
    """Launches on the hosts of a cluster."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._ports = itertools.count(20_000)
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "TORCH_NUM_THREADS": "1",  # of with_torch.py, which otherwise shares the cores out
            "SHOAL_JOIN_KEY": "a-key-for-benchmarks-0123456789",
        }

    def measure(self, side: Side, seconds: dict[str, float]) -> dict[str, float]:
        """Seconds from launch to the end of the first step, per step by rate of the link, and processor time of a step."""
        out = self._folder / "steps"
        out.unlink(missing_ok=True)
        port, address = next(self._ports), self._cluster[0].address
        script = [side.kind, "1000000", str(out), "--live"]
        if side.options is None:
            meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}", "--rdzv-id", "job"]
            of_each = ["--nnodes", "2", "--nproc-per-node", str(side.workers // 2)]
            run = ["torch.distributed.run", *of_each, *meet, str(SCRIPTS / "with_torch.py"), *script]
            commands = [run, run]
        else:
            hosts = ["--hosts", "2", "--bind", f"{address}:{port}", "-n", str(side.workers)]
            where = ["--run-dir", str(self._folder / "runs"), "--oversubscribe"]
            run = ["shoal", "run", *hosts, *where, *side.options, str(SCRIPTS / "with_shoal.py"), *script]
            commands = [run, ["shoal", "join", f"shoal://{address}:{port}"]]
        self._limit(None)
        began_at = time.time()
        started = [self._start(number, command) for number, command in enumerate(commands)]
        try:
            self._wait_for(out, NUM_WARM, started)
            figures = {LAUNCH: _read(out)[0] - began_at}
            for rate, for_s in seconds.items():
                self._limit(RATES[rate])
                num_before = len(_read(out)) + NUM_WARM
                self._wait_for(out, num_before, started)
                num_at, processor_s = len(_read(out)), self._processor_s()
                time.sleep(for_s)
                self._wait_for(out, num_before + 2, started)
                counted = _read(out)[num_before - 1 :]
                num_counted = num_before - 1 + len(counted) - num_at
                figures[processor_of(rate)] = (self._processor_s() - processor_s) / num_counted
                num_batches = (len(counted) - 1) * (side.workers if side.has_whole_batches else 1)
                figures[rate] = (counted[-1] - counted[0]) / num_batches
            return figures
        finally:
            for host in self._cluster:
                for process in host.processes():
                    process.kill()
            for each in started:
                each.wait()

    def _processor_s(self) -> float:
        """Of all threads on all hosts."""
        found = 0
        for host in self._cluster:
            for process in host.processes():
                for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                    with contextlib.suppress(OSError):
                        found += int(thread.read_text().split()[0])
        return found / 1e9

    def _limit(self, bandwidth: str | None) -> None:
        for host in self._cluster:
            host.limit(bandwidth)

    def _start(self, number: int, command: list[str]) -> subprocess.Popen[Any]:
        with open(self._log(number), "w") as file:
            return self._cluster[number].popen(
                [sys.executable, "-W", "ignore", "-m", *command],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def _log(self, number: int) -> Path:
        return self._folder / f"host-{number}.log"

    def _wait_for(self, out: Path, num_steps: int, started: list[subprocess.Popen[Any]]) -> None:
        deadline = time.monotonic() + LAUNCH_TIMEOUT_S
        while len(_read(out)) < num_steps:
            if time.monotonic() > deadline or any(each.poll() is not None for each in started):
                raise SystemExit("\n".join(self._log(number).read_text() for number in range(2)))
            time.sleep(0.02)


def processor_of(rate: str) -> str:
    return f"{rate}, processor"


def _read(out: Path) -> list[float]:
    try:
        lines = out.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [float(line) for line in lines if line.endswith("\n")]


def compare(report: Report, bench: Bench, group: str, *, rounds: int, seconds: dict[str, float]) -> None:
    sides = GROUPS[group]
    measured: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for number in range(rounds):
        # Who goes first changes from round to round.
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            figures = bench.measure(side, seconds)
            print(f"{group}: {side.name}: {figures}", file=sys.stderr, flush=True)
            measured[side.name].append(figures)
    for side, which in itertools.product(sides[1:], (LAUNCH, *seconds)):
        ours, theirs = ([each[which] for each in measured[name]] for name in (side.name, sides[0].name))
        ratios = sorted(other / mine for mine, other in zip(ours, theirs, strict=True))
        values = {
            "times_faster": round(statistics.median(ratios), 3),
            "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
            "ours_s": round(statistics.median(ours), 4),
            "theirs_s": round(statistics.median(theirs), 4),
            "rounds": rounds,
        }
        if which != LAUNCH:
            for name, of_side in (("ours", side.name), ("theirs", sides[0].name)):
                spent = [each[processor_of(which)] for each in measured[of_side]]
                values[f"{name}_processor_ms"] = round(1e3 * statistics.median(spent), 1)
        what = LAUNCH if which == LAUNCH else f"per step, {which}"
        told: dict[str, Any] = {
            "model": group,
            "workers": side.workers,
            "options": " ".join(side.options or ()),
        }
        told["load_per_core"] = round(os.getloadavg()[1] / len(os.sched_getaffinity(0)), 1)
        report.add(f"{what}: {side.name} against torchrun's DDP", values, **told)


def main(quick: bool = False, parts: list[str] | None = None, rounds: int = 2) -> None:
    from tests.hosts.namespaces import Cluster, unsupported

    if reason := unsupported():
        print(f"hosts_ddp is skipped: {reason}", file=sys.stderr)
        return
    for module in (SHM_KERNELS, row_kernels.KERNELS, fused_updates.KERNELS):
        kernel_cache.compile_all(module)
    report = Report("hosts_ddp", keeps_others=True)
    seconds = dict.fromkeys(RATES, 0.5) if quick else SECONDS
    # Not in /tmp: that is each host's own.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="shoal-hosts-") as name:
        folder = Path(name)
        with Cluster(2, folder / "cluster") as cluster:
            bench = Bench(cluster, folder)
            for group in GROUPS:
                if not parts or any(part in group for part in parts):
                    compare(report, bench, group, rounds=1 if quick else rounds, seconds=seconds)
                    if not quick:
                        report.save()


if __name__ == "__main__":
    main()
