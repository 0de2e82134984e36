"""Trains an MLP with one worker in each of two networks: SECONDS STEPS NAMESPACE NAMESPACE.

Until both so many seconds and so many steps are over, counted from the third
step on; metrics.jsonl of the run is the result.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch import nn

import shoal
from benchmarks import namespaces
from shoal.recovery import rendezvous

seconds, num_steps = float(sys.argv[1]), int(sys.argv[2])
namespaces.enter(sys.argv[3 + shoal.rank()])
rendezvous.interface = namespaces.INTERFACE


class Clock(shoal.callbacks.Callback):
    """Ends it."""

    ranks = "zero"

    def __init__(self) -> None:
        self._began = 0.0

    def on_step_end(self, trainer: shoal.Trainer, logs: shoal.callbacks.StepLogs) -> None:
        if logs.step == 2:
            self._began = time.monotonic()
        if logs.step > num_steps and time.monotonic() - self._began > seconds:
            trainer.stop()


def teacher(x: torch.Tensor) -> torch.Tensor:
    """Ten classes that take some layers to tell apart."""
    torch.manual_seed(1)
    body = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    with torch.no_grad():
        return (body(x) * 4 + torch.randn(len(x), 10) * 0.1).argmax(1)


x = torch.randn(40_000, 64, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = nn.Sequential(  # 1.0 M parameters
    nn.Linear(64, 640),
    nn.ReLU(),
    nn.Linear(640, 960),
    nn.ReLU(),
    nn.Linear(960, 360),
    nn.ReLU(),
    nn.Linear(360, 10),
)
trainer = shoal.Trainer(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    callbacks=[Clock()],
    device="cpu",
    seed=0,
)
trainer.fit(shoal.Dataset.from_arrays((x, teacher(x))).shuffle(seed=0).batch(256), epochs=10_000)
