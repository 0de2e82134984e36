"""Thousands of schedules in which everything goes wrong that can: no promise is broken in any."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from simulation.cluster import Cluster
from simulation.running import BUGS, SCENARIOS, run
from simulation.seeds import FINDS

BLOCK = 200
NUM_BLOCKS = {
    "training": 12,
    "leasing": 2,
    "serving": 1,
    "fencing": 1,
    "hosts": 3,
    "takeover": 2,
    "joining": 2,
}
"""Of so many seeds each: a test is short, however busy the machine."""

REACHED = {
    "begun from a checkpoint": 20,
    "batches run again": 20,
    "coordinator killed": 20,
    "fault: coordinator dies at: coordinator writes": 20,
    "fault: coordinator dies at: coordinator wrote, not answered": 20,
    "fault: worker dies at: entered a view": 20,
    "fault: worker dies at: exchange finished, not committed": 20,
    "fault: worker dies at: state is there, not taken": 20,
    "fault: worker dies at: view formed, group not": 20,
    "fault: worker is killed as a donor": 20,
    "fenced: told so": 20,
    "fenced: worker given up": 20,
    "fenced: worker killed": 20,
    "group not formed": 20,
    "hosts: a wait ended by asking": 20,
    "hosts: given up alive": 20,
    "hosts: given up and refused": 10,
    "hosts: healed in time": 20,
    "hosts: power": 20,
    "hosts: waits for a host": 20,
    "job refused": 5,
    "joins: agent refused": 20,
    "joins: begun after a takeover": 8,
    "joins: gave up late": 4,
    "joins: refused, all taken": 100,
    "joins: refused, joined already": 100,
    "joins: seat given again": 100,
    "joins: seat of another given": 100,
    "joins: timed out": 20,
    "joins: waits for a seat": 500,
    "killed before it heard": 10,
    "let go when born too late": 5,
    "regrouped at BeginCall": 20,
    "regrouped at ScriptEnded": 20,
    "result recalled": 20,
    "slots moved": 20,
    "state lost half-way": 20,
    "state taken by a replacement": 100,
    "state taken by who was behind": 100,
    "suspect killed": 5,
    "takeover: claimed": 100,
    "takeover: cut etcd head": 20,
    "takeover: fenced": 50,
    "takeover: kill head": 50,
    "takeover: stop head": 50,
    "takeover: write refused": 2,
}
"""Where it hurts: so often at least the schedules of the test run must come there."""

reached: Counter[str] = Counter()


@pytest.mark.parametrize(
    ("scenario", "block"), [(name, block) for name, number in NUM_BLOCKS.items() for block in range(number)]
)
def test_no_schedule_breaks_a_promise(scenario: str, block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        reached.update(run(seed, SCENARIOS[scenario]).counts)
    reached["blocks"] += 1


def test_the_schedules_reach_where_it_hurts() -> None:
    if reached["blocks"] < sum(NUM_BLOCKS.values()):
        pytest.skip("only where all schedules were run before")
    missed = {what: reached[what] for what, often in REACHED.items() if reached[what] < often}
    assert not missed, f"too seldom reached, so nothing was proven there: {missed}"


@pytest.mark.parametrize("bug", [bug for bug in FINDS if "once real" in bug])
def test_a_seed_that_once_found_a_bug_finds_none_now(bug: str) -> None:
    scenario = next(each for each in SCENARIOS.values() if issubclass(BUGS[bug], each))
    run(FINDS[bug], scenario)


def test_without_faults_nobody_is_replaced_and_no_view_is_formed_twice() -> None:
    for seed in range(20):
        cluster = Cluster(seed, plan=[])
        cluster.stray = -1
        cluster.run()
        assert cluster.num_forks == cluster.num_workers
        assert len(cluster.oracle.views) == 1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_seed_is_a_schedule(scenario: str) -> None:
    # Another process with another hash seed tells the same story: nothing depends on the order of a set.
    code = "import sys; from simulation.test_schedules import digest; print(digest(sys.argv[1], range(40)))"
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "PYTHONHASHSEED": "12345",
    }
    there = subprocess.run(
        [sys.executable, "-c", code, scenario], env=environment, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == digest(scenario, range(40))


def digest(scenario: str, seeds: range) -> str:
    """The stories of these seeds, as one hash."""
    stories = hashlib.sha256()
    for seed in seeds:
        made = SCENARIOS[scenario](seed)
        made.run()
        stories.update(made.world.story().encode())
    return stories.hexdigest()
