"""Ray, for real: a cluster of this machine with an autoscaler, actors as hosts, one of them killed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine_jobs import (
    TRAINING,
    EngineJob,
    aggregate_on,
    command_lines,
    differences,
    kill_host,
    rounds_with_a_kill,
)

from shoal.cluster.hosts.engine_hosts import own_address
from waiting import wait_until

KEY = "a-key-for-tests-0123456789"
TOKEN = secrets.token_hex(32)
DRIVER = Path(__file__).parent / "ray_driver.py"


@pytest.fixture(scope="module")
def ray_address(installed: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Ray with 1 CPU, which several jobs share. Its autoscaler adds up to 2 nodes of 1 CPU, as asked for."""
    installed("ray")
    folder, port = tmp_path_factory.mktemp("ray"), _free_port()
    address = f"{own_address()}:{port}"
    (folder / "autoscaling.json").write_text(json.dumps(_autoscaling(address)))
    options = [f"--port={port}", "--num-cpus=1", f"--autoscaling-config={folder}/autoscaling.json"]
    with _ray_head(folder, options, RAY_FAKE_CLUSTER="1", AUTOSCALER_UPDATE_INTERVAL_S="1"):
        yield address


@pytest.fixture(scope="module")
def fixed_ray(installed: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`ray://` address of a Ray of this machine that cannot grow: 2 CPUs, and 2 GPUs by its own word."""
    installed("ray")
    port = _free_port()
    options = [f"--port={_free_port()}", "--num-cpus=2", "--num-gpus=2", f"--ray-client-server-port={port}"]
    with _ray_head(tmp_path_factory.mktemp("fixed-ray"), options):
        yield f"ray://127.0.0.1:{port}"


@contextlib.contextmanager
def _ray_head(folder: Path, options: list[str], **variables: str) -> Iterator[None]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--include-dashboard=false", "--disable-usage-stats", *options]
    log = (folder / "log").open("wb")
    with (
        log,
        pytest.MonkeyPatch.context() as patch,
        # Whatever this machine's default is: these clusters ask for a token of their own, which their clients inherit.
        _environment(patch, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN, RAY_raylet_start_wait_time_s="170"),
        subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=log, stderr=log, start_new_session=True
        ) as head,
    ):
        _wait_for(head, Path(log.name))
        yield
        head.terminate()
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            head.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _autoscaling(address: str) -> dict[str, Any]:
    """Configuration of Ray's autoscaler with the provider that Ray tests it with: nodes are raylets of this machine."""
    node: dict[str, Any] = {"node_config": {}, "resources": {"CPU": 1}}
    empty: dict[str, Any] = {name: {} for name in ("auth", "docker", "file_mounts")}
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    empty |= {f"{name}_commands": [] for name in commands}
    empty |= {name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")}
    return {
        **empty,
        "cluster_name": "tests",
        "max_workers": 2,
        "upscaling_speed": 100,
        "idle_timeout_minutes": 60,
        "file_mounts_sync_continuously": False,
        "provider": {
            "type": "fake_multinode",
            "head_node_id": "f" * 51 + "00000",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {**node, "max_workers": 0},
            "small": {**node, "min_workers": 0, "max_workers": 2},
        },
    }


@contextlib.contextmanager
def _environment(patch: pytest.MonkeyPatch, **variables: str) -> Iterator[None]:
    for name, value in variables.items():
        patch.setenv(name, value)
    yield


def _wait_for(head: subprocess.Popen[bytes], log: Path) -> None:
    """Until the node is there: its port listens seconds before that, on a busy machine a minute."""
    wait_until(lambda: "Ray runtime started" in log.read_text() or head.poll() is not None, 180.0)
    assert "Ray runtime started" in log.read_text(), log.read_text()


def test_a_job_larger_than_the_cluster_has_nodes_added_and_a_killed_actor_replaced_with_the_same_bits(
    ray_address: str, start_job: Callable[..., EngineJob], undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    options = ["-n", "3", "--exchange", "native", "--on", f"ray:{ray_address}", "--hosts", "3"]
    options += ["--bind", "127.0.0.1"]  # nodes of this machine: each host has a loopback address of its own
    job = start_job(*options, str(TRAINING), str(out), "--gate", "5", env={"SHOAL_JOIN_KEY": KEY})
    job.wait_for_gate(out, 3)
    assert KEY not in command_lines()
    listed = subprocess.run(
        [sys.executable, "-m", "shoal", "jobs", "list", "--on", f"ray:{ray_address}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert job.name in listed
    assert "created" in listed
    actor = job.agent(2).parent()
    assert actor is not None
    assert "ray::" in " ".join(actor.cmdline())
    actor.kill()
    (out / "go").touch()
    assert job.wait() == 0, job.output()
    assert [event["ranks"] for event in job.events("host-lost")] == [[1]]
    assert "asked for another" in job.output()  # "is being", where the engine takes its time
    assert differences(out, undisturbed) == []


def test_a_killed_node_is_a_lost_host_and_the_bits_are_those_of_this_machine_alone(
    ray_address: str, start_job: Callable[..., EngineJob], undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    options = ["-n", "3", "--exchange", "native", "--on", f"ray:{ray_address}", "--hosts", "3"]
    options += ["--bind", "127.0.0.1", "--join-timeout", "240"]
    job = start_job(*options, str(TRAINING), str(out), "--gate", "5")
    job.wait_for_gate(out, 3)
    agents = {host: job.agent(host) for host in (1, 2, 3)}
    lost = next(host for host, agent in agents.items() if "--head" not in _raylet(agent).cmdline())
    kill_host(_raylet(agents[lost]))  # processes of a node go on without their raylet, and so does the job
    (out / "go").touch()
    # Ray's provider for tests counts a raylet that was killed as running, so its autoscaler adds none: this node comes by itself.
    node = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={ray_address}"]
    with subprocess.Popen([*node, "--num-cpus=1", "--disable-usage-stats"], start_new_session=True) as other:
        try:
            assert job.wait(300) == 0, job.output()
        finally:
            other.terminate()
    assert [event["ranks"] for event in job.events("host-lost")] == [[lost - 1]]
    assert differences(out, undisturbed) == []


def _raylet(agent: psutil.Process) -> psutil.Process:
    """Node of Ray that a host of a job is on."""
    return next(each for each in agent.parents() if each.name() == "raylet")


def test_a_client_of_ray_has_a_job_with_a_gpu_for_each_worker(
    fixed_ray: str, start_job: Callable[..., EngineJob], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    options = ["-n", "2", "--on", f"ray:{fixed_ray}", "--resources", "worker:gpus=1"]
    job = start_job(*options, str(TRAINING), str(out), "--gate", "1")
    job.wait_for_gate(out, 2)
    assert job.agent(1).environ()["CUDA_VISIBLE_DEVICES"] == "0,1"  # what Ray gave to the actor
    (out / "go").touch()
    assert job.wait() == 0, job.output()


def test_more_gpus_than_ray_has_are_refused_with_both_numbers(
    fixed_ray: str, start_job: Callable[..., EngineJob]
) -> None:
    options = ["-n", "2", "--on", f"ray:{fixed_ray}", "--resources", "worker:gpus=2"]
    job = start_job(*options, str(TRAINING), "nowhere")
    assert job.wait() == 2, job.output()
    assert "1 host needs 4 GPUs, and this Ray has 2 GPUs" in job.output()


def test_an_actor_killed_before_its_host_has_joined_ends_the_job_with_its_name(
    ray_address: str, start_job: Callable[..., EngineJob]
) -> None:
    job = start_job("-n", "2", "--hosts", "2", "--on", f"ray:{ray_address}", str(TRAINING), "nowhere")
    job.slot(2).kill()
    assert job.wait() == 3, job.output()
    assert "host 2 was lost during the start: its actor died" in job.output()
    assert "Nothing was trained; the other hosts were let go" in job.output()


def test_rounds_as_tasks_of_ray_give_the_bits_of_local_processes_where_one_is_killed(
    ray_address: str, start_job: Callable[..., EngineJob], local_rounds: dict[str, Any], tmp_path: Path
) -> None:
    there = rounds_with_a_kill(start_job, tmp_path / "there", "--on", f"ray:{ray_address}")
    assert all(torch.equal(each, there["weights"][name]) for name, each in local_rounds["weights"].items())


def test_what_the_autoscaler_never_gives_ends_with_what_is_asked_for_and_what_there_is(
    ray_address: str, start_job: Callable[..., EngineJob]
) -> None:
    options = ["--on", f"ray:{ray_address}", "--resources", "worker:cpus=2", "--join-timeout", "5"]
    job = start_job(*options, str(TRAINING), "nowhere")
    assert job.wait() == 3, job.output()
    assert "for host 1 (Ray has found no room: 1 host asks for 2 CPUs, and" in job.output()
    assert "--join-timeout (now 5 s)" in job.output()


def test_a_job_that_is_stopped_while_it_starts_ray_leaves_nothing_behind(
    installed: Callable[[str], None], start_job: Callable[..., EngineJob]
) -> None:
    installed("ray")
    job = start_job("--on", "ray:local", str(TRAINING), "nowhere")
    head, children = psutil.Process(job.process.pid), list[psutil.Process]()

    def is_starting() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            children[:] = head.children(recursive=True)
            return any("gcs_server" in each.name() for each in children)
        return False

    job.wait_for(is_starting)
    job.process.terminate()
    assert job.wait() == 143, job.output()
    _, left = psutil.wait_procs(children, 30)
    assert not left


def test_ray_is_started_here_where_none_runs_and_refuses_more_than_it_has(
    installed: Callable[[str], None], start_job: Callable[..., EngineJob], tmp_path: Path
) -> None:
    installed("ray")
    out = tmp_path / "out"
    out.mkdir()
    job = start_job("-n", "2", "--on", "ray:local", str(TRAINING), str(out), "--steps", "2")
    assert job.wait() == 0, job.output()
    job = start_job(
        "-n", "2", "--on", "ray:local", "--resources", "worker:memory=4000", str(TRAINING), "nowhere"
    )
    assert job.wait() == 2, job.output()
    assert "1 host needs 8000.0 GB of memory, and this Ray has" in job.output()


def test_a_ray_that_does_not_answer_is_named(
    installed: Callable[[str], None], start_job: Callable[..., EngineJob]
) -> None:
    installed("ray")
    job = start_job("--on", "ray:127.0.0.1:1", str(TRAINING), "nowhere")
    assert job.wait() == 2, job.output()
    assert "Ray cannot be reached at 127.0.0.1:1" in job.output()


def test_a_dataset_of_ray_is_trained_on_block_by_block(ray_address: str, tmp_path: Path) -> None:
    job = EngineJob(tmp_path / "driver", [ray_address], {}, program=[sys.executable, str(DRIVER)])
    assert job.wait(300) == 0, job.output()
    said = job.output()
    assert "4 shards of 4 blocks" in said
    assert "all of it" in said
    assert "the Ray Dataset has no column 'z', which label= asks for. It has a, b, y" in said
    assert "the column 'nested' of the Ray Dataset is of type struct" in said
    assert "the column 'object' of the Ray Dataset holds objects of Python" in said
    assert "from_ray got a Dataset without rows" in said
    assert "from_ray takes a Dataset of ray.data, but got a list" in said
    job.close()


def test_a_script_has_its_aggregate_from_tasks_of_ray_with_the_bytes_of_local_processes(
    ray_address: str, tmp_path: Path
) -> None:
    said = aggregate_on(f"ray:{ray_address}", tmp_path / "driver")
    assert (
        "runs tasks on several machines, which exchange files. Nothing was computed; give directory=" in said
    )


def test_tasks_on_a_ray_without_cpus_are_refused_and_not_waited_for(
    installed: Callable[[str], None], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    installed("ray")
    (tmp_path / "in").write_text("a\n")
    port = _free_port()
    program = [
        sys.executable,
        "-m",
        "shoal",
        "map-reduce",
        "--on",
        f"ray:127.0.0.1:{port}",
        "--mapper",
        "cat",
    ]
    with _ray_head(tmp_path_factory.mktemp("no-cpus"), [f"--port={port}", "--num-cpus=0"]):
        job = EngineJob(tmp_path / "job", ["../in", "../out"], {}, program=program)
        assert job.wait() == 2, job.output()
    assert "a task needs 1 CPU, and this Ray has 0 and no autoscaler" in job.output()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "job"]


def test_map_reduce_runs_as_tasks_and_a_failed_one_is_run_again(ray_address: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("b\t1\na\t2\nb\t3\n")
    (tmp_path / "once.sh").write_text("#!/bin/sh\n[ -e failed ] && exec cat\ntouch failed; exit 7\n")
    (tmp_path / "once.sh").chmod(0o755)
    program = [sys.executable, "-m", "shoal", "map-reduce", "--on", f"ray:{ray_address}"]
    cases = [
        ("../once.sh", 0, ""),
        ("sh -c 'echo no such city >&2; exit 3'", 3, "exit code 3; last it said: no such city"),
        ("sh -c 'cat; printf \"\\377\\n\"'", 3, "line 4 of what it printed is not UTF-8 text"),
    ]
    for number, (mapper, code, words) in enumerate(cases):
        args = ["--mapper", mapper, "--reducer", "cat", "../in", f"../out-{number}"]
        job = EngineJob(tmp_path / f"job-{number}", args, {}, program=program)
        assert job.wait() == code, job.output()
        assert words in job.output()
        if code:  # Ray tells of one that is run again, too
            assert f"failed on {tmp_path / 'in'}, bytes 0 to 12" in job.output()
    assert (tmp_path / "out-0" / "part-00000").read_text() == "a\t2\nb\t1\nb\t3\n"
    assert (tmp_path / "job-0" / "failed").exists()
    assert not list(tmp_path.glob("out-[12]"))
