from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lr

from shoal.errors import CheckpointMismatch, ConfigError
from shoal.parallel.state import load_optimizer, optimizer_pieces, optimizer_settings
from shoal.train.checkpoint.saving import load_scheduler, scheduler_state


def sequential(optimizer: optim.Optimizer) -> lr.SequentialLR:
    warm_up, decay = lr.LinearLR(optimizer, 0.1, total_iters=3), lr.ExponentialLR(optimizer, 0.9)
    return lr.SequentialLR(optimizer, [warm_up, decay], milestones=[3])


class HalfLife:
    """A callable object: LambdaLR keeps its attributes as state."""

    def __init__(self) -> None:
        self.factors = (0.5, 0.25)

    def __call__(self, epoch: int) -> float:
        return float(self.factors[epoch % 2])


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "step": lambda optimizer: lr.StepLR(optimizer, 2, gamma=0.3),
    "multi step": lambda optimizer: lr.MultiStepLR(optimizer, [2, 4, 4], gamma=0.3),
    "constant": lambda optimizer: lr.ConstantLR(optimizer, total_iters=3),
    "linear": lambda optimizer: lr.LinearLR(optimizer, total_iters=7),
    "exponential": lambda optimizer: lr.ExponentialLR(optimizer, 0.9),
    "polynomial": lambda optimizer: lr.PolynomialLR(optimizer, total_iters=9, power=2),
    "cosine": lambda optimizer: lr.CosineAnnealingLR(optimizer, T_max=10, eta_min=1e-5),
    "warm restarts": lambda optimizer: lr.CosineAnnealingWarmRestarts(optimizer, T_0=3, T_mult=2),
    "one cycle": lambda optimizer: lr.OneCycleLR(optimizer, max_lr=0.5, total_steps=20),
    "cyclic": lambda optimizer: lr.CyclicLR(optimizer, 0.01, 0.5, step_size_up=3),
    "lambda": lambda optimizer: lr.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "lambda object": lambda optimizer: lr.LambdaLR(optimizer, HalfLife()),
    "multiplicative": lambda optimizer: lr.MultiplicativeLR(optimizer, lambda epoch: 0.95),
    "sequential": sequential,
    "chained": lambda optimizer: lr.ChainedScheduler(
        [lr.StepLR(optimizer, 2), lr.ExponentialLR(optimizer, 0.9)]
    ),
    "plateau": lambda optimizer: lr.ReduceLROnPlateau(optimizer, patience=1, factor=0.5),
}


def go(model: nn.Module, optimizer: optim.Optimizer, scheduler: Any, steps: range) -> list[float]:
    rates = []
    for step in steps:
        optimizer.zero_grad()
        model(torch.ones(1, 2) * step).sum().backward()
        optimizer.step()
        # The plateau sees a loss that stops falling.
        scheduler.step(max(1.0, 4.0 - step)) if isinstance(
            scheduler, lr.ReduceLROnPlateau
        ) else scheduler.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("stop", [0, 1, 4, 8])
def test_a_resumed_schedule_goes_on_to_the_bit(name: str, stop: int) -> None:
    def build() -> tuple[nn.Module, optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    model, optimizer, scheduler = build()
    go(model, optimizer, scheduler, range(stop))
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    pieces = {piece.name: piece.tensor.clone() for piece in optimizer_pieces(model, optimizer)}
    settings, state = json.loads(
        json.dumps([optimizer_settings(model, optimizer), scheduler_state(scheduler)], allow_nan=False)
    )
    straight = go(model, optimizer, scheduler, range(stop, 16))

    fresh, again, resumed = build()
    fresh.load_state_dict(weights)
    load_optimizer(fresh, again, pieces, settings)
    load_scheduler(resumed, state)
    assert go(fresh, again, resumed, range(stop, 16)) == straight
    assert torch.equal(fresh.weight, model.weight)


def test_a_tensor_learning_rate_is_scheduled_too() -> None:
    model = nn.Linear(2, 1)
    optimizer = optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    scheduler = lr.StepLR(optimizer, 2)
    go(model, optimizer, scheduler, range(3))
    state = json.loads(json.dumps(scheduler_state(scheduler)))
    again = lr.StepLR(optim.Adam(model.parameters(), lr=torch.tensor(0.1)), 2)
    load_scheduler(again, state)
    assert scheduler_state(again) == state


def test_what_json_cannot_hold_is_refused_by_its_key() -> None:
    optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = lr.StepLR(optimizer, 2)
    scheduler.history = {1, 2}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"StepLR\.history is a set"):
        scheduler_state(scheduler)


def test_another_scheduler_is_refused() -> None:
    optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    saved = scheduler_state(lr.StepLR(optimizer, 2))
    with pytest.raises(CheckpointMismatch, match="its scheduler is StepLR, the script builds ExponentialLR"):
        load_scheduler(lr.ExponentialLR(optimizer, 0.9), saved, path="step-000000001")
