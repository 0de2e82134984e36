"""Rows that count how often each sample was trained on, beside a model. scaled_epochs.py OUT STEP...

After each STEP rank 0 touches OUT/at-STEP and waits until the job is asked to leave.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.train.calls import asked_to_leave

OUT, STEPS = Path(sys.argv[1]), [int(step) for step in sys.argv[2:]]
SAMPLES, BATCH = 8 * 15 + 3, 8
torch.set_num_threads(1)
torch.manual_seed(2)
INPUTS = torch.randn(SAMPLES, 4)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(SAMPLES, 1)
        nn.init.zeros_(self.times.weight)
        self.layers = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """As large as what the layers give; its gradient counts."""
        times = self.times(ids).squeeze(1)
        return self.layers(INPUTS[ids]).squeeze(1) ** 2 - times + times.detach()


class Gate(shoal.callbacks.Callback):
    def on_step_end(self, trainer: Any, logs: Any) -> None:
        time.sleep(
            0.02
        )  # progress is reported every 0.1 s: the supervisor has to know of the fit by the first gate
        if logs.step in STEPS:
            (OUT / f"at-{logs.step}").touch()
            while not asked_to_leave():
                time.sleep(0.01)


model = Counts()
trainer = shoal.Trainer(
    model,
    loss=lambda output: output.mean(),
    optimizer=lambda params: torch.optim.SGD(
        [
            {"params": [model.times.weight], "lr": float(BATCH)},
            {"params": list(model.layers.parameters()), "lr": 0.01},
        ]
    ),
    callbacks=[Gate()],
    seed=0,
)
data = shoal.Dataset.from_arrays(torch.arange(SAMPLES)).shuffle(seed=1).batch(BATCH, drop_last=True)
trainer.fit(data, epochs=3)
weights = {piece.name: piece.tensor.flatten().tolist() for piece in trainer.strategy.state()}
if shoal.rank() == 0:
    (OUT / "told.json").write_text(json.dumps(weights))
