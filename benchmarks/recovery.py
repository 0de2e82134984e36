"""What a death costs: whether the bits are equal, how long until training goes on, and what it costs without one.

Aims: bits equal every time; under 1 s from the kill to the next commit for a
script with light set-up; the coordinator back in 3 s without stopping the
training; under 1 % per step without faults.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Report
from shoal import Faults
from shoal.cluster.api import LaunchConfig, launch
from shoal.cluster.warm_client import WarmParent

SCRIPT = Path(__file__).parent / "scripts" / "recovering.py"


@dataclass(slots=True)
class Ran:
    weights: set[str]
    steps_s: list[float]
    events: list[dict[str, Any]]
    commits: list[float]
    exit_code: int


class Runs:
    """Launches of the benchmark's script, one after the other."""

    def __init__(self, folder: str, warm: WarmParent) -> None:
        self._folder, self._warm, self._num = Path(folder), warm, 0

    def __call__(self, workers: int, steps: int, faults: Faults | None = None, *extra: str) -> Ran:
        self._num += 1
        out = self._folder / f"out-{self._num}"
        out.mkdir()
        config = LaunchConfig(
            script=str(SCRIPT),
            args=(str(steps), str(out), *extra),
            workers=workers,
            run_dir=str(self._folder / "runs"),
            quiet=True,
            seed=0,
            step_timeout_s=20.0,
            max_restarts=50,
            faults=faults,
        )
        result = launch(config, warm=self._warm, stdout=io.BytesIO(), stderr=io.BytesIO())
        told = [json.loads(path.read_text()) for path in out.glob("*.json")]
        times: list[float] = told[0]["times"] if told else []
        return Ran(
            weights={each["weights"] for each in told},
            steps_s=[b - a for a, b in itertools.pairwise(times)],
            events=_lines(result.run_dir / "events.jsonl"),
            commits=[line["time"] for line in _lines(result.run_dir / "metrics.jsonl")],
            exit_code=result.exit_code,
        )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_to_commit_s(ran: Ran) -> list[float]:
    """From each fault to the first step that was committed in the view formed after it."""
    found = []
    for number, event in enumerate(ran.events):
        if event["event"] == "fault" and event["hit"]:
            formed = next(
                (each["time"] for each in ran.events[number:] if each["event"] == "view-formed"), None
            )
            after = next((at for at in ran.commits if formed is not None and at > formed), None)
            if after is not None:
                found.append(after - event["time"])
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile (of few values: the largest)."""
    ordered = sorted(values)
    return {
        "median_s": round(statistics.median(ordered), 3),
        "p99_s": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
    }


def main(quick: bool = False) -> None:
    report = Report("recovery")
    draw = random.Random(0)
    num_kills = 5 if quick else 34
    load = f"shared with other work, load {os.getloadavg()[0]:.1f} before"
    about = {"cores": len(os.sched_getaffinity(0)), "machine": load}
    with tempfile.TemporaryDirectory() as folder, WarmParent() as warm:
        warm.wait_ready()
        runs = Runs(folder, warm)
        for workers in (2, 3, 4):
            steps = 120
            calm = runs(workers, steps)
            lasted_s = calm.commits[-1] - calm.commits[0]
            times: list[float] = []
            equal = 0
            for _ in range(num_kills):
                victim = f"worker-{draw.randrange(workers)}"
                ran = runs(
                    workers, steps, Faults().kill(victim, after_s=round(draw.uniform(0.0, lasted_s + 0.1), 3))
                )
                equal += ran.exit_code == 0 and ran.weights == calm.weights
                times += kill_to_commit_s(ran)
            report.add(
                "a worker killed at random moments",
                {"kills": num_kills, "bits_equal": equal, "recoveries": len(times), **spread(times)},
                workers=workers,
                steps=steps,
                **about,
                aim="bits_equal == kills, median_s < 1",
            )
        _coordinator(report, runs, draw, num_kills // 2, about)
        _goodput(report, runs, quick, about)
        _overhead(report, runs, quick, about)
    report.save()


def _coordinator(
    report: Report, runs: Runs, draw: random.Random, num_kills: int, about: dict[str, Any]
) -> None:
    steps = 120
    calm = runs(2, steps)
    calm_rate = len(calm.steps_s) / sum(calm.steps_s)
    back, rates, equal = [], [], 0
    for _ in range(num_kills):
        at_s = round(draw.uniform(0.1, calm.commits[-1] - calm.commits[0]), 3)
        ran = runs(2, steps, Faults().kill("coordinator", after_s=at_s))
        equal += ran.exit_code == 0 and ran.weights == calm.weights
        back += [event["after_s"] for event in ran.events if event["event"] == "coordinator-serves-again"]
        rates.append(len(ran.steps_s) / sum(ran.steps_s))
    values = {"kills": num_kills, "bits_equal": equal, "restarts": len(back), **spread(back)}
    values["steps_per_s_of_calm"] = round(statistics.median(rates) / calm_rate, 3)
    report.add(
        "the coordinator killed at random moments", values, workers=2, steps=steps, **about, aim="p99_s < 3"
    )


def _goodput(report: Report, runs: Runs, quick: bool, about: dict[str, Any]) -> None:
    steps = 600 if quick else 2500
    calm = runs(2, steps)
    calm_s = calm.commits[-1] - calm.commits[0]
    faults = Faults()
    every_s = 4.0 if quick else 15.0
    for number in range(1, int(calm_s * 2 / every_s) + 1):
        faults = faults.kill(f"worker-{number % 2}", after_s=number * every_s)
    ran = runs(2, steps, faults)
    took_s = ran.commits[-1] - ran.commits[0]
    values = {
        "goodput": round(calm_s / took_s, 3),
        "calm_s": round(calm_s, 1),
        "disturbed_s": round(took_s, 1),
        "kills": len(kill_to_commit_s(ran)),
        "bits_equal": ran.weights == calm.weights,
    }
    report.add(f"goodput at one kill per {every_s:g} s", values, workers=2, steps=steps, **about)


def _overhead(report: Report, runs: Runs, quick: bool, about: dict[str, Any]) -> None:
    """Blocks of steps with and without the anchor and the log, in turn, within one job."""
    steps, block = 400 if quick else 1600, 20
    taken = runs(2, steps, None, "alternate").steps_s
    # taken[i] is step i + 2: the first block is with, the second without, and so on.
    blocks = [taken[begin : begin + block] for begin in range(block - 1, len(taken) - block, block)]
    medians = [statistics.median(each) for each in blocks]
    pairs = list(zip(medians[1::2], medians[::2], strict=False))  # with, without
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    quarter = len(ratios) // 4
    values = {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_spread": [round(ratios[quarter], 4), round(ratios[-1 - quarter], 4)],
        "with_ms": round(1e3 * statistics.median(ours for ours, _ in pairs), 3),
        "without_ms": round(1e3 * statistics.median(theirs for _, theirs in pairs), 3),
    }
    report.add(
        "a step with anchor and log against one without",
        values,
        workers=2,
        steps=steps,
        **about,
        aim="ratio < 1.01",
    )


if __name__ == "__main__":
    main()
