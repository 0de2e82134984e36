"""Layers that make a cut batch differ from a whole one are named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.collectives.gradients import GradientExchange
from shoal.errors import ConfigError
from shoal.parallel.batch_dependence import (
    DRAWS,
    MIXES,
    MixingLayer,
    mixing_layers,
    refuse_gradient_hooks,
    watch_randomness,
)
from shoal.parallel.own_gradients import OwnGradients, Resting


class Sampling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.noise = Sampling()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noise(self.first(x))


def test_types_that_mix_or_draw_are_named_with_their_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Dropout(0.0))
    assert mixing_layers(model) == [
        MixingLayer("1", "BatchNorm1d", MIXES),
        MixingLayer("2", "Dropout", DRAWS),
    ]


def test_a_frozen_layer_neither_mixes_nor_draws() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    assert mixing_layers(model) == []


def test_recurrent_and_attention_dropout_count() -> None:
    model = nn.ModuleDict(
        {
            "lstm": nn.LSTM(4, 4, num_layers=2, dropout=0.1),
            "attention": nn.MultiheadAttention(4, 2, dropout=0.1),
        }
    )
    assert {layer.layer for layer in mixing_layers(model)} == {"lstm", "attention"}


def test_randomness_hidden_in_a_forward_is_found_at_its_innermost_module() -> None:
    model = Hidden()
    stop = watch_randomness(model)
    model(torch.zeros(2, 4))
    assert stop() == [MixingLayer("noise", "Sampling", DRAWS)]


def test_functional_dropout_is_found() -> None:
    class Functional(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, 0.5)

    model = nn.Sequential(nn.Linear(4, 4), Functional())
    stop = watch_randomness(model)
    model(torch.ones(2, 4))
    assert [layer.layer for layer in stop()] == ["1"]


def test_a_model_without_randomness_is_silent() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    stop = watch_randomness(model)
    model(torch.ones(2, 4))
    assert stop() == []


def test_a_gradient_hook_that_adds_up_over_parts_is_kept_and_another_one_refused() -> None:
    masked, clamped = nn.Linear(4, 4), nn.Linear(4, 4)
    masked.weight.register_hook(lambda gradient: gradient * torch.eye(4) * 0.5)
    clamped.bias.register_hook(lambda gradient: gradient.clamp(-100, 100))
    refuse_gradient_hooks(masked, "ddp", is_cut=False)
    with pytest.raises(ConfigError, match=r"'bias'.*add up.*clip_norm"):
        refuse_gradient_hooks(clamped, "ddp", is_cut=False)
    with pytest.raises(ConfigError, match=r"'weight'.*have no hooks"):
        refuse_gradient_hooks(masked, "fsdp", is_cut=True)


def test_a_hook_that_adds_up_but_for_rounding_is_kept_in_any_precision() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        model = nn.Linear(300, 300, dtype=dtype)
        model.weight.register_hook(lambda gradient: gradient * 0.3)
        refuse_gradient_hooks(model, "ddp", is_cut=False)


def zero_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()


def step_at_once(parameter: torch.Tensor) -> None:
    parameter.data.add_(parameter.grad, alpha=-0.1)


@pytest.mark.parametrize("hook", [zero_gradient, step_at_once])
def test_a_hook_after_backward_is_refused_unless_it_only_looks(hook: Callable[..., None]) -> None:
    seen: list[float] = []
    model = nn.Linear(4, 4)
    weight = model.weight.detach().clone()
    model.weight.register_post_accumulate_grad_hook(
        lambda parameter: seen.append(float(parameter.grad.norm()))
    )
    refuse_gradient_hooks(model, "ddp", is_cut=False)
    assert seen
    assert model.weight.grad is None
    assert torch.equal(model.weight, weight)
    model.weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(ConfigError, match="before it is summed"):
        refuse_gradient_hooks(model, "ddp", is_cut=False)


def test_hooks_of_an_earlier_trainer_are_none_of_the_scripts() -> None:
    model = nn.Linear(4, 4)
    GradientExchange(list(model.named_parameters()), sparse=frozenset())
    own = OwnGradients(model)
    own.weight = 0.5
    refuse_gradient_hooks(model, "ddp", is_cut=False)
    model(torch.ones(1, 4)).sum().backward()
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [0.5] * 4
    model.zero_grad()
    with Resting():  # while another one runs
        model(torch.ones(1, 4)).sum().backward()
    assert model.bias.grad.tolist() == [1.0] * 4
