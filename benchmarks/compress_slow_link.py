"""`ddp` between two networks that pass 100 Mbit/s: time per step, and the loss after equal steps and after equal time.

Two workers of one `shoal run`, each in a network namespace of its own; their
gradients travel by gloo (`--exchange native`) over the link, the rest of the
job by Unix sockets as always. An MLP of 1.0 M parameters, so 4 MB of
gradients a step. Skipped, with the reason, where such networks may not be made.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import namespaces
from benchmarks.ddp_step import SCRIPTS, run_shoal
from benchmarks.harness import Report

RATE = "100mbit"
WAYS: dict[str, list[str]] = {
    "none": [],
    "bf16": ["--compress", "bf16"],
    "int8": ["--compress", "int8"],
    "topk:ratio=0.01": ["--compress", "topk:ratio=0.01"],
    "powersgd:rank=4": ["--compress", "powersgd:rank=4"],
    "sync-every 8": ["--sync-every", "8"],
    "sync-every 8, nesterov": ["--sync-every", "8", "--outer", "nesterov"],
}
SMOOTHED = 16  # steps over which a loss is averaged


def train(
    way: list[str], names: list[str], *, seconds: float, steps: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Lines of metrics.jsonl, and what summary.json says of bytes."""
    with tempfile.TemporaryDirectory() as folder:
        run_shoal(
            ["-n", "2", "--exchange", "native", *way, "--name", "link", "--run-dir", folder, "--seed", "0"],
            [SCRIPTS / "over_link.py", seconds, steps, *names],
        )
        lines = (Path(folder) / "link" / "metrics.jsonl").read_text().splitlines()
        summary = json.loads((Path(folder) / "link" / "summary.json").read_text())
    return [json.loads(line) for line in lines], summary.get("exchange", {})


def figures(lines: list[dict[str, Any]], *, steps: int, seconds: float) -> dict[str, Any]:
    """From the third step on: the first ones connect and warm up."""
    lines = lines[2:]
    began = lines[0]["time"]
    in_time = [line for line in lines if line["time"] - began <= seconds]
    whole_s = lines[-1]["time"] - began
    return {
        # Of all of them, as they come: where workers meet now and then, most steps are short and some are long.
        "step_s": round(whole_s / (len(lines) - 1), 4),
        f"loss_after_{steps}_steps": _loss(lines[:steps]),
        f"loss_after_{seconds:g}_s": _loss(in_time),
        f"steps_in_{seconds:g}_s": len(in_time),
    }


def _loss(lines: list[dict[str, Any]]) -> float:
    """Of the last steps that tell one: workers that train apart tell theirs when they meet."""
    told = [line["loss"] for line in lines if line["loss"] is not None]
    return round(statistics.fmean(told[-SMOOTHED:]), 4)


def main(quick: bool = False) -> None:
    report = Report("compress_slow_link")
    seconds, steps = (3.0, 16) if quick else (16.0, 48)
    try:
        with namespaces.slow_link(RATE) as names:
            without: float | None = None
            for name, way in WAYS.items():
                lines, exchanged = train(way, names, seconds=seconds, steps=steps)
                values = figures(lines, steps=steps, seconds=seconds)
                without = without or values["step_s"]
                sent = {"sent_bytes_per_step": exchanged.get("sent_bytes_per_step")}
                faster = {"times_faster": round(without / values["step_s"], 2)}
                report.add(f"a step with {name}", {**values, **faster, **sent}, workers=2, link=RATE)
    except namespaces.NotPermitted as why:
        print(f"compress_slow_link is skipped: {why}", file=sys.stderr)
        return
    report.save()


if __name__ == "__main__":
    main()
