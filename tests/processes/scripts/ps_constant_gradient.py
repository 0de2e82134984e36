"""A weight whose gradient is 50 at every step, SGD with lr 1. ps_constant_gradient.py OUT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import shoal


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


model = Slope()
trainer = shoal.Trainer(
    model,
    loss=lambda output: 50.0 * output.mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
    seed=0,
)
trainer.fit(shoal.Dataset.from_arrays(torch.ones(4 * 60)).batch(4), epochs=2)
if shoal.rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps({"weight": model.weight.item(), "steps": trainer.step}))
