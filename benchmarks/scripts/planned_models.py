"""Models that `benchmarks/planner.py` plans: `planned_models.py mlp|gpt|clicks|conv`, trained until they are told to stop."""

from __future__ import annotations

import itertools
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

BATCH = 64


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query_key_value, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.think = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.norm_2(x))


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


def mlp() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    layers = [layer for _ in range(6) for layer in (nn.Linear(768, 768), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(768, 10)), (torch.randn(4096, 768), torch.arange(4096) % 10)


def gpt() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    blocks = [Block(96, 4) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(64, 96), *blocks, nn.LayerNorm(96), Last(), nn.Linear(96, 64))
    return model, (torch.randint(64, (4096, 32)), torch.arange(4096) % 64)


def clicks() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    rows = nn.Embedding(200_000, 16, sparse=True)
    model = nn.Sequential(rows, nn.Flatten(), nn.Linear(26 * 16, 256), nn.ReLU(), nn.Linear(256, 2))
    return model, (torch.randint(200_000, (8192, 26)), torch.arange(8192) % 2)


def conv() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    sizes = (3, 32, 64, 64)
    layers = [
        layer
        for before, after in itertools.pairwise(sizes)
        for layer in (nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, (torch.randn(2048, 3, 32, 32), torch.arange(2048) % 10)


def main() -> None:
    torch.manual_seed(0)
    name = sys.argv[1]
    model, data = {"mlp": mlp, "gpt": gpt, "clicks": clicks, "conv": conv}[name]()
    trainer = shoal.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: (torch.optim.Adagrad if name == "clicks" else torch.optim.Adam)(
            params, lr=1e-3
        ),
        seed=0,
    )
    trainer.fit(shoal.Dataset.from_arrays(data).batch(BATCH if name != "clicks" else 1024), epochs=1_000_000)


if __name__ == "__main__":
    main()
