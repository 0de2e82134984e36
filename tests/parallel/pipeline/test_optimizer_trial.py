"""Optimizers of a script's own whose update of a parameter reads others: refused where stages have not all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import ConfigError
from shoal.parallel.pipeline.optimizer_trial import refuse_mixed_parameters
from shoal.parallel.pipeline.state import drop_foreign_tensors, ownership_of
from shoal.ps.weight_average import keep_average


class Plain(Optimizer):
    """Momentum and a trust ratio of each parameter by itself; its attributes are not in `__getstate__`."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.momentum = 0.9

    @property
    def given(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def factor(self) -> float | Tensor:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        factor = self.factor()
        for p in self.given:
            state = self.state[p]
            state["m"] = state.get("m", torch.zeros_like(p)) * self.momentum + p.grad * factor
            p -= self.param_groups[0]["lr"] * p.norm() / (state["m"].norm() + 1e-6) * state["m"]


class OfGradients(Plain):
    def factor(self) -> Tensor:
        norm = torch.stack([p.grad.norm() for p in self.given if p.grad is not None]).norm()
        return (1.0 / (norm + 1e-6)).clamp(max=1.0)


class OfWeights(Plain):
    """Reads weights of all stages, of which a worker has not all: its step fails there."""

    def factor(self) -> Tensor:
        return torch.stack([p.norm() for group in self.param_groups for p in group["params"]]).sum()


class OfState(Plain):
    """A count of all steps and a mean over momenta."""

    def factor(self) -> float:
        return 1.0 + float(sum(state["m"].mean() for state in self.state.values()))


class Drawn(Plain):
    def factor(self) -> Tensor:
        return torch.rand(())


class Around(Plain):
    def __init__(self, params: Any, base: Callable[..., Optimizer] = Plain) -> None:
        params = list(params)
        super().__init__(params)
        self.base = base(params)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


class AroundMixing(Around):
    def __init__(self, params: Any) -> None:
        super().__init__(params, OfGradients)


class WithClosure(Plain):
    def step(self, closure: Any = None) -> None:
        closure()


class AsOne(Plain):
    """Updates all of its parameters in one tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        flat = torch.cat([p.grad.flatten() for p in self.given if p.grad is not None])
        flat = flat / (flat.square() + 1e-8).sqrt()
        for p, part in zip(self.given, flat.split([p.numel() for p in self.given]), strict=True):
            p -= 0.1 * part.view_as(p)


def tried(build: Callable[[Any], Optimizer], *, is_cut: bool = True) -> Optimizer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.LayerNorm(20), nn.Conv1d(20, 3, 2))
    ownership = ownership_of(model, [model[:1], model[1:]], 2, 0)
    if is_cut:
        drop_foreign_tensors(model, ownership)
    optimizer = build(model.parameters())
    refuse_mixed_parameters(optimizer, model, ownership, 2, "pp")
    return optimizer


@pytest.mark.parametrize("kind", [OfGradients, OfWeights, OfState, AroundMixing])
def test_an_update_that_reads_other_parameters_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"the update of {kind.__name__} mixes parameters.*Nothing was trained"
    ):
        tried(kind)


@pytest.mark.parametrize("kind", [Plain, Drawn, Around, WithClosure, AsOne])
def test_an_update_of_each_parameter_and_one_that_cannot_be_tried_is_let_through(kind: Any) -> None:
    optimizer = tried(kind)
    assert not optimizer.state


def test_an_average_of_weights_is_let_through() -> None:
    tried(lambda params: keep_average(torch.optim.AdamW(params, lr=0.1), decay=0.9))
    tried(lambda params: keep_average(Plain(params), decay=0.9))


def test_a_trial_leaves_the_optimizer_as_it_was() -> None:
    seen: list[Any] = []

    def build(params: Any) -> Optimizer:
        optimizer = Plain(params)
        optimizer.register_step_pre_hook(lambda *_: seen.append("hook"))
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps its step
        return optimizer

    before = torch.get_rng_state()
    optimizer = tried(build, is_cut=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.LayerNorm(20), nn.Conv1d(20, 3, 2))
    for p, initial in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True):
        assert torch.equal(p, initial)
        assert p.grad is None
    assert not seen
    assert not optimizer.state
    torch.set_rng_state(before)
