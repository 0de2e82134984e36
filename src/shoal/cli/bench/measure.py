"""Measurements of `shoal bench`: jobs launched one after the other, and the figures their ranks write.

Figures hold for one machine at one time. Two of them compare only where both
were measured in one call; comparisons that must hold alternate, and are in
benchmarks/.
"""

from __future__ import annotations

import io
import json
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.cluster.launch.api import LaunchConfig, launch
from shoal.cluster.launch.roles import preload_for
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.config import exchange_rule

JOBS = Path(__file__).parent / "jobs.py"

NUM_PAIRS = 10_000_000
"""Less where little time is given: making so many rows takes seconds."""

CLICKS = (("single", 1, 0), ("ddp", 2, 0), ("ps", 2, 1), ("ps:async", 2, 1))
"""Strategy, workers, servers."""


EXCHANGE_WORKERS = (2, 4)

KEPT_FROM_S = 2.0
"""What was measured for less says little, and is not kept for `--exchange auto`."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing that was measured."""

    what: str
    value: float
    unit: str
    configuration: dict[str, Any] = field(default_factory=dict)
    benchmark: str = "ps"

    @property
    def how(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.configuration.items())

    def line(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "figure": self.what,
            "value": self.value,
            "unit": self.unit,
            "configuration": self.configuration,
        }


def measure_ps(seconds: float, emit: Callable[[Figure], None]) -> None:
    """Push, pull and a click model; each figure is emitted as soon as it is there."""
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
        WarmParent("bench", preload=preload_for(str(JOBS), with_servers=True)) as warm,
    ):
        warm.wait_ready()
        num_pairs = NUM_PAIRS if seconds >= 1 else NUM_PAIRS // 20
        for told in run_job("kv", (str(num_pairs),), "ps:async", 1, 1, folder=Path(folder), warm=warm)[0]:
            emit(Figure(told["what"], told["value"], told["unit"], {"workers": 1, "servers": 1}))
        for strategy, workers, servers in CLICKS:
            ranks = run_job(
                "click", (str(seconds),), strategy, workers, servers, folder=Path(folder), warm=warm
            )
            rate = sum(rank["samples_per_s"] for rank in ranks)
            about = {
                "workers": workers,
                "servers": servers,
                "threads": ranks[0]["threads"],
                "batch": ranks[0]["batch"],
            }
            emit(Figure(f"click model, 1 M rows x 16, {strategy}", round(rate, 1), "samples/s", about))


def measure_exchange(seconds: float, emit: Callable[[Figure], None]) -> None:
    """All-reduce by every exchange, alternated, at every size; medians by size, the fastest first."""
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
        WarmParent("bench", preload=preload_for(str(JOBS), with_servers=False)) as warm,
    ):
        warm.wait_ready()
        measured: dict[int, dict[int, dict[str, float]]] = {}
        for workers in EXCHANGE_WORKERS:
            [told] = run_job(
                "exchange", (str(3 * seconds),), "ddp", workers, 0, folder=Path(folder), warm=warm, num_told=1
            )
            measured[workers] = {int(size): medians for size, medians in told.items()}
            for size, medians in told.items():
                for name, median_s in sorted(medians.items(), key=lambda each: each[1]):
                    about = {"workers": workers, "x native": round(medians["native"] / median_s, 2)}
                    what = f"{_shown(int(size))} by {name}"
                    emit(Figure(what, round(median_s * 1e6, 1), "us", about, benchmark="exchange"))
    kept = seconds >= KEPT_FROM_S and exchange_rule.write(exchange_rule.path(), measured)
    for workers in EXCHANGE_WORKERS:
        rule = exchange_rule.choose(measured, num_workers=workers, num_hosts=1, processor=platform.machine())
        where = f"kept in {exchange_rule.path()}" if kept else "not kept: too short, or no place for it"
        print(f"--exchange auto, {workers} workers: {rule} ({where})", file=sys.stderr)


def _shown(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def run_job(
    job: str,
    args: tuple[str, ...],
    strategy: str,
    workers: int,
    servers: int,
    *,
    folder: Path,
    warm: WarmParent,
    num_told: int | None = None,
) -> list[Any]:
    """Figures of every rank of a job of jobs.py, or of the first `num_told` ranks."""
    out = Path(tempfile.mkdtemp(dir=folder))
    config = LaunchConfig(
        script=str(JOBS),
        args=(job, str(out), *args),
        workers=workers,
        strategy=strategy,
        servers=servers or None,
        run_dir=str(folder / "runs"),
        seed=0,
        quiet=True,
    )
    result = launch(config, warm=warm, stdout=io.BytesIO(), stderr=io.BytesIO())
    if result.error is not None:
        raise result.error
    return [
        json.loads((out / f"{rank}.json").read_text())
        for rank in range(workers if num_told is None else num_told)
    ]
