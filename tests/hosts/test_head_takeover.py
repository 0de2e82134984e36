"""Loss of the head with --journal: another host goes on by itself, and the old head does not."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import SCRIPT, HostsJob, differences
from namespaces import DISK, Cluster
from zygote import Zygote

import etcd_members
from etcd_members import EtcdMembers
from shoal.observe.runs import newest_checkpoint
from waiting import wait_until

pytestmark = pytest.mark.timeout(400)

GATE, STEPS_SAVED = 5, 4
NUM_WORKERS = NUM_HOSTS = 3
OPTIONS = ("--exchange", "native")


class Watched:
    """A job on three hosts with disks of their own and a member of etcd each, at its gate."""

    def __init__(self, cluster: Cluster, zygote: Zygote, folder: Path) -> None:
        self.hosts, self.out = cluster, folder / "out"
        self.out.mkdir()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.etcd = EtcdMembers(
            [(host.address, 2379, 2380) for host in cluster],
            lambda i, command: cluster[i].popen(command, **quiet),
            lambda i: DISK / "etcd",
        )
        with cluster[0].network():
            self.etcd.wait_until_ready()
        self.job = HostsJob(cluster, zygote, folder, SCRIPT, own_disks=True)
        options = (*OPTIONS, "--journal", self.etcd.url)
        self.job.start(NUM_WORKERS, str(self.out), "--gate", str(GATE), "--keep", "--loop", options=options)
        self.job.wait_for_gate(self.out, NUM_WORKERS)
        for number in range(1, NUM_HOSTS):
            self.job.wait_for(lambda number=number: self._has_checkpoint(number))

    def _has_checkpoint(self, number: int) -> bool:
        newest = newest_checkpoint(self.job.run_dir_on(number))
        return newest is not None and newest.endswith(f"step-{STEPS_SAVED:09d}")

    def wait_for_takeover(self) -> int:
        """Number of the host that says that it takes over."""

        def heads() -> list[int]:
            return [number for number in (1, 2) if "this host takes over" in self.job.output(number)]

        assert wait_until(lambda: bool(heads()), 60.0), self.job.story()
        (self.job.head_number,) = heads()
        self.job.head = self.job.agents[self.job.head_number]
        return self.job.head_number

    def assert_same_bits(self, undisturbed: Callable[..., Path]) -> None:
        """Every host ended well, and with the weights of an undisturbed run."""
        assert [agent.wait(90.0) for agent in self.job.agents.values()] == [0] * len(self.job.agents), (
            self.job.story()
        )
        one = undisturbed(NUM_WORKERS, *OPTIONS)
        assert differences(self.out, one, NUM_WORKERS) == [], self.job.story()
        assert "takes over" not in self.job.output(3 - self.job.head_number).replace(
            "takes over and does", ""
        )


@pytest.fixture
def watched(
    start_cluster: Callable[[int], Cluster], zygote: Zygote, shared_folder: Path
) -> Iterator[Watched]:
    if reason := etcd_members.unsupported():
        pytest.skip(reason)
    made = Watched(start_cluster(NUM_HOSTS), zygote, shared_folder)
    yield made
    made.job.close()
    made.etcd.close()


def test_another_host_takes_over_when_the_head_loses_power_and_the_bits_stay(
    watched: Watched, undisturbed: Callable[..., Path]
) -> None:
    watched.hosts[0].kill()  # and a member of etcd with it
    watched.wait_for_takeover()
    (watched.out / "go").touch()
    watched.assert_same_bits(undisturbed)


def test_a_head_that_is_cut_off_is_fenced_and_joins_its_successor_as_any_host(
    watched: Watched, undisturbed: Callable[..., Path]
) -> None:
    job, old = watched.job, watched.job.head
    watched.hosts[0].link(down=True)
    assert old.wait() == 3, job.story()
    told = " ".join(job.output(0).split())
    assert "the job goes on, and ends here in" in told
    assert "error: this host is no longer the head of job: its lease was not renewed for" in told
    new = watched.wait_for_takeover()
    watched.hosts[0].link(down=False)
    job.join(0)
    job.wait_for(lambda: "joined job as host" in job.output(0))
    copied = job.run_dir_on(3 - new) / "config.json"
    job.wait_for(lambda: f'"number":0,"name":"host-{new}"' in copied.read_text())
    assert job.run_on(3 - new, "status", "job").wait() == 0
    assert f"host 0, host-{new} (10.77.0.{new + 1}), the head: " in job.said()
    (watched.out / "go").touch()
    watched.assert_same_bits(undisturbed)
