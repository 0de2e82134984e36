"""Bad clients of shared memory: the connection is closed and counted, and the others notice nothing."""

from __future__ import annotations

import os
import socket
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from serving import HELLO, PULL, PUSH, Server, serving

from shoal.errors import LinkLost, WireError
from shoal.runtime.transport import memfd, shared_server, unix
from shoal.runtime.transport.arena import ArenaConfig
from shoal.runtime.transport.envelope import MAX_FRAMES, REQUEST_BYTES, Envelope, seal
from shoal.runtime.transport.messages.client_server import Committed, PsRefused
from shoal.runtime.transport.shared_client import Link
from shoal.runtime.transport.shared_server import ListenerConfig, Request

SEGMENT = 64 << 10
FEW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
SIZES = st.sampled_from([0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1])
PLACES = st.lists(st.tuples(st.sampled_from([0, 1, 2, 1 << 63]), SIZES, SIZES), max_size=4)

CONFIG = ListenerConfig(num_peers=8, num_segments=4, segment_bytes=1 << 20, hello_timeout_s=2.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("bad"), CONFIG) as running:
        yield running


@pytest.fixture
def good(server: Server) -> Iterator[Callable[[], None]]:
    """A client that is there all along; calling it is a push and a pull that must work."""
    link = Link.connect(server.path, HELLO, arena=ArenaConfig(segment_bytes=SEGMENT))
    pushed, into = link.alloc(10_000), link.alloc(10_000)

    def works() -> None:
        pushed.view[:] = os.urandom(10_000)
        assert isinstance(link.wait(link.send(PUSH, [pushed]), 60.0)[0], Committed)
        link.wait(link.send(PULL, into=[into]), 60.0)
        assert into.view == pushed.view

    with link:
        yield works


def tell(server: Server, data: Sequence[bytes | memoryview | bytearray], fds: Sequence[int] = ()) -> bytes:
    """Send these bytes and hang up; what came back until the server hung up too."""
    with unix.connect(server.path, timeout_s=60.0) as sock:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        back = b""
        try:
            whole = b"".join(data) or b"\0"
            sent = sock.sendmsg([whole], rights)
            sock.sendall(whole[sent:])
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(1 << 16):
                back += part
        except (BrokenPipeError, ConnectionResetError):
            pass
        return back


@given(st.binary(min_size=1, max_size=300))
@example(b"SHOL")
@example(b"SHOL" + b"\xff" * 40)
@FEW
def test_random_bytes(server: Server, good: Callable[[], None], data: bytes) -> None:
    before = server.listener.num_refused
    assert tell(server, [data]) == b""
    assert server.listener.num_refused == before + 1
    good()


@given(st.data())
@FEW
def test_a_request_with_a_few_bytes_changed(
    server: Server, good: Callable[[], None], data: st.DataObject
) -> None:
    whole = bytearray(b"".join(seal(Envelope(1, [], [(0, 0, 5)], []), PUSH, [b"12345"])))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    tell(server, [whole])
    good()


@given(
    new=st.lists(st.tuples(st.integers(0, 3), SIZES), max_size=6),
    frames=PLACES,
    into=PLACES,
    num_fds=st.integers(0, 6),
)
@example(new=[(1, SEGMENT)], frames=[(1, 0, SEGMENT)], into=[(1, 1, SEGMENT)], num_fds=1)
@example(new=[(1, SEGMENT)], frames=[(1, 1 << 63, 1 << 63)], into=[], num_fds=1)
@example(new=[(1, 1 << 63)], frames=[], into=[], num_fds=1)
@FEW
def test_places_that_are_none(
    server: Server,
    good: Callable[[], None],
    new: list[tuple[int, int]],
    frames: list[tuple[int, int, int]],
    into: list[tuple[int, int, int]],
    num_fds: int,
) -> None:
    """Whatever is not wholly right is refused; nothing ever reads or writes outside of a segment."""
    before = server.listener.num_refused
    fds = [memfd.create(SEGMENT, "bad") for _ in range(num_fds)]
    try:
        inline = [b"x" for segment, _, _ in frames if segment == 0]
        tell(server, seal(Envelope(1, new, frames, into), PUSH, inline), fds)
    finally:
        memfd.close(fds)
    numbers = [number for number, _ in new]
    is_right = (
        len(new) <= min(num_fds, CONFIG.num_segments)
        and all(number and nbytes == SEGMENT for number, nbytes in new)
        and len(set(numbers)) == len(numbers)
        and all(
            (segment == 0 and nbytes == 1 and is_frame) or (segment in numbers and offset + nbytes <= SEGMENT)
            for places, is_frame in ((frames, True), (into, False))
            for segment, offset, nbytes in places
        )
    )
    assert server.listener.num_refused == before + (not is_right)
    good()
    assert server.listener.bytes_mapped <= 16 << 20


@pytest.mark.parametrize(
    "lengths", [[1 << 63], [(1 << 64) - 1], [REQUEST_BYTES * 2], [1 << 40] * 3, [0] * (MAX_FRAMES + 2)]
)
def test_a_length_that_cannot_be(server: Server, good: Callable[[], None], lengths: list[int]) -> None:
    before = server.listener.num_refused
    head = struct.pack("<4sHHII", b"SHOL", 1, len(lengths), 100, 0)
    assert tell(server, [head, struct.pack(f"<{len(lengths)}Q", *lengths), b"x" * 1000]) == b""
    assert server.listener.num_refused == before + 1
    assert "allowed" in server.listener.last_refusal
    good()


