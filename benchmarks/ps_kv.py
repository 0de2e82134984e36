"""Pairs of a key and a float into a storing table and out again, through shoal.ps and a real server.

Aim: 10 million pairs at 15 million a second or more, pushed by one worker to
one server into rows that are there; what the first push costs, which makes
them, stands beside it. A push is over when it is acknowledged, a pull when
the rows are in an array of the worker's own.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path

from benchmarks.harness import Report
from shoal.cluster.launch.api import LaunchConfig, launch
from shoal.cluster.supervisor.warm_parent import WarmParent

SCRIPT = Path(__file__).parent / "scripts" / "kv_pairs.py"
NUM_PAIRS = 10_000_000


def main(quick: bool = False) -> None:
    report = Report("ps_kv")
    rounds, num_pairs = (2, NUM_PAIRS // 10) if quick else (8, NUM_PAIRS)
    with tempfile.TemporaryDirectory() as folder, WarmParent() as warm:
        out = Path(folder) / "out.json"
        config = LaunchConfig(
            script=str(SCRIPT),
            args=(str(num_pairs), str(rounds), str(out)),
            workers=1,
            servers=1,
            strategy="ps:async",
            run_dir=folder,
            quiet=True,
        )
        result = launch(config, warm=warm)
        if result.exit_code:
            raise SystemExit(str(result.error))
        found: dict[str, dict[str, list[float]]] = json.loads(out.read_text())
    told = {"workers": 1, "servers": 1, "cores": len(os.sched_getaffinity(0)), "rounds": rounds}
    small = found.pop("256 pairs")
    for kind, by_request in found.items():
        for request, times in by_request.items():
            rates = sorted(num_pairs / each / 1e6 for each in times)
            values = {
                "million_pairs_per_s": round(statistics.median(rates), 1),
                "spread": [round(rates[0], 1), round(rates[-1], 1)],
            }
            aim = {"aim": "million_pairs_per_s >= 15"} if request == "push" else {}
            report.add(f"{request}, {kind}", values, pairs=num_pairs, **told, **aim)
    for request, times in small.items():
        values = {"median_us": round(statistics.median(times) * 1e6, 1)}
        report.add(f"{request} of 256 pairs", values, **told)
    report.save()


if __name__ == "__main__":
    main()
