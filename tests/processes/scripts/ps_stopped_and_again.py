"""A fit that is stopped, another of the same trainer, and one of a second trainer. ps_stopped_and_again.py OUT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import shoal

NUM_BATCHES = 96


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sum() + 0.0 * x


class Stop(shoal.callbacks.Callback):
    is_over = False

    def on_step_end(self, trainer: shoal.Trainer, logs: dict[str, float]) -> None:
        if trainer.step >= 20 and not self.is_over:
            self.is_over = True
            trainer.stop()


def trainer(*callbacks: shoal.callbacks.Callback) -> shoal.Trainer:
    return shoal.Trainer(
        Slope(),
        loss=lambda output: output.mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        callbacks=list(callbacks),
        seed=0,
    )


data = shoal.Dataset.from_arrays(torch.zeros(4 * NUM_BATCHES)).batch(4)
first, second = trainer(Stop()), trainer()
weights = []
for each, epochs in ((first, 1), (first, 2), (second, 1)):
    each.fit(data, epochs=epochs)
    weights.append(-int(each.model.weight[0]))
if shoal.rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(weights))
