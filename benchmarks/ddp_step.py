"""`shoal run -n 2` against hand-written torch DDP: per step, and from launch to first step.

Aims: at most 3 % slower per step; sooner at the first step. The step is
measured with both sides alternated in the same two processes: between two
launches the machine changes more than the sides differ. Launching is measured
against torchrun, launch by launch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Report, in_turn, summarise

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent


def seconds_to_first_step(command: list[str], out: Path) -> float:
    out.unlink(missing_ok=True)
    began = time.time()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    # Not by the exit code: torch's group sometimes aborts while it is taken down, and the step was measured by then.
    if not out.exists():
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return float(json.loads(out.read_text())["first_step_at"]) - began


def run_shoal(options: Sequence[str], script: Sequence[object]) -> None:
    """`shoal run` to its end; what it said where it fails."""
    command = [str(BIN / "shoal"), "run", *options, *map(str, script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")


def compare_steps(
    report: Report,
    kind: str,
    *,
    workers: int,
    steps: int,
    rounds: int,
    exchange: str = "auto",
    aim: str = "ratio <= 1.03",
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        run_shoal(
            ["-n", str(workers), "--exchange", exchange, "--run-dir", folder],
            [SCRIPTS / "alternate_ddp.py", kind, steps, out, rounds],
        )
        pairs = json.loads(out.read_text())
    values = summarise(pairs)
    report.add(
        f"{kind}, per step: shoal / torch DDP, in the same processes",
        values,
        aim=aim,
        workers=workers,
        exchange=exchange,
        steps_per_round=steps,
    )


def compare_launches(report: Report, kind: str, *, workers: int, rounds: int) -> None:
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        ours = [
            str(BIN / "shoal"), "run", "-n", str(workers), "--run-dir", folder,
            str(SCRIPTS / "with_shoal.py"), kind, "2", str(out),
        ]  # fmt: skip
        theirs = [
            str(BIN / "torchrun"), "--nproc-per-node", str(workers), "--master-addr", "127.0.0.1",
            str(SCRIPTS / "with_torch.py"), kind, "2", str(out),
        ]  # fmt: skip
        for number in range(rounds):
            mine, other = in_turn(
                lambda: seconds_to_first_step(ours, out), lambda: seconds_to_first_step(theirs, out), number
            )
            pairs.append((mine, other))
    report.add(
        f"{kind}, launch to first step: shoal run / torchrun with DDP",
        summarise(pairs),
        aim="ratio < 1",
        workers=workers,
    )


def main(quick: bool = False) -> None:
    report = Report("ddp_step")
    compare_steps(report, "click", workers=2, steps=20 if quick else 40, rounds=4 if quick else 16)
    compare_steps(report, "resnet", workers=2, steps=2 if quick else 4, rounds=2 if quick else 10)
    compare_launches(report, "tiny", workers=2, rounds=2 if quick else 6)
    compare_launches(report, "click", workers=2, rounds=2 if quick else 4)
    report.save()


if __name__ == "__main__":
    main()
