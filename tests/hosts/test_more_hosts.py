"""Hosts that join a running job beyond the number at its launch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import SCRIPT, HostsJob
from namespaces import Cluster
from zygote import Zygote

pytestmark = pytest.mark.timeout(400)

GATE = 5


def test_hosts_join_a_running_job_and_take_workers_and_servers(
    start_cluster: Callable[[int], Cluster], zygote: Zygote, shared_folder: Path
) -> None:
    """One host at the launch, three in the end; the gates hold the job while hosts come."""
    out = shared_folder / "out"
    out.mkdir()
    job = HostsJob(start_cluster(3), zygote, shared_folder, SCRIPT)
    try:
        options = ("--hosts", "1", "--strategy", "ps")  # after the fixture's own number of hosts
        args = (str(out), "--gate", str(GATE), "--keep", "--steps", "40")
        job.start(2, *args, options=options, joining=())
        job.wait_for_gate(out, 2)
        assert job.join(1).wait(60.0) == 2, job.story()
        assert (
            "the key is used up. `shoal scale job --hosts 2` on the head lets another one join"
            in " ".join(job.output(1).split())
        )
        assert job.run_on_head("scale", "job", "--hosts", "1").wait(60.0) == 2
        assert "it may have 1 host already" in job.said()
        assert job.run_on_head("scale", "job", "--hosts", "3").wait(60.0) == 0, job.said()
        assert (
            "2 more hosts can join, with the key of this job; on each: shoal join shoal://10.77.0.1:7070"
            in job.said()
        )
        for number in (1, 2):
            job.join(number)
            job.wait_for(lambda number=number: len(job.events("host-joined")) == number)
        # Servers move while workers stand at the gate.
        assert job.run_on_head("scale", "job", "--servers", "3").wait(100.0) == 0, job.said()
        assert {each["server"]: each["host"] for each in job.events("server-started")} == {0: 0, 1: 1, 2: 2}
        scaling = job.run_on_head("scale", "job", "--workers", "4")
        job.wait_for(lambda: job.events("resizing"))
        (out / "go").touch()
        assert scaling.wait(100.0) == 0, job.said()
        assert job.wait() == 0, job.story()
        # Two that began, then four over the three hosts, which start theirs at the same time.
        started = [each["host"] for each in job.events("worker-started")]
        assert (started[:2], sorted(started[2:])) == ([0, 0], [0, 0, 1, 2])
        facts = json.loads((job.run_dir / "config.json").read_text())["hosts"]
        assert [host["workers"] for host in facts] == [[0, 1], [2], [3]]
        assert [agent.wait(30.0) for agent in job.agents.values()] == [0, 0]
        assert job.processes() == []
    finally:
        job.close()
