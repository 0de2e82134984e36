"""A model that only sleeps: on rank 0 SLOWER times as long. BATCHES BATCH_S SLOWER EPOCHS OUT; rank 1 tells how long each epoch took.

Sleeping, so that three workers on two cores are as fast as three machines.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import shoal
from shoal.callbacks import Callback

num_batches, epochs, out = int(sys.argv[1]), int(sys.argv[4]), Path(sys.argv[5])
batch_s, slower = float(sys.argv[2]), float(sys.argv[3])
BATCH = 48
torch.set_num_threads(1)


class Sleeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(batch_s * len(x) / BATCH * (slower if shoal.rank() == 0 else 1.0))
        return self.layer(x)


class Times(Callback):
    ranks = "every"

    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_epoch_end(self, trainer: shoal.Trainer, logs: dict[str, float]) -> None:
        self.ended.append(time.monotonic())


times = Times()
x = torch.randn(num_batches * BATCH, 4, generator=torch.Generator().manual_seed(0))
trainer = shoal.Trainer(
    Sleeps(),
    loss=nn.MSELoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.001),
    callbacks=[times],
    seed=0,
    device="cpu",
)
trainer.fit(
    shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).shuffle(seed=0).batch(BATCH), epochs=epochs
)
if shoal.rank() == 1:
    out.write_text(
        json.dumps([end - begin for begin, end in zip(times.ended, times.ended[1:], strict=False)])
    )
