"""Counts how often each record of a stream was trained: every sample lowers its own weight by 1.

counted_records.py URL NUM_STEPS [OPTIONS]    batches of 8; OPTIONS of from_stream as JSON

It fails after the step in the file `fail`; rank 1 dies after that in the file `kill`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.callbacks import Callback, ModelCheckpoint

BATCH, MOST = 8, 512


class Watch(Callback):
    ranks = "every"

    def on_step_end(self, trainer: shoal.Trainer, logs: Any) -> None:
        Path(f"step-{logs.step}").touch()
        if Path("fail").exists() and logs.step == int(Path("fail").read_text()):
            raise RuntimeError("as the test wants it")
        if Path("kill").exists() and shoal.rank() == 1 and logs.step == int(Path("kill").read_text()):
            Path("kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)


options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
data = shoal.Dataset.from_stream(sys.argv[1], label="y", timeout_s=60, **options)
model = nn.Embedding(MOST, 1)
nn.init.zeros_(model.weight)
trainer = shoal.Trainer(
    model,
    loss=lambda output, target: output.sum() / len(target),
    optimizer=torch.optim.SGD(model.parameters(), lr=float(BATCH)),
    callbacks=[Watch(), ModelCheckpoint(every_steps=2)],
)
trainer.fit(data.map(lambda sample: (sample[0]["x"], sample[1])).batch(BATCH), max_steps=int(sys.argv[2]))
if shoal.rank() == 0:
    counts = (-model.weight.detach().flatten()).round(decimals=3).tolist()
    Path("counts").write_text(json.dumps(counts))
