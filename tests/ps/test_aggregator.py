"""The thread that merges a host's pushes: its address."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from shoal import system
from shoal.config.job import Job
from shoal.errors import LinkLost
from shoal.ps.client import aggregator as module
from shoal.ps.client.aggregator import Aggregator, AggregatorGroup, name_of
from shoal.ps.codecs import Compression
from shoal.runtime.transport.shared_server import _check_identity as check_identity
from shoal.runtime.transport.tls import Identity


def test_each_model_has_its_own_and_a_held_address_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "CONNECT_S", 0.05)
    job = Job(name="job", run_dir=tmp_path, num_workers=2)
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # as a child of its predecessor may
    system.bind_name(held, name_of(job, 0, 1))
    held.listen()
    threads = [Aggregator(job, 2, Compression(), model) for model in (0, 1)]
    try:
        for thread in threads:  # a server of another host takes this name from this worker
            check_identity(Identity("worker-0", 0), thread._group._hello)
        groups = [AggregatorGroup(job, system.address_of(name_of(job, 0, model))) for model in (0, 1)]
        with pytest.raises(LinkLost):
            groups[1].link(0)
        held.close()
        for group in groups:
            deadline = time.monotonic() + 60.0
            while True:
                try:
                    group.link(0)
                    break
                except LinkLost:
                    assert time.monotonic() < deadline
            group.close()
    finally:
        held.close()
        for thread in threads:
            thread.close()
