from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.sharding import CutLoad, balanced_cuts


def heaviest(costs: list[float], cuts: list[int]) -> float:
    return max(sum(costs[begin:end]) for begin, end in itertools.pairwise(cuts))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 4))
def test_no_contiguous_cuts_have_a_lighter_heaviest_part(costs: list[float], num_parts: int) -> None:
    cuts = balanced_cuts(np.array(costs, dtype=np.float64), num_parts)
    everywhere = itertools.combinations_with_replacement(range(len(costs) + 1), num_parts - 1)
    best = min(heaviest(costs, [0, *inner, len(costs)]) for inner in everywhere)
    assert heaviest(costs, cuts) == best


@given(
    st.lists(st.floats(0, 1e9, allow_subnormal=False), min_size=1, max_size=200),
    st.integers(1, 20),
)
def test_cuts_ascend_cover_everything_and_are_no_heavier_than_equal_ones(
    costs: list[float], num_parts: int
) -> None:
    row = np.array(costs)
    cuts = balanced_cuts(row, num_parts)
    assert len(cuts) == num_parts + 1
    assert (cuts[0], cuts[-1]) == (0, len(costs))
    assert all(before <= after for before, after in itertools.pairwise(cuts))
    equal = [len(costs) * part // num_parts for part in range(num_parts + 1)]
    assert heaviest(costs, cuts) <= heaviest(costs, equal) * (1 + 1e-9)


@pytest.mark.parametrize(("num_costs", "num_parts"), [(4, 3), (7, 3), (3, 5), (1, 4), (100, 7)])
def test_samples_that_cost_the_same_are_spread(num_costs: int, num_parts: int) -> None:
    sizes = np.diff(balanced_cuts(np.ones(num_costs), num_parts))
    assert sizes.max() <= -(-num_costs // num_parts)
    assert sizes.min() >= min(1, num_costs // num_parts)


def test_where_nothing_costs_anything_parts_are_equal_in_length() -> None:
    assert balanced_cuts(np.zeros(7), 3) == [0, 2, 4, 7]


def test_load_is_what_steps_wait_for_over_what_there_is_to_do() -> None:
    load = CutLoad.of([(np.array([4.0, 1, 1]), [0, 1, 3]), (np.array([1.0, 1]), [0, 1, 2])])
    assert load == CutLoad((4 + 1) / (3 + 1), 2)
    assert CutLoad.of([(np.zeros(2), [0, 1, 2])]).max_over_mean == 1.0
