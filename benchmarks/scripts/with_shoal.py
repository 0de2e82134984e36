"""The same job under shoal."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

import shoal
from benchmarks.scripts.job import Job

job = Job(sys.argv)


class Clock(shoal.callbacks.Callback):
    ranks = "zero"

    def on_step_end(self, trainer: shoal.Trainer, logs: object) -> None:
        job.step_done(time.time())


torch.manual_seed(0)
trainer = shoal.Trainer(
    job.model(), loss=job.loss(), optimizer=job.optimizer, callbacks=[Clock()], device="cpu"
)
data = shoal.Dataset.from_arrays(job.arrays()).shuffle(seed=0).batch(job.batch)
trainer.fit(data, max_steps=job.steps)
if shoal.rank() == 0:
    job.write()
