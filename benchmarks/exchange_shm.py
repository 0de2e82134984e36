"""`shm` all-reduce against gloo's, two processes, 4 KiB to 256 MiB, alternated in the same processes.

Aims: at least 3 times at 1 MiB and above; at least 5 times lower median
latency at 4 KiB. Ratios are of times, so a third is three times as fast.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.ddp_step import SCRIPTS, run_shoal
from benchmarks.harness import Report, summarise


def main(quick: bool = False) -> None:
    report = Report("exchange_shm")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        seconds = "1" if quick else "12"
        run_shoal(
            ["-n", "2", "--exchange", "shm", "--run-dir", folder],
            [SCRIPTS / "alternate_sums.py", out, seconds],
        )
        by_bytes = json.loads(out.read_text())
    for size, pairs in by_bytes.items():
        num_bytes, values = int(size), summarise(pairs, digits=7)
        times_faster = round(1 / values["ratio"], 2)
        rates = {
            f"{side}_gb_per_s": round(num_bytes / values[f"{side}_s"] / 1e9, 3) for side in ("ours", "theirs")
        }
        aim = (
            "times_faster >= 5"
            if num_bytes == 4 << 10
            else "times_faster >= 3"
            if num_bytes >= 1 << 20
            else "-"
        )
        report.add(
            f"all-reduce of {_shown(num_bytes)}: shm / gloo",
            {"times_faster": times_faster, **values, **rates},
            aim=aim,
            workers=2,
        )
    report.save()


def _shown(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


if __name__ == "__main__":
    main()
