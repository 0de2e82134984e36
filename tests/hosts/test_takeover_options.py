"""Takeover of a job whose script was shipped and which may go on with fewer workers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import SCRIPT, HostsJob
from namespaces import DISK, Cluster
from zygote import Zygote

import etcd_members
from etcd_members import EtcdMembers
from shoal.observe.runs import newest_checkpoint
from waiting import wait_until

pytestmark = pytest.mark.timeout(400)

GATE, STEPS_SAVED = 5, 4


def test_the_next_head_ships_the_script_it_was_sent_and_goes_on_with_fewer_workers(
    start_cluster: Callable[[int], Cluster], zygote: Zygote, shared_folder: Path
) -> None:
    if reason := etcd_members.unsupported():
        pytest.skip(reason)
    cluster, out = start_cluster(3), shared_folder / "out"
    out.mkdir()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    etcd = EtcdMembers(
        [(host.address, 2379, 2380) for host in cluster],
        lambda i, command: cluster[i].popen(command, **quiet),
        lambda i: DISK / "etcd",
    )
    with cluster[0].network():
        etcd.wait_until_ready()
    # The head alone has the script: the next head has to send on the copy that it was sent.
    cluster[0].path(DISK / "code").mkdir()
    shutil.copy(SCRIPT, cluster[0].path(DISK / "code"))
    job = HostsJob(cluster, zygote, shared_folder, DISK / "code" / SCRIPT.name, own_disks=True)
    try:
        options = ("--exchange", "native", "--journal", etcd.url, "--ship", "--min-workers", "2")
        args = (str(out), "--gate", str(GATE), "--keep")
        # One core on each of the others: without the head's two there is room for three workers of four.
        job.start(4, *args, options=options, join_options=("--cores", "1"))
        job.wait_for_gate(out, 4)

        def has_copy(number: int) -> bool:
            newest = newest_checkpoint(job.run_dir_on(number))
            return newest is not None and newest.endswith(f"step-{STEPS_SAVED:09d}")

        for number in (1, 2):
            job.wait_for(lambda number=number: has_copy(number))
        cluster[0].kill()
        assert wait_until(
            lambda: any("this host takes over" in job.output(number) for number in (1, 2)), 90.0
        ), job.story()
        (new,) = (number for number in (1, 2) if "this host takes over" in job.output(number))
        job.head_number, job.head = new, job.agents[new]
        (out / "go").touch()
        assert [agent.wait(120.0) for agent in job.agents.values()] == [0, 0], job.story()
        told = " ".join(job.output(new).split())
        assert "the hosts that are left have room for" in told, job.story()
        assert "the bits are no longer those of the undisturbed run" in told
        assert (out / "weights.pt").exists()
    finally:
        job.close()
        etcd.close()
