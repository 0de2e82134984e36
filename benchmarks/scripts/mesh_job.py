"""The model that fsdp, tp and pp are measured on: a sequence of residual blocks, and its data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH = 128
NUM_CLASSES = 10


class Block(nn.Module):
    """Two layers around an activation, and a way past them."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, inside)
        self.second = nn.Linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


def model(width: int = 512, num_blocks: int = 4) -> nn.Sequential:
    """8.4 M parameters; 30 M with `width=960, num_blocks=4`."""
    torch.manual_seed(0)
    blocks = [Block(width, 4 * width) for _ in range(num_blocks)]
    return nn.Sequential(nn.Linear(64, width), *blocks, nn.Linear(width, NUM_CLASSES))


def arrays(num_samples: int = 4 * BATCH) -> tuple[Tensor, Tensor]:
    """Noise, drawn once."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 64, generator=generator)
    return x, torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)
