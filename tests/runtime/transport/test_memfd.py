"""Shared memory by descriptor: what arrives is what was sent, and a bad sender costs nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError, WireError
from shoal.runtime.transport import memfd


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


def test_both_sides_see_what_either_writes_after_the_descriptors_are_closed() -> None:
    with pair() as (ours, theirs):
        fd = memfd.create(1 << 16, "test")
        socket.send_fds(ours, [b"x"], [fd])
        (other,) = socket.recv_fds(theirs, 1, 1)[1]
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
                (fd,) = socket.recv_fds(theirs, 1, 1)[1]
                memfd.map_shared(fd, 4096)[:5] = b"child"
                code = 0
            finally:
                os._exit(code)
        fd = memfd.create(4096, "test")
        socket.send_fds(ours, [b"x"], [fd])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with memfd.map_shared(fd, 4096) as memory:
            assert memory[:5] == b"child"
        os.close(fd)


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


def test_sizes_that_cannot_be_are_refused_in_a_sentence() -> None:
    before = open_fds()
    for num_bytes in (0, -1, 1 << 63, 1 << 64):
        with pytest.raises(ConfigError, match="shared memory"):
            memfd.create(num_bytes, "test")
    assert open_fds() == before
