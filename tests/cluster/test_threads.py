from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.threads import available_cores, threads_per_worker


@given(st.integers(1, 64), st.integers(1, 256))
def test_threads_never_exceed_the_cores_unless_workers_do(num_workers: int, cores: int) -> None:
    threads = threads_per_worker(num_workers, cores=cores, env={})
    assert threads >= 1
    assert threads == 1 or threads * num_workers <= cores
    assert (
        threads == 1 or (threads + 1) * num_workers > cores
    )  # and no core is left idle that could be shared


@pytest.mark.parametrize(("asked", "threads"), [("2", 2), ("64", 4), ("0", 4), ("many", 4), ("", 4)])
def test_a_smaller_wish_is_granted(asked: str, threads: int) -> None:
    assert threads_per_worker(2, cores=8, env={"OMP_NUM_THREADS": asked}) == threads


def test_cores_are_those_this_process_may_use() -> None:
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))
