"""TCP: messages arrive as they were sent, nobody's bytes cost more than their connection, and the kernel knows its owner."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import WireError
from shoal.runtime.transport import framing as codec
from shoal.runtime.transport import tcp
from shoal.runtime.transport.messages.worker_coordinator import StoreCheck, StoreSet

LIMITS = codec.FrameLimits(num_frames=4, frames_bytes=1 << 16)


@contextmanager
def connected(host: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket]]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        with (
            socket.create_connection(listener.getsockname()[:2], 5.0) as ours,
            listener.accept()[0] as theirs,
        ):
            yield ours, theirs


@given(st.text(max_size=50), st.lists(st.binary(max_size=2000), max_size=4))
@settings(max_examples=30)
def test_messages_with_frames_arrive_as_they_were_sent(key: str, frames: list[bytes]) -> None:
    with connected() as (ours, theirs):
        codec.send_message(ours, StoreCheck([key]), frames, limits=LIMITS)
        message, received = codec.read_message(theirs, limits=LIMITS, timeout_s=60.0)
        assert message == StoreCheck([key])
        assert [bytes(frame) for frame in received] == frames


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_says_whose_process_it_is(host: str) -> None:
    if host == "::1":
        interfaces = Path("/proc/net/if_inet6")
        if not interfaces.exists() or f"{1:032x}" not in interfaces.read_text():
            pytest.skip("no IPv6 loopback here")
    with connected(host) as (ours, theirs):
        ends = ours.getsockname()[:2], theirs.getsockname()[:2]
        assert tcp.owner_of_ends(*ends) == tcp.owner_of_ends(*reversed(ends)) == os.getuid()


@given(st.binary(min_size=1, max_size=300))
@settings(max_examples=50)
def test_random_bytes_are_refused_or_end_with_the_connection(data: bytes) -> None:
    with connected() as (ours, theirs):
        ours.sendall(data)
        ours.close()
        with pytest.raises(WireError):
            codec.read_message(theirs, limits=LIMITS, timeout_s=60.0)


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
            codec.read_message(theirs, limits=LIMITS, timeout_s=60.0)


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
        assert time.monotonic() - before < 30.0  # all of it would take a minute


def test_a_peer_that_sends_nothing_is_waited_for_until_the_time_is_over() -> None:
    with connected() as (_, theirs), pytest.raises(TimeoutError):
        codec.read_message(theirs, timeout_s=0.05)
