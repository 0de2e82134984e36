"""What `shoal bench ps` measures: launches jobs of its own, one after the other, and reads what their ranks tell.

Figures of one machine at one time. Which of two is faster, they say only
where both were measured in one call; comparisons that must hold alternate,
and stand in benchmarks/.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.cluster.launch.api import LaunchConfig, launch
from shoal.cluster.launch.roles import preload_for
from shoal.cluster.supervisor.warm_parent import WarmParent

FOLDER = Path(__file__).parent
KV_JOB, CLICK_JOB = FOLDER / "bench_kv_job.py", FOLDER / "bench_click_job.py"
NUM_PAIRS = 10_000_000
"""Less where little time is given: making so many rows takes seconds."""

CLICKS = (("single", 1, 0), ("ddp", 2, 0), ("ps", 2, 1), ("ps:async", 2, 1))
"""Strategy, workers, servers."""


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
        """The configuration, for people."""
        return ", ".join(f"{name} {value}" for name, value in self.configuration.items())

    def line(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "benchmark": self.benchmark,
            "figure": self.what,
            "value": self.value,
            "unit": self.unit,
            "configuration": self.configuration,
        }


def measure(seconds: float, tell: Callable[[Figure], None]) -> None:
    """Measure everything; each figure is told as soon as it is there."""
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
        WarmParent("bench", preload=preload_for(str(CLICK_JOB), with_servers=True)) as warm,
    ):
        warm.wait_ready()
        num_pairs = NUM_PAIRS if seconds >= 1 else NUM_PAIRS // 20
        for told in run_job(KV_JOB, (str(num_pairs),), "ps:async", 1, 1, folder=Path(folder), warm=warm)[0]:
            tell(Figure(told["what"], told["value"], told["unit"], {"workers": 1, "servers": 1}))
        for strategy, workers, servers in CLICKS:
            ranks = run_job(
                CLICK_JOB, (str(seconds),), strategy, workers, servers, folder=Path(folder), warm=warm
            )
            rate = sum(rank["samples_per_s"] for rank in ranks)
            about = {
                "workers": workers,
                "servers": servers,
                "threads": ranks[0]["threads"],
                "batch": ranks[0]["batch"],
            }
            tell(Figure(f"click model, 1 M rows x 16, {strategy}", round(rate, 1), "samples/s", about))


def run_job(
    script: Path,
    args: tuple[str, ...],
    strategy: str,
    workers: int,
    servers: int,
    *,
    folder: Path,
    warm: WarmParent,
    num_told: int | None = None,
) -> list[Any]:
    """What every rank of a job told, or the first `num_told` of them."""
    out = Path(tempfile.mkdtemp(dir=folder))
    config = LaunchConfig(
        script=str(script),
        args=(str(out), *args),
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
