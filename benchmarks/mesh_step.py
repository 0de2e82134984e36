"""fsdp, tp and pp against the same written by hand with torch, two processes; and their memory per process against ddp.

Aim: at most 3 % slower. A step is measured with both sides alternated in the
same two processes. Memory is of a model of 30 M parameters with Adam, over
what a worker has before it builds it: what it holds between steps
(proportional, so what workers share counts once) and its peak, in which the
whole model is, since every worker builds it before it is cut.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.ddp_step import SCRIPTS, run_shoal
from benchmarks.harness import Report, summarise

SIDES = (("fsdp", "1f1b"), ("tp", "1f1b"), ("pp", "1f1b"), ("pp", "gpipe"))


def compare(report: Report, strategy: str, schedule: str, *, steps: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        run_shoal(
            ["-n", "2", "--strategy", strategy, "--schedule", schedule, "--run-dir", folder],
            [SCRIPTS / "alternate_mesh.py", strategy, schedule, steps, out, rounds],
        )
        pairs = json.loads(out.read_text())
    name = f"{strategy} {schedule}" if strategy == "pp" else strategy
    report.add(
        f"{name}, per step: shoal / by hand, in the same processes",
        summarise(pairs),
        aim="ratio <= 1.03",
        workers=2,
        steps_per_round=steps,
    )


def memory_of(strategy: str, *, steps: int) -> dict[str, float]:
    """The worker that needs most."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        run_shoal(
            ["-n", "2", "--strategy", strategy, "--run-dir", folder],
            [SCRIPTS / "mesh_memory.py", out, steps],
        )
        each = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]
    return {name: round(max(worker[name] for worker in each), 1) for name in each[0]}


def main(quick: bool = False) -> None:
    report = Report("mesh_step")
    for strategy, schedule in SIDES:
        compare(report, strategy, schedule, steps=2 if quick else 16, rounds=2 if quick else 6)
    whole = memory_of("ddp", steps=3)
    report.add("ddp, memory per process", whole, workers=2)
    for strategy in ("fsdp", "pp"):
        part = memory_of(strategy, steps=3)
        against = {
            f"{name}_to_ddp": round(part[f"{name}_mb"] / whole[f"{name}_mb"], 3) for name in ("held", "peak")
        }
        report.add(f"{strategy}, memory per process", {**part, **against}, workers=2)
    report.save()


if __name__ == "__main__":
    main()
