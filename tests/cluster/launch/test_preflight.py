"""Preflight: jobs larger than a machine, and those only slow on it."""

from __future__ import annotations

import pytest

from shoal.cluster.launch.preflight import PROCESS_BYTES, refuse_too_large, refuse_without_room
from shoal.config.hosts import HostsConfig
from shoal.config.launch import LaunchConfig
from shoal.errors import ConfigError

GB = 10**9


def refusal(
    num_workers: int, num_servers: int = 0, *, free_bytes: int = 64 * GB, is_mesh: bool = True
) -> str:
    with pytest.raises(ConfigError) as refused:
        refuse_too_large(
            num_workers=num_workers,
            num_servers=num_servers,
            cores=2,
            free_bytes=free_bytes,
            is_mesh=is_mesh,
        )
    return str(refused.value)


@pytest.mark.parametrize("num_workers", [1, 8, 64])
def test_workers_that_take_turns_are_started(num_workers: int) -> None:
    refuse_too_large(num_workers=num_workers, num_servers=0, cores=2, free_bytes=64 * GB, is_mesh=False)


def test_more_than_the_cores_can_carry_is_refused_with_what_would_do() -> None:
    said = refusal(1000)
    for words in (
        "1000 workers",
        "2 cores",
        "Nothing was started",
        "-n 64 or less, with degrees",
        "--oversubscribe",
    ):
        assert words in said
    assert "degrees" not in refusal(1000, is_mesh=False)
    assert "60 workers and 8 servers" in refusal(60, 8)
    assert "-n 56 or less" in refusal(60, 8)


def test_more_than_the_memory_can_carry_is_refused_with_its_bytes() -> None:
    said = refusal(40, free_bytes=20 * PROCESS_BYTES)
    for words in ("40 workers take about 2.1 GB", "1.0 GB free", "-n 20 or less"):
        assert words in said
    assert "-n 1 or less" in refusal(2, free_bytes=0)
    assert "fewer of both" in refusal(2, 2, free_bytes=PROCESS_BYTES)


def test_a_job_that_is_meant_is_started_all_the_same() -> None:
    with pytest.raises(ConfigError, match="--oversubscribe"):
        refuse_without_room(LaunchConfig(script="train.py", workers=100), cores=1)
    refuse_without_room(LaunchConfig(script="train.py", workers=100, oversubscribe=True), cores=1)


def test_tensor_parallel_ranks_on_two_hosts_are_worth_a_line() -> None:
    hosts = HostsConfig(num_hosts=2, bind="10.0.0.1")
    [note] = LaunchConfig(script="train.py", workers=6, strategy="fsdp=3,tp=2", hosts=hosts).notes()
    assert note.startswith("note: tp=2 spans hosts: ranks 2 to 3, on hosts 0 to 1, exchange activations")
    assert LaunchConfig(script="train.py", workers=4, strategy="pp=2,tp=2", hosts=hosts).notes() == []
    assert LaunchConfig(script="train.py", workers=4, strategy="fsdp", hosts=hosts).notes() == []


def test_what_one_worker_has_no_use_for_is_said_and_not_refused() -> None:
    assert LaunchConfig(script="train.py", workers=2, exchange="ring").notes() == []
    [note] = LaunchConfig(script="train.py", exchange="ring", compress="int8").notes()
    assert note.startswith("note: --exchange ring and --compress int8 do nothing here")
