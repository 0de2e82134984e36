"""Loops over rows in several threads: the same bits as in one, nothing left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.embedding.row_table import RowTable
from shoal.runtime import row_kernels, row_threads
from shoal.runtime.transport.messages.client_server import TableSpec


@pytest.fixture(autouse=True)
def _one_thread_afterwards() -> Iterator[None]:
    yield
    row_threads.use(1)


def test_ranges_cover_all_rows_in_order_and_none_is_too_short() -> None:
    row_threads.use(4)
    for num_rows in (0, 1, 2047, 4096, 10_000, 1_000_001):
        ranges = row_threads.ranges(num_rows)
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == num_rows
        assert len(ranges) == 1 or min(end - begin for begin, end in ranges) >= row_threads.MIN_ROWS


def test_ranges_run_in_several_threads_and_results_come_in_order() -> None:
    row_threads.use(3)
    meet = threading.Barrier(3, timeout=60)  # broken unless three ranges run at the same time

    def work(begin: int, end: int) -> tuple[int, int, int]:
        meet.wait()
        return begin, end, threading.get_ident()

    done = row_threads.over(3 * row_threads.MIN_ROWS, work)
    assert [(begin, end) for begin, end, _ in done] == row_threads.ranges(3 * row_threads.MIN_ROWS)
    assert len({thread for _, _, thread in done}) == 3


def test_an_error_of_one_range_is_raised_after_all_others_ended() -> None:
    row_threads.use(2)
    ended = []

    def work(begin: int, end: int) -> None:
        if begin == 0:
            raise ValueError("first range")
        ended.append(begin)

    with pytest.raises(ValueError, match="first range"):
        row_threads.over(2 * row_threads.MIN_ROWS, work)
    assert ended == [row_threads.MIN_ROWS]


def test_a_forked_process_has_threads_of_its_own() -> None:
    row_threads.use(2)
    row_threads.over(2 * row_threads.MIN_ROWS, lambda begin, end: None)
    pid = os.fork()
    if pid == 0:
        done = row_threads.over(2 * row_threads.MIN_ROWS, lambda begin, end: 1)
        os._exit(0 if done == [1, 1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.integers(1, 4), st.booleans())
def test_sum_of_lists_is_that_of_one_list_after_the_other(
    num_lists: int, seed: int, num_threads: int, from_zero: bool
) -> None:
    rng = np.random.default_rng(seed)
    keys_of = [
        np.unique(rng.integers(-9, 4000, int(rng.integers(0, 6000)))).astype(np.int64)
        for _ in range(num_lists)
    ]
    keys_of[0] = np.append(keys_of[0], np.iinfo(np.int64).max)  # an id like any other
    rows_of = [rng.standard_normal((len(keys), 3)).astype(np.float32) for keys in keys_of]
    for rows in rows_of:
        rows[rng.random(rows.shape) < 0.1] = -0.0
    row_threads.use(num_threads)
    try:
        keys, sums = row_kernels.sum_lists(keys_of, rows_of, from_zero=from_zero)
    finally:
        row_threads.use(1)
    expected: dict[int, np.ndarray] = {}
    for of_list, rows in zip(keys_of, rows_of, strict=True):
        for key, row in zip(of_list.tolist(), rows, strict=True):
            start = expected.get(key, np.zeros(3, np.float32) if from_zero else None)
            expected[key] = row if start is None else start + row
    assert keys.tolist() == sorted(expected)
    assert sums.tobytes() == np.array([expected[key] for key in sorted(expected)], np.float32).tobytes()


@pytest.mark.parametrize("num_rows", [20_000, None])
def test_a_table_has_the_same_bits_with_any_number_of_threads(num_rows: int | None) -> None:
    spec = TableSpec(
        number=0, name="t", dim=4, dtype="float32", num_rows=num_rows, rule="adagrad", settings={}, seed=3
    )
    found = []
    for num_threads in (1, 2, 4):
        row_threads.use(num_threads)
        table, rng = RowTable(spec), np.random.default_rng(0)
        for _ in range(3):
            keys = np.unique(rng.integers(0, 20_000, 15_000))
            table.apply(keys, rng.standard_normal((len(keys), 4)).astype(np.float32), 0.5)
        everything = np.arange(20_000)
        values = np.empty((20_000, 4), np.float32)
        table.pull(everything, values)
        there, _, _ = table.read_all()
        copy = RowTable(spec)
        copy.set_whole(there, table.read_whole(there))
        found.append((values.tobytes(), table.read_whole(there).tobytes(), copy.read_whole(there).tobytes()))
    assert found[0] == found[1] == found[2]
    assert found[0][1] == found[0][2]
