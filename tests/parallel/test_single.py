"""One process: what every exact strategy is compared with, also slice by slice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.data.slice import Slice
from shoal.parallel.loss import loss_rule
from shoal.parallel.protocol import ControlFlags, PieceReader, TrainJob
from shoal.parallel.single import Single
from shoal.parallel.state import optimizer_settings

X = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X[:, :1].sin()
BATCH = Slice(batch=(X, Y), num_local=10, num_global=10)


def prepared(*layers: nn.Module, num_slices: int = 1, **options: Any) -> tuple[Single, nn.Sequential]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 1)).double()
    strategy = Single(num_slices=num_slices)
    settings: dict[str, Any] = {
        "build_optimizer": lambda m: torch.optim.Adam(m.parameters(), lr=0.1),
        **options,
    }
    strategy.prepare(TrainJob(model=model, loss=loss_rule(nn.MSELoss()), **settings))
    return strategy, model


def steps(strategy: Single, number: int) -> list[float]:
    losses = []
    for _ in range(number):
        strategy.forward_backward(BATCH)
        losses.append(strategy.commit().loss)
    return losses


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_slices", [2, 3, 4])
def test_slice_by_slice_is_the_whole_batch_where_nothing_mixes_it(num_slices: int) -> None:
    whole, model = prepared(nn.Tanh())
    sliced, other = prepared(nn.Tanh(), num_slices=num_slices)
    assert steps(whole, 4) == pytest.approx(steps(sliced, 4), rel=1e-12)
    assert_close(model, other)


def test_slice_by_slice_draws_and_normalises_as_workers_do() -> None:
    whole, model = prepared(nn.BatchNorm1d(4), nn.Dropout(0.5))
    sliced, other = prepared(nn.BatchNorm1d(4), nn.Dropout(0.5), num_slices=3)
    assert steps(whole, 2) != pytest.approx(steps(sliced, 2), rel=1e-3)
    assert not torch.allclose(model[0].weight, other[0].weight)
    assert other[1].num_batches_tracked == 2, "a batch is counted once, as a worker counts it"


def test_changes_come_with_the_commit_and_not_before() -> None:
    strategy, model = prepared(nn.Tanh())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = strategy.forward_backward(BATCH)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert strategy.step == 0
    verdict = strategy.commit()
    assert strategy.step == 1
    assert not any(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert verdict.loss == pytest.approx(float(result.total) / 10)
    assert (verdict.loss_total, verdict.count, verdict.applied) == (float(result.total), 10.0, True)


def test_control_flags_come_back_in_the_result() -> None:
    control = ControlFlags()
    strategy, _ = prepared(control=control)
    for stop, checkpoint, leave in [(True, False, False), (False, True, False), (False, False, True)]:
        control.stop, control.checkpoint, control.leave = stop, checkpoint, leave
        strategy.forward_backward(BATCH)
        verdict = strategy.commit()
        assert (verdict.stop, verdict.checkpoint, verdict.leave) == (stop, checkpoint, leave)


def test_gradients_of_a_loop_of_the_users_own_are_taken_as_they_are() -> None:
    strategy, model = prepared(nn.Tanh())
    other, reference = prepared(nn.Tanh())
    nn.functional.mse_loss(model(X), Y).backward()
    strategy.adopt(BATCH)
    strategy.commit()
    steps(other, 1)
    assert_close(model, reference)


def test_state_goes_on_in_another_strategy() -> None:
    first, model = prepared(nn.BatchNorm1d(4))
    steps(first, 3)
    pieces = {piece.name: piece.tensor.clone() for piece in first.state()}
    assert {"model/0.weight", "model/1.running_mean", "optimizer/0.weight/exp_avg"} <= pieces.keys()
    assert first.optimizer is not None
    settings = optimizer_settings(model, first.optimizer)
    second, _ = prepared(nn.BatchNorm1d(4))
    second.load(PieceReader(pieces, settings))
    second.step = first.step
    assert steps(first, 2) == steps(second, 2)
    third, _ = prepared(nn.BatchNorm1d(4))
    third.load(PieceReader(pieces, None))
    assert third.optimizer is not None
    assert not third.optimizer.state, "weights alone leave the optimizer as it was"


def test_one_rank_sums_and_gathers_itself() -> None:
    strategy, _ = prepared()
    values = torch.arange(3.0, requires_grad=True)
    summed = strategy.reduce(values)
    assert torch.equal(summed, values.detach())
    assert summed.data_ptr() != values.data_ptr()
    assert [part.tolist() for part in strategy.gather(values)] == [[0.0, 1.0, 2.0]]
    assert [part.numel() for part in strategy.gather(None)] == [0]


def test_a_hook_on_a_gradient_sees_that_of_the_mean() -> None:
    """Also of a loss that counts more than its samples: a hook that clips would clip at another size."""
    strategy, model = prepared()
    model[1] = nn.Linear(4, 4, dtype=torch.float64)
    target = torch.ones(10, 4, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(nn.functional.mse_loss(model(X), target), model[0].weight)
    seen: list[torch.Tensor] = []
    model[0].weight.register_hook(seen.append)
    strategy.forward_backward(Slice(batch=(X, target), num_local=10, num_global=10))
    torch.testing.assert_close(seen[0], wanted, rtol=1e-12, atol=1e-15)
    assert strategy.commit().applied
