"""Rows that count how often each sample was trained on. counted_epochs.py OUT [--pause-at STEP] [--how HOW] ...; rank 0 writes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.callbacks import Callback, ModelCheckpoint
from shoal.config.job import current

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--samples", type=int, default=8 * 45)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument(
    "--pause-at", type=int, help="rank 0 says so in a file after this step, and waits for ever"
)
parser.add_argument("--save-every", type=int, default=10)
parser.add_argument("--how", default="")
parser.add_argument("--drain", type=float, default=8.0)
parser.add_argument("--drop-last", action="store_true")
parser.add_argument("--pause-all", action="store_true", help="every rank does so, in a file of its own")
parser.add_argument("--computed", action="store_true", help="write every sample that is computed into a file")
parser.add_argument(
    "--die-in", type=int, help="rank 1 kills itself in this forward of its own, in the first launch"
)
parser.add_argument("--step-s", type=float, default=0.0, help="how long a step takes, at least")
options = parser.parse_args()
torch.set_num_threads(1)
BATCH = 8
job = current()
COMPUTED = os.open(f"computed-{os.getpid()}", os.O_CREAT | os.O_WRONLY) if options.computed else -1


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(options.samples, 1)
        nn.init.zeros_(self.times.weight)
        self.num_forwards = 0

    def forward(self, ids: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.num_forwards += 1
            if self.num_forwards == options.die_in and (job.rank, job.launch, job.incarnation) == (1, 1, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            if options.computed:
                os.write(COMPUTED, b"".join(b"%d\n" % number for number in ids.tolist()))
            time.sleep(options.step_s)
        return self.times(ids).squeeze(1)


class Pauses(Callback):
    ranks = "every" if options.pause_all else "zero"

    def on_step_end(self, trainer: shoal.Trainer, logs: Any) -> None:
        if options.pause_at and logs.step >= options.pause_at and not trainer.job.resume:
            Path(f"paused-{shoal.rank()}" if options.pause_all else "paused").touch()
            while True:
                time.sleep(0.01)


model = Counts()
trainer = shoal.Trainer(
    model,
    loss=lambda output: -output.mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=float(BATCH)),
    callbacks=[ModelCheckpoint(every_steps=options.save_every), Pauses()],
    seed=0,
)
data = shoal.Dataset.from_arrays(torch.arange(options.samples))
batches = data.shuffle(seed=1).batch(BATCH, drop_last=options.drop_last)
match options.how:
    case "balanced":
        batches = batches.shard("balanced", cost=[1 + number % 7 for number in range(options.samples)])
    case "measured":
        batches = batches.shard("weighted", weights="measured")
    case "weighted":
        batches = batches.shard("weighted", weights=[2, *[1] * (shoal.num_workers() - 1)])
    case "dynamic":
        batches = batches.shard("dynamic", drain_slower_than=options.drain, probe_every_s=0.3)
    case "equal":
        batches = batches.shard("equal")
trainer.fit(batches, epochs=options.epochs)
if shoal.rank() == 0:
    report = {"times": model.times.weight.flatten().tolist(), "step": trainer.step, "epoch": trainer.epoch}
    options.out.write_text(json.dumps(report))
