"""Launches of the script that recovery is measured with, and what is read from what they leave behind."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import Faults
from shoal.cluster.launch.api import LaunchConfig, launch
from shoal.cluster.supervisor.warm_parent import WarmParent

SCRIPT = Path(__file__).parent / "scripts" / "recovering.py"
STEP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Ran:
    weights: frozenset[str]
    """Hashes of what the ranks ended with: one, where all is well."""

    steps_s: list[float]
    own_s: list[float]
    """Of each of those steps, what anchor and log took, where that was timed."""

    events: list[dict[str, Any]]
    commits: list[float]
    exit_code: int
    problem: str

    def is_equal_to(self, calm: Ran) -> bool:
        return self.exit_code == 0 and len(self.weights) == 1 and self.weights == calm.weights

    def num(self, kind: str) -> int:
        return sum(event["event"] == kind for event in self.events)

    @property
    def lasted_s(self) -> float:
        return self.commits[-1] - self.commits[0]


class Runs:
    """One launch after the other, from one warm parent; what they leave is read, and removed unless kept."""

    def __init__(self, folder: str, warm: WarmParent, odd: str | None = None) -> None:
        self._folder, self._warm, self._num = Path(folder), warm, 0
        self._odd = Path(odd) if odd else None
        self._last: Path | None = None

    def __call__(self, workers: int, steps: int, faults: Faults | None = None, mode: str = "plain") -> Ran:
        self._num += 1
        if self._last is not None:
            shutil.rmtree(self._last)
        out = self._folder / f"out-{self._num}"
        out.mkdir()
        config = LaunchConfig(
            script=str(SCRIPT),
            args=(str(steps), str(out), mode),
            workers=workers,
            run_dir=str(self._folder / "runs"),
            quiet=True,
            seed=0,
            step_timeout_s=STEP_TIMEOUT_S,
            max_restarts=50,
            faults=faults,
        )
        result = launch(config, warm=self._warm, stdout=io.BytesIO(), stderr=io.BytesIO())
        told = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
        times: list[float] = told[0]["times"] if told else []
        ran = Ran(
            weights=frozenset(each["weights"] for each in told),
            steps_s=[b - a for a, b in itertools.pairwise(times)],
            own_s=told[0]["own"][1 : len(times)] if told else [],
            events=_lines(result.run_dir / "events.jsonl"),
            commits=[line["time"] for line in _lines(result.run_dir / "metrics.jsonl")],
            exit_code=result.exit_code,
            problem=str(result.error or "")[:300],
        )
        shutil.rmtree(out)
        self._last = result.run_dir
        return ran

    def keep(self, why: str) -> None:
        """Put the last run's directory aside, with a line that says why, where a folder for such was given."""
        if self._odd is None or self._last is None:
            return
        kept = (
            self._odd / f"{self._last.name}-{os.getpid()}-{self._num}"
        )  # the last's name is given out again
        shutil.copytree(self._last, kept, ignore=shutil.ignore_patterns("*.sock", "checkpoints"))
        (kept / "why.txt").write_text(why + "\n")


def kill_to_commit_s(ran: Ran) -> list[float]:
    """From each death to the first step that was committed in the view formed after it.

    A death is the moment of the kill where the supervisor did it, else the
    moment at which the warm parent had reaped it.
    """
    found = []
    struck = {"fault"} if ran.num("fault") else {"worker-exited"}
    for number, event in enumerate(ran.events):
        if event["event"] not in struck or not event.get("hit", event.get("code")):
            continue
        later = ran.events[number:]
        formed = next((each["time"] for each in later if each["event"] == "view-formed"), None)
        after = next((at for at in ran.commits if formed is not None and at > formed), None)
        if after is not None:
            found.append(after - event["time"])
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile (of fewer than a hundred: the largest) and the largest."""
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "median_s": round(statistics.median(ordered), 3),
        "p99_s": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
        "largest_s": round(ordered[-1], 3),
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
