"""Three spirals told apart by an MLP: small enough to be run under every strategy (see README.md here)."""

from __future__ import annotations

import math

import torch
from torch import nn

import shoal

torch.manual_seed(0)
turn = torch.rand(6000)
arm = torch.arange(6000) % 3
angle = 2 * math.pi * (turn * 0.75 + arm / 3)
points = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None] + torch.randn(6000, 2) * 0.02
train, test = shoal.Dataset.from_arrays((points, arm)).split(0.8, 0.2, seed=0)

model = nn.Sequential(
    nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
)
trainer = shoal.Trainer(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
    metrics=["accuracy"],
    seed=0,
)
trainer.fit(train.shuffle(seed=0).batch(240), epochs=4)
measured = trainer.evaluate(test.batch(1200))
if shoal.rank() == 0:
    print(f"test loss {measured['loss']:.4f}, accuracy {measured['accuracy']:.3f}")
