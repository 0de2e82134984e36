from __future__ import annotations

import pytest

from shoal.cluster.launch.api import LaunchConfig
from shoal.config.faults import Fault, Faults, Injector
from shoal.errors import ConfigError


def test_faults_are_written_one_after_the_other() -> None:
    faults = Faults().kill("worker-1", at_step=30).pause("worker-0", at_step=50, for_s=3)
    assert faults.planned == (
        Fault(act="kill", process="worker-1", step=30),
        Fault(act="pause", process="worker-0", step=50, for_s=3),
    )


def test_a_plan_reads_back_from_its_own_words() -> None:
    faults = (
        Faults()
        .kill("worker-1", at_step=30)
        .pause("worker-0", after_s=2.5, for_s=3)
        .kill("coordinator", at_step=2)
        .slow("worker-2", at_step=5, by_s=0.2, for_s=3)
    )
    assert Faults.parse(str(faults)) == faults


@pytest.mark.parametrize(
    "text", ["kill worker-1", "kick worker-1 at step 3", "kill worker-1 at step -3", "x"]
)
def test_words_that_are_no_fault_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no fault"):
        Faults.parse(text)


@pytest.mark.parametrize(("process", "when", "problem"), [
    ("driver-1", {"at_step": 3}, "no process of a job"),
    ("worker-1", {"at_step": 0}, "steps count from 1"),
    ("worker-1", {"at_step": -3}, "steps count from 1"),
    ("worker-1", {"after_s": -1.0}, "cannot happen"),
    ("worker-1", {}, "say when"),
    ("worker-1", {"at_step": 1, "after_s": 1.0}, "not both"),
    ("worker-1", {"at": "worker: exchange begin"}, "Did you mean 'worker: exchange begun'"),
    ("coordinator", {"at": "worker: committed"}, "never comes to"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(process: str, when: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Faults().kill(process, **when)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["slow worker-1 at step 3", "slow server-1 at step 3 by 1 s", "kill worker-1 at step 3 by 1 s"]
)
def test_only_a_worker_is_slowed_and_by_how_much_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match=r"slow|by how much"):
        Faults.parse(text)


def test_a_fault_for_a_worker_that_the_job_lacks_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="worker-2"):
        LaunchConfig(script="x.py", workers=2, faults=Faults().kill("worker-2", at_step=1))


def test_the_same_seed_draws_the_same_faults_at_the_rate_asked_for() -> None:
    def draw(seed: int) -> Faults:
        return Faults.random(seed=seed, num_workers=3, every_s=2.0, for_s=20.0)

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert 8 < sum(len(draw(seed).planned) for seed in range(200)) / 200 < 12


def test_the_supervisor_causes_what_comes_by_the_clock_and_the_coordinators_death_once() -> None:
    by_clock = Faults().kill("worker-0", after_s=2.0)
    injector = Injector(by_clock.kill("coordinator", at_step=5).kill("worker-1", at_step=1))
    assert injector.due(since_start_s=1.0, step=4) == []
    assert injector.wait_s(1.5) == 0.5
    assert [fault.process for fault in injector.due(since_start_s=2.0, step=4)] == ["worker-0"]
    assert [fault.process for fault in injector.due(since_start_s=2.1, step=6)] == ["coordinator"]
    assert injector.due(since_start_s=9.0, step=9) == []
    assert injector.wait_s(9.0) is None
