"""Tables of four times the servers' memory, and compressed pushes and pulls: weights, throughput, bytes and AUC.

The table alone first: pulls and updates of a server's rows, a quarter of them
in memory, beside all of them. Then jobs: `ps` with and without --table-memory
must end with the same weights; with --compress, bytes and AUC beside those
without. Jobs run in turn within a round.

    python -m benchmarks ps_tables                3 rounds
    python -m benchmarks ps_tables --minutes 5    as many as fit
    python -m benchmarks ps_tables --quick        one round, few samples; nothing is written down
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Report, alternate
from benchmarks.ps_quality import SCRIPT, SERVERS, WORKERS, train
from shoal.cluster.launch.roles import preload_for
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.embedding.row_table import RowTable
from shoal.embedding.tiered_rows import RowBudget
from shoal.runtime.transport.messages.client_server import TableSpec

DIM, ROW_BYTES = 16, 16 * 2 * 4
NUM_KEYS = 20_000
"""Of a step, before they are made unique: about those of 1,024 samples of the click model."""

JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "ps": ("ps", {}),
    "ps --table-memory, a quarter": ("ps", {"table_memory": ""}),
    "ps --compress bf16": ("ps", {"compress": "bf16"}),
    "ps --compress int8": ("ps", {"compress": "int8"}),
    "ps:async": ("ps:async", {}),
    "ps:async --compress int8": ("ps:async", {"compress": "int8"}),
}


def table_alone(num_rows: int, exponent: float, *, rounds: int) -> dict[str, Any]:
    """Seconds of 20 steps on one table, a quarter of it in memory / all of it."""
    spec = TableSpec(
        number=0, name="rows", dim=DIM, dtype="float32", rule="adagrad", settings={"lr": 0.02}, num_rows=num_rows
    )  # fmt: skip
    generator = np.random.default_rng(0)
    share = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent)
    scattered = generator.permutation(num_rows)
    steps = [
        np.unique(scattered[np.searchsorted(share / share[-1], generator.random(NUM_KEYS))])
        for _ in range(20)
    ]
    with tempfile.TemporaryDirectory() as folder:
        budget = RowBudget(num_rows * ROW_BYTES // 4, folder)
        tables = RowTable(spec), RowTable(spec, budget)
        for table in tables:
            table.set(np.arange(num_rows), np.zeros((num_rows, DIM), np.float32), None, 0)

        def run(table: RowTable) -> float:
            began = time.perf_counter()
            for keys in steps:
                rows = np.empty((len(keys), DIM), np.float32)
                table.pull(keys, rows)
                table.apply(keys, rows + 1)
            return time.perf_counter() - began

        found = alternate(lambda: run(tables[1]), lambda: run(tables[0]), rounds=rounds)
        lookups = budget.num_hits + budget.num_misses
        same = [table.read_rows(np.arange(num_rows)) for table in tables]
        assert all((one == other).all() for one, other in zip(*same, strict=True))
    return {**found, "hit_rate": round(budget.num_hits / lookups, 4), "rows_per_step": len(steps[0])}


def main(quick: bool = False, minutes: float | None = None) -> None:
    samples, ids, num_rounds = (30_000, 20_000, 1) if quick else (100_000, 100_000, 3)
    report = Report("ps_tables", keeps_others=True)
    for exponent in (1.05, 0.0):
        num_rows = 100_000 if quick else 1_000_000
        values = table_alone(num_rows, exponent, rounds=3 if quick else 5)
        report.add(
            f"pull and update of a table, a quarter in memory / all, ids {'Zipf 1.05' if exponent else 'uniform'}",
            values, rows=num_rows, dim=DIM, rule="adagrad",
        )  # fmt: skip
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in JOBS}
    with (
        tempfile.TemporaryDirectory() as folder,
        WarmParent(preload=preload_for(str(SCRIPT), with_servers=True)) as warm,
    ):
        warm.wait_ready()
        began = time.monotonic()
        for number in range(num_rounds):
            if number and minutes and (time.monotonic() - began) * (number + 1) / number > 60 * minutes:
                break
            for name, (strategy, given) in JOBS.items():
                options = dict(given)
                if "table_memory" in options:
                    options["table_memory"] = str(ids * ROW_BYTES // 4)
                runs[name].append(train(strategy, 0, samples, ids, folder=Path(folder), warm=warm, **options))
    for name, (strategy, _) in JOBS.items():
        plain, mine = runs[strategy], runs[name]
        if plain is mine:
            continue
        ratios = [a["samples_per_s"] / b["samples_per_s"] for a, b in zip(mine, plain, strict=True)]
        report.add(
            f"{name} / {strategy}",
            {
                "throughput_ratio": round(statistics.median(ratios), 3),
                "throughput_ratios": [round(ratio, 3) for ratio in ratios],
                "auc_gap_percent": round(100 * (mine[0]["auc"] / plain[0]["auc"] - 1), 4),
                "auc": [round(each["auc"], 5) for each in mine],
                "auc_without": [round(each["auc"], 5) for each in plain],
                "same_weights": [a["weights"] == b["weights"] for a, b in zip(mine, plain, strict=True)],
                "exchange": mine[0]["exchange"],
                "tables": mine[0]["tables"],
            },
            workers=WORKERS, servers=SERVERS, train_samples=samples, ids=ids, dim=DIM, batch=1024,
        )  # fmt: skip
        if not quick:
            report.save()


if __name__ == "__main__":
    main()
