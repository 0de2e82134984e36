from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shoal.cluster.supervisor import forkserver_messages as warm_messages
from shoal.cluster.supervisor.forkserver import WarmParentLoop
from shoal.cluster.supervisor.forkserver_messages import Exited, Fork, Forked, NotForked, Ready, Signal
from shoal.errors import WireError

MESSAGES = [
    Fork("worker", "shoal worker 0 [x]", ["spec", "stdout"]),
    Signal(12, signal.SIGTERM),
    Ready(2.5, 7),
    Forked(12),
    NotForked("no"),
    Exited(12, -9),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(
    pair: tuple[socket.socket, socket.socket], message: Fork | Signal | Ready | Forked | NotForked | Exited
) -> None:
    ours, theirs = pair
    warm_messages.send(ours, message)
    if isinstance(message, Fork | Signal):
        assert warm_messages.receive_command(theirs) == (message, [])
    else:
        assert warm_messages.receive_report(theirs) == message


def test_descriptors_travel_with_a_message_and_are_closed_on_exec(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    memory = warm_messages.memfd_with(b"what to do" * 100_000)
    warm_messages.send(ours, Fork("worker", "", ["spec"]), [memory])
    os.close(memory)
    received = warm_messages.receive_command(theirs)
    assert received is not None
    (fd,) = received[1]
    assert not os.get_inheritable(fd)
    with open(fd, "rb") as file:
        assert file.read() == b"what to do" * 100_000


@given(st.binary(min_size=1, max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(b"[" * 200)
@example(b'{"type": "fork"}')
def test_bytes_that_are_no_message_are_refused_and_their_descriptors_closed(
    pair: tuple[socket.socket, socket.socket], packet: bytes
) -> None:
    ours, theirs = pair
    before = sorted(os.listdir("/proc/self/fd"))
    for receive in (warm_messages.receive_command, warm_messages.receive_report):
        socket.send_fds(ours, [packet], [ours.fileno(), theirs.fileno()])
        with pytest.raises(
            WireError, match=f"{len(packet)} bytes between the supervisor and its warm parent"
        ):
            receive(theirs)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_warm_parent_that_hears_nonsense_ends_its_children_and_itself(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    loop = WarmParentLoop(theirs)
    loop._pidfds[child.pid] = os.pidfd_open(child.pid)
    ours.send(b"nonsense")
    with pytest.raises(WireError):
        loop.run()
    assert child.wait(timeout=10.0) == -signal.SIGKILL
    os.close(loop._pidfds.pop(child.pid))
    loop._selector.close()


def test_an_end_that_closed_is_none(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.close()
    assert warm_messages.receive_command(theirs) is None


def test_a_process_with_a_second_thread_refuses_to_fork(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        loop = WarmParentLoop(theirs)
        warm_messages.send(ours, Fork("worker", "", []))
        assert loop._serve()
        refused = warm_messages.receive_report(ours)
        loop._selector.close()
    finally:
        release.set()
        thread.join()
    assert isinstance(refused, NotForked)
    assert "threads" in refused.reason
