"""Parameter servers under every fault: no schedule breaks a promise, and every planted bug is found."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation.ps_scenarios import PLANTED_PS, PS_SCENARIOS
from simulation.ps_seeds import PS_FINDS
from simulation.running import Broken, first_broken, run

BLOCK = 20
NUM_BLOCKS = {"ps-exact": 6, "ps-relaxed": 4, "ps-hurried": 3, "ps-merged": 2}
MAX_SEEDS = 600

REACHED = {
    "server killed": 20,
    "worker killed": 20,
    "coordinator killed": 10,
    "connection cut": 20,
    "result recalled": 10,
    "batch acknowledged again": 5,
    "back to a checkpoint": 3,
    "told to be late": 100,
    "pull from a replica": 500,
    "step passed by": 20,
    "pushes merged": 10,
    "merged push left out": 3,
    "pushed past the aggregator": 20,
}
"""Where it hurts: so often at least the schedules of the test run must come there."""

reached: Counter[str] = Counter()


@pytest.mark.parametrize(
    ("scenario", "block"), [(name, block) for name, number in NUM_BLOCKS.items() for block in range(number)]
)
def test_no_schedule_of_servers_breaks_a_promise(scenario: str, block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        reached.update(run(seed, PS_SCENARIOS[scenario]).counts)
    reached["blocks"] += 1


@pytest.mark.parametrize(
    ("seed", "outcome"),
    [(227, "done"), (2511, "a step that cannot be summed again")],
)
def test_a_step_that_a_replacement_does_not_run_again_ends_or_takes_the_job_back(
    seed: int, outcome: str
) -> None:
    assert run(seed, PS_SCENARIOS["ps-exact"]).counts[outcome] == 1


def test_the_schedules_of_servers_reach_where_it_hurts() -> None:
    if reached["blocks"] < sum(NUM_BLOCKS.values()):
        pytest.skip("only where all schedules were run before")
    missed = {what: reached[what] for what, often in REACHED.items() if reached[what] < often}
    assert not missed, f"too seldom reached, so nothing was proven there: {missed}"


@pytest.mark.parametrize("bug", PLANTED_PS)
def test_a_planted_bug_of_servers_is_found(bug: str) -> None:
    try:
        run(PS_FINDS.get(bug, 0), PLANTED_PS[bug])
    except Broken:
        return
    assert first_broken(PLANTED_PS[bug], num_seeds=MAX_SEEDS) is not None, f"not found: {bug}"


def test_a_seed_of_servers_is_a_schedule() -> None:
    for scenario in PS_SCENARIOS.values():
        first, second = scenario(11), scenario(11)
        first.run()
        second.run()
        assert first.world.story() == second.world.story()
