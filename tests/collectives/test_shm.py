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
from shoal.collectives.schemes import part_bounds
from shoal.collectives.shm import Shm
from shoal.errors import PeerLost

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "use_compiled", lambda: request.param == "compiled")
    monkeypatch.setattr(shm, "CHUNK_BYTES", 256)
    monkeypatch.setattr(shm, "NUM_CHUNKS", 3)
    monkeypatch.setattr(shm, "LARGE_BYTES", 1000)


def part(rank: int, number: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    values = torch.randn(
        size, dtype=torch.complex128 if dtype.is_complex else torch.float64, generator=generator
    )
    return (values * 10).to(dtype) if dtype in FLOATS else (values.abs() * 10).to(dtype)


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
    def run(group: Any) -> list[Tensor]:
        reducer = Shm(group, num_cores=1)
        mine = [part(group.rank, number, *each) for number, each in enumerate(tensors)]
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
    def run(group: Any) -> Tensor:
        reducer = Shm(group, num_cores=1)
        whole = torch.full((40, 6), float(group.rank + 1))
        reducer.finish(reducer.start_all_reduce(whole[:, ::2]), "a sum")
        return whole

    for whole in with_ranks(3, run):
        assert (whole[:, ::2] == 6.0).all()
        assert (whole[:, 1::2] < 4.0).all()


@pytest.mark.parametrize("num_workers", [2, 4])
def test_a_rank_that_does_not_come_is_named(num_workers: int) -> None:
    gave_up = threading.Barrier(num_workers - 1)
    missing = num_workers - 1

    def run(group: Any) -> str:
        reducer = Shm(group, num_cores=1, timeout_s=0.3)
        if group.rank == missing:
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
    def run(group: Any) -> None:
        reducer = Shm(group, num_cores=1, is_broken=lambda: True)
        if group.rank == 0:
            with pytest.raises(PeerLost, match="a connection of the group was closed"):
                reducer.finish(reducer.start_all_reduce(torch.ones(5)), "a sum")

    with_ranks(2, run)


def test_what_is_not_a_number_has_the_same_bits_on_every_rank() -> None:
    def run(group: Any) -> Tensor:
        mine = torch.full((40,), 0x7FC00001 + group.rank, dtype=torch.int32).view(torch.float32)
        reducer = Shm(group, num_cores=1)
        reducer.finish(reducer.start_all_reduce(mine), "a sum")
        return mine.view(torch.int32)

    first, *others = with_ranks(3, run)
    assert all(torch.equal(first, other) for other in others)


def test_views_that_are_conjugated_or_negated_when_they_are_read() -> None:
    def run(group: Any) -> tuple[Tensor, Tensor]:
        reducer = Shm(group, num_cores=1)
        whole = torch.full((20,), complex(1.0, 2.0 + group.rank))
        conjugated, negated = whole.clone().conj(), whole.conj().imag
        for tensor in (conjugated, negated) if group.rank else (whole.clone(), torch.zeros(20)):
            reducer.finish(reducer.start_all_reduce(tensor), "a sum")
        return conjugated, negated

    for conjugated, negated in with_ranks(2, run)[1:]:
        assert (conjugated == complex(2.0, -1.0)).all()
        assert (negated == -3.0).all()


def test_dtypes_that_it_cannot_add_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(shm.KINDS, torch.float16)

    def run(group: Any) -> Tensor:
        reducer = Shm(group, num_cores=1)
        mine = torch.ones(9, dtype=torch.float16)
        work = reducer.start_all_reduce(mine)
        assert work is None  # of the group underneath
        reducer.finish(work, "a sum")
        return mine

    assert all((each == 2.0).all() for each in with_ranks(2, run))


@settings(max_examples=20, deadline=None)
@given(num_workers=st.integers(1, 5), sizes=st.lists(st.integers(0, 900), min_size=1, max_size=4))
def test_every_rank_gathers_every_part_between_sums(num_workers: int, sizes: list[int]) -> None:
    def run(group: Any) -> list[list[Tensor]]:
        reducer = Shm(group, num_cores=1)
        gathered = []
        for number, size in enumerate(sizes):
            dtype = DTYPES[(number + size) % len(DTYPES)]
            total = part(group.rank, number, 70, torch.float32)
            work = reducer.start_all_reduce(total)
            # Every other element: memory that is not contiguous.
            mine = part(group.rank, number, 2 * size, dtype)[::2]
            gathered.append(reducer.gather_rows(mine))
            reducer.finish(work, "a sum")
            assert torch.equal(total, in_rank_order(num_workers, number, 70, torch.float32))
        return gathered

    for result in with_ranks(num_workers, run):
        for number, (size, parts) in enumerate(zip(sizes, result, strict=True)):
            dtype = DTYPES[(number + size) % len(DTYPES)]
            for rank, found in enumerate(parts):
                assert torch.equal(found, part(rank, number, 2 * size, dtype)[::2])


@settings(max_examples=30, deadline=None)
@given(
    num_workers=st.integers(1, 5),
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
)
def test_even_parts_are_gathered_where_they_lie_between_sums(
    num_workers: int, lengths: list[int], dtype: torch.dtype
) -> None:
    def run(group: Any) -> list[Tensor]:
        reducer, found = Shm(group, num_cores=1), []
        for number, length in enumerate(lengths):
            whole = torch.zeros(num_workers * length, dtype=dtype)
            whole.view(num_workers, length)[group.rank] = part(group.rank, number, length, dtype)
            summed = part(group.rank, number, length, dtype)
            reducer.finish(reducer.start_all_reduce(summed), "a sum")
            reducer.finish(reducer.start_gather_in_place(whole), "a gathering")
            found += [whole, summed]
        return found

    for result in with_ranks(num_workers, run):
        for number, length in enumerate(lengths):
            parts = [part(rank, number, length, dtype) for rank in range(num_workers)]
            assert torch.equal(result[2 * number], torch.cat(parts))
            assert torch.equal(result[2 * number + 1], in_rank_order(num_workers, number, length, dtype))


@settings(max_examples=40, deadline=None)
@given(
    num_workers=st.integers(1, 5),
    lengths=st.lists(st.integers(0, 900), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    has_one_part=st.booleans(),
)
def test_each_rank_gets_its_part_of_a_sum_in_rank_order_and_keeps_the_rest(
    num_workers: int, lengths: list[int], dtype: torch.dtype, has_one_part: bool
) -> None:
    """`has_one_part`: all of the sum is for rank 0, as where hosts have different numbers of ranks."""

    def bounds(rank: int, length: int) -> tuple[int, int]:
        if has_one_part:
            return (0, length) if rank == 0 else (0, 0)
        return part_bounds(length, rank, num_workers)

    def run(group: Any) -> list[Tensor]:
        reducer = Shm(group, num_cores=1)
        mine = [part(group.rank, number, length, dtype) for number, length in enumerate(lengths)]
        works = [reducer.start_reduce_scatter(each, *bounds(group.rank, len(each))) for each in mine]
        after = part(group.rank, len(lengths), 70, torch.float32)
        reducer.finish(reducer.start_all_reduce(after), "a sum")
        for work in works:
            reducer.finish(work, "a sum")
        return [*mine, after]

    for rank, result in enumerate(with_ranks(num_workers, run)):
        for number, length in enumerate(lengths):
            expected = part(rank, number, length, dtype)
            begin, end = bounds(rank, length)
            expected[begin:end] = in_rank_order(num_workers, number, length, dtype)[begin:end]
            assert torch.equal(result[number], expected)
        assert torch.equal(result[-1], in_rank_order(num_workers, len(lengths), 70, torch.float32))
