"""Checkpoints of a table on servers of which 1 % of the rows changed: only those, beside all of them; stall and bytes.

One job, both kinds after every step, in alternating order. `stall` is the time
within the call that saves; a thread writes the whole one afterwards.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

import shoal
from benchmarks.harness import Report, summarise

SCRIPT = Path(__file__).parent / "scripts" / "increments_job.py"


def main(quick: bool = False) -> None:
    num_rows, rounds = (150_000, 2) if quick else (500_000, 5)
    report = Report("table_increments")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        shoal.run(
            SCRIPT, strategy="ps", servers=1, args=(str(out), str(num_rows), str(rounds)), run_dir=folder, quiet=True
        )  # fmt: skip
        figures = json.loads(out.read_text())
    # The first of each kind is whole in both.
    whole, changed = (figures[kind][-rounds:] for kind in ("whole", "changed"))
    stall = summarise([(mine[0], other[0]) for mine, other in zip(changed, whole, strict=True)])
    num_bytes = [statistics.median(num for _, num in each) for each in (changed, whole)]
    report.add(
        "a checkpoint of changed rows / a whole one",
        {**stall, "bytes": num_bytes, "bytes_ratio": round(num_bytes[0] / num_bytes[1], 4)},
        rows=num_rows, dim=16, rule="adagrad", changed="1 %", workers=1, servers=1,
    )  # fmt: skip
    if not quick:
        report.save()


if __name__ == "__main__":
    main()
