"""Sums through shared memory, in rank order, whatever the size, the dtype and the number of ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import with_ranks
from torch import Tensor

from shoal.collectives import shm
from shoal.collectives.shm import Shm
from shoal.core.errors import PeerLost

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "CHUNK_BYTES", 256)
    monkeypatch.setattr(shm, "NUM_CHUNKS", 3)


def part(rank: int, number: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    values = torch.randn(size, dtype=torch.float64, generator=generator) * 10
    return values.to(dtype) if dtype.is_floating_point else values.abs().to(dtype)


def in_rank_order(num_workers: int, number: int, size: int, dtype: torch.dtype) -> Tensor:
    total = part(0, number, size, dtype)
    for rank in range(1, num_workers):
        total = total + part(rank, number, size, dtype)
    return total


@settings(max_examples=40, deadline=None)
@given(
    num_workers=st.integers(1, 6),
    tensors=st.lists(st.tuples(st.integers(0, 900), st.sampled_from(DTYPES)), min_size=1, max_size=6),
    started_first=st.integers(1, 6),
)
def test_every_rank_gets_the_sum_in_rank_order(
    num_workers: int, tensors: list[tuple[int, torch.dtype]], started_first: int
) -> None:
    def run(native: Any) -> list[Tensor]:
        reducer = Shm(native, num_cores=1)
        mine = [part(native.rank, number, *each) for number, each in enumerate(tensors)]
        works: list[Any] = []
        for number, tensor in enumerate(mine):
            works.append(reducer.start_all_reduce(tensor))
            if number >= started_first:
                reducer.finish(works[number - started_first], "a sum")
        for work in works:
            reducer.finish(work, "a sum")
        return mine

    expected = [in_rank_order(num_workers, number, *each) for number, each in enumerate(tensors)]
    for result in with_ranks(num_workers, run):
        for got, wanted in zip(result, expected, strict=True):
            assert torch.equal(got, wanted)


def test_memory_that_is_not_contiguous_is_summed_in_its_place() -> None:
    def run(native: Any) -> Tensor:
        reducer = Shm(native, num_cores=1)
        whole = torch.full((40, 6), float(native.rank + 1))
        reducer.finish(reducer.start_all_reduce(whole[:, ::2]), "a sum")
        return whole

    for whole in with_ranks(3, run):
        assert (whole[:, ::2] == 6.0).all()
        assert (whole[:, 1::2] < 4.0).all()


@pytest.mark.parametrize("num_workers", [2, 4])
def test_a_rank_that_does_not_come_is_named(num_workers: int) -> None:
    gave_up = threading.Barrier(num_workers - 1)
    missing = num_workers - 1

    def run(native: Any) -> str:
        reducer = Shm(native, num_cores=1, timeout_s=0.3)
        if native.rank == missing:
            return ""
        tensor = torch.ones(1000)
        with pytest.raises(PeerLost) as caught:
            reducer.finish(reducer.start_all_reduce(tensor), "the exchange of gradients")
        gave_up.wait(10.0)
        return str(caught.value)

    said = with_ranks(num_workers, run)
    assert all("the exchange of gradients" in each for each in said[:missing])
    assert all(f"rank {missing} did not come within 0.3 s" in each for each in said[:missing])


def test_a_broken_connection_ends_the_wait_before_its_time() -> None:
    def run(native: Any) -> None:
        reducer = Shm(native, num_cores=1, is_broken=lambda: True)
        if native.rank == 0:
            with pytest.raises(PeerLost, match="a connection of the group was closed"):
                reducer.finish(reducer.start_all_reduce(torch.ones(5)), "a sum")

    with_ranks(2, run)
