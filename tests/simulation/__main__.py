"""Run many seeds on all cores: `make simulate SEEDS=100000`; or one, and read its story: `--seed 18`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from multiprocessing import get_context

from simulation import running
from simulation.ps_scenarios import PLANTED_PS, PS_SCENARIOS
from simulation.running import Broken, Scenario, first_broken, run

SCENARIOS: dict[str, type[Scenario]] = {**running.SCENARIOS, **PS_SCENARIOS}
BUGS: dict[str, type[Scenario]] = {**running.BUGS, **PLANTED_PS}

CHUNK = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20_000, help="how many, over all scenarios")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="only this one; default all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, help="one seed of --scenario (default training), with its story")
    parser.add_argument(
        "--bug", choices=BUGS, metavar="NAME", help="the first seed that finds this planted bug"
    )
    options = parser.parse_args()
    if options.bug is not None:
        broken = first_broken(BUGS[options.bug], num_seeds=options.seeds)
        print(broken.why if broken else f"not found by {options.seeds} seeds")
        return 0 if broken else 1
    scenarios = options.scenario or list(SCENARIOS)
    if options.seed is not None:
        return _tell(scenarios[0], options.seed)
    return _run_many(scenarios, options.start, options.seeds, options.jobs)


def _tell(scenario: str, seed: int) -> int:
    made = SCENARIOS[scenario](seed)
    print(made.describe())
    try:
        made.run()
    finally:
        print(made.world.story())
    return 0


def _run_many(scenarios: list[str], start: int, num_seeds: int, num_jobs: int) -> int:
    # Most of the seeds go to training: it has the most that can go wrong.
    shares = {name: (6 if name == "training" else 1) for name in scenarios}
    counted = {name: num_seeds * share // sum(shares.values()) for name, share in shares.items()}
    counted[scenarios[0]] += num_seeds - sum(counted.values())
    chunks = [
        (name, first, min(CHUNK, start + count - first))
        for name, count in counted.items()
        for first in range(start, start + count, CHUNK)
    ]
    began, num_run, num_events = time.monotonic(), 0, 0
    counts: Counter[str] = Counter()
    broken: list[Broken] = []
    with get_context("fork").Pool(num_jobs) as pool:
        for done in pool.imap_unordered(_run_chunk, chunks):
            num_run, num_events = num_run + done[0], num_events + done[1]
            counts += done[2]
            broken += done[3]
            rate = num_run / (time.monotonic() - began)
            left_s = (sum(chunk[2] for chunk in chunks) - num_run) / rate
            said = f"{num_run} schedules, {rate:.0f}/s, {len(broken)} broken, {left_s:.0f} s left"
            print(f"\r{said} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for what, count in sorted(counts.items()):
        print(f"{count:10}  {what}")
    seconds = time.monotonic() - began
    print(
        f"{num_run} schedules, {num_events} events in {seconds:.1f} s ({num_run / seconds:.0f} schedules/s)"
    )
    if broken:
        print(f"\n{broken[0]}\n\n{len(broken)} seeds are broken:")
        for each in broken[:20]:
            print(each.why.splitlines()[-1])
    return 1 if broken else 0


def _run_chunk(chunk: tuple[str, int, int]) -> tuple[int, int, Counter[str], list[Broken]]:
    name, first, count = chunk
    num_events, counts, broken = 0, Counter[str](), []
    for seed in range(first, first + count):
        try:
            ran = run(seed, SCENARIOS[name])
            num_events += ran.num_events
            counts += ran.counts
        except Broken as error:
            broken.append(error)
    return count, num_events, counts, broken


if __name__ == "__main__":
    sys.exit(main())
