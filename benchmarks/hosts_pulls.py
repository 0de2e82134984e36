"""Bytes between two hosts in a step of `ps` with replicas, of this tree and of one before it.

    git worktree add ../before REVISION
    python -m benchmarks.hosts_pulls ../before

Two workers and a server on each of two namespaced hosts, a link of 100 Mbit/s,
two copies of every slot. Bytes do not depend on what else the machine does;
seconds do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Report

ROOT = Path(__file__).resolve().parents[1]
WORKERS, RATE, NUM_STEPS, TIMEOUT_S = 4, "100mbit", 12, 400.0


def measure(cluster: Any, folder: Path, tree: Path, port: int) -> dict[str, float]:
    """Bytes of both hosts together, and seconds, per step."""
    out, where = folder / f"steps-{port}", f"{cluster[0].address}:{port}"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree / 'src'}:{tree}",
        "OMP_NUM_THREADS": "1",
        "SHOAL_JOIN_KEY": "a-key-for-benchmarks-0123456789",
    }
    servers = ["--strategy", "ps", "--servers", "2", "--replicas", "2", "--oversubscribe"]
    script = [str(tree / "benchmarks/scripts/with_shoal.py"), "mlp", "1000000", str(out), "--live"]
    run = ["run", "--hosts", "2", "--bind", where, "-n", str(WORKERS), *servers, *script]
    started = []
    for host in cluster:
        host.limit(None)
    for number, command in enumerate((run, ["join", f"shoal://{where}"])):
        with open(folder / f"host-{number}.out", "w") as output:
            arguments = [sys.executable, "-W", "ignore", "-m", "shoal", *command]
            started.append(
                cluster[number].popen(arguments, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                                      stdout=output, stderr=subprocess.STDOUT)
            )  # fmt: skip

    def steps_after(count: int) -> list[float]:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            lines = out.read_text().splitlines(keepends=True) if out.exists() else []
            times = [float(line) for line in lines if line.endswith("\n")]
            if len(times) >= count:
                return times
            if time.monotonic() > deadline or any(each.poll() is not None for each in started):
                raise SystemExit((folder / "host-0.out").read_text())
            time.sleep(0.01)

    def sent_bytes() -> int:
        return sum(host.sent_bytes() for host in cluster)

    try:
        steps_after(3)
        for host in cluster:
            host.limit(RATE)
        before = steps_after(len(steps_after(3)) + 2)
        bytes_before = sent_bytes()
        after = steps_after(len(before) + NUM_STEPS)
        num_bytes, num_steps = sent_bytes() - bytes_before, len(after) - len(before)
        return {
            "mb_per_step": round(num_bytes / num_steps / 1e6, 2),
            "s_per_step": round((after[-1] - before[-1]) / num_steps, 3),
        }
    finally:
        for host in cluster:
            for process in host.processes():
                process.kill()
        for each in started:
            each.wait()


def main() -> None:
    from tests.hosts.namespaces import Cluster, unsupported

    if reason := unsupported():
        raise SystemExit(f"hosts_pulls cannot be measured: {reason}")
    trees = {"this tree": ROOT, "the tree before": Path(sys.argv[1]).resolve()}
    report = Report("hosts_pulls")
    # Not in /tmp: that is each host's own.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="shoal-hosts-") as name:
        with Cluster(2, Path(name) / "cluster") as cluster:
            for port, (tree, path) in enumerate(trees.items(), 20_000):
                values = measure(cluster, Path(name), path, port)
                load = round(os.getloadavg()[0], 1)
                report.add(
                    f"a step of ps between two hosts: {tree}",
                    values,
                    model="mlp of 8.4 MB", workers=WORKERS, servers=2, replicas=2, link=RATE, load=load,
                )  # fmt: skip
    report.save()


if __name__ == "__main__":
    main()
