"""From fork to first step, and what each further worker adds.

Aims, for a script with light set-up: under 0.3 s from the first fork to the
first step; under 50 ms for each further worker.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Report
from shoal.cluster.launch.api import LaunchConfig, launch
from shoal.cluster.supervisor.warm_parent import WarmParent

SCRIPT = Path(__file__).parent / "scripts" / "with_shoal.py"


def launch_once(warm: WarmParent, workers: int, folder: str) -> float:
    """Seconds from asking for the workers to the end of rank 0's first step."""
    out = Path(folder) / "out.json"
    config = LaunchConfig(
        script=str(SCRIPT), args=("tiny", "2", str(out)), workers=workers, run_dir=folder, quiet=True
    )
    began = time.time()
    result = launch(config, warm=warm)
    if result.exit_code:
        raise SystemExit(str(result.error))
    return float(json.loads(out.read_text())["first_step_at"]) - began


def main(quick: bool = False) -> None:
    report = Report("launch")
    counts = (1, 2, 3, 4)
    rounds = 3 if quick else 15
    with tempfile.TemporaryDirectory() as folder, WarmParent() as warm:
        warm.wait_ready()
        launch_once(warm, 1, folder)
        measured: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(rounds):
            for count in counts:
                measured[count].append(launch_once(warm, count, folder))
        medians = {count: statistics.median(times) for count, times in measured.items()}
    cores = len(os.sched_getaffinity(0))
    for count in counts:
        spread = sorted(measured[count])
        values = {"seconds": round(medians[count], 4), "spread": [round(spread[0], 4), round(spread[-1], 4)]}
        report.add(
            "fork to first step", values, workers=count, cores=cores, rounds=rounds, aim="seconds < 0.3"
        )
    added = (medians[counts[-1]] - medians[1]) / (counts[-1] - 1)
    report.add(
        "each further worker", {"seconds": round(added, 4)}, cores=cores, rounds=rounds, aim="seconds < 0.05"
    )
    report.add("imports of the warm parent", {"seconds": round(warm.import_s, 3)}, cores=cores)
    report.save()


if __name__ == "__main__":
    main()
