"""Hosts that a cluster file or TF_CONFIG names, a key in a file, and a fabric without encryption: one job with all of them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import KEY, PORT, SCRIPT, HostsJob, differences
from namespaces import Cluster
from zygote import Zygote

from whole_matrix import matrix_only

GATE = 5
PS = ("--strategy", "ps")
CLUSTER = """
bind = "10.77.0.1:7070"
[[host]]
name = "host-0"
workers = 1
[[host]]
name = "host-1"
workers = 2
servers = 1
"""
TF_CONFIG = {
    "cluster": {"chief": ["host-0:1"], "worker": ["host-1:1", "host-1:2"], "ps": ["host-1:3"]},
    "task": {"type": "chief", "index": 0},
}


def key_file(folder: Path, name: str, key: str, mode: int = 0o600) -> tuple[str, str]:
    path = folder / name
    path.write_text(key + "\n")
    path.chmod(mode)
    return "--join-key-file", str(path)


@pytest.mark.parametrize("named_by", ["cluster.toml", *matrix_only("TF_CONFIG")])
def test_named_hosts_with_the_key_of_a_file_compute_the_same_bits_without_encryption(
    start_cluster: Callable[[int], Cluster],
    zygote: Zygote,
    shared_folder: Path,
    undisturbed: Callable[..., Path],
    named_by: str,
) -> None:
    out = shared_folder / "out"
    out.mkdir()
    job = HostsJob(start_cluster(2), zygote, shared_folder, SCRIPT)
    if named_by == "TF_CONFIG":
        job.env = {"TF_CONFIG": json.dumps(TF_CONFIG)}
        named: tuple[str, ...] = ("--bind", f"{job.cluster[0].address}:{PORT}")
    else:
        job.env = {}
        (shared_folder / named_by).write_text(CLUSTER)
        named = ("--cluster", str(shared_folder / named_by))
    right = key_file(shared_folder, "right", KEY)
    with contextlib.closing(job):
        options = (*PS, "--servers", "1", *named, "--plaintext", *right)
        job.start(3, str(out), "--gate", str(GATE), options=options, joining=[], is_named=True)
        wrong = key_file(shared_folder, "wrong", KEY[::-1])
        assert job.join(1, *wrong).wait() == 2, job.story()
        assert job.join(1, *key_file(shared_folder, "open", KEY, 0o644)).wait() == 2
        told = " ".join(job.output(1).split())
        assert "this host was not admitted: the join key is not this job's" in told
        assert "by others (mode 0644" in told
        assert "Traceback" not in told
        job.join(1, *right)
        job.wait_for_gate(out, 3)
        assert not [line for line in job.processes() if KEY in line]
        assert job.run_on_head("status", "job").wait() == 0
        assert re.search(r"host 1, host-1 \(10\.77\.0\.2\): \w+; workers 1-2; server 0", job.said()), (
            job.said()
        )
        (out / "go").touch()
        assert job.wait() == 0, job.story()
        assert job.agents[1].wait() == 0
        assert "--plaintext: traffic between hosts is not encrypted" in " ".join(job.output().split())
        hosts = json.loads((job.run_dir / "config.json").read_text())["hosts"]
        assert [(host["workers"], host["servers"]) for host in hosts] == [([0], []), ([1, 2], [0])]
        assert job.join(1, "--timeout", "1", *right).wait() == 2
        assert "no job can be joined at shoal://10.77.0.1:7070" in " ".join(job.output(1).split())
        assert job.processes() == []
    assert differences(out, undisturbed(3, *PS, "--servers", "1"), 3) == []


@pytest.mark.parametrize("options", [("--exchange", "native"), (*PS, "--servers", "2")], ids=["ddp", "ps"])
def test_hosts_join_and_train_over_ipv6_with_the_same_bits(
    start_cluster: Callable[[int], Cluster],
    zygote: Zygote,
    shared_folder: Path,
    undisturbed: Callable[..., Path],
    options: tuple[str, ...],
) -> None:
    cluster = start_cluster(2)
    for number, host in enumerate(cluster):
        host.run(["ip", "-6", "addr", "add", f"fd77::{number + 1}/64", "dev", "eth0", "nodad"])
    out = shared_folder / "out"
    out.mkdir()
    job = HostsJob(cluster, zygote, shared_folder, SCRIPT)
    with contextlib.closing(job):
        bound = ("--hosts", "2", "--bind", f"[fd77::1]:{PORT}", *options)
        job.start(2, str(out), "--loop", options=bound, joining=[], is_named=True)
        job.wait_for(lambda: f"shoal join shoal://[fd77::1]:{PORT}" in " ".join(job.output().split()))
        agent = job.run_on(1, "join", f"shoal://[fd77::1]:{PORT}")
        assert job.wait() == 0, job.story()
        assert agent.wait() == 0
    assert differences(out, undisturbed(2, *options), 2) == []
