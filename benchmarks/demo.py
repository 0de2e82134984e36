"""First demonstration: the click model on servers, a worker and a server killed on the way, and what it cost.

    make demo          or: python -m benchmarks.demo [--samples 200000]

Trains examples/clicks.py on 2 workers and 2 servers and kills one of each on
purpose; then the same in peace, in one process, data parallel and
asynchronous, and a table of what was measured here and now. Ends with exit
code 1 where the killed processes changed a single bit of the weights.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.cli.verb import console
from shoal.cluster.launch.api import LaunchConfig, RunResult, launch
from shoal.cluster.launch.roles import preload_for
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.config.faults import Faults

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "clicks.py"
FAULTS = "kill worker-1 at step 40; kill server-1 at step 90"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    what: str
    workers: int
    strategy: str | None
    servers: int | None = None


ROWS = (
    Row("one process", 1, None),
    Row("data parallel", 2, "ddp"),
    Row("parameter server", 2, "ps", 2),
    Row("parameter server, asynchronous", 2, "ps:async", 2),
)


class Demo:
    """One launch after the other, from one warm parent: torch is imported once."""

    def __init__(self, folder: str, warm: WarmParent, samples: int) -> None:
        self._folder, self._warm, self._samples, self._num = Path(folder), warm, samples, 0

    def __call__(
        self, row: Row, faults: Faults | None = None, *, name: str | None = None, shown: bool = False
    ) -> tuple[RunResult, dict[str, Any]]:
        """Train as the row says; what came of it, and the hashes of the final weights."""
        self._num += 1
        hashes = self._folder / f"weights-{self._num}"
        config = LaunchConfig(
            script=str(SCRIPT),
            args=("--samples", str(self._samples), "--out", str(self._folder / f"model-{self._num}")),
            workers=row.workers,
            strategy=row.strategy,
            servers=row.servers,
            run_dir=str(self._folder / "runs"),
            seed=0,
            faults=faults,
            fingerprints=str(hashes),
            quiet=not shown,
        )
        if name is not None:
            config = replace(config, name=name, run_dir="runs")
        if shown:
            result = launch(config, warm=self._warm)
        else:
            result = launch(config, warm=self._warm, stdout=io.BytesIO(), stderr=io.BytesIO())
        if result.error is not None:
            raise SystemExit(f"{row.what}: {result.error}")
        return result, {path.stem: json.loads(path.read_text()) for path in sorted(hashes.glob("*.json"))}


def show(measured: list[tuple[str, RunResult]]) -> None:
    """The table."""
    from rich.table import Table

    table = Table("", "workers", "servers", "samples/s", "loss", "validation AUC", box=None, pad_edge=False)
    for what, result in measured:
        summary = result.summary
        table.add_row(
            what,
            str(summary["workers"]),
            str(summary["servers"] or "-"),
            f"{summary['samples_per_s']:,.0f}",
            f"{summary['metrics']['loss']:.4f}",
            f"{summary['metrics']['val_auroc']:.4f}",
        )
    console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a click model on servers, and kill some of its processes."
    )
    parser.add_argument("--samples", type=int, default=200_000)
    options = parser.parse_args()
    began = time.monotonic()
    exact = ROWS[2]
    # Numba keeps kernels by the path of their source: every new checkout compiles, and must not look as if it hung.
    print(
        "loading torch and the kernels; the first time in a checkout they are compiled, half a minute",
        flush=True,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        WarmParent("demo", preload=preload_for(str(SCRIPT), with_servers=True)) as warm,
    ):
        warm.wait_ready()
        print(f"torch and kernels loaded in {time.monotonic() - began:.1f} s", flush=True)
        demo = Demo(folder, warm, options.samples)
        print(f"\nexamples/clicks.py on 2 workers and 2 servers, and on purpose: {FAULTS}\n", flush=True)
        # Unchanged it is run by: shoal run -n 2 --servers 2 --strategy ps --faults "..." examples/clicks.py
        disturbed, its_hashes = demo(exact, Faults.parse(FAULTS), name=f"demo-{int(time.time())}", shown=True)
        print("\nThe same script, unchanged, in other ways ...", flush=True)
        measured, calm_hashes = [], {}
        for row in ROWS:
            result, hashes = demo(row)
            measured.append((row.what, result))
            if row is exact:
                calm_hashes = hashes
    measured.append((f"{exact.what}, 2 killed", disturbed))
    print()
    show(measured)
    is_equal = bool(calm_hashes) and its_hashes == calm_hashes
    num_killed = disturbed.summary["restarts"]
    verdict = (
        "equal to those of the undisturbed run, to the bit"
        if is_equal
        else "NOT those of the undisturbed run"
    )
    print(f"\n{num_killed} processes were killed and replaced; the final weights are {verdict}.")
    print(
        f"Samples per second are of whole runs, start and validation included. {time.monotonic() - began:.0f} s in all."
    )
    raise SystemExit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
