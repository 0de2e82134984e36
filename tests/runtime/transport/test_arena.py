"""Memory shared with a server: buffers never overlap, what comes back is used again, and a limit is a limit."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ArenaFull, ConfigError
from shoal.runtime.transport.arena import ALIGNMENT, Arena, ArenaConfig, Buffer, size_class

SMALL = ArenaConfig(limit_bytes=1 << 20, segment_bytes=64 << 10)


@given(st.integers(0, 1 << 40))
def test_a_size_class_holds_its_size_with_at_most_a_quarter_of_slack(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size % ALIGNMENT == 0
    assert size <= max(ALIGNMENT, nbytes + ALIGNMENT, nbytes * 1.25)
    assert size_class(size) == size


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100_000), st.integers(0, 1 << 30)), max_size=60))
def test_whatever_comes_and_goes_buffers_keep_apart_and_the_books_are_right(
    turns: list[tuple[bool, int, int]],
) -> None:
    arena = Arena(SMALL)
    held: list[tuple[Buffer, int]] = []
    for number, (is_free, nbytes, which) in enumerate(turns):
        if is_free and held:
            buffer, mark = held.pop(which % len(held))
            assert bytes(buffer.view) == bytes([mark]) * buffer.nbytes
            arena.free(buffer)
        else:
            try:
                buffer = arena.alloc(nbytes)
            except ArenaFull:
                continue
            assert len(buffer.view) == nbytes
            assert buffer.offset % ALIGNMENT == 0
            buffer.view[:] = bytes([number]) * nbytes
            held.append((buffer, number))
    for buffer, mark in held:
        assert bytes(buffer.view) == bytes([mark]) * buffer.nbytes
    assert arena.bytes_in_use == sum(size_class(buffer.nbytes) for buffer, _ in held)
    assert arena.bytes_in_use <= arena.bytes_reserved <= SMALL.limit_bytes
    arena.close()


def test_what_is_given_back_is_used_again_whatever_sizes_follow() -> None:
    arena = Arena(SMALL)
    for nbytes in range(1, 60_000, 97):
        buffers = [arena.alloc(nbytes), arena.alloc(100), arena.alloc(nbytes // 2 + 1)]
        for buffer in buffers:
            arena.free(buffer)
    assert arena.bytes_in_use == 0
    assert arena.bytes_reserved <= 3 * SMALL.segment_bytes
    arena.close()


def test_a_full_arena_says_what_is_in_use_and_which_setting_to_raise() -> None:
    arena = Arena(SMALL)
    first = arena.alloc(1 << 19)
    with pytest.raises(ArenaFull, match="raise limit_bytes") as caught:
        arena.alloc((1 << 19) + 1)
    assert (caught.value.asked, caught.value.in_use) == ((1 << 19) + 1, 1 << 19)
    arena.free(first)
    arena.free(arena.alloc(1 << 19))
    with pytest.raises(ConfigError):
        ArenaConfig(limit_bytes=10, segment_bytes=100)
    arena.close()


def test_a_buffer_comes_back_once_and_to_its_own_arena() -> None:
    arena, other = Arena(SMALL), Arena(SMALL)
    buffer = arena.alloc(10)
    with pytest.raises(ValueError, match="not its own"):
        other.free(buffer)
    arena.free(buffer)
    with pytest.raises(ValueError, match="twice"):
        arena.free(buffer)
    arena.close()
    other.close()


def test_a_closed_arena_gives_out_nothing_and_what_is_held_stays_readable() -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena(SMALL)
    array = np.frombuffer(arena.alloc(8000).view, np.float64)
    array[:] = 3.0
    arena.close()
    with pytest.raises(ArenaFull):
        arena.alloc(1)
    assert array.sum() == 3000.0
    del array
    assert len(os.listdir("/proc/self/fd")) == before
