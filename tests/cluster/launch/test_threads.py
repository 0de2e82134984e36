from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.cluster.launch.threads import available_cores, choose_vector_code, threads_per_worker


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


def test_vector_functions_are_first_called_on_one_element_which_no_second_thread_can_share() -> None:
    called: set[tuple[str, torch.dtype]] = set()

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if args and isinstance(args[0], torch.Tensor):
                assert args[0].numel() == 1
                called.add((function.overloadpacket.__name__, args[0].dtype))
            return function(*args, **(kwargs or {}))

    with Spy():
        choose_vector_code()
    # What the optimizers and losses of torch compute with.
    for name in ("sqrt", "exp", "log", "tanh"):
        assert {(name, torch.float32), (name, torch.float64)} <= called
