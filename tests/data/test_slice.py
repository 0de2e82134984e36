"""A batch is cut into contiguous parts that are all there, and nobody is left without a sample to run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.slice import Slice, bounds, split_target
from shoal.errors import TrainingError


def batch_of(num_samples: int) -> Slice:
    numbers = torch.arange(num_samples)
    return Slice(
        ({"x": numbers, "y": numbers * 2.0}, numbers),
        num_local=num_samples,
        num_global=num_samples,
        indices=range(100, 100 + num_samples),
    )


@given(st.integers(0, 200), st.integers(1, 12))
def test_bounds_cover_everything_once_in_order(num_samples: int, num_parts: int) -> None:
    edges = [bounds(num_samples, part, num_parts) for part in range(num_parts)]
    covered = [sample for begin, end in edges for sample in range(begin, end)]
    assert covered == list(range(num_samples))
    sizes = [end - begin for begin, end in edges]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 60), st.integers(1, 9))
def test_the_parts_of_a_slice_hold_its_samples_in_order(num_samples: int, num_parts: int) -> None:
    parts = batch_of(num_samples).cut(num_parts)
    own = [part for part in parts if not part.borrowed]
    assert torch.cat([part.target for part in own]).tolist() == list(range(num_samples))
    assert [index for part in own for index in part.indices] == list(range(100, 100 + num_samples))
    assert sum(part.num_local for part in parts) == num_samples
    assert all(part.num_global == num_samples for part in parts)


@given(st.integers(1, 8), st.integers(2, 9))
def test_a_part_without_samples_borrows_one(num_samples: int, num_parts: int) -> None:
    for part in batch_of(num_samples).cut(num_parts):
        assert part.target.shape[0] == max(part.num_local, 1)
        assert len(part.indices) == part.num_local


def test_cutting_a_part_again_keeps_its_place_in_the_batch() -> None:
    second = batch_of(10).cut(2)[1]
    assert [part.first for part in second.cut(5)] == [5, 6, 7, 8, 9]


def test_what_cannot_be_cut_by_samples_is_refused() -> None:
    mixed = Slice((torch.zeros(4, 2), torch.zeros(())), num_local=4, num_global=4)
    with pytest.raises(TrainingError, match=r"shape \(\)"):
        mixed.cut(2)


def test_the_target_is_the_last_of_a_tuple_and_absent_elsewhere() -> None:
    a, b, c = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    assert split_target((a, b)) == (a, b)
    assert split_target((a, b, c)) == ((a, b), c)
    assert split_target((a,)) == (a, None)
    assert split_target({"x": a}) == ({"x": a}, None)
    assert split_target(a) == (a, None)
