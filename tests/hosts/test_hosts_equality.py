"""A job over several hosts computes what the same job computes on one host, to the bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import SCRIPT, HostsJob, differences

from whole_matrix import matrix_only

OPTIONS = {"ddp": ("--exchange", "native"), "ps": ("--strategy", "ps", "--servers", "2")}
USUAL = [("ddp", 4, 3), ("fsdp", 3, 2), ("tp", 2, 2), ("pp", 3, 3), ("ps", 3, 2)]
ALL = [
    (strategy, workers, hosts)
    for strategy in ("ddp", "fsdp", "tp", "pp", "ps")
    for workers, hosts in ((2, 2), (3, 2), (3, 3), (4, 2), (4, 3))
    if strategy != "tp" or workers != 3  # no layer of the model can be cut in three
]


@pytest.mark.parametrize(
    ("strategy", "workers", "hosts"), [*USUAL, *matrix_only(*(case for case in ALL if case not in USUAL))]
)
def test_hosts_compute_the_bits_of_one_host(
    strategy: str,
    workers: int,
    hosts: int,
    start_job: Callable[..., HostsJob],
    shared_folder: Path,
    undisturbed: Callable[..., Path],
) -> None:
    options = OPTIONS.get(strategy, ("--strategy", strategy))
    out = shared_folder / "out"
    out.mkdir()
    # Connections of which nothing on one host tells.
    between = ("--connections", "3") if strategy == "ps" else ()
    job = start_job(SCRIPT, str(out), "--loop", workers=workers, hosts=hosts, options=(*options, *between))
    assert job.wait() == 0, job.story()
    assert [agent.wait() for agent in job.agents.values()] == [0] * (hosts - 1)
    for rank in range(workers):
        assert f"rank {rank} has ended" in (job.run_dir / "logs" / f"worker-{rank}.log").read_text()
    assert differences(out, undisturbed(workers, *options), workers) == []


def test_ranks_of_a_host_sum_in_its_memory_and_hosts_among_each_other_also_when_one_is_killed(
    start_job: Callable[..., HostsJob], shared_folder: Path, undisturbed: Callable[..., Path]
) -> None:
    out = shared_folder / "out"
    out.mkdir()
    job = start_job(SCRIPT, str(out), "--loop", "--gate", "5", workers=3, hosts=2)
    job.wait_for_gate(out, 3)
    os.kill(job.pid_of("shoal worker 1", 0), signal.SIGKILL)
    (out / "go").touch()
    assert job.wait() == 0, job.story()
    assert [each["rank"] for each in job.events("worker-replaced")] == [1]
    assert json.loads((job.run_dir / "config.json").read_text())["exchange_rule"] == "hierarchical"
    # Ranks 0 and 1 at the first host, 2 at the second: a sum in rank order, as shared memory of one host makes it.
    same = undisturbed(3, "--exchange", "shm")
    assert differences(out, same, 3) == []


def test_an_encrypted_ring_computes_the_bits_of_the_ring_and_recovers(
    start_job: Callable[..., HostsJob], shared_folder: Path, undisturbed: Callable[..., Path]
) -> None:
    out = shared_folder / "out"
    out.mkdir()
    options = ("--exchange", "ring", "--tls")
    args = (str(out), "--loop", "--gate", "5")
    bound = ("--interface", "eth0")
    job = start_job(SCRIPT, *args, workers=3, hosts=3, options=(*options, *bound), join_options=bound)
    job.wait_for_gate(out, 3)
    os.kill(job.pid_of("shoal worker 1", 1), signal.SIGKILL)
    (out / "go").touch()
    assert job.wait() == 0, job.story()
    assert [each["rank"] for each in job.events("worker-replaced")] == [1]
    assert job.events("went-back") == []
    assert differences(out, undisturbed(3, "--exchange", "ring"), 3) == []


@pytest.mark.parametrize(
    ("on_hosts", "on_one"),
    [((), ("--exchange", "tree")), (("--strategy", "ps", "--servers", "2"),) * 2],
    ids=["ddp", "ps"],
)
def test_megabytes_that_travel_in_pieces_and_while_others_compute_leave_the_same_bits(
    on_hosts: tuple[str, ...],
    on_one: tuple[str, ...],
    start_job: Callable[..., HostsJob],
    shared_folder: Path,
) -> None:
    """Two hosts with two ranks each add as a tree of four does: (0 + 1) + (2 + 3)."""
    outs = []
    for hosts, options in ((2, on_hosts), (1, on_one)):
        outs.append(shared_folder / f"out-{hosts}")
        outs[-1].mkdir()
        job = start_job(
            SCRIPT,
            str(outs[-1]),
            "--width",
            "900",
            workers=4,
            hosts=hosts,
            options=(*options, "--oversubscribe"),
        )
        if hosts > 1:
            for host in job.cluster:
                host.limit("200mbit")
        assert job.wait() == 0, job.story()
    assert differences(*outs, 4) == []
