"""Layers that make a cut batch differ from a whole one are named."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from shoal.parallel.batch_dependence import DRAWS, MIXES, MixingLayer, mixing_layers, watch_randomness


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
