"""Cost of a death: equal bits, time until training goes on, and the overhead without one.

Aims: bits equal every time; under 1 s from the kill to the next commit for a
script with light set-up; the coordinator back in 3 s without stopping the
training; under 1 % per step without faults.

    python -m benchmarks recovery                          all of it, about 40 minutes
    python -m benchmarks recovery --part workers           workers, failpoints, coordinator, goodput, cost, own
    python -m benchmarks recovery --part workers --workers 3  only with so many of them
    python -m benchmarks recovery --part cost --minutes 5  stop repeating after so long; what was done is written down
    python -m benchmarks recovery --odd FOLDER             keep the run directories of runs worth a look
    python -m benchmarks recovery --quick                  whether it runs at all; nothing is written down
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness import Report
from benchmarks.recovery_runs import Ran, Runs, kill_to_commit_s, spread
from shoal import Faults
from shoal.cluster.launch.threads import available_cores, threads_per_worker
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.config.faults import POINTS

STEPS = 120
FAR_STEP = 60
BLOCK = 20  # as in scripts/recovering.py


class Recovery:
    """All parts. Each adds its figures as soon as they are there, and they are kept at once."""

    def __init__(
        self, runs: Runs, *, quick: bool, minutes: float | None, workers: Sequence[int] = (2, 3, 4)
    ) -> None:
        self._runs, self._quick, self._minutes, self._workers = runs, quick, minutes, workers
        self._report = Report("recovery", keeps_others=True)
        self._draw = random.Random(0)

    def workers(self) -> None:
        for workers in self._workers:
            calm = self._runs(workers, STEPS)
            tally = Tally(calm, self._runs)
            for _ in self._until(tally, 3 if self._quick else 100, share=len(self._workers)):
                victim = f"worker-{self._draw.randrange(workers)}"
                at_s = round(self._draw.uniform(0.0, calm.lasted_s + 0.1), 3)
                faults = Faults().kill(victim, after_s=at_s)
                tally.add(self._runs(workers, STEPS, faults), str(faults))
            self._add(
                "a worker killed at random moments",
                {**tally.values(), **spread(tally.times)},
                workers=workers,
                aim="bits_equal == kills, p99_s < 1",
            )

    def failpoints(self) -> None:
        """At every failpoint, every rank once: the faults that random moments hit least."""
        for workers in self._workers[:1] if self._quick else self._workers:
            calm = self._runs(workers, STEPS, None, "whole")
            tally, missed = Tally(calm, self._runs), []
            for point, faults, num_deaths in planned(workers):
                ran = self._runs(workers, STEPS, faults, "whole")
                tally.add(ran, str(faults), is_timed=False)
                if ran.num("worker-replaced") + ran.num("coordinator-restarted") < num_deaths:
                    missed.append(f"{point}: {faults}")
            self._add(
                "killed at every failpoint",
                {
                    **tally.values(),
                    "failpoints": len(POINTS),
                    "not_reached": missed,
                    **spread(tally.times),
                },
                workers=workers,
                aim="bits_equal == kills, p99_s < 1",
            )

    def coordinator(self) -> None:
        calm = self._runs(2, STEPS)
        tally, back, rates = Tally(calm, self._runs), [], []
        for number in self._until(tally, 3 if self._quick else 100):
            if number % 10 == 0:
                calm = self._runs(2, STEPS)  # how fast it is now
            at_s = round(self._draw.uniform(0.1, calm.lasted_s), 3)
            faults = Faults().kill("coordinator", after_s=at_s)
            ran = self._runs(2, STEPS, faults)
            tally.add(ran, str(faults))
            back += [event["after_s"] for event in ran.events if event["event"] == "coordinator-serves-again"]
            if ran.steps_s:
                rates.append(statistics.median(calm.steps_s) / statistics.median(ran.steps_s))
        values = {**tally.values(), "restarts": len(back), **spread(back)}
        values["median_step_of_calm"] = round(statistics.median(rates), 3)
        self._add(
            "the coordinator killed at random moments",
            values,
            workers=2,
            aim="bits_equal == kills, p99_s < 3",
        )

    def goodput(self) -> None:
        """One job, long enough for ten kills and more, against the same job left in peace."""
        every_s, num_kills = (2.0, 3) if self._quick else (15.0, 11)
        pace = self._runs(2, 200)
        steps = int((num_kills + 0.5) * every_s * len(pace.steps_s) / sum(pace.steps_s))
        calm = self._runs(2, steps)
        faults = Faults()
        # More than fit in: should the disturbed run take longer, it is disturbed to its end.
        for number in range(1, num_kills * 3):
            faults = faults.kill(f"worker-{number % 2}", after_s=number * every_s)
        ran = self._runs(2, steps, faults)
        values = {
            "goodput": round(calm.lasted_s / ran.lasted_s, 3) if ran.commits else None,
            "calm_s": round(calm.lasted_s, 1),
            "disturbed_s": round(ran.lasted_s, 1) if ran.commits else None,
            "kills": ran.num("worker-replaced"),
            "bits_equal": ran.is_equal_to(calm),
            **spread(kill_to_commit_s(ran)),
        }
        self._add(f"goodput at one kill per {every_s:g} s", values, workers=2, steps=steps)

    def cost(self) -> None:
        """Blocks of steps with and without what recovery needs of a step, in turn, within one job."""
        for size in ("small", "large"):
            ratios: list[float] = []
            extra_s: list[float] = []
            steps_s: list[float] = []
            steps = 8 * BLOCK if self._quick else 2000 if size == "small" else 600
            for _ in self._repeat(2 if self._quick else 30, share=2):
                ran = self._runs(2, steps, None, f"alternate-{size}")
                for ours, theirs in pairs(ran.steps_s):
                    ratios.append(ours / theirs)
                    extra_s.append(ours - theirs)
                    steps_s.append(theirs)
            ordered, quarter = sorted(ratios), len(ratios) // 4
            low, high = confident(ratios)
            values = {
                "ratio": round(statistics.median(ratios), 4),
                "ratio_spread": [round(ordered[quarter], 4), round(ordered[-1 - quarter], 4)],
                "ratio_95_percent": [round(low, 4), round(high, 4)],
                "extra_us": round(1e6 * statistics.median(extra_s), 1),
                "without_ms": round(1e3 * statistics.median(steps_s), 3),
                "pairs": len(ratios),
            }
            self._add(
                "a step with anchor and log against one without",
                values,
                workers=2,
                steps=steps,
                model=size,
                aim="ratio < 1.01",
            )

    def own(self) -> None:
        """The same without comparing steps, which differ by more than it: a stop-watch around anchor and log."""
        for size in ("small", "large"):
            steps = 8 * BLOCK if self._quick else 2000 if size == "small" else 600
            shares, own_s, steps_s = [], [], []
            for _ in self._repeat(2 if self._quick else 5, share=2):
                ran = self._runs(2, steps, None, f"timed-{size}")
                shares.append(sum(ran.own_s) / sum(ran.steps_s))
                own_s += ran.own_s
                steps_s += ran.steps_s
            values = {
                "share": round(statistics.median(shares), 4),
                "largest_share": round(max(shares), 4),
                "own_us": round(1e6 * statistics.median(own_s), 1),
                "step_ms": round(1e3 * statistics.median(steps_s), 3),
                "runs": len(shares),
            }
            self._add(
                "time in anchor and log, of a step",
                values,
                workers=2,
                steps=steps,
                model=size,
                aim="share < 0.01",
            )

    def _until(self, tally: Tally, num_kills: int, share: int = 1) -> Iterator[int]:
        """Until so many kills have hit: one that comes when the job is over is none."""
        for number in self._repeat(2 * num_kills, share):
            if tally.num_kills == num_kills:
                return
            yield number

    def _repeat(self, times: int, share: int = 1) -> Iterator[int]:
        """Up to so many rounds: fewer where the minutes are over, of which this is one of `share` users."""
        began = time.monotonic()
        for number in range(times):
            if number and self._minutes and time.monotonic() - began > 60 * self._minutes / share:
                return
            print(f"\r{number + 1}/{times} ", end="", file=sys.stderr, flush=True)
            yield number

    def _add(self, figure: str, values: dict[str, Any], **configuration: Any) -> None:
        cores = available_cores()
        about = {
            "steps": STEPS,
            **configuration,
            "cores": cores,
            "threads": threads_per_worker(configuration["workers"], cores=cores, env=os.environ),
            "load_after": round(os.getloadavg()[0], 1),
        }
        self._report.add(figure, values, **about)
        if not self._quick:
            self._report.save()


class Tally:
    """How many disturbed runs ended like the calm one, and what became of the others."""

    def __init__(self, calm: Ran, runs: Runs) -> None:
        self._calm, self._runs = calm, runs
        self.num_kills = self._num_equal = self._num_late = 0
        self._others: list[str] = []
        self.times: list[float] = []

    def add(self, ran: Ran, what: str, *, is_timed: bool = True) -> None:
        # At a failpoint the process does it to itself, and no event says so.
        came_late = is_timed and not ran.num("fault")
        if came_late or any(event["event"] == "fault" and not event["hit"] for event in ran.events):
            self._num_late += 1
            return
        self.num_kills += 1
        self._num_equal += ran.is_equal_to(self._calm)
        took_s = kill_to_commit_s(ran)
        self.times += took_s
        if not ran.is_equal_to(self._calm):
            self._others.append(f"{what}: exit {ran.exit_code}, {len(ran.weights)} weights {ran.problem}")
        elif took_s and max(took_s) > 1.0:
            self._others.append(f"{what}: {max(took_s):.1f} s")
        else:
            return
        self._runs.keep(self._others[-1])

    def values(self) -> dict[str, Any]:
        return {
            "kills": self.num_kills,
            "came_too_late": self._num_late,
            "bits_equal": self._num_equal,
            "recoveries": len(self.times),
            "worth_a_look": self._others[:10],
        }


def planned(workers: int) -> Iterator[tuple[str, Faults, int]]:
    """Every failpoint, with a fault that reaches it and how many deaths that makes."""
    for point in POINTS:
        if point.startswith("coordinator"):
            yield point, Faults().kill("coordinator", at=point).kill("worker-1", at_step=FAR_STEP), 2
        elif point == "worker: view left":
            for rank in {0, workers - 1} - {1}:  # a survivor leaves its view
                first = Faults().kill("worker-1", at_step=FAR_STEP)
                yield point, first.kill(f"worker-{rank}", at=point), 2
        elif "taking state" in point:
            first = Faults().kill("worker-1", at_step=FAR_STEP)
            yield point, first.kill("worker-1", at=point, incarnation=1), 2
        else:
            for rank in range(workers if point != "worker: checkpoint written" else 1):  # only rank 0 writes
                yield point, Faults().kill(f"worker-{rank}", at=point, at_step=_step_of(point)), 1


def _step_of(point: str) -> int | None:
    is_of_a_step = any(word in point for word in ("forward", "commit", "exchange"))
    return FAR_STEP if is_of_a_step else None


def pairs(steps_s: Sequence[float]) -> list[tuple[float, float]]:
    """Medians of neighbouring blocks, (with, without); the first block warms up.

    steps_s[i] is step i + 2, and blocks go with, without, without, with, ...:
    of neighbours, each kind comes first as often as the other.
    """
    begins = range(2 * BLOCK - 1, len(steps_s) - BLOCK + 1, BLOCK)
    # The first two steps of a block still pay for the change.
    medians = [statistics.median(steps_s[begin + 2 : begin + BLOCK]) for begin in begins]
    found = []
    for number in range(0, len(medians) - 1, 2):
        first, second = medians[number], medians[number + 1]
        has_first = number // 2 % 2 == 0
        found.append((first, second) if has_first else (second, first))
    return found


def confident(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies, by drawing from the values again and again."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(500))
    return medians[12], medians[-13]


PARTS = ("workers", "failpoints", "coordinator", "goodput", "cost", "own")


def main(
    quick: bool = False,
    parts: Sequence[str] = (),
    minutes: float | None = None,
    workers: Sequence[int] = (),
    odd: str | None = None,
) -> None:
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise SystemExit(f"recovery has no part '{unknown[0]}'; it has: {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder, WarmParent() as warm:
        warm.wait_ready()
        runs = Runs(folder, warm, odd)
        recovery = Recovery(runs, quick=quick, minutes=minutes, workers=workers or (2, 3, 4))
        for part in parts or PARTS:
            getattr(recovery, part)()


if __name__ == "__main__":
    main()
