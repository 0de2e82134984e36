"""The click model as a plain PyTorch module: what shoal trains unmodified, and what plain PyTorch trains."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from benchmarks.click_model import DIM, HIDDEN, NUM_COLUMNS, NUM_ROWS, ROW_STD


def mlp() -> nn.Sequential:
    first, second = HIDDEN
    return nn.Sequential(
        nn.Linear(NUM_COLUMNS * DIM, first),
        nn.ReLU(),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Linear(second, 1),
    )


class ClickModel(nn.Module):
    """26 ids a sample, their rows side by side, an MLP over them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(NUM_ROWS, DIM, sparse=True)
        nn.init.normal_(self.rows.weight, std=ROW_STD)
        self.mlp = mlp()

    def forward(self, ids: Tensor) -> Tensor:
        return torch.squeeze(self.mlp(self.rows(ids).flatten(1)), 1)


def wide_mlp() -> nn.Sequential:
    """2 M parameters, all dense: 512 inputs, 1024, 1024, 512, 10 classes."""
    sizes = (512, 1024, 1024, 512)
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(sizes):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


WIDE_BATCH = 256
WIDE_LR = 0.02


def wide_arrays(num_samples: int = 64 * WIDE_BATCH) -> tuple[Tensor, Tensor]:
    """Inputs and classes of the wide MLP: the class is the largest of the first ten inputs."""
    x = torch.randn(num_samples, 512, generator=torch.Generator().manual_seed(0))
    return x, x[:, :10].argmax(1)
