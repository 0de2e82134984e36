"""Script of jobs whose roles are services: services.py OUT; at the steps of GATES each rank waits for the test's word."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal

GATES = (6, 9, 13)
OUT = Path(sys.argv[1])


class Gate(shoal.callbacks.Callback):
    """Holds every rank at a step: OUT/at-STEP-RANK says that it is there, OUT/go-STEP lets it go on."""

    ranks = "every"

    def on_step_end(self, trainer: Any, logs: Any) -> None:
        time.sleep(
            0.03
        )  # progress is reported every 0.1 s: the supervisor has to know of the fit by the gate
        if logs.step in GATES:
            (OUT / f"at-{logs.step}-{shoal.rank()}").touch()
            while not (OUT / f"go-{logs.step}").exists():
                time.sleep(0.01)


torch.manual_seed(0)
x = torch.randn(64, 4, dtype=torch.float64)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
trainer = shoal.Trainer(
    model,
    loss=nn.MSELoss(),
    optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
    callbacks=[Gate(), shoal.callbacks.ModelCheckpoint(every_steps=4)],
)
trainer.fit(shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).shuffle(seed=1).batch(16), epochs=4)
weights = {piece.name: piece.tensor.detach().to("cpu", copy=True) for piece in trainer.strategy.state()}
if shoal.rank() == 0:
    torch.save(weights, OUT / "weights.pt")
