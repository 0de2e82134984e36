"""Runs over hosts with disks of their own go on after the loss of the head, on any host that has a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import SCRIPT, HostsJob, differences

from shoal.observe.runs import newest_checkpoint
from waiting import wait_until

pytestmark = pytest.mark.timeout(400)

GATE = 5
STEPS_SAVED = 4
END_S = 10.0

StartJob = Callable[..., HostsJob]


class Lost:
    """A job on hosts with disks of their own, at its gate, with the newest checkpoint on every host."""

    def __init__(
        self, start_job: StartJob, shared_folder: Path, workers: int, hosts: int, *options: str
    ) -> None:
        self.out, self.workers = shared_folder / "out", workers
        self.out.mkdir()
        self._start_job, self._one = start_job, shared_folder / "one"
        self._options = ("--exchange", "native", *options)
        args = (str(self.out), "--gate", str(GATE), "--keep")
        self.job = start_job(
            SCRIPT, *args, workers=workers, hosts=hosts, options=self._options, own_disks=True
        )
        self.job.wait_for_gate(self.out, workers)
        for number in range(1, hosts):
            self.job.wait_for(lambda number=number: self.has_checkpoint(number))
        self.hosts = self.job.cluster

    def has_checkpoint(self, number: int) -> bool:
        newest = newest_checkpoint(self.job.run_dir_on(number))
        return newest is not None and newest.endswith(f"step-{STEPS_SAVED:09d}")

    def lose_head(self) -> None:
        self.hosts[0].kill()
        others = list(self.hosts)[1:]
        assert wait_until(lambda: not any(host.processes() for host in others), END_S), self.job.story()
        (self.out / "go").touch()

    def assert_same_bits(self) -> None:
        """It ended well, and with the weights of an undisturbed run."""
        assert self.job.wait() == 0, self.job.story()
        self._one.mkdir()
        one = self._start_job(
            SCRIPT, str(self._one), "--keep", workers=self.workers, hosts=1, options=self._options
        )
        assert one.wait() == 0, one.story()
        assert differences(self.out, self._one, self.workers) == [], self.job.story()


@pytest.fixture
def start_lost(start_job: StartJob, shared_folder: Path) -> Callable[..., Lost]:
    return lambda *args: Lost(start_job, shared_folder, *args)


def test_a_run_goes_on_from_the_copy_of_any_host_after_the_head_lost_power(
    start_lost: Callable[..., Lost],
) -> None:
    run = start_lost(3, 3)
    run.lose_head()
    assert "shoal resume /srv/runs/job --hosts N --bind 10.77.0.3" in run.job.output(2)
    run.job.resume(2, joining=[1])
    run.assert_same_bits()
    assert f"checkpoints/step-{STEPS_SAVED:09d}: step {STEPS_SAVED}" in run.job.output(2)
    assert run.job.agents[1].wait() == 0


def test_a_head_that_comes_back_joins_the_run_that_went_on_without_it(
    start_lost: Callable[..., Lost],
) -> None:
    run = start_lost(2, 2)
    run.lose_head()
    run.hosts[0].start()
    run.job.resume(1, joining=[0])
    run.assert_same_bits()
    assert run.job.agents[0].wait() == 0


def test_a_former_head_cannot_go_on_with_hosts_on_which_the_run_went_on(
    start_lost: Callable[..., Lost],
) -> None:
    run = start_lost(2, 2)
    run.lose_head()
    run.job.resume(1, "-n", "2")
    assert run.job.wait() == 0, run.job.story()
    run.hosts[0].start()
    run.job.resume(0, "--join-timeout", "10", joining=[1])
    assert run.job.agents[1].wait() == 2
    told = " ".join(run.job.output(1).split())
    assert "this run went on from the copy on host-1: its launch 2 began there" in told
    run.job.wait_for(lambda: "went on from the copy on host-1" in run.job.output(0))
    assert run.job.wait() != 0


def test_a_run_goes_on_on_the_same_head_and_hosts(start_lost: Callable[..., Lost]) -> None:
    run = start_lost(3, 2)
    run.job.head.kill()
    assert run.job.agents[1].wait() == 3
    (run.out / "go").touch()
    run.job.resume(0, joining=[1])
    run.assert_same_bits()


def test_a_run_of_several_hosts_goes_on_on_one_where_no_other_is_named(
    start_lost: Callable[..., Lost],
) -> None:
    run = start_lost(2, 2)
    run.lose_head()
    run.job.resume(1)
    run.assert_same_bits()
    told = " ".join(run.job.output(1).split())
    assert "had 2 hosts (host-0, host-1) and goes on on this machine alone" in told


def test_a_checkpoint_directory_that_not_every_host_sees_is_refused_before_training(
    start_job: StartJob, shared_folder: Path
) -> None:
    args = (str(shared_folder), "--keep", "--directory", "/srv/kept")
    job = start_job(SCRIPT, *args, workers=2, hosts=2, options=("--exchange", "native"), own_disks=True)
    assert job.wait() == 2, job.story()
    told = " ".join(job.output().split())
    assert (
        "checkpoints are written to /srv/kept by rank 0, and host 1 (10.77.0.2) of rank 1 does not see"
        in told
    )
    assert "Nothing was trained" in told
    assert not list(job.cluster[0].path("/srv/kept").glob("step-*"))


def test_a_checkpoint_directory_that_every_host_sees_is_used(
    start_job: StartJob, shared_folder: Path
) -> None:
    kept = shared_folder / "kept"
    args = (str(shared_folder), "--keep", "--directory", f"file://{kept}")
    job = start_job(SCRIPT, *args, workers=2, hosts=2, options=("--exchange", "native"), own_disks=True)
    assert job.wait() == 0, job.story()
    assert all(path.name.startswith("step-") for path in kept.iterdir())
