"""One of three workers is four times slower: an epoch by `dynamic`, by `equal` shares and by measured ones, against the ideal.

The ideal is all three at work until the end: a batch's time, times the
batches, over 1 + 1 + 1/4 workers. Work is sleep, so two cores are enough. The
first epoch warms up and is not counted.

    python -m benchmarks data_dynamic            about two minutes
    python -m benchmarks data_dynamic --quick    one round; nothing is written down
"""

from __future__ import annotations

import io
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Report
from shoal.cluster.launch.api import LaunchConfig, launch
from shoal.cluster.launch.roles import preload_for
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.observe.runs import read_ledger

SCRIPT = Path(__file__).parent / "scripts" / "slowed.py"
MODES = {
    "ps:async, equal": ("ps:async", "equal"),
    "ps:async, dynamic": ("ps:async", "dynamic"),
    "ddp, equal": ("ddp", "equal"),
    "ddp, weighted by measured speed": ("ddp", "weighted=measured"),
}
WORKERS, SLOWER, BATCHES, BATCH_S = 3, 4.0, 96, 0.05
IDEAL_S = BATCHES * BATCH_S / (WORKERS - 1 + 1 / SLOWER)


def run(mode: str, *, epochs: int, folder: Path, warm: WarmParent) -> dict[str, Any]:
    """Seconds of each epoch after the first, and what the slow worker had of the last."""
    strategy, shard = MODES[mode]
    out = folder / "told.json"
    out.unlink(missing_ok=True)
    config = LaunchConfig(
        script=str(SCRIPT),
        args=(str(BATCHES), str(BATCH_S), str(SLOWER), str(epochs), str(out)),
        workers=WORKERS,
        strategy=strategy,
        shard=shard,
        run_dir=str(folder / "runs"),
        seed=0,
        quiet=True,
    )
    result = launch(config, warm=warm, stdout=io.BytesIO(), stderr=io.BytesIO())
    if result.error is not None:
        raise SystemExit(f"{mode}: {result.error}")
    *_, last = read_ledger(result.run_dir, is_alive=False)["epochs"]
    return {
        "epochs_s": json.loads(out.read_text()),
        "exact": last["is_exact"],
        "slow": last["workers"].get("0", {"samples": 0})["samples"] / last["samples"],
        "twice": last["handed_out_twice"] / last["samples"],
    }


def main(quick: bool = False) -> None:
    rounds, epochs = (1, 2) if quick else (2, 3)
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    with (
        tempfile.TemporaryDirectory() as folder,
        WarmParent(preload=preload_for(str(SCRIPT), with_servers=True)) as warm,
    ):
        warm.wait_ready()
        for _ in range(rounds):
            for mode in MODES:
                found[mode].append(run(mode, epochs=epochs, folder=Path(folder), warm=warm))
    report = Report("data_dynamic")
    for mode, runs in found.items():
        seconds = sorted(each for run in runs for each in run["epochs_s"])
        report.add(
            f"an epoch with one of {WORKERS} workers {SLOWER:g} times slower: {mode} / ideal",
            {
                "ratio": round(statistics.median(seconds) / IDEAL_S, 3),
                "ratio_spread": [round(seconds[0] / IDEAL_S, 3), round(seconds[-1] / IDEAL_S, 3)],
                "epoch_s": round(statistics.median(seconds), 3),
                "ideal_s": round(IDEAL_S, 3),
                "slow_workers_share": round(statistics.median(run["slow"] for run in runs), 3),
                "handed_out_twice": round(statistics.median(run["twice"] for run in runs), 3),
                "every_sample_once": all(run["exact"] for run in runs),
            },
            workers=WORKERS,
            batches=BATCHES,
            batch_s=BATCH_S,
            epochs=len(seconds),
            cores=os.cpu_count(),
            load_after=round(os.getloadavg()[0], 1),
        )
    if not quick:
        report.save()


if __name__ == "__main__":
    main()
