"""Tensors of any shape from every rank, and sums whose order nobody can change."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import with_ranks

from shoal.collectives.reducer import HostStaged, Native, gather_any, sum_in_rank_order
from shoal.errors import PeerLost

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
    for gathered in with_ranks(len(brought), lambda group: gather_any(group, brought[group.rank])):
        assert len(gathered) == len(brought)
        for part, given_one in zip(gathered, brought, strict=True):
            if given_one is None:
                assert part.numel() == 0
            else:
                assert (part.dtype, part.shape) == (given_one.dtype, given_one.shape)
                assert torch.equal(part, given_one)


def test_a_rank_without_a_tensor_gives_rows_that_fit_the_others() -> None:
    gathered = with_ranks(2, lambda group: gather_any(group, torch.ones(3, 2).half() if group.rank else None))
    assert torch.cat(gathered[0]).shape == (3, 2)
    assert gathered[0][0].dtype == torch.float16


def test_strides_do_not_travel() -> None:
    def mine(rank: int) -> Any:
        return torch.arange(6.0).reshape(2, 3).t()[rank:]

    for gathered in with_ranks(2, lambda group: gather_any(group, mine(group.rank))):
        assert all(torch.equal(part, mine(rank)) for rank, part in enumerate(gathered))


def test_a_sum_is_added_in_rank_order_on_every_rank() -> None:
    # In floating point the order is visible: 1e16 + 1 is lost, -1e16 first is not.
    values = [1e16, 1.0, -1e16, 1.0]
    expected = ((values[0] + values[1]) + values[2]) + values[3]
    sums = with_ranks(
        4, lambda group: sum_in_rank_order(group, torch.tensor([values[group.rank]], dtype=torch.float64))
    )
    assert [float(one) for one in sums] == [expected] * 4 != [sum(sorted(values))] * 4


def test_what_is_summed_is_not_changed() -> None:
    mine = [torch.ones(2), torch.full((2,), 2.0)]
    sums = with_ranks(2, lambda group: sum_in_rank_order(group, mine[group.rank]))
    assert [one.tolist() for one in (*sums, *mine)] == [[3.0, 3.0], [3.0, 3.0], [1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize("dims", [0, 8])
def test_up_to_eight_dims(dims: int) -> None:
    value = torch.ones([1] * dims)
    assert with_ranks(1, lambda group: gather_any(group, value))[0][0].shape == value.shape


class Work:
    """torch's, as a script of looks: each is over in time or not; the last says what became of it."""

    def __init__(self, *, looks_in_vain: int, done_after_the_last: bool, error: str = "") -> None:
        self._in_vain, self._done_after, self._error = looks_in_vain, done_after_the_last, error
        self._is_done = False

    def wait(self, timeout: timedelta | None = None) -> None:
        if self._in_vain and not self._is_done:
            self._in_vain -= 1
            # Nobody is asked between the end of a look and this: it is when the last one comes.
            self._is_done = not self._in_vain and self._done_after
            raise RuntimeError("Operation timed out!")
        self._is_done = True
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return self._is_done


def group(*, is_broken: bool = False) -> Native:
    return Native(rank=0, num_workers=2, is_broken=lambda: is_broken)


@pytest.mark.parametrize("done_after_the_last", [False, True])
@pytest.mark.parametrize("looks_in_vain", [1, 3])
def test_work_that_ends_right_after_a_look_in_vain_is_done_and_nobody_lost(
    looks_in_vain: int, done_after_the_last: bool
) -> None:
    group().finish(Work(looks_in_vain=looks_in_vain, done_after_the_last=done_after_the_last), "a sum")


@pytest.mark.parametrize("looks_in_vain", [0, 1])
def test_work_that_broke_tells_why_not_that_a_look_was_in_vain(looks_in_vain: int) -> None:
    work = Work(looks_in_vain=looks_in_vain, done_after_the_last=True, error="Connection closed by peer")
    with pytest.raises(PeerLost) as lost:
        group().finish(work, "a sum")
    assert lost.value.reason == "Connection closed by peer"


def test_a_closed_connection_ends_a_wait_that_would_go_on() -> None:
    with pytest.raises(PeerLost, match="a connection of the group was closed"):
        group(is_broken=True).finish(Work(looks_in_vain=9, done_after_the_last=False), "a sum")


def test_far_tensors_are_summed_and_gathered_as_if_they_were_near() -> None:
    def run(group: Any) -> tuple[torch.Tensor, list[torch.Tensor], bool]:
        # One rank computes on a device and the others do not, as in a job of different kinds.
        staged = HostStaged(group, is_far=lambda tensor: group.rank == 1)
        tensor = torch.arange(5.0) * (group.rank + 1)
        work = staged.start_all_reduce(tensor)
        untouched = torch.equal(tensor, torch.arange(5.0) * (group.rank + 1))
        staged.finish(work, "a sum")
        return tensor, staged.all_gather(torch.tensor([group.rank])), untouched

    results = with_ranks(3, run)
    for total, gathered, _ in results:
        assert torch.equal(total, torch.arange(5.0) * 6)
        assert torch.cat(gathered).tolist() == [0, 1, 2]
    assert results[1][2]  # what is summed is the copy: the device's own is written when the sum is whole
