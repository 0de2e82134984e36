"""`shoal run -n 2` against hand-written torch DDP under torchrun: per step, and from launch to first step.

Aims: at most 3 % slower per step; sooner at the first step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Report

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent


def run_once(command: list[str], out: Path) -> dict[str, float]:
    began = time.time()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    measured = json.loads(out.read_text())
    steps = sorted(measured["steps_s"][3:] or measured["steps_s"])
    return {"launch_s": measured["first_step_at"] - began, "step_s": statistics.median(steps)}


def compare(report: Report, kind: str, *, workers: int, steps: int, rounds: int) -> None:
    shoal_runs: list[dict[str, float]] = []
    torch_runs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        ours = [
            str(BIN / "shoal"), "run", "-n", str(workers), "--run-dir", folder,
            str(SCRIPTS / "with_shoal.py"), kind, str(steps), str(out),
        ]  # fmt: skip
        theirs = [
            str(BIN / "torchrun"), "--nproc-per-node", str(workers), "--master-addr", "127.0.0.1",
            str(SCRIPTS / "with_torch.py"), kind, str(steps), str(out),
        ]  # fmt: skip
        for number in range(rounds):
            sides = [(shoal_runs, ours), (torch_runs, theirs)]
            for kept, command in sides if number % 2 else reversed(sides):
                kept.append(run_once(command, out))
    configuration: dict[str, Any] = {
        "workers": workers,
        "steps": steps,
        "rounds": rounds,
        "threads_per_worker": 1,
    }
    for figure, aim in (("step_s", "ratio <= 1.03"), ("launch_s", "ratio < 1")):
        ratios = sorted(a[figure] / b[figure] for a, b in zip(shoal_runs, torch_runs, strict=True))
        values = {
            "ratio": round(statistics.median(ratios), 4),
            "ratio_spread": [round(ratios[0], 4), round(ratios[-1], 4)],
            "ours_s": round(statistics.median(run[figure] for run in shoal_runs), 4),
            "theirs_s": round(statistics.median(run[figure] for run in torch_runs), 4),
        }
        name = "per step" if figure == "step_s" else "launch to first step"
        report.add(f"{kind}, {name}: shoal run / torchrun with DDP", values, aim=aim, **configuration)


def main(quick: bool = False) -> None:
    report = Report("ddp_step")
    compare(report, "click", workers=2, steps=20 if quick else 120, rounds=2 if quick else 6)
    compare(report, "resnet", workers=2, steps=4 if quick else 14, rounds=2 if quick else 6)
    report.save()


if __name__ == "__main__":
    main()
