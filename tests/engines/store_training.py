"""Trains from Parquet files below a URL, with checkpoints and the model written there.

store_training.py URL [FOLDER]    FOLDER: rank 1 is killed at step 3, and all wait for the file FOLDER/go at step 5
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shoal
from shoal.callbacks import Callback, ModelCheckpoint

URL = sys.argv[1]


class Trouble(Callback):
    ranks = "every"

    def on_step_end(self, trainer, logs):
        folder = Path(sys.argv[2])
        if logs.step == 3 and shoal.rank() == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if logs.step == 5:
            (folder / f"at-gate-{shoal.rank()}").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)


def as_tensors(sample):
    columns, y = sample
    return torch.stack([columns["a"], columns["b"]]).float(), y.float()[None]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 1))
trainer = shoal.Trainer(
    model,
    loss=nn.MSELoss(),
    optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
    callbacks=[
        *([Trouble()] if len(sys.argv) > 2 else []),
        ModelCheckpoint(directory=f"{URL}/checkpoints", every_steps=2),
    ],
)
data = shoal.Dataset.from_parquet(f"{URL}/data/*.parquet", label="y")
trainer.fit(data.map(as_tensors, workers=1).shuffle(seed=0).batch(10), epochs=2)
trainer.save(f"{URL}/model")
