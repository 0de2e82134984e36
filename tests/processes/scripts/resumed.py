"""Two fits that save at every step. `stop` holds the step to stop at; what comes of it is written to the folder given.

resumed.py FOLDER plain|random     "random" adds layers that mix the batch or draw
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import shoal
from shoal.callbacks import Callback, EarlyStopping, ModelCheckpoint, StopAtStep
from shoal.cluster.worker import session

OUT, KIND = Path(sys.argv[1]), sys.argv[2]
N = 37  # with batches of 10: four steps an epoch, the last of 7 samples


class WaitsToBeAsked(Callback):
    """Says "now" after a step, and goes on once the wish to leave has come: it is decided with the step after it."""

    ranks = "every"

    def on_step_end(self, trainer: shoal.Trainer, logs: Any) -> None:
        if Path("ask-at").exists() and logs.step == int(Path("ask-at").read_text()):
            Path(f"now-{shoal.rank()}").touch()
            while session.stop_requested() is None:
                time.sleep(0.005)


def model() -> nn.Module:
    if KIND == "plain":
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    return nn.Sequential(nn.Linear(6, 16), nn.GroupNorm(4, 16), nn.Dropout(0.4), nn.Linear(16, 4)).double()


generator = torch.Generator().manual_seed(1)
x = torch.randn(N, 6, dtype=torch.float64, generator=generator)
data = shoal.Dataset.from_arrays((x, torch.arange(N) * 5 % 4))
early = EarlyStopping("val_loss", patience=3, min_delta=100.0)
stops = [StopAtStep(int(Path("stop").read_text()))] if Path("stop").exists() else []
trainer = shoal.Trainer(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7),
    metrics=["accuracy", "auroc"],
    callbacks=[WaitsToBeAsked(), *stops, early, ModelCheckpoint(every_steps=1)],
    seed=5,
)
batches = data.shuffle(seed=4).batch(10)
first = trainer.fit(batches, epochs=1, validation_data=data.batch(20))
second = trainer.fit(batches, epochs=9, validation_data=data.batch(20))
if shoal.rank() == 0:
    save_file(
        {name: tensor.contiguous() for name, tensor in trainer.model.state_dict().items()}, OUT / "weights"
    )
    report = {
        "step": trainer.step,
        "epoch": trainer.epoch,
        "histories": [first.epochs, second.epochs],
        "learning rates": trainer.learning_rates,
        "evaluated": trainer.evaluate(data.batch(8)) if not stops else None,
        "without improvement": early.num_epochs_without,
    }
    (OUT / "report").write_text(json.dumps(report))
elif not stops:
    trainer.evaluate(data.batch(8))
