"""A coordinator that the tests of its clients share their process with."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from shoal.cluster.coordinator.process import Coordinator
from shoal.cluster.coordinator.state import CoordinationConfig
from shoal.cluster.worker.coordinator_client import CoordinatorClient
from shoal.config.liveness import LivenessConfig
from shoal.runtime.transport import unix


@dataclass
class Running:
    """A coordinator at work in a thread of its own, and where to reach it."""

    path: str
    coordinator: Coordinator
    num_workers: int

    @contextmanager
    def client(
        self, rank: int, incarnation: int = 0, join_timeout_s: float = 30.0
    ) -> Iterator[CoordinatorClient]:
        client = CoordinatorClient(
            self.path,
            rank,
            incarnation,
            num_workers=self.num_workers,
            liveness=LivenessConfig(join_timeout_s=join_timeout_s),
        )
        try:
            yield client
        finally:
            client.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Start coordinators; all are stopped, and their sockets gone, when the test ends."""
    directory = unix.runtime_dir()
    stops: list[Callable[[], None]] = []

    def start(num_workers: int = 2, *, can_recover: bool = False, **liveness: float) -> Running:
        path = str(directory / f"c{len(stops)}")
        config = CoordinationConfig(
            num_workers=num_workers,
            can_recover=can_recover,
            liveness=LivenessConfig(**{"join_timeout_s": 30.0, **liveness}),
        )
        coordinator = Coordinator(unix.listen(path), config, supervisor=os.getpid())
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=coordinator.serve, kwargs={"until_readable": theirs})
        thread.start()

        def stop() -> None:
            ours.send(b"\n")
            thread.join()
            coordinator.close()
            ours.close()
            theirs.close()

        stops.append(stop)
        return Running(path, coordinator, num_workers)

    yield start
    for stop in stops:
        stop()
    shutil.rmtree(directory)
