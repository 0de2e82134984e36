"""The exchanged vector of a step, and the decision made from it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.errors import ConfigError
from shoal.parallel.loss import loss_rule
from shoal.parallel.protocol import ControlFlags, TrainJob
from shoal.parallel.step import (
    as_loss,
    clip,
    contribution,
    decide,
    decide_in_loop,
    drop_gradients,
    gradient_norm,
    gradients_of,
    merge_turns,
    scale,
)


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


def test_a_batch_that_counts_nothing_has_no_loss() -> None:
    verdict = decide(vector_of([0.0, 0.0], [0.0, 0.0], [ControlFlags(), ControlFlags()]))
    assert verdict.loss == 0.0


def verdict(*, loss_total: float = 1.0, count: float = 4.0) -> Any:
    return decide(
        contribution(rank=0, num_workers=1, loss_total=loss_total, count=count, control=ControlFlags())
    )


def applied(
    gradients: list[torch.Tensor | None], *, count: float = 4.0, **options: Any
) -> tuple[list[float], Any]:
    """By how much each parameter moved, as one number, in a step of lr 1 over four samples."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in gradients])
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    job = TrainJob(model=model, loss=loss_rule(nn.MSELoss()), build_optimizer=None, **options)
    told, factor = clip(job, verdict(count=count), 4, lambda: gradient_norm(gradients_of(parameters)))
    if told.applied:
        scale(gradients_of(parameters), factor)
        torch.optim.SGD(parameters, lr=1.0).step()
    drop_gradients(parameters)
    assert all(parameter.grad is None for parameter in parameters), "the gradients are gone afterwards"
    return [float(-parameter.detach().sum()) for parameter in parameters], told


def two(a: float, b: float) -> torch.Tensor:
    return torch.tensor([a, b], dtype=torch.float64)


def test_a_plain_mean_is_applied_as_it_is() -> None:
    moved, told = applied([two(1, 2), None])
    assert moved == [3.0, 0.0]
    assert (told.applied, told.grad_norm) == (True, None)


@pytest.mark.parametrize(("count", "moved"), [(4.0, 3.0), (2.0, 6.0), (8.0, 1.5), (0.0, 0.0)])
def test_the_divisor_is_what_the_loss_really_counted(count: float, moved: float) -> None:
    assert applied([two(1, 2)], count=count)[0] == [moved]


def test_the_norm_is_of_the_corrected_gradient_over_all_parameters() -> None:
    moved, told = applied([two(3, 0), two(0, 4), None], count=2.0, clip_norm=5.0)
    assert told.grad_norm == pytest.approx(10.0)
    assert moved == pytest.approx([3.0, 4.0, 0.0], rel=1e-6)
    moved, told = applied([two(3, 0), two(0, 4)], clip_norm=50.0)
    assert moved == [3.0, 4.0]


def test_rows_that_occur_twice_count_as_their_sum() -> None:
    row = torch.tensor([[0, 0]]), torch.tensor([3.0, 1.0], dtype=torch.float64)
    sparse = torch.sparse_coo_tensor(*row, (2,), check_invariants=False)
    moved, told = applied([sparse], clip_norm=2.0)
    assert told.grad_norm == pytest.approx(4.0)
    assert moved == pytest.approx([2.0], rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_left_out_where_it_is_looked_at(bad: float) -> None:
    for options in ({"on_nonfinite": "skip"}, {"clip_norm": 1.0}):
        moved, told = applied([two(1, bad)], **options)  # type: ignore[arg-type]
        assert moved == [0.0]
        assert not told.applied


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    job = TrainJob(model=nn.ParameterList([parameter]), loss=loss_rule(nn.MSELoss()), build_optimizer=None)
    told, factor = clip(job, verdict(loss_total=math.nan), 4, lambda: gradient_norm([torch.ones(2)]))
    assert (told.applied, told.nonfinite[0][0], factor) == (False, 0, 0.0)
    assert torch.equal(parameter, torch.zeros(2))


def test_a_turn_that_was_left_out_has_no_part_in_the_loss_of_its_step() -> None:
    applied, spoilt = (decide(vector_of([loss], [4.0], [ControlFlags()])) for loss in (8.0, math.nan))
    for turns in ([applied, spoilt], [spoilt, applied]):
        merged = merge_turns(turns)
        assert (merged.loss, merged.loss_total, merged.count) == (2.0, 8.0, 4.0)
        assert merged.applied
        assert merged.nonfinite
    assert merge_turns([applied, applied]).loss == 4.0
    assert math.isnan(merge_turns([spoilt, spoilt]).loss)


def in_a_loop(*ranks: tuple[int, int] | None) -> torch.Tensor:
    losses = [float(as_loss(each)) for each in ranks]
    return vector_of(losses, [4.0] * len(ranks), [ControlFlags() for _ in ranks])


@pytest.mark.parametrize(
    "ranks", [((1, 1), (1, 1)), ((3, 2), None, (3, 2)), (None, None), ((1, 0), (1, 0)), (None, (5, 5))]
)
def test_a_loop_of_which_all_ranks_ran_the_same_batches_back_is_applied(
    ranks: tuple[tuple[int, int] | None, ...],
) -> None:
    decided = decide_in_loop(in_a_loop(*ranks))
    assert decided.applied
    assert decided.loss_total == 0.0


def test_a_backward_or_a_step_that_one_rank_left_out_is_refused_by_rank() -> None:
    for left_out, said in (((1, 0), "took 1 and ran it on 0"), ((2, 1), "took 2 and ran it on 1")):
        with pytest.raises(ConfigError, match=f"worker 1 took 1 batches and .* worker 3 {said}"):
            decide_in_loop(in_a_loop(None, (1, 1), (1, 1), left_out))


def test_a_gradient_that_a_rank_of_a_loop_found_not_finite_is_not_applied() -> None:
    vector = in_a_loop((1, 1), (1, 1))
    vector[-1] = math.nan
    assert [rank for rank, _ in decide_in_loop(vector).nonfinite] == [1]
