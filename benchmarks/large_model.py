"""Models larger than a process: peak memory of a rank of fsdp, tp and pp, and the largest model within 2 GiB a process.

Aim: with 4 ranks and a model of 1 GiB, a peak of at most 0.35 of model,
gradients and Adam state (4 GiB). Both forms of `model=` are alternated: a
function, which shoal builds, and a model that the script has built whole.
Peaks are VmHWM and hold everything: Python, torch and the libraries too.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.ddp_step import SCRIPTS, run_shoal
from benchmarks.harness import Report

BLOCK_MIB = 32
COPIES = 4  # weights, gradients and Adam's two
LIMIT_MIB = 2048


def peaks(strategy: str, workers: int, num_blocks: int, form: str, steps: int) -> dict[str, float]:
    """Of the rank that needs most."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        run_shoal(
            ["-n", str(workers), "--strategy", strategy, "--run-dir", folder],
            [SCRIPTS / "large_model_job.py", out, num_blocks, form, steps],
        )
        each = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(workers)]
    return {name: round(max(rank[name] for rank in each), 1) for name in each[0]}


def share_of_state(report: Report, strategy: str, *, workers: int, num_blocks: int, steps: int) -> None:
    values: dict[str, Any] = {}
    for form in ("instance", "factory"):
        measured = peaks(strategy, workers, num_blocks, form, steps)
        values |= {f"{form}_{name}": value for name, value in measured.items()}
    state_mib = COPIES * BLOCK_MIB * num_blocks
    values["peak_of_state"] = round(values["factory_peak_mib"] / state_mib, 3)
    values["peak_of_state_before"] = round(values["instance_peak_mib"] / state_mib, 3)
    report.add(
        f"{strategy}, peak memory of a rank",
        values,
        aim="peak_of_state <= 0.35",
        workers=workers,
        model_mib=BLOCK_MIB * num_blocks,
        state_mib=state_mib,
        steps=steps,
        counts="VmHWM",
    )


def largest(report: Report, strategy: str, *, workers: int, first: int, stride: int, steps: int) -> None:
    """Models of `first` blocks and more, until one needs more than the limit."""
    seen: dict[int, float] = {}
    num_blocks = first
    while True:
        seen[num_blocks] = peaks(strategy, workers, num_blocks, "factory", steps)["peak_mib"]
        if seen[num_blocks] > LIMIT_MIB:
            break
        num_blocks += stride
    fits = [num for num, peak in seen.items() if peak <= LIMIT_MIB]
    report.add(
        f"{strategy}, largest model within {LIMIT_MIB} MiB a process",
        {
            "model_mib": BLOCK_MIB * max(fits) if fits else None,
            "peak_mib_by_model_mib": {BLOCK_MIB * num: peak for num, peak in seen.items()},
        },
        workers=workers,
        step_of_search_mib=BLOCK_MIB * stride,
        counts="VmHWM",
    )


def main(quick: bool = False) -> None:
    report = Report("large_model", keeps_others=True)
    steps, num_blocks = (1, 4) if quick else (2, 32)
    for strategy in ("tp", "pp", "fsdp"):
        share_of_state(report, strategy, workers=4, num_blocks=num_blocks, steps=steps)
        report.save()
    if not quick:
        for strategy, workers, first, stride in (
            ("single", 1, 12, 2),
            ("ddp", 2, 10, 2),
            ("pp", 4, 44, 6),
            ("fsdp", 4, 44, 6),
        ):
            largest(report, strategy, workers=workers, first=first, stride=stride, steps=1)
            report.save()


if __name__ == "__main__":
    main()
