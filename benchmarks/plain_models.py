"""The models that are measured, plain PyTorch, shared by both sides."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ClickModel(nn.Module):
    """26 id columns into one table of rows, 13 numbers, an MLP of 128-64-1."""

    def __init__(self, num_rows: int = 1_000_000, dim: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(num_rows, dim, sparse=True)
        nn.init.normal_(self.table.weight, std=0.01)
        self.mlp = nn.Sequential(
            nn.Linear(13 + 26 * dim, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        rows = self.table(ids).flatten(1)
        return self.mlp(torch.cat([dense, rows], 1)).squeeze(1)


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
            if stride != 1 or inside != outside
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(out)) + self.shortcut(x))


def resnet18(num_classes: int = 10, width: int = 64) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inside = width
    for stage, stride in enumerate((1, 2, 2, 2)):
        for block in range(2):
            layers.append(Block(inside, width << stage, stride if block == 0 else 1))
            inside = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, num_classes))


def click_arrays(num_samples: int, num_rows: int = 1_000_000) -> tuple[Tensor, Tensor, Tensor]:
    """Dense numbers, Zipf-like ids over all rows, labels: drawn once, the same for both sides."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(num_samples, 26, generator=generator, dtype=torch.float64)
    exponent = 1.0 - 1.05
    top = float(num_rows) ** exponent
    ids = ((uniform * (top - 1) + 1) ** (1 / exponent)).long().clamp_(1, num_rows) - 1
    dense = torch.randn(num_samples, 13, generator=generator)
    label = (torch.rand(num_samples, generator=generator) < 0.25).float()
    return dense, ids, label


def image_arrays(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(num_samples, 3, 32, 32, generator=generator)
    return images, torch.randint(0, 10, (num_samples,), generator=generator)
