"""Quality of the relaxed modes: AUC on held-out clicks after as many samples as `ps` saw.

Aim: within 0.1 % of `ps`, or the gap reported. Every seed is another world of
generated clicks, whose best possible AUC is known; within a seed all modes see
the same samples from the same first weights, so the gap is taken per seed, and
its spread is over the seeds. `ps` itself is run twice: exact, so the gap of
the second to the first is 0, and what is not 0 is the mode's.

    python -m benchmarks ps_quality                 5 seeds, about 25 minutes
    python -m benchmarks ps_quality --minutes 10    as many seeds as fit
    python -m benchmarks ps_quality --quick         one seed, few samples; nothing is written down
"""

from __future__ import annotations

import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Report
from shoal.cluster.launch.api import LaunchConfig, launch
from shoal.cluster.launch.roles import preload_for
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.data import generated

SCRIPT = Path(__file__).parent / "scripts" / "ps_auc.py"
MODES = ("ps", "ps:ssp=4", "ps:async", "ps:hybrid", "ps:drop=1", "ps:stale-ok")
NUM_SEEDS = 5
WORKERS, SERVERS = 2, 1


def train(
    strategy: str, seed: int, samples: int, ids: int, *, folder: Path, warm: WarmParent, **options: Any
) -> dict[str, Any]:
    """One run: what it told, with how stale it was and what was left out."""
    out = folder / "told.json"
    out.unlink(missing_ok=True)
    config = LaunchConfig(
        script=str(SCRIPT),
        args=(str(seed), str(samples), str(ids), str(out)),
        workers=WORKERS,
        servers=SERVERS,
        strategy=strategy,
        run_dir=str(folder / "runs"),
        seed=seed,
        quiet=True,
        **options,
    )
    result = launch(config, warm=warm, stdout=io.BytesIO(), stderr=io.BytesIO())
    if result.error is not None:
        raise SystemExit(f"{strategy}, seed {seed}: {result.error}")
    told: dict[str, Any] = json.loads(out.read_text())
    staleness = {int(ahead): num for ahead, num in result.summary.get("staleness", {}).items()}
    pulls = sum(staleness.values())
    told["staleness_mean"] = sum(ahead * num for ahead, num in staleness.items()) / pulls if pulls else 0.0
    told["staleness_largest"] = max(staleness, default=0)
    told["left_out"] = result.summary.get("late", 0) + result.summary.get("missed", 0)
    told["samples"] = result.summary["samples"]
    told["samples_per_s"] = result.summary["samples_per_s"]
    told["exchange"] = result.summary.get("exchange", {})
    told["tables"] = result.summary.get("tables", {})
    return told


def figures(runs: list[dict[str, Any]], exact: list[dict[str, Any]]) -> dict[str, Any]:
    """A mode's AUC against that of `ps`, seed by seed."""
    gaps = [100 * (one["auc"] / other["auc"] - 1) for one, other in zip(runs, exact, strict=True)]
    return {
        "auc_gap_percent": round(statistics.mean(gaps), 4),
        "auc_gap_percent_by_seed": [round(gap, 4) for gap in gaps],
        "auc_gap_deviation": round(statistics.stdev(gaps), 4) if len(gaps) > 1 else None,
        "auc": [round(each["auc"], 5) for each in runs],
        "auc_of_ps": [round(each["auc"], 5) for each in exact],
        "test_loss": [round(each["test_loss"], 5) for each in runs],
        "staleness_mean": round(statistics.mean(each["staleness_mean"] for each in runs), 2),
        "staleness_largest": max(each["staleness_largest"] for each in runs),
        "contributions_left_out": [each["left_out"] for each in runs],
        "samples": sorted({each["samples"] for each in runs}),
    }


def main(quick: bool = False, minutes: float | None = None) -> None:
    samples, ids, num_seeds = (30_000, 20_000, 1) if quick else (1_000_000, 200_000, NUM_SEEDS)
    report = Report("ps_quality")
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in (*MODES, "ps again")}
    best: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        WarmParent(preload=preload_for(str(SCRIPT), with_servers=True)) as warm,
    ):
        warm.wait_ready()
        began = time.monotonic()
        for seed in range(num_seeds):
            took_s = (time.monotonic() - began) / seed if seed else 0.0
            if minutes and time.monotonic() - began + took_s > 60 * minutes:
                break
            best.append(generated.best_auc(seed=seed, num_ids=ids))
            for mode in found:
                strategy = mode.removesuffix(" again")
                found[mode].append(train(strategy, seed, samples, ids, folder=Path(folder), warm=warm))
    for mode in list(found)[1:]:
        report.add(
            f"AUC on held-out clicks: {mode} / ps",
            {**figures(found[mode], found["ps"]), "best_auc": [round(each, 5) for each in best]},
            aim="|auc_gap_percent| < 0.1",
            workers=WORKERS,
            servers=SERVERS,
            seeds=len(best),
            train_samples=samples,
            test_samples=100_000,
            ids=ids,
            batch=1024,
            optimizer="Adagrad, lr 0.02",
        )
    if not quick:
        report.save()


if __name__ == "__main__":
    main()
