"""Real processes find each other through a real coordinator, and nothing of it is heard outside loopback."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from shoal.runtime.transport import unix
from waiting import wait_until
from whole_matrix import matrix_only

WORKER = Path(__file__).with_name("rendezvous_worker.py")

COORDINATOR = """
import sys, msgspec
from shoal.cluster.coordinator import process as coordinator_process
from shoal.cluster.coordinator.state import CoordinationConfig
from shoal.config.liveness import LivenessConfig
assert "torch" not in sys.modules, "the coordinator imports torch"
fd, num_workers, join_timeout_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
config = CoordinationConfig(num_workers=num_workers, liveness=LivenessConfig(join_timeout_s=join_timeout_s))
spec = coordinator_process.CoordinatorSpec(config=config)
sys.exit(coordinator_process.main(msgspec.msgpack.encode(spec), {"listener": fd}))
"""


class Workers:
    """Four processes that have imported torch, told what to do line by line."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for _ in range(4)
        ]
        for process in self.processes:
            assert self._answer(process) == {"ready": process.pid}

    def __call__(
        self,
        do: str,
        coordinator: Coordinator | SimpleNamespace,
        *,
        ranks: list[int] | None = None,
        **more: Any,
    ) -> list[Any]:
        """Let the ranks of a job do something at once; what each answers."""
        ranks = list(range(coordinator.num_workers)) if ranks is None else ranks
        for rank in ranks:
            job = {"rank": rank, "num_workers": coordinator.num_workers, "coordinator": coordinator.path}
            job["join_timeout_s"] = coordinator.join_timeout_s
            line = json.dumps({"do": do, "job": job, **more})
            print(line, file=self.processes[rank].stdin, flush=True)
        answers = [self._answer(self.processes[rank]) for rank in ranks]
        return [answer.get("result", answer) for answer in answers]

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"worker {process.pid} is gone"
        return json.loads(line)

    def close(self) -> None:
        for process in self.processes:
            with process:
                assert process.stdin is not None
                process.stdin.close()  # the worker's loop ends with it
                assert process.wait(30) == 0


class Coordinator:
    """A coordinator process of its own."""

    def __init__(self, path: str, num_workers: int, join_timeout_s: float) -> None:
        self.path, self.num_workers, self.join_timeout_s = path, num_workers, join_timeout_s
        with unix.listen(path) as listener:
            fd = listener.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", COORDINATOR, str(fd), str(num_workers), str(join_timeout_s)],
                pass_fds=[fd],
                stderr=subprocess.PIPE,
                text=True,
            )

    def stop(self) -> str:
        """Ask it to leave; what it had to say."""
        self.process.terminate()
        _, said = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        return said


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Coordinator]]:
    directory = unix.runtime_dir()
    started: list[Coordinator] = []

    def start(num_workers: int, join_timeout_s: float = 30.0) -> Coordinator:
        started.append(Coordinator(str(directory / f"c{len(started)}"), num_workers, join_timeout_s))
        return started[-1]

    yield start
    for coordinator in started:
        if coordinator.process.poll() is None:
            assert coordinator.stop() == ""
    shutil.rmtree(directory)


def listening(pid: int) -> list[str]:
    """The addresses at which a process can be reached over a network."""
    return [
        each.laddr.ip
        for each in psutil.Process(pid).net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]


@pytest.mark.parametrize("num_workers", [3, *matrix_only(2, 4)])
def test_a_group_forms_works_and_is_heard_on_loopback_alone(
    workers: Workers, start: Callable[..., Coordinator], num_workers: int
) -> None:
    coordinator = start(num_workers)
    members = workers.processes[:num_workers]
    try:
        workers("form", coordinator, view=1)
        told = workers("use", coordinator)
        addresses = [address for process in members for address in listening(process.pid)]
    finally:
        workers("leave", coordinator)
    total = num_workers * (num_workers + 1) / 2
    assert [each["all"] for each in told] == [total] * num_workers
    assert [each["pair"] for each in told[:2]] == [3.0, 3.0]
    assert [each["mesh"] for each in told] == [float(num_workers)] * num_workers
    assert {each["backend"] for each in told} == {"gloo"}
    assert len(addresses) >= num_workers  # gloo does listen, so the next line says something
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses
    assert listening(coordinator.process.pid) == []


def test_a_group_that_was_left_leaves_nothing_open_and_forms_again_in_the_next_view(
    workers: Workers, start: Callable[..., Coordinator]
) -> None:
    coordinator = start(3)
    left_open = []
    for view in (1, 2, 3):
        workers("form", coordinator, view=view)
        assert [each["all"] for each in workers("use", coordinator)] == [6.0] * 3
        workers("leave", coordinator)
        members = [psutil.Process(process.pid) for process in workers.processes[:3]]
        assert [each.net_connections("inet") for each in members] == [[], [], []]
        # A group's own thread may take a moment to end.
        assert wait_until(lambda: [each[0] for each in workers("threads", coordinator)] == [1] * 3)
        left_open.append(
            [
                (each.num_fds(), threads)
                for each, threads in zip(members, workers("threads", coordinator), strict=True)
            ]
        )
    # The first group makes what torch keeps for the life of a process; the next ones add nothing.
    assert left_open[1] == left_open[2]


def test_the_group_of_a_job_is_formed_once_and_beside_no_other(
    workers: Workers, start: Callable[..., Coordinator]
) -> None:
    coordinator = start(2)
    try:
        refused = "torch.distributed already has a default process group in this process"
        assert workers("form-once", coordinator) == [[True, refused]] * 2
    finally:
        workers("leave", coordinator)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_without_a_coordinator_only_one_worker_can_form_a_group(workers: Workers, num_workers: int) -> None:
    alone = SimpleNamespace(path=None, num_workers=num_workers, join_timeout_s=1.0)
    told = workers("form", alone, view=1)
    workers("leave", alone)
    if num_workers == 1:
        assert told == [None]
    else:
        assert [each["error"] for each in told] == ["ConfigError"] * num_workers


def test_a_rank_that_does_not_come_to_the_group_is_named(
    workers: Workers, start: Callable[..., Coordinator]
) -> None:
    coordinator = start(3, join_timeout_s=1.0)
    for told in workers("form", coordinator, ranks=[0, 2], view=1):
        assert told["error"] == "WaitTimedOut"
        assert "forming the group of view 1 waited" in told["message"]
        assert "for rank 1." in told["message"]


def test_real_processes_make_their_calls_in_step(workers: Workers, start: Callable[..., Coordinator]) -> None:
    joined, first, second = zip(*workers("call-together", start(4)), strict=True)
    assert max(joined) <= min(first)  # nobody is through a call before all are at it
    assert max(first) <= min(second)


def test_the_coordinator_leaves_at_sigterm_and_only_then_and_says_whom_it_refused(
    workers: Workers, start: Callable[..., Coordinator]
) -> None:
    coordinator = start(2)
    with unix.connect(coordinator.path, timeout_s=10.0) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(1) == b""
    coordinator.process.send_signal(signal.SIGINT)
    assert len(workers("call-together", coordinator)) == 2
    said = coordinator.stop()
    assert "b'GET '" in said
    assert said.count("\n") == 1
