"""Hosts that leave a running job, and jobs that go on with fewer workers until one joins."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from jobs import SCRIPT, HostsJob, differences

GATE = 5
StartJob = Callable[..., HostsJob]


def gated(
    start_job: StartJob, folder: Path, workers: int, hosts: int, *options: str, steps: int = 12
) -> tuple[HostsJob, Path]:
    out = folder / "out"
    out.mkdir()
    args = (str(out), "--gate", str(GATE), "--keep", "--steps", str(steps))
    exchange = () if "--strategy" in options else ("--exchange", "native")
    job = start_job(SCRIPT, *args, workers=workers, hosts=hosts, options=(*exchange, *options))
    job.wait_for_gate(out, workers)
    return job, out


def test_a_host_that_leaves_is_drained_and_the_bits_are_the_same(
    start_job: StartJob, shared_folder: Path
) -> None:
    job, out = gated(start_job, shared_folder, 3, 3)
    leaving = job.run_on_head("leave", "job", "--host", "2")
    job.wait_for(lambda: job.events("resizing"))
    (out / "go").touch()
    assert leaving.wait(60.0) == 0, job.story()
    assert job.agents[2].wait(30.0) == 0
    assert job.wait() == 0, job.story()
    assert job.events("host-lost") == []
    assert [each["host"] for each in job.events("host-left")] == [2]
    assert {each["host"] for each in job.events("worker-started")[3:]} == {0, 1}
    assert "3 workers from step 6 on: the bits are still those of the undisturbed run" in job.output()
    one = shared_folder / "one"
    one.mkdir()
    undisturbed = start_job(SCRIPT, str(one), "--keep", workers=3, hosts=1, options=("--exchange", "native"))
    assert undisturbed.wait() == 0, undisturbed.story()
    assert differences(out, one, 3) == [], job.story()


def test_a_host_without_which_there_is_no_room_cannot_leave(start_job: StartJob, shared_folder: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    job, out = gated(start_job, shared_folder, 2 * cores, 2)
    refused = [job.run_on_head("leave", "job", "--host", str(number)).wait(60.0) for number in (1, 5)]
    assert refused == [2, 2], job.story()
    assert f"without host 1 there are {cores} cores, and {2 * cores} workers need one each" in job.said()
    assert "it has no host 5 at present; there are 0, 1" in job.said()
    (out / "go").touch()
    assert job.wait() == 0, job.story()
    assert job.events("resizing") == []


def test_a_job_goes_on_with_fewer_workers_and_takes_a_host_back_that_returns(
    start_job: StartJob, shared_folder: Path
) -> None:
    cores = len(os.sched_getaffinity(0))
    job, out = gated(start_job, shared_folder, 2 * cores, 2, "--min-workers", "1")
    job.cluster[1].kill()
    for reached in out.glob("at-gate-*"):
        reached.unlink()
    job.wait_for(lambda: len(job.events("resized")) == 1)
    (shrunk,) = job.events("resized")
    assert (shrunk["before"], shrunk["workers"]) == (2 * cores, cores)
    job.wait_for_gate(out, cores)
    told = " ".join(job.output().split())
    assert f"the hosts that are left have room for {cores} workers" in told
    assert f"{cores} workers from step 4 on: the bits are no longer those of the undisturbed run" in told
    job.cluster[1].start()
    job.join(1)
    job.wait_for(lambda: len(job.events("resizing")) == 2)
    (out / "go").touch()
    assert job.wait() == 0, job.story()
    assert [each["workers"] for each in job.events("resized")] == [cores, 2 * cores]
    assert job.agents[1].wait(30.0) == 0
    assert f"{2 * cores} workers from step 6 on" in job.output()


def test_a_server_that_is_added_while_the_job_trains_starts_at_its_home(
    start_job: StartJob, shared_folder: Path
) -> None:
    job, out = gated(start_job, shared_folder, 2, 2, "--strategy", "ps", "--servers", "2")
    scaling = job.run_on_head("scale", "job", "--servers", "3")
    assert scaling.wait(100.0) == 0, job.said()  # servers move while workers stand at the gate
    (out / "go").touch()
    assert job.wait() == 0, job.story()
    assert {each["server"]: each["host"] for each in job.events("server-started")} == {0: 0, 1: 1, 2: 0}


def test_a_host_that_joins_later_takes_workers_at_the_next_scale(
    start_job: StartJob, shared_folder: Path
) -> None:
    job, out = gated(start_job, shared_folder, 2, 2, steps=100_000)
    leaving = job.run_on_head("leave", "job", "--host", "1")
    job.wait_for(lambda: job.events("resizing"))
    (out / "go").touch()
    assert leaving.wait(100.0) == 0, job.story()
    job.wait_for(lambda: len(job.events("worker-started")) == 4)
    assert [each["host"] for each in job.events("worker-started")] == [0, 1, 0, 0]
    job.agents[1].wait(60.0)
    job.join(1)
    job.wait_for(lambda: len(job.events("host-joined")) == 2)
    assert job.run_on_head("scale", "job", "--workers", "3").wait(100.0) == 0, job.said()
    job.wait_for(lambda: len(job.events("worker-started")) == 7)
    assert [each["host"] for each in job.events("worker-started")[4:]] == [0, 0, 1]
    job.head.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.story()
