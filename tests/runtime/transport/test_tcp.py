"""TCP: the same messages, on loopback unless both ends are proven, and nobody's bytes cost more than their connection."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError, WireError
from shoal.runtime.transport import framing as codec
from shoal.runtime.transport import tcp
from shoal.runtime.transport.messages.worker_coordinator import StoreCheck, StoreSet

LIMITS = codec.FrameLimits(num_frames=4, frames_bytes=1 << 16)


@contextmanager
def connected(host: str = tcp.LOOPBACK) -> Iterator[tuple[socket.socket, socket.socket]]:
    with tcp.listen(host) as listener:
        port = listener.getsockname()[1]
        with tcp.connect(host, port, timeout_s=5.0) as ours, tcp.accept(listener, timeout_s=5.0) as theirs:
            yield ours, theirs


@given(st.text(max_size=50), st.lists(st.binary(max_size=2000), max_size=4))
@settings(max_examples=30)
def test_messages_with_frames_arrive_as_they_were_sent(key: str, frames: list[bytes]) -> None:
    with connected() as (ours, theirs):
        codec.send_message(ours, StoreCheck([key]), frames, limits=LIMITS)
        message, received = codec.read_message(theirs, limits=LIMITS, timeout_s=5.0)
        assert message == StoreCheck([key])
        assert [bytes(frame) for frame in received] == frames


def test_it_listens_on_loopback_alone_unless_told_otherwise() -> None:
    with tcp.listen() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        (found,) = [
            each.laddr.ip
            for each in psutil.Process().net_connections("inet")
            if each.status == "LISTEN" and each.laddr.port == listener.getsockname()[1]
        ]
        assert found == "127.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_nothing_outside_of_loopback_is_bound_or_called_without_proof(host: str) -> None:
    with pytest.raises(ConfigError, match="without certificates"):
        tcp.listen(host)
    with pytest.raises(ConfigError, match="without certificates"):
        tcp.connect(host, 9, timeout_s=0.1)


def test_what_cannot_be_bound_is_one_paragraph() -> None:
    with tcp.listen() as listener, pytest.raises(ConfigError, match=r"in use.*another port"):
        tcp.listen(port=listener.getsockname()[1])
    for port in (-1, 65536):
        with pytest.raises(ConfigError, match=f"port {port}"):
            tcp.listen(port=port)
    with pytest.raises(ConfigError, match="name a host"):
        tcp.listen("no such host.invalid")


def test_nobody_listening_is_an_error_at_once() -> None:
    with tcp.listen() as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        tcp.connect(tcp.LOOPBACK, port, timeout_s=5.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_says_whose_process_it_is(host: str) -> None:
    if host == "::1":
        interfaces = Path("/proc/net/if_inet6")
        if not interfaces.exists() or f"{1:032x}" not in interfaces.read_text():
            pytest.skip("no IPv6 loopback here")
    with connected(host) as (ours, theirs):
        assert tcp.owner_of(ours) == tcp.owner_of(theirs) == os.getuid()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_refused_by_both_sides() -> None:
    with tcp.listen() as listener:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setgroups([])
                os.setuid(65534)
                tcp.connect(tcp.LOOPBACK, listener.getsockname()[1], timeout_s=5.0)
                code = 0
            except WireError:
                code = 7
            finally:
                os._exit(code)
        # The child's end is open until it has judged ours; it may be gone by the time we look.
        with pytest.raises(WireError, match=r"belongs to user 65534|closed"):
            tcp.accept(listener, timeout_s=5.0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_the_connection_of_a_stranger_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tcp.listen() as listener:
        with tcp.connect(tcp.LOOPBACK, listener.getsockname()[1], timeout_s=5.0) as ours:
            monkeypatch.setattr(os, "getuid", lambda: 4242)
            with pytest.raises(WireError, match="this one to user 4242"):
                tcp.accept(listener, timeout_s=5.0)
            assert ours.recv(1) == b""


def test_who_is_gone_before_it_was_accepted_is_no_more_than_a_refusal() -> None:
    with tcp.listen() as listener:
        with socket.create_connection(listener.getsockname()) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by reset
        with pytest.raises((WireError, OSError)):
            tcp.accept(listener, timeout_s=5.0)


def test_a_proof_takes_the_place_of_the_kernels_word_and_its_refusal_closes_the_connection() -> None:
    seen: list[float | None] = []

    def accepts(sock: socket.socket) -> socket.socket:
        seen.append(sock.gettimeout())
        return sock

    def refuses(sock: socket.socket) -> socket.socket:
        raise WireError("it has no certificate of this job")

    with tcp.listen("0.0.0.0", secure=accepts) as listener:
        port = listener.getsockname()[1]
        with tcp.connect(tcp.LOOPBACK, port, timeout_s=3.0, secure=accepts) as ours:
            with pytest.raises(WireError, match="no certificate"):
                tcp.accept(listener, timeout_s=2.0, secure=refuses)
            assert ours.recv(1) == b""
        with tcp.connect(tcp.LOOPBACK, port, timeout_s=3.0, secure=accepts):
            tcp.accept(listener, timeout_s=2.0, secure=accepts).close()
    assert seen == [3.0, 3.0, 2.0]


@given(st.binary(min_size=1, max_size=300))
@settings(max_examples=50)
def test_random_bytes_are_refused_or_end_with_the_connection(data: bytes) -> None:
    with connected() as (ours, theirs):
        ours.sendall(data)
        ours.close()
        with pytest.raises(WireError):
            codec.read_message(theirs, limits=LIMITS, timeout_s=5.0)


@pytest.mark.parametrize(
    ("num_frames", "header_bytes", "table"),
    [(0, 0xFFFFFFFF, b""), (0xFFFF, 10, b""), (1, 10, struct.pack("<Q", 1 << 63)), (0, 0, b"")],
)
def test_an_oversized_length_is_refused_before_anything_is_allocated(
    num_frames: int, header_bytes: int, table: bytes
) -> None:
    with connected() as (ours, theirs):
        ours.sendall(struct.pack("<4sHHII", codec.MAGIC, codec.VERSION, num_frames, header_bytes, 0) + table)
        with pytest.raises(WireError, match="allowed"):
            codec.read_message(theirs, limits=LIMITS, timeout_s=5.0)


def test_a_peer_that_sends_byte_by_byte_is_waited_for_no_longer_than_one_that_sends_nothing() -> None:
    packet = b"".join(codec.encode(StoreSet({"key": b"x" * 3000})))
    with connected() as (ours, theirs):
        stop = threading.Event()

        def drip() -> None:
            for each in packet:
                if stop.wait(0.02):
                    return
                ours.sendall(bytes([each]))

        slow = threading.Thread(target=drip)
        slow.start()
        before = time.monotonic()
        try:
            with pytest.raises(TimeoutError):
                codec.read_message(theirs, timeout_s=0.3)
        finally:
            stop.set()
            slow.join()
        assert time.monotonic() - before < 5.0  # all of it would take a minute


def test_a_peer_that_sends_nothing_is_waited_for_until_the_time_is_over() -> None:
    with connected() as (_, theirs), pytest.raises(TimeoutError):
        codec.read_message(theirs, timeout_s=0.05)
