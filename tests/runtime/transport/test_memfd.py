"""Shared memory by descriptor: what arrives is what was sent, and a bad sender costs nothing."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError, WireError
from shoal.runtime.transport import framing as codec
from shoal.runtime.transport import memfd
from shoal.runtime.transport.messages.worker_coordinator import StoreCheck


def open_fds() -> set[str]:
    listed = os.listdir("/proc/self/fd")
    return {fd for fd in listed if os.path.lexists(f"/proc/self/fd/{fd}")}


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends that wait no longer than 5 s; and nothing is left open that was not before."""
    before = open_fds()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5.0)
        theirs.settimeout(5.0)
        yield ours, theirs
    assert open_fds() == before


@given(st.lists(st.binary(min_size=1, max_size=9000), max_size=8))
def test_every_content_arrives_whole_and_in_order(contents: list[bytes]) -> None:
    with pair() as (ours, theirs):
        sent = [memfd.create(len(content), "test") for content in contents]
        for fd, content in zip(sent, contents, strict=True):
            with memfd.map_shared(fd, len(content)) as memory:
                memory[:] = content
        memfd.send_fds(ours, sent)
        memfd.close(sent)
        received = memfd.recv_fds(theirs, 8)
        assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in received)
        found = []
        for fd, content in zip(received, contents, strict=True):
            with memfd.map_shared(fd, len(content)) as memory:
                found.append(memory[:])
        memfd.close(received)
        assert found == contents


def test_both_sides_see_what_either_writes_after_the_descriptors_are_closed() -> None:
    with pair() as (ours, theirs):
        fd = memfd.create(1 << 16, "test")
        memfd.send_fds(ours, [fd])
        (other,) = memfd.recv_fds(theirs, 1)
        with memfd.map_shared(fd, 1 << 16) as here, memfd.map_shared(other, 1 << 16) as there:
            memfd.close([fd, other])
            here[0], there[-1] = 1, 2
            assert (there[0], here[-1]) == (1, 2)


def test_another_process_writes_into_it() -> None:
    with pair() as (ours, theirs):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                (fd,) = memfd.recv_fds(theirs, 1)
                memfd.map_shared(fd, 4096)[:5] = b"child"
                code = 0
            finally:
                os._exit(code)
        fd = memfd.create(4096, "test")
        memfd.send_fds(ours, [fd])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with memfd.map_shared(fd, 4096) as memory:
            assert memory[:5] == b"child"
        os.close(fd)


def test_descriptors_travel_between_messages_on_one_connection() -> None:
    message = StoreCheck(["key"])
    with pair() as (ours, theirs):
        codec.send_message(ours, message)
        fd = memfd.create(1, "test")
        memfd.send_fds(ours, [fd])
        codec.send_message(ours, message)
        os.close(fd)
        assert codec.read_message(theirs)[0] == message
        memfd.close(memfd.recv_fds(theirs, 1))
        assert codec.read_message(theirs)[0] == message


@given(st.integers(1, 1 << 40))
def test_the_size_is_exact_and_cannot_be_changed_by_anybody(num_bytes: int) -> None:
    fd = memfd.create(num_bytes, "test")
    try:
        assert os.fstat(fd).st_size == num_bytes
        for other in (num_bytes - 1, num_bytes + 1, 0):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, other)
    finally:
        os.close(fd)


@given(st.integers(1, 10_000), st.integers(-1, 10_000))
def test_another_size_than_announced_is_never_mapped(real: int, announced: int) -> None:
    fd = memfd.create(real, "test")
    try:
        if real == announced:
            memfd.map_shared(fd, announced).close()
        else:
            with pytest.raises(WireError, match=f"of {real:,} bytes, where {announced:,} were announced"):
                memfd.map_shared(fd, announced)
    finally:
        os.close(fd)


def test_memory_that_its_sender_left_open_to_shrinking_is_sealed_before_it_is_mapped() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with memfd.map_shared(fd, 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    os.close(fd)


def test_memory_that_cannot_be_sealed_and_what_is_no_memory_are_refused(tmp_path: Path) -> None:
    unsealable = os.memfd_create("test", 0)
    os.ftruncate(unsealable, 4096)
    with pytest.raises(WireError, match="may shrink"):
        memfd.map_shared(unsealable, 4096)
    (tmp_path / "file").write_bytes(b"x" * 4096)
    file = os.open(tmp_path / "file", os.O_RDWR)
    reader, writer = os.pipe()
    for fd in (file, reader, writer):
        with pytest.raises(WireError, match=r"no memfd|may shrink"):
            memfd.map_shared(fd, 4096)
    memfd.close([unsealable, file, reader, writer])


def test_memory_that_is_not_ours_to_write_is_refused() -> None:
    fd = memfd.create(4096, "test")
    readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    with pytest.raises(WireError, match="cannot be mapped"):
        memfd.map_shared(readable, 4096)
    memfd.close([fd, readable])


@given(
    st.binary(max_size=12) | st.integers(0, 9).map(lambda n: struct.pack("<2sH", b"FD", n)),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_whatever_bytes_come_with_whatever_descriptors_nothing_stays_open(
    record: bytes, num_fds: int, max_fds: int
) -> None:
    with pair() as (ours, theirs):
        sent = [memfd.create(1, "test") for _ in range(num_fds)]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", sent))] if sent else []
        if record:
            ours.sendmsg([record], rights)
        memfd.close(sent)
        ours.close()
        is_good = record[:4] == struct.pack("<2sH", b"FD", num_fds) and num_fds <= max_fds
        try:
            received = memfd.recv_fds(theirs, max_fds)
        except WireError:
            assert record
            assert not is_good
        except EOFError:
            assert not record
        else:
            assert is_good
            assert len(received) == num_fds
            memfd.close(received)


def test_who_sends_nothing_is_waited_for_no_longer_than_the_socket_waits() -> None:
    with pair() as (_, theirs):
        theirs.settimeout(0.01)
        with pytest.raises(TimeoutError):
            memfd.recv_fds(theirs, 1)


def test_more_descriptors_than_the_kernel_passes_are_refused_before_they_are_sent() -> None:
    with pair() as (ours, _), pytest.raises(WireError, match="254 descriptors"):
        memfd.send_fds(ours, [0] * 254)


def test_sizes_that_cannot_be_are_refused_in_a_sentence() -> None:
    before = open_fds()
    for num_bytes in (0, -1, 1 << 63, 1 << 64):
        with pytest.raises(ConfigError, match="shared memory"):
            memfd.create(num_bytes, "test")
    assert open_fds() == before
