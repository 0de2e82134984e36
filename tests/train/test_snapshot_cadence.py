"""Default interval of snapshots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.train.checkpoint.saving import EVERY_STEPS, MOST_STEPS, SHARE, steps_between


@given(cost_s=st.floats(0.0, 1e4), step_s=st.floats(0.0, 1e3))
def test_snapshots_cost_a_share_of_the_time_within_bounds(cost_s: float, step_s: float) -> None:
    steps = steps_between(cost_s=cost_s, step_s=step_s)
    assert EVERY_STEPS <= steps <= MOST_STEPS
    assert steps % EVERY_STEPS == 0  # a sum over the ranks gives all of them the same number
    if steps < MOST_STEPS:
        assert cost_s <= SHARE * max(step_s, 1e-9) * steps * (1 + 1e-9)


@pytest.mark.parametrize(
    ("cost_s", "step_s", "steps"), [(0.45, 0.085, 300), (0.01, 1.0, 50), (60.0, 0.01, 2000)]
)
def test_as_seldom_as_they_are_dear(cost_s: float, step_s: float, steps: int) -> None:
    assert steps_between(cost_s=cost_s, step_s=step_s) == steps
