"""A weight and two rows whose gradients are the same at every step, SGD with lr 1. ps_constant_rows.py OUT [STEPS]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import shoal

NUM_BATCHES, EPOCHS = 256, 2


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.rows = nn.Embedding(4, 2, sparse=True)
        nn.init.zeros_(self.rows.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight.sum() + self.rows(ids).sum(1)


model = Slope()
trainer = shoal.Trainer(
    model,
    loss=lambda output: output.mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
    callbacks=[shoal.callbacks.ModelCheckpoint(every_steps=50)],
    seed=0,
)
ids = torch.tensor([0, 3, 0, 3]).repeat(NUM_BATCHES)
data = shoal.Dataset.from_arrays(ids).batch(4)
steps = {"max_steps": int(sys.argv[2])} if len(sys.argv) > 2 else {"epochs": EPOCHS}
trainer.fit(data, **steps)
if shoal.rank() == 0:
    found = {"weight": model.weight.tolist(), "rows": model.rows.weight.tolist(), "steps": trainer.step}
    Path(sys.argv[1]).write_text(json.dumps(found))
