"""Options of the relaxed modes: bytes at the servers, throughput and AUC beside `ps:async` without them.

Jobs of the click model run in turn within a round, each beside the plain one of
the same round. Bytes are what all servers received and sent.

    python -m benchmarks ps_relaxed                3 rounds
    python -m benchmarks ps_relaxed --minutes 5    as many as fit
    python -m benchmarks ps_relaxed --quick        one round, few samples; nothing is written down
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Report
from benchmarks.ps_quality import SCRIPT, SERVERS, WORKERS, train
from shoal.cluster.launch.roles import preload_for
from shoal.cluster.supervisor.warm_parent import WarmParent

PLAIN = "ps:async"
JOBS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "--push-every 4": {"push_every": 4},
    "--pull-every 4": {"pull_every": 4},
    "--row-cache 50000 --pull-every 4": {"row_cache": 50_000, "pull_every": 4},
    "--fan-in 2": {"fan_in": 2},
    "--compress int8": {"compress": "int8"},
    "--compress topk:ratio=0.01": {"compress": "topk"},
}


def server_bytes(run: Path) -> int:
    lines = [
        json.loads(line)
        for path in (run / "activity").glob("server-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sum(line["bytes"]["received"] + line["bytes"]["sent"] for line in lines)


def main(quick: bool = False, minutes: float | None = None) -> None:
    samples, ids, num_rounds = (30_000, 20_000, 1) if quick else (100_000, 100_000, 3)
    report = Report("ps_relaxed")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in JOBS}
    with (
        tempfile.TemporaryDirectory() as temporary,
        WarmParent(preload=preload_for(str(SCRIPT), with_servers=True)) as warm,
    ):
        warm.wait_ready()
        began = time.monotonic()
        for number in range(num_rounds):
            if number and minutes and (time.monotonic() - began) * (number + 1) / number > 60 * minutes:
                break
            for at, (name, options) in enumerate(JOBS.items()):
                folder = Path(temporary) / f"{number}-{at}"
                folder.mkdir()
                told = train(PLAIN, number, samples, ids, folder=folder, warm=warm, **options)
                (run,) = (folder / "runs").iterdir()
                summary = json.loads((run / "summary.json").read_text())
                told |= {"bytes": server_bytes(run)} | {
                    key: summary[key] for key in ("row_cache", "fan_in") if key in summary
                }
                runs[name].append(told)
    for name in JOBS:
        plain, mine = runs[PLAIN], runs[name]
        pairs = list(zip(mine, plain, strict=True))
        ratios = [a["samples_per_s"] / b["samples_per_s"] for a, b in pairs]
        gaps = [100 * (a["auc"] / b["auc"] - 1) for a, b in pairs]
        report.add(
            name if name == PLAIN else f"{PLAIN} {name} / {PLAIN}",
            {
                "bytes_ratio": round(statistics.median(a["bytes"] / b["bytes"] for a, b in pairs), 3),
                "bytes_per_sample": round(statistics.median(a["bytes"] / a["samples"] for a in mine), 1),
                "throughput_ratio": round(statistics.median(ratios), 3),
                "throughput_ratios": [round(ratio, 3) for ratio in ratios],
                "auc_gap_percent": round(statistics.mean(gaps), 4),
                "auc": [round(each["auc"], 5) for each in mine],
                "staleness_mean": [round(each["staleness_mean"], 2) for each in mine],
                **{key: mine[0][key] for key in ("row_cache", "fan_in") if key in mine[0]},
            },
            workers=WORKERS, servers=SERVERS, train_samples=samples, ids=ids, batch=1024,
        )  # fmt: skip
    if not quick:
        report.save()


if __name__ == "__main__":
    main()
