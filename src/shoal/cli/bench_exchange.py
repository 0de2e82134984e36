"""What `shoal bench exchange` measures: every exchange in one job, alternated, at every size."""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from shoal.cli.bench_ps import Figure, run_job
from shoal.cluster.launch.roles import preload_for
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.config import exchange_rule

JOB = Path(__file__).parent / "bench_exchange_job.py"
WORKERS = (2, 4)

KEPT_FROM_S = 2.0
"""What was measured for less says little, and is not kept for `--exchange auto`."""


def measure(seconds: float, tell: Callable[[Figure], None]) -> None:
    """Medians by size, the fastest first."""
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
        WarmParent("bench", preload=preload_for(str(JOB), with_servers=False)) as warm,
    ):
        warm.wait_ready()
        measured: dict[int, dict[int, dict[str, float]]] = {}
        for workers in WORKERS:
            [told] = run_job(
                JOB, (str(3 * seconds),), "ddp", workers, 0, folder=Path(folder), warm=warm, num_told=1
            )
            measured[workers] = {int(size): medians for size, medians in told.items()}
            for size, medians in told.items():
                for name, median_s in sorted(medians.items(), key=lambda each: each[1]):
                    about = {"workers": workers, "x native": round(medians["native"] / median_s, 2)}
                    what = f"{_shown(int(size))} by {name}"
                    tell(Figure(what, round(median_s * 1e6, 1), "us", about, benchmark="exchange"))
    kept = seconds >= KEPT_FROM_S and exchange_rule.write(exchange_rule.path(), measured)
    for workers in WORKERS:
        rule = exchange_rule.choose(measured, num_workers=workers, num_hosts=1, processor=platform.machine())
        where = f"kept in {exchange_rule.path()}" if kept else "not kept: too short, or no place for it"
        print(f"--exchange auto, {workers} workers: {rule} ({where})", file=sys.stderr)


def _shown(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
