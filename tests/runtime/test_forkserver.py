from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shoal import system
from shoal.errors import WireError
from shoal.runtime.forkserver import messages
from shoal.runtime.forkserver.client import ForkedServer, ForkServerGone
from shoal.runtime.forkserver.messages import ChildExited, Close, Fork, Forked, NotForked, ServerReady, Signal
from shoal.runtime.forkserver.server import ForkServer, is_readable
from waiting import wait_until

MESSAGES = [
    Fork("worker", "shoal worker 0 [x]", ["spec", "stdout"]),
    Signal(12, signal.SIGTERM),
    Close(1.5),
    ServerReady(2.5, 7),
    Forked(12),
    NotForked("no"),
    ChildExited(12, -9),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = system.packet_pair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(
    pair: tuple[socket.socket, socket.socket], message: messages.Command | messages.Report
) -> None:
    ours, theirs = pair
    messages.send(ours, message)
    if isinstance(message, Fork | Signal | Close):
        assert messages.receive_command(theirs) == (message, [])
    else:
        assert messages.receive_report(theirs) == (message, [])


def test_descriptors_travel_with_a_message_and_are_closed_on_exec(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    memory = messages.file_with(b"what to do" * 100_000)
    messages.send(ours, Fork("worker", "", ["spec"]), [memory])
    os.close(memory)
    received = messages.receive_command(theirs)
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
    for receive in (messages.receive_command, messages.receive_report):
        socket.send_fds(ours, [packet], [ours.fileno(), theirs.fileno()])
        with pytest.raises(WireError, match=f"{len(packet)} bytes between a fork server and its owner"):
            receive(theirs)
    assert sorted(os.listdir("/proc/self/fd")) == before


def nothing(role: str, fds: dict[str, int]) -> int:
    return 0


def test_a_server_that_hears_nonsense_ends_its_children_and_itself(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    child, ended = system.fork()
    if child == 0:
        os.execvp("sleep", ["sleep", "600"])
    server = ForkServer(theirs, nothing, own_sessions=True, allow_threads=False)
    server._ended[child] = ended
    ours.send(b"nonsense")
    with pytest.raises(WireError):
        server.serve()
    assert not psutil.pid_exists(child), "killed and reaped"
    os.close(ended)
    server._selector.close()


def test_an_end_that_closed_is_none(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.close()
    assert messages.receive_command(theirs) is None


def test_a_process_with_a_second_thread_refuses_to_fork(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        server = ForkServer(theirs, nothing, own_sessions=True, allow_threads=False)
        messages.send(ours, Fork("worker", "", []))
        assert server._obey()
        answer = messages.receive_report(ours)
        server._selector.close()
    finally:
        release.set()
        thread.join()
    assert answer is not None
    refused, _ = answer
    assert isinstance(refused, NotForked)
    assert "threads" in refused.reason


# ---- a server that is a fork of this process --------------------------------------------------------


@pytest.fixture
def forked() -> Iterator[ForkedServer]:
    server = ForkedServer(lambda role, fds: os.write(fds["out"], role.encode()), title="shoal test")
    yield server
    server.close()


def test_children_get_their_role_and_descriptors_and_their_ends_are_told(forked: ForkedServer) -> None:
    reader, writer = os.pipe()
    children = [forked.fork(role, title="shoal test", fds={"out": writer}) for role in ("ab", "cde")]
    assert [forked.exit_code(child.pid, within_s=10.0) for child in children] == [2, 3]
    assert sorted(os.read(reader, 10)) == sorted(b"abcde")
    for fd in (reader, writer, *(child.ended for child in children)):
        os.close(fd)


def test_a_server_that_is_killed_takes_its_children_along_and_says_so() -> None:
    server = ForkedServer(lambda role, fds: signal.pause() or 0, title="shoal test")
    child = server.fork("", title="shoal test", fds={})
    os.kill(server.pid, signal.SIGKILL)
    assert is_readable(child.ended, 10.0)
    assert not server.is_alive
    # Its children held the connection too, and a child may close it after the descriptor that tells its end.
    with pytest.raises(ForkServerGone):
        wait_until(lambda: server.exits() is None)
    os.close(child.ended)
    server.close()
