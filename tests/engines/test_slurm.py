"""Slurm, for real: one machine's slurmctld and slurmd, jobs as hosts, one that is killed and one that is preempted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_jobs import TRAINING, EngineJob, command_lines, differences, kill_host
from slurm_cluster import SlurmCluster, unsupported

KEY = "a-key-for-tests-0123456789"


@pytest.fixture(scope="module")
def slurm(
    installed: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    installed("slurm")
    if reason := unsupported():
        pytest.skip(reason)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


def test_a_killed_job_of_slurm_is_replaced_and_the_bits_are_those_of_this_machine_alone(
    slurm: SlurmCluster, start_job: Callable[..., EngineJob], undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    options = ["-n", "3", "--exchange", "native", "--on", "slurm", "--hosts", "3"]
    env = {**slurm.env, "SHOAL_JOIN_KEY": KEY}
    job = start_job(*options, str(TRAINING), str(out), "--gate", "5", env=env)
    job.wait_for_gate(out, 3)
    assert KEY not in command_lines()
    assert not [
        path for path in job.folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()
    ]
    listed = slurm.ask(sys.executable, "-m", "shoal", "jobs", "list", "--on", "slurm", "--json")
    assert [entry["state"] for entry in json.loads(listed)] == ["running"] * 3
    kill_host(job.agent(2))
    (out / "go").touch()
    assert job.wait() == 0, job.output() + slurm.logs()
    assert [event["ranks"] for event in job.events("host-lost")] == [[1]]
    assert differences(out, undisturbed) == []


def test_a_preempted_job_saves_within_the_grace_and_goes_on_when_it_is_requeued(
    slurm: SlurmCluster, start_job: Callable[..., EngineJob], undisturbed: Path, tmp_path: Path
) -> None:
    """One host with all workers: nobody else has their state, so what was not saved would be lost."""
    out = tmp_path / "out"
    out.mkdir()
    options = ["-n", "3", "--exchange", "native", "--on", "slurm:low"]
    job = start_job(*options, str(TRAINING), str(out), "--gate", "5", env=slurm.env)
    job.wait_for_gate(out, 3)
    number = job.events("saved")
    slurm.ask("sbatch", "-p", "high", "-n", "4", "-o", os.devnull, "--wrap", "sleep 1")
    job.wait_for(lambda: job.events("resizing"))
    (out / "go").touch()
    assert job.wait() == 0, job.output() + slurm.logs()
    assert len(job.events("saved")) > len(number)
    assert [event["host"] for event in job.events("host-left")] == [1]
    assert len(job.events("host-joined")) == 2
    assert differences(out, undisturbed) == []


def test_a_job_at_its_time_limit_saves_and_goes_on_when_it_is_requeued(
    slurm: SlurmCluster, start_job: Callable[..., EngineJob], undisturbed: Path, tmp_path: Path
) -> None:
    """One minute, and Slurm signals up to half a minute earlier than it was told."""
    out = tmp_path / "out"
    out.mkdir()
    options = ["-n", "3", "--exchange", "native", "--on", "slurm:time=1,grace=5"]
    job = start_job(*options, str(TRAINING), str(out), "--gate", "5", env=slurm.env)
    job.wait_for_gate(out, 3)
    number = job.events("saved")
    job.wait_for(lambda: job.events("resizing"))
    (out / "go").touch()
    assert job.wait() == 0, job.output() + slurm.logs()
    assert len(job.events("saved")) > len(number)
    assert job.events("host-lost") == []
    assert len(job.events("host-joined")) == len(job.events("host-left")) + 1 >= 2
    assert differences(out, undisturbed) == []


def test_more_than_the_cluster_has_is_refused_with_both_numbers(
    slurm: SlurmCluster, start_job: Callable[..., EngineJob]
) -> None:
    options = ["--on", "slurm", "--resources", "worker:cpus=64"]
    job = start_job(*options, str(TRAINING), "nowhere", env=slurm.env)
    assert job.wait() == 2, job.output()
    assert "1 job of 64 CPUs, 0 GPUs and 0 GB were asked of Slurm, which has no node for it" in job.output()
    assert "It has 1 of 4 CPUs" in job.output()


def test_a_job_that_waits_in_the_queue_is_named_with_the_reason(
    slurm: SlurmCluster, start_job: Callable[..., EngineJob]
) -> None:
    options = ["-n", "2", "--hosts", "2", "--on", "slurm", "--resources", "worker:cpus=4"]
    job = start_job(*options, "--join-timeout", "5", str(TRAINING), "nowhere", env=slurm.env)
    assert job.wait() == 3, job.output()
    assert "is PENDING: Resources)" in job.output()


def test_a_slurm_that_does_not_answer_is_named(
    slurm: SlurmCluster, start_job: Callable[..., EngineJob], tmp_path: Path
) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=gone\nSlurmctldHost=nobody.invalid\n")
    job = start_job(
        "--on", "slurm", str(TRAINING), "nowhere", env={"SLURM_CONF": str(tmp_path / "slurm.conf")}
    )
    assert job.wait() == 2, job.output()
    assert "Slurm cannot be reached from here (sinfo:" in job.output()
