"""Tensors of any shape from every rank, and sums whose order nobody can change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import with_ranks

from shoal.collectives.reducer import gather_any, sum_in_rank_order

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor | None:
    if draw(st.integers(0, 4)) == 0:
        return None
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 10
    return values.to(draw(st.sampled_from(DTYPES)))


@settings(max_examples=40, deadline=None)
@given(brought=st.lists(tensors(), min_size=1, max_size=4))
def test_every_rank_gets_every_ranks_tensor(brought: list[torch.Tensor | None]) -> None:
    for gathered in with_ranks(len(brought), lambda native: gather_any(native, brought[native.rank])):
        assert len(gathered) == len(brought)
        for part, given_one in zip(gathered, brought, strict=True):
            if given_one is None:
                assert part.numel() == 0
            else:
                assert (part.dtype, part.shape) == (given_one.dtype, given_one.shape)
                assert torch.equal(part, given_one)


def test_a_rank_without_a_tensor_gives_rows_that_fit_the_others() -> None:
    gathered = with_ranks(
        2, lambda native: gather_any(native, torch.ones(3, 2).half() if native.rank else None)
    )
    assert torch.cat(gathered[0]).shape == (3, 2)
    assert gathered[0][0].dtype == torch.float16


def test_strides_do_not_travel() -> None:
    def mine(rank: int) -> Any:
        return torch.arange(6.0).reshape(2, 3).t()[rank:]

    for gathered in with_ranks(2, lambda native: gather_any(native, mine(native.rank))):
        assert all(torch.equal(part, mine(rank)) for rank, part in enumerate(gathered))


def test_a_sum_is_added_in_rank_order_on_every_rank() -> None:
    # In floating point the order is visible: 1e16 + 1 is lost, -1e16 first is not.
    values = [1e16, 1.0, -1e16, 1.0]
    expected = ((values[0] + values[1]) + values[2]) + values[3]
    sums = with_ranks(
        4, lambda native: sum_in_rank_order(native, torch.tensor([values[native.rank]], dtype=torch.float64))
    )
    assert [float(one) for one in sums] == [expected] * 4 != [sum(sorted(values))] * 4


def test_what_is_summed_is_not_changed() -> None:
    mine = [torch.ones(2), torch.full((2,), 2.0)]
    sums = with_ranks(2, lambda native: sum_in_rank_order(native, mine[native.rank]))
    assert [one.tolist() for one in (*sums, *mine)] == [[3.0, 3.0], [3.0, 3.0], [1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize("dims", [0, 8])
def test_up_to_eight_dims(dims: int) -> None:
    value = torch.ones([1] * dims)
    assert with_ranks(1, lambda native: gather_any(native, value))[0][0].shape == value.shape
