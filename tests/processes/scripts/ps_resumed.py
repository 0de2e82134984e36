"""Trains to `--until` steps in all, going on from `--from` where it is given; what comes of it is written by rank 0: OUT."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import shoal
from shoal.callbacks import Callback, ModelCheckpoint

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--until", type=int, default=16)
parser.add_argument("--from", dest="start")
parser.add_argument(
    "--pause-at", type=int, help="say so in a file after this step, and wait while it is there"
)
parser.add_argument("--optimizer", default="adagrad")
options = parser.parse_args()
torch.set_num_threads(1)

generator = torch.Generator().manual_seed(1)
x = torch.randn(64, 5, generator=generator, dtype=torch.float64)
ids = torch.randint(50, (64, 3), generator=generator)


class Pauses(Callback):
    def on_step_end(self, trainer: shoal.Trainer, logs: Any) -> None:
        if logs.step == options.pause_at and trainer.job.incarnation == 0 and not trainer.job.resume:
            Path("paused").touch()
            while True:
                time.sleep(0.01)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(50, 4)
        self.layers = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layers(torch.cat([x, self.rows(ids).sum(1)], dim=1))


BUILD = {
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
}
torch.manual_seed(0)
trainer = shoal.Trainer(
    Model().double(),
    loss=nn.CrossEntropyLoss(),
    optimizer=BUILD[options.optimizer],
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.7),
    callbacks=[ModelCheckpoint(every_steps=6), Pauses()],
    seed=0,
)
data = shoal.Dataset.from_arrays(({"x": x, "ids": ids}, (x.sum(1) > 0).long())).shuffle(seed=0).batch(8)
trainer.fit(data, max_steps=options.until, resume=options.start)
evaluated = trainer.evaluate(data)
if shoal.rank() == 0:
    options.out.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in trainer.model.state_dict().items()}, options.out / "weights")
    report = {
        "step": trainer.step,
        "epoch": trainer.epoch,
        "lr": trainer.learning_rates,
        "evaluated": evaluated,
    }
    (options.out / "report").write_text(json.dumps(report))