def test_a_frame_that_was_announced_and_never_comes_costs_no_memory(
    server: Server, good: Callable[[], None]
) -> None:
    parts = seal(Envelope(1, [], [(0, 0, 60 << 20)], []), PUSH, [bytes(60 << 20)])
    before = resident_bytes()
    socks = []
    for _ in range(5):
        sock = unix.connect(server.path, timeout_s=60.0)
        sock.sendall(b"".join(parts[:2]) + b"x" * 100)
        socks.append(sock)
    good()
    assert resident_bytes() - before < 30 << 20
    for sock in socks:
        sock.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_peer_that_reads_no_answers_is_not_listened_to(tmp_path: Path) -> None:
    config = ListenerConfig(unsent_bytes=4 << 20, pause_bytes=1 << 20)
    with serving(tmp_path, config) as server, Link.connect(server.path, HELLO) as good:
        server.last = [memoryview(bytes(1 << 20))]
        with unix.connect(server.path, timeout_s=0.3) as deaf:
            asks = b"".join(seal(Envelope(1, [], [], []), PULL, [])) * 100_000
            with pytest.raises(TimeoutError):  # nobody reads them
                deaf.sendall(asks)
            assert isinstance(good.wait(good.send(PUSH, [b"1"]), 60.0)[0], Committed)
        assert server.listener.num_refused == 0


def test_a_peer_that_is_owed_too_much_is_closed(tmp_path: Path) -> None:
    config = ListenerConfig(unsent_bytes=2 << 20, pause_bytes=1 << 20)
    with serving(tmp_path, config) as server, Link.connect(server.path, HELLO) as good:
        waiting: list[Request] = []
        server.answer = waiting.append
        with unix.connect(server.path, timeout_s=60.0) as deaf:
            deaf.sendall(b"".join(seal(Envelope(1, [], [], []), PULL, [])) * 50)
            deadline = time.monotonic() + 5.0
            while len(waiting) < 50 and time.monotonic() < deadline:
                time.sleep(0.001)
            server.answer = lambda last: [  # type: ignore[assignment]
                server.listener.reply(each.peer, each.ticket, Committed(1, 1, 1), [bytes(1 << 20)])
                for each in (*waiting, last)
            ]
            ticket = good.send(PUSH)
            assert isinstance(good.wait(ticket, 60.0)[0], Committed)
        assert "unread" in server.listener.last_refusal
        assert server.gone == [2]


def test_one_that_never_says_a_word_is_closed_and_one_connection_too_many_too(
    server: Server, good: Callable[[], None]
) -> None:
    silent = [unix.connect(server.path, timeout_s=60.0) for _ in range(CONFIG.num_peers + 2)]
    for sock in silent:
        assert sock.recv(1) == b""
        sock.close()
    good()


def test_more_segments_than_a_peer_may_have(server: Server, good: Callable[[], None]) -> None:
    with Link.connect(server.path, HELLO) as greedy:
        ticket = greedy.send(PUSH, [greedy.alloc(2 << 20)])  # in a segment of 16 MiB
        with pytest.raises(LinkLost):
            greedy.wait(ticket, 60.0)
    assert "where at most 1,048,576 are allowed" in server.listener.last_refusal
    good()


def test_a_server_short_of_memory_refuses_a_segment_and_keeps_the_connection(tmp_path: Path) -> None:
    with serving(tmp_path, memory_problem=lambda nbytes: f"no {nbytes} bytes") as server:
        with Link.connect(server.path, HELLO) as link:
            for _ in range(2):
                message, _ = link.wait(link.send(PUSH, [link.alloc(10_000)]), 60.0)
                assert isinstance(message, PsRefused)
            assert isinstance(link.wait(link.send(PUSH, [b"1"]), 60.0)[0], Committed)
        assert server.listener.bytes_mapped == 0


def test_what_a_server_would_refuse_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Link.connect(server.path, HELLO) as link:
        with pytest.raises(WireError, match="allowed"):
            link.send(PUSH, [bytes(REQUEST_BYTES + (1 << 20))])
        with pytest.raises(WireError, match="allowed"):
            link.send(PUSH, [b""] * (MAX_FRAMES + 1))
        assert isinstance(link.wait(link.send(PUSH, [b"1"]), 60.0)[0], Committed)


def test_a_server_short_of_descriptors_refuses_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as server, Link.connect(server.path, HELLO) as link:
        monkeypatch.setattr(shared_server, "SPARE_FILES", 1 << 40)
        message, _ = link.wait(link.send(PUSH, [link.alloc(10_000)]), 60.0)
        assert isinstance(message, PsRefused)
        assert "ulimit -n" in message.reason
        with pytest.raises(LinkLost):
            Link.connect(server.path, HELLO)
        assert isinstance(link.wait(link.send(PUSH, [b"1"]), 60.0)[0], Committed)
