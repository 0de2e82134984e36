"""A model whose rows count how often each sample was trained on. ps_counting.py OUT [WHAT]; rank 0 writes the counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.callbacks import Callback, EarlyStopping

OUT, WHAT = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "epochs"
BATCH, N = 8, 8 * 60


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(N, 1)
        self.bias = nn.Parameter(torch.zeros(()))
        nn.init.zeros_(self.times.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.times(ids).squeeze(1) + self.bias


class StopsAt(Callback):
    ranks = "every"
    at = 20

    def on_step_end(self, trainer: shoal.Trainer, logs: Any) -> None:
        if logs.step >= self.at and shoal.rank() == shoal.num_workers() - 1:
            trainer.stop()


stops = StopsAt()
early = EarlyStopping("loss", patience=1, mode="max")
stops.at = 56 if WHAT == "late stop" else 20
callbacks: list[Callback] = [early] if WHAT == "early" else [stops] if "stop" in WHAT else []
model = Counts()
trainer = shoal.Trainer(
    model,
    loss=lambda output: -output.mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=float(BATCH)),
    callbacks=callbacks,
    seed=0,
)
data = shoal.Dataset.from_arrays(torch.arange(N))
batches = data.shuffle(seed=1).batch(BATCH)
steps: list[int] = []
if WHAT == "steps":
    trainer.fit(batches, max_steps=25)
    steps.append(trainer.step)
    trainer.fit(batches, max_steps=80)
elif callbacks:
    trainer.fit(batches, epochs=8 if WHAT == "early" else 1)
    steps.append(trainer.step)
    stops.at = 10**9
    trainer.fit(batches, epochs=2)
else:
    trainer.fit(batches, epochs=1)
    steps.append(trainer.step)
    trainer.fit(batches, epochs=2, validation_data=data.batch(64))
steps.append(trainer.step)
report = {
    "times": model.times.weight.flatten().tolist(),
    "bias": float(model.bias.detach()),
    "steps": steps,
    "epoch": trainer.epoch,
    "samples": trainer.position.samples,
}
(OUT / f"{shoal.rank()}.json").write_text(json.dumps(report))
