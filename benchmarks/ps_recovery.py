"""Cost of a death with servers: updates lost or doubled, time to the next push, remaining speed.

Aims: nothing lost or doubled, under `ps` equal to the bit; under 1 s from the
kill to the next acknowledged push at the 99th percentile; goodput 0.80 at a
kill per 15 s and 0.95 at one per 60 s, over workers, servers and coordinator
(the best published for a comparable test: 0.13 and 0.81).

    python -m benchmarks ps_recovery                  all of it, about 80 minutes
    python -m benchmarks ps_recovery --part bits      a part: bits, latency, goodput
    python -m benchmarks ps_recovery --minutes 5      each part stops repeating after so long; what was done is written down
    python -m benchmarks ps_recovery --odd FOLDER     keep the run directories of runs worth a look
    python -m benchmarks ps_recovery --quick          whether it runs at all; nothing is written down
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness import Report
from benchmarks.ps_runs import ROLES, Ran, Runs, Setup
from benchmarks.recovery_runs import spread
from shoal import Faults
from shoal.cluster.launch.roles import PRELOAD_WITH_SERVERS
from shoal.cluster.launch.threads import available_cores, threads_per_worker
from shoal.cluster.supervisor.warm_parent import WarmParent

PARTS = ("bits", "latency", "goodput")
STRATEGIES = ("ps", "ps:async")
LARGE_ROWS = 1_000_000
_AIM = {
    "ps": "bits_equal == counted_once == runs, p99_s < 1",
    "ps:async": "counted_once == runs, p99_s < 1",
}


class PsRecovery:
    """All parts. Each adds its figures as soon as they are there, and they are kept at once."""

    def __init__(self, runs: Runs, *, quick: bool, minutes: float | None) -> None:
        self._runs, self._quick, self._minutes = runs, quick, minutes
        self._report = Report("ps_recovery", keeps_others=True)
        self._draw = random.Random(0)

    def bits(self) -> None:
        """One kill a run, at any moment from its first process to its last."""
        plans = [(2, 50), (3, 15)] if not self._quick else [(2, 1)]
        for size, num_kills in plans:
            for strategy in STRATEGIES:
                setup = Setup(strategy=strategy, workers=size, servers=size)
                calm = self._runs(setup)
                _must_end(calm)
                for role in ROLES:
                    tally = Tally(calm, self._runs)
                    for _ in self._until(tally, num_kills, share=len(plans) * len(STRATEGIES) * len(ROLES)):
                        at_s = round(self._draw.uniform(0.0, calm.whole_s), 3)
                        faults = Faults().kill(self._one_of(role, setup), after_s=at_s)
                        tally.add(self._runs(setup, faults), str(faults))
                    self._add(f"{strategy}: a {role} killed at random moments", tally.values(), setup)

    def latency(self) -> None:
        """Many kills of one long run, each a while after the last was healed."""
        for strategy in STRATEGIES:
            for rows in (1000, LARGE_ROWS):
                setup = self._lasting(
                    Setup(strategy=strategy, rows=rows), 8.0 if self._quick else self._limited_s(120.0, 4)
                )
                calm = self._runs(setup)
                _must_end(calm)
                faults, at_s = Faults(), 3.0
                while at_s < 2 * calm.whole_s:
                    faults = faults.kill(
                        self._one_of(self._draw.choice(ROLES), setup), after_s=round(at_s, 3)
                    )
                    at_s += self._draw.uniform(2.0, 3.0)
                tally = Tally(calm, self._runs)
                ran = self._runs(setup, faults)
                tally.add(ran, f"{ran.num_kills} kills")
                self._add(f"{strategy}: from kill to push, {rows} rows", tally.values(), setup)

    def goodput(self) -> None:
        """The same job in peace and under kills, alternated; as many steps, so the ratio of times is what is left."""
        plans = [(2.0, 2)] if self._quick else [(15.0, 8), (60.0, 5)]
        for strategy in STRATEGIES[:1] if self._quick else STRATEGIES:
            for every_s, num_kills in plans:
                share = 4 * len(STRATEGIES) * len(plans)
                length_s = (num_kills + 0.5) * every_s
                if not self._quick:
                    length_s = max(1.5 * every_s, self._limited_s(length_s, share))
                setup = self._lasting(Setup(strategy=strategy, rows=LARGE_ROWS), length_s)
                calms, disturbed = [], []
                for number in range(1 if self._quick else 2):
                    # Calm, disturbed, disturbed, calm: what drifts, drifts for both.
                    for is_calm in ((True, False), (False, True))[number % 2]:
                        if is_calm:
                            calms.append(self._runs(setup))
                            _must_end(calms[-1])
                        else:
                            disturbed.append(self._runs(setup, self._by_turns(setup, every_s, length_s)))
                            if not disturbed[-1].is_whole:
                                self._runs.keep(disturbed[-1].problem)
                # What did not come to its end was good for nothing.
                ratios = [
                    one.lasted_s / other.lasted_s if other.is_whole else 0.0
                    for one, other in zip(calms, disturbed, strict=True)
                ]
                taken = [each.to_next_push_s for ran in disturbed for each in ran.recoveries()]
                values = {
                    "goodput": round(statistics.median(ratios), 3),
                    "goodput_by_round": [round(each, 3) for each in ratios],
                    "calm_s": [round(each.lasted_s, 1) for each in calms],
                    "disturbed_s": [round(each.lasted_s, 1) for each in disturbed],
                    "kills": [each.num_kills for each in disturbed],
                    "bits_equal": [each.is_equal_to(calms[0]) for each in disturbed]
                    if strategy == "ps"
                    else None,
                    "counted_once": all(each.is_once for each in disturbed),
                    **spread(taken),
                    "worth_a_look": [each.problem for each in disturbed if each.problem],
                }
                aim = {15.0: "goodput >= 0.80", 60.0: "goodput >= 0.95"}.get(every_s, "")
                self._add(f"{strategy}: goodput at a kill per {every_s:g} s", values, setup, aim=aim)

    def _by_turns(self, setup: Setup, every_s: float, length_s: float) -> Faults:
        """One kill after the other over all roles; more than fit in, so that it is disturbed to its end."""
        faults = Faults()
        for number in range(int(3 * length_s / every_s) + 1):
            role, turn = ROLES[number % len(ROLES)], number // len(ROLES)
            process = role if role == "coordinator" else f"{role}-{turn % getattr(setup, role + 's')}"
            faults = faults.kill(process, after_s=(number + 1) * every_s)
        return faults

    def _one_of(self, role: str, setup: Setup) -> str:
        if role == "coordinator":
            return role
        return f"{role}-{self._draw.randrange(getattr(setup, role + 's'))}"

    def _lasting(self, setup: Setup, seconds: float) -> Setup:
        """The same with so many epochs that it lasts so long in peace."""
        pace = self._runs(setup)
        _must_end(pace)
        return replace(setup, epochs=max(1, math.ceil(seconds / max(pace.lasted_s, 0.1))))

    def _limited_s(self, seconds: float, share: int) -> float:
        return min(seconds, 60 * self._minutes / share) if self._minutes else seconds

    def _until(self, tally: Tally, num_kills: int, share: int = 1) -> Iterator[int]:
        """Until so many kills have hit, or the minutes are over; one that comes when the job is over is none."""
        began = time.monotonic()
        for number in range(2 * num_kills):
            is_late = self._minutes and time.monotonic() - began > 60 * self._minutes / share
            if tally.num_kills >= num_kills or (number and is_late):
                return
            print(f"\r{number + 1}: {tally.num_kills}/{num_kills} ", end="", file=sys.stderr, flush=True)
            yield number

    def _add(self, figure: str, values: dict[str, Any], setup: Setup, aim: str | None = None) -> None:
        cores = available_cores()
        about = {
            "workers": setup.workers,
            "servers": setup.servers,
            "replicas": 2,
            "steps": setup.epochs * setup.steps_per_epoch,
            "rows": setup.rows,
            "aim": aim if aim is not None else _AIM[setup.strategy],
            "cores": cores,
            "threads": threads_per_worker(setup.workers, cores=cores, env=os.environ),
            "load_after": round(os.getloadavg()[0], 1),
        }
        self._report.add(figure, values, **about)
        if not self._quick:
            self._report.save()


class Tally:
    """How many disturbed runs ended like the calm one, and what became of the others."""

    def __init__(self, calm: Ran, runs: Runs) -> None:
        self._calm, self._runs = calm, runs
        self.num_kills = self._num_runs = self._num_equal = self._num_once = self._num_late = 0
        self._num_back = 0
        self._others: list[str] = []
        self._times: dict[str, list[float]] = {role: [] for role in ROLES}
        self._own: list[float] = []
        self._back: list[float] = []

    def add(self, ran: Ran, what: str) -> None:
        if not ran.num_kills:
            self._num_late += 1
            return
        self.num_kills += ran.num_kills
        self._num_runs += 1
        is_exact = ran.setup.strategy == "ps"
        is_equal = ran.is_equal_to(self._calm)
        self._num_equal += is_equal
        self._num_once += ran.is_once
        self._num_back += bool(ran.summary.get("went_back"))
        self._back += [each["after_s"] for each in ran.events if each["event"] == "coordinator-serves-again"]
        found = list(ran.recoveries())
        for each in found:
            self._times[each.process.partition("-")[0]].append(each.to_next_push_s)
            if each.to_own_push_s is not None:
                self._own.append(each.to_own_push_s)
        longest = max((each.to_next_push_s for each in found), default=0.0)
        if not ran.is_once or (is_exact and not is_equal):
            self._others.append(
                f"{what}: exit {ran.exit_code}, ranks {ran.ranks}, leases {ran.summary.get('leases')} {ran.problem}"
            )
        elif longest > 1.0:
            self._others.append(f"{what}: {longest:.1f} s")
        else:
            return
        self._runs.keep(self._others[-1])

    def values(self) -> dict[str, Any]:
        together = [each for times in self._times.values() for each in times]
        by_role = {role: {"num": len(times), **spread(times)} for role, times in self._times.items() if times}
        return {
            "kills": self.num_kills,
            "came_too_late": self._num_late,
            "runs": self._num_runs,
            **({"bits_equal": self._num_equal} if self._calm.setup.strategy == "ps" else {}),
            "counted_once": self._num_once,
            "went_back": self._num_back,
            "recoveries": len(together),
            **spread(together),
            **({"by_role": by_role} if len(by_role) > 1 else {}),
            **({"replacement": spread(self._own)} if self._own else {}),
            **({"coordinator_back": spread(self._back)} if self._back else {}),
            "worth_a_look": self._others[:10],
        }


def _must_end(ran: Ran) -> None:
    """There is nothing to compare with a run that did not end."""
    if not ran.is_whole:
        raise SystemExit(f"a run ended with {ran.exit_code}, ranks {ran.ranks}: {ran.problem}")


def main(
    quick: bool = False, parts: Sequence[str] = (), minutes: float | None = None, odd: str | None = None
) -> None:
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise SystemExit(f"ps_recovery has no part '{unknown[0]}'; it has: {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder, WarmParent(preload=PRELOAD_WITH_SERVERS) as warm:
        warm.wait_ready()
        recovery = PsRecovery(Runs(folder, warm, odd), quick=quick, minutes=minutes)
        for part in parts or PARTS:
            getattr(recovery, part)()


if __name__ == "__main__":
    main()
