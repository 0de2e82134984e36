"""A host, a link, an agent or the head fails: the job goes on with the same bits, or ends everywhere."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import SCRIPT, HostsJob, differences
from namespaces import Cluster
from zygote import Zygote

from shoal.cluster.hosts.agent import COPY_EVERY_S
from waiting import wait_until
from whole_matrix import matrix_only

GATE = 5
END_S = 10.0
"""Within so long nothing of the job is left on a host that was given up, or of which the head is gone."""

StartJob = Callable[..., HostsJob]


class Gated:
    """A job whose ranks all wait at the gate."""

    def __init__(
        self,
        start_job: StartJob,
        undisturbed: Callable[..., Path],
        shared_folder: Path,
        workers: int,
        hosts: int,
        *options: str,
    ) -> None:
        self.out, self.workers = shared_folder / "out", workers
        self.out.mkdir()
        self._undisturbed, self._options = undisturbed, options or ("--exchange", "native")
        args = (str(self.out), "--gate", str(GATE), "--keep", "--loop")
        self.job = start_job(SCRIPT, *args, workers=workers, hosts=hosts, options=self._options)
        self.job.wait_for_gate(self.out, workers)
        self.hosts = self.job.cluster

    def go(self) -> None:
        (self.out / "go").touch()

    def assert_same_bits(self, hosts: int = 1) -> None:
        """It ended well, and with what the same job on one host ends with, where nothing fails."""
        assert self.job.wait() == 0, self.job.story()
        undisturbed = self._undisturbed(self.workers, *self._options, hosts=hosts)
        assert differences(self.out, undisturbed, self.workers) == [], self.job.story()

    def assert_nothing_left(self, *numbers: int) -> None:
        """No process of the job on these hosts, or on any."""
        hosts = [self.hosts[number] for number in numbers] or list(self.hosts)
        assert wait_until(lambda: not any(host.processes() for host in hosts), END_S), self.job.story()


Start = Callable[..., Gated]


@pytest.fixture
def gated(start_job: StartJob, undisturbed: Callable[..., Path], shared_folder: Path) -> Start:
    return lambda *args: Gated(start_job, undisturbed, shared_folder, *args)


def test_workers_of_a_host_without_power_start_on_another_with_room(gated: Start) -> None:
    run = gated(3, 3)
    run.hosts[2].kill()
    lost_at = time.monotonic()
    run.go()
    run.job.wait_for((run.out / "after-gate").exists)
    print(f"from the loss to the next commit: {time.monotonic() - lost_at:.2f} s")
    run.assert_same_bits()
    (lost,) = run.job.events("host-lost")
    assert (lost["host"], lost["ranks"]) == (2, [2])
    assert "host 2 (host-2, 10.77.0.3) was lost (nothing was heard of it for 3 s)" in run.job.output()
    assert "rank 2 starts again on host 0" in run.job.output()
    assert run.job.agents[1].wait() == 0


def test_workers_wait_for_a_host_that_comes_back_where_no_other_has_room(gated: Start) -> None:
    cores = len(os.sched_getaffinity(0))
    run = gated(2 * cores, 2)
    run.hosts[1].kill()
    run.hosts[1].start()
    run.job.join(1)  # before the head has missed it
    run.go()
    run.assert_same_bits()
    assert [joined["incarnation"] for joined in run.job.events("host-joined")] == [0, 1]
    assert "wait for a host: none that is left has a core to spare" in run.job.output()
    assert "shoal join shoal://10.77.0.1:7070" in run.job.output()
    assert run.job.agents[1].wait() == 0


@pytest.mark.parametrize("fault", ["in", "out", *matrix_only("link")])
def test_a_host_that_is_cut_off_is_fenced_and_its_workers_start_on_another(gated: Start, fault: str) -> None:
    run = gated(3, 3)
    cut_off = run.hosts[1]
    if fault == "link":
        cut_off.link(down=True)
    else:
        cut_off.drop(fault)
    run.go()
    run.assert_nothing_left(1)
    assert run.job.agents[1].wait() == 3
    run.assert_same_bits()
    assert [lost["host"] for lost in run.job.events("host-lost")] == [1]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_children_end_with_their_agent(gated: Start, signum: signal.Signals, code: int) -> None:
    run = gated(2, 2)
    run.job.agents[1].send_signal(signum)
    if signum is signal.SIGINT:  # once is a wish to leave
        run.job.wait_for(lambda: run.job.events("resizing"))
        run.job.agents[1].send_signal(signum)
    assert run.job.agents[1].wait() == code
    run.assert_nothing_left(1)
    run.go()
    run.assert_same_bits()
    if signum is not signal.SIGKILL:
        assert f"its agent ends: it was stopped by {signum.name}" in run.job.output()


def test_interrupting_an_agent_drains_its_host(gated: Start) -> None:
    run = gated(3, 3)
    run.job.agents[2].send_signal(signal.SIGTERM)
    run.job.wait_for(lambda: run.job.events("resizing"))
    run.go()
    assert run.job.agents[2].wait() == 0, run.job.story()
    run.assert_same_bits()
    assert run.job.events("host-lost") == []
    assert [each["host"] for each in run.job.events("host-left")] == [2]
    assert "host 2 leaves: its agent was stopped by SIGTERM" in run.job.output()


@pytest.mark.parametrize("fault", ["cut_off_from", *matrix_only("refuse")])
def test_hosts_that_reach_the_head_and_not_each_other_are_named(gated: Start, fault: str) -> None:
    run = gated(3, 3, "--exchange", "native", "--step-timeout", "5")
    for one, other in ((1, 2), (2, 1)):
        getattr(run.hosts[one], fault)(run.hosts[other])
    run.go()
    assert run.job.wait() == 3, run.job.story()
    told = " ".join(run.job.output().split())
    assert re.search(
        r"rank (1 did not reach rank 2 \(10\.77\.0\.3\)|2 did not reach rank 1 \(10\.77\.0\.2\)) in 6 attempts",
        told,
    ), run.job.story()
    assert "the group is formed again (1 of 6 times)" in told
    run.assert_nothing_left()


def test_servers_on_every_host_survive_the_loss_of_one(gated: Start) -> None:
    run = gated(3, 3, "--strategy", "ps", "--servers", "colocated")
    started = sorted(run.job.events("server-started"), key=lambda each: each["server"])
    assert [(each["server"], each["host"], each["hostname"]) for each in started] == [
        (number, number, f"host-{number}") for number in range(3)
    ]
    assert started[1]["pid"] < 1 << 22  # as its host numbers it
    config = json.loads((run.job.run_dir / "config.json").read_text())
    assert [host["servers"] for host in config["hosts"]] == [[0], [1], [2]]
    run.hosts[1].kill()
    run.go()
    run.assert_same_bits()
    (replaced,) = run.job.events("server-replaced")
    assert (replaced["server"], replaced["host"]) == (1, 2)
    assert run.job.events("went-back") == []
    assert "server 1 was lost: host 1 (host-1, 10.77.0.2) was lost" in " ".join(run.job.output().split())


def test_an_agent_that_was_paused_is_fenced(gated: Start) -> None:
    run = gated(2, 2)
    run.job.agents[1].send_signal(signal.SIGSTOP)
    run.go()
    run.job.wait_for(lambda: run.job.events("host-lost"))
    run.assert_same_bits()
    run.job.agents[1].send_signal(signal.SIGCONT)
    assert run.job.agents[1].wait() == 3
    run.assert_nothing_left(1)


def test_a_head_without_network_goes_on_alone(gated: Start) -> None:
    run = gated(2, 2)
    run.hosts[0].link(down=True)
    run.go()
    run.assert_nothing_left(1)
    run.assert_same_bits()
    assert run.job.agents[1].wait() == 3


def test_a_head_that_stood_still_for_too_long_has_lost_its_hosts_and_goes_on(gated: Start) -> None:
    run = gated(2, 2)
    run.hosts[0].pause()
    run.assert_nothing_left(1)
    assert run.job.agents[1].wait() == 3
    run.hosts[0].resume()
    run.go()
    run.assert_same_bits()
    assert [lost["host"] for lost in run.job.events("host-lost")] == [1]


@pytest.mark.parametrize("is_power_lost", [False, True])
def test_every_process_ends_where_the_head_is_gone(gated: Start, is_power_lost: bool) -> None:
    run = gated(3, 3)
    if is_power_lost:
        run.hosts[0].kill()
    else:
        run.job.head.kill()
    run.assert_nothing_left()
    assert [run.job.agents[number].wait() for number in (1, 2)] == [3, 3]


def test_a_worker_of_another_host_is_replaced_there_and_the_coordinator_at_the_head(gated: Start) -> None:
    run = gated(3, 2)
    os.kill(run.job.pid_of("shoal worker 2", 1), signal.SIGKILL)
    os.kill(run.job.pid_of("shoal coordinator", 0), signal.SIGKILL)
    run.go()
    run.assert_same_bits()
    assert [(each["rank"], each["host"]) for each in run.job.events("worker-replaced")] == [(2, 1)]
    assert run.job.events("coordinator-restarted")
    assert run.job.events("host-lost") == []


def test_parts_of_a_model_on_a_lost_host_begin_anew_from_the_checkpoint(gated: Start) -> None:
    run = gated(2, 2, "--strategy", "fsdp")
    run.hosts[1].kill()
    run.go()
    run.assert_same_bits()
    assert "worker 1 was lost with its host, and nobody else held its part of the model" in run.job.output()


def test_sums_within_a_lost_host_keep_their_order_where_its_ranks_are_on_two(gated: Start) -> None:
    run = gated(5, 3, "--exchange", "hierarchical", "--oversubscribe")
    assert sorted(each["host"] for each in run.job.events("worker-started")) == [0, 0, 1, 1, 2]
    run.hosts[1].kill()
    run.go()
    run.assert_same_bits(hosts=3)
    assert {each["host"] for each in run.job.events("worker-replaced")} == {0, 2}


def test_a_job_without_a_host_for_its_workers_ends_and_names_them(gated: Start) -> None:
    cores = len(os.sched_getaffinity(0))
    run = gated(2 * cores, 2, "--exchange", "native", "--join-timeout", "15")
    run.hosts[1].kill()
    assert run.job.wait() == 3, run.job.story()
    told = " ".join(run.job.output().split())
    ranks = ", ".join(str(rank) for rank in range(cores, 2 * cores))
    assert f"workers {ranks} had no host for 15 s: host 1 (host-1, 10.77.0.2) was lost" in told
    assert "The newest checkpoint is" in told
    run.assert_nothing_left()


def test_hosts_that_never_come_or_vanish_during_the_start_are_named_and_the_others_let_go(
    start_cluster: Callable[[int], Cluster], zygote: Zygote, shared_folder: Path
) -> None:
    job = HostsJob(start_cluster(4), zygote, shared_folder, SCRIPT)
    with contextlib.closing(job):
        job.start(4, str(shared_folder), options=("--join-timeout", "12"), joining=[1, 2])
        job.cluster[2].kill()
        assert job.wait() == 3
        told = " ".join(job.output().split())
        assert "12.0 s" in told
        missing = told.partition("12.0 s")[2]
        assert "host 2" in missing, told
        assert "host 3" in missing, told
        assert "host 1" not in missing, told
        assert job.agents[1].wait() == 3
        assert job.processes() == []


def test_a_host_whose_disk_is_full_says_so_and_the_head_goes_on_waiting(
    start_cluster: Callable[[int], Cluster], zygote: Zygote, shared_folder: Path
) -> None:
    cluster = start_cluster(2)
    cluster[1].run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/srv"])
    cluster[1].run(["sh", "-c", "cat /dev/zero > /srv/full"], check=False)
    job = HostsJob(cluster, zygote, shared_folder, SCRIPT, own_disks=True)
    with contextlib.closing(job):
        job.start(2, str(shared_folder), joining=[])
        assert job.join(1).wait() == 2
        told = " ".join(job.output(1).split())
        assert "cannot keep its files of the run job in /srv/runs: No space left on device." in told
        assert "Traceback" not in told
        assert job.head.poll() is None
        job.head.send_signal(signal.SIGINT)
        assert job.wait() == 130
        assert job.processes() == []


def test_a_disk_that_fills_up_while_a_host_copies_the_run_is_told_once_and_the_job_goes_on(
    start_cluster: Callable[[int], Cluster], zygote: Zygote, shared_folder: Path
) -> None:
    cluster = start_cluster(2)
    cluster[1].run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", "/srv"])
    job = HostsJob(cluster, zygote, shared_folder, SCRIPT, own_disks=True)
    with contextlib.closing(job):
        options = ("--exchange", "native")
        job.start(2, str(shared_folder), "--gate", str(GATE), "--keep", "--loop", options=options)
        job.wait_for_gate(shared_folder, 2)
        cluster[1].run(["sh", "-c", "cat /dev/zero > /srv/full"], check=False)
        time.sleep(2.5 * COPY_EVERY_S)
        (shared_folder / "go").touch()
        assert job.wait() == 0, job.story()
        assert job.agents[1].wait() == 0
        told = job.output(1)
        assert told.count("the run could not be copied to /srv/runs/job: ") == 1, told
        assert "No space left on device; it is tried again" in " ".join(told.split())
        assert "Traceback" not in told
        assert job.events("host-lost") == job.events("worker-replaced") == []


def test_interrupting_the_head_ends_all_hosts_with_its_code(gated: Start) -> None:
    run = gated(3, 3)
    run.job.head.send_signal(signal.SIGINT)
    run.go()
    assert run.job.wait() == 130
    assert [run.job.agents[number].wait() for number in (1, 2)] == [130, 130]
    assert "Go on with `shoal resume" in " ".join(run.job.output().split())
    run.assert_nothing_left()
