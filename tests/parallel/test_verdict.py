"""What the ranks of a step tell each other, and what follows from it."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.parallel.protocol import ControlFlags
from shoal.parallel.step_result import contribution, decide


def vector_of(losses: list[float], counts: list[float], wishes: list[ControlFlags]) -> torch.Tensor:
    parts = [
        contribution(rank=rank, num_workers=len(losses), loss_total=loss, count=count, control=wish)
        for rank, (loss, count, wish) in enumerate(zip(losses, counts, wishes, strict=True))
    ]
    return torch.stack(parts).sum(0)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 1000)), min_size=1, max_size=6))
def test_the_loss_is_the_global_mean(ranks: list[tuple[float, int]]) -> None:
    losses, counts = [loss for loss, _ in ranks], [float(count) for _, count in ranks]
    verdict = decide(vector_of(losses, counts, [ControlFlags() for _ in ranks]))
    assert verdict.applied
    assert math.isclose(verdict.loss, math.fsum(losses) / sum(counts), rel_tol=1e-12, abs_tol=1e-12)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_one_ranks_wish_is_everybodys(wishes: list[tuple[bool, bool, bool]]) -> None:
    verdict = decide(
        vector_of([1.0] * len(wishes), [1.0] * len(wishes), [ControlFlags(*wish) for wish in wishes])
    )
    assert (verdict.stop, verdict.checkpoint, verdict.leave) == tuple(
        any(column) for column in zip(*wishes, strict=True)
    )


def test_a_loss_that_is_not_finite_names_its_rank_and_is_not_applied() -> None:
    verdict = decide(vector_of([1.0, math.nan, 2.0, math.inf], [4.0] * 4, [ControlFlags() for _ in range(4)]))
    assert not verdict.applied
    assert [rank for rank, _ in verdict.nonfinite] == [1, 3]


def test_a_norm_that_is_not_finite_is_not_applied() -> None:
    assert not decide(vector_of([1.0], [1.0], [ControlFlags()]), grad_norm=math.inf).applied


def test_a_batch_that_counts_nothing_has_no_loss() -> None:
    verdict = decide(vector_of([0.0, 0.0], [0.0, 0.0], [ControlFlags(), ControlFlags()]))
    assert verdict.loss == 0.0
