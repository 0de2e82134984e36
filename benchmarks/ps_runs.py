"""Launches of the script that the parameter server's recovery is measured with, and what is read from what they leave."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import Faults
from shoal.cluster.launch.api import LaunchConfig, launch
from shoal.cluster.supervisor.warm_parent import WarmParent

SCRIPT = Path(__file__).parent / "scripts" / "ps_recovering.py"
BATCH = 256  # as in the script
STEP_TIMEOUT_S = 20.0
ROLES = ("worker", "server", "coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is launched."""

    strategy: str = "ps"
    workers: int = 2
    servers: int = 2
    epochs: int = 1
    steps_per_epoch: int = 150
    rows: int = 1000

    @property
    def samples(self) -> int:
        return self.steps_per_epoch * BATCH


@dataclass(frozen=True, slots=True)
class Recovery:
    """What followed one kill."""

    process: str
    to_next_push_s: float
    """Until a push was acknowledged by servers that knew of the death, whoever made it."""

    to_own_push_s: float | None
    """Of a worker: until its replacement had a push acknowledged."""


@dataclass(frozen=True, slots=True)
class Ran:
    setup: Setup
    ranks: list[dict[str, Any]]
    """Of each rank that came to its end: hash of its weights, and samples that were lost or doubled."""

    commits: dict[int, list[float]]
    events: list[dict[str, Any]]
    summary: dict[str, Any]
    exit_code: int
    problem: str

    @property
    def is_whole(self) -> bool:
        """Whether it ended, on every rank alike."""
        return (
            self.exit_code == 0
            and len(self.ranks) == self.setup.workers
            and len({each["weights"] for each in self.ranks}) == 1
        )

    def is_equal_to(self, calm: Ran) -> bool:
        return self.is_whole and calm.is_whole and self.ranks[0]["weights"] == calm.ranks[0]["weights"]

    @property
    def is_once(self) -> bool:
        """Whether every sample counted exactly once an epoch, by the weights; and by the leases, where there are any."""
        wanted = self.setup.samples * self.setup.epochs
        leases = self.summary.get("leases")
        by_leases = leases is None or sum(samples for _, samples in leases.values()) == wanted
        return self.is_whole and by_leases and not any(each["lost"] or each["doubled"] for each in self.ranks)

    def num(self, kind: str) -> int:
        return sum(event["event"] == kind for event in self.events)

    @property
    def num_kills(self) -> int:
        return sum(event["event"] == "fault" and event["hit"] for event in self.events)

    @property
    def lasted_s(self) -> float:
        """From the first commit to the last."""
        every = [at for times in self.commits.values() for at in times]
        return max(every) - min(every) if every else 0.0

    @property
    def whole_s(self) -> float:
        """From the first process to the end of the job: moments at which a kill hits somebody."""
        return float(self.events[-1]["time"] - self.events[0]["time"])

    def recoveries(self) -> Iterator[Recovery]:
        """What followed each kill; nothing of those after which nothing had to be pushed any more."""
        every = sorted(at for times in self.commits.values() for at in times)
        for number, event in enumerate(self.events):
            if event["event"] != "fault" or not event["hit"]:
                continue
            process = event["what"].split()[1]
            role, _, which = process.partition("-")
            # A push that was under way at the kill proves nothing: count from the moment it was known.
            sign = {"worker": "worker-replaced", "server": "server-view", "coordinator": "fault"}[role]
            later = (each for each in self.events[number:] if each["event"] == sign)
            known = next(
                (each["time"] for each in later if each.get("rank") in (None, int(which or 0))), None
            )
            after = next((at for at in every if known is not None and at > known), None)
            if known is None or after is None:
                continue
            own = (
                next((at for at in self.commits[int(which)] if at > known), None)
                if role == "worker"
                else None
            )
            yield Recovery(process, after - event["time"], own - event["time"] if own is not None else None)


class Runs:
    """One launch after the other, from one warm parent; what they leave is read, and removed unless kept."""

    def __init__(self, folder: str, warm: WarmParent, odd: str | None = None) -> None:
        self._folder, self._warm, self._num = Path(folder), warm, 0
        self._odd = Path(odd) if odd else None
        self._last: Path | None = None

    def __call__(self, setup: Setup, faults: Faults | None = None) -> Ran:
        self._num += 1
        if self._last is not None:
            shutil.rmtree(self._last)
        out = self._folder / f"out-{self._num}"
        out.mkdir()
        config = LaunchConfig(
            script=str(SCRIPT),
            args=(str(setup.samples), str(setup.epochs), str(out), str(setup.rows)),
            workers=setup.workers,
            servers=setup.servers,
            strategy=setup.strategy,
            run_dir=str(self._folder / "runs"),
            quiet=True,
            seed=0,
            step_timeout_s=STEP_TIMEOUT_S,
            max_restarts=50,
            faults=faults,
        )
        result = launch(config, warm=self._warm, stdout=io.BytesIO(), stderr=io.BytesIO())
        ran = Ran(
            setup=setup,
            ranks=[json.loads(path.read_text()) for path in sorted(out.glob("*.json"))],
            commits={rank: _times(out / f"commits-{rank}") for rank in range(setup.workers)},
            events=_lines(result.run_dir / "events.jsonl"),
            summary=result.summary,
            exit_code=result.exit_code,
            problem=str(result.error or "")[-300:],
        )
        shutil.rmtree(out)
        self._last = result.run_dir
        return ran

    def keep(self, why: str) -> None:
        """Put the last run's directory aside, with a line that says why, where a folder for such was given."""
        if self._odd is None or self._last is None:
            return
        kept = self._odd / f"{self._last.name}-{os.getpid()}-{self._num}"
        shutil.copytree(self._last, kept, ignore=shutil.ignore_patterns("*.sock", "checkpoints"))
        (kept / "why.txt").write_text(why + "\n")


def _times(path: Path) -> list[float]:
    return [float(line) for line in path.read_text().split()] if path.exists() else []


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
