"""Hosts with several interfaces, and one behind network address translation, in one job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import SCRIPT, HostsJob, differences
from namespaces import Cluster
from nat import Nat
from zygote import Zygote

OPTIONS = ("--strategy", "ps", "--servers", "3")
PUBLIC = "10.77.0.50"


@pytest.mark.skipif(
    not os.path.exists("/dev/net/tun"), reason="translating addresses here takes /dev/net/tun"
)
def test_servers_are_reached_over_two_networks_and_behind_an_advertised_address_with_the_same_bits(
    start_cluster: Callable[[int], Cluster],
    zygote: Zygote,
    shared_folder: Path,
    undisturbed: Callable[..., Path],
) -> None:
    cluster = start_cluster(3)
    cluster.add_bridge("second")
    for number in (0, 1):
        cluster[number].add_interface("eth1", f"10.78.0.{number + 1}", "second")
    with contextlib.ExitStack() as stack:
        nat = Nat(cluster, cluster[2], private="10.88.0.2", public=PUBLIC)
        stack.callback(nat.close)
        out = shared_folder / "out"
        out.mkdir()
        job = HostsJob(cluster, zygote, shared_folder, SCRIPT)
        stack.callback(job.close)
        bound = ("--interface", "eth0,eth1")
        before = [cluster[number].sent_bytes("eth1") for number in (0, 1)]
        job.start(
            3,
            str(out),
            options=(*OPTIONS, *bound, "--connections", "2"),
            joining=[1],
            join_options=bound,
        )
        job.join(2, "--advertise", PUBLIC)
        assert job.wait() == 0, job.story()
        assert job.agents[2].wait() == 0, job.story()
        sent = [cluster[number].sent_bytes("eth1") - at for number, at in zip((0, 1), before, strict=True)]
    # A certificate each way per connection, at least.
    assert min(sent) > 2000, sent
    assert "host 2 is host-2 (10.77.0.50" in job.output(), job.output()
    assert differences(out, undisturbed(3, *OPTIONS), 3) == []
