"""A GAN in the Trainer: two optimizers that take turns, an average where weights are here: OUT RESUME."""

from __future__ import annotations

import copy
import sys

import torch
from torch import nn
from torch.nn import functional as F

import shoal

out, resume = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
draw = torch.Generator().manual_seed(1)
real = torch.randn(41, 6, dtype=torch.float64, generator=draw)
noise = torch.randn(41, 3, dtype=torch.float64, generator=draw)


def mlp(*sizes):
    return nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:]))


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.critic, self.fake = mlp(6, 8, 1), mlp(3, 8, 6)
        self.average = copy.deepcopy(self.fake).requires_grad_(False)

    def forward(self, noise):
        return self.fake(noise)


def training_step(model, batch, name):
    noise, real = batch
    made = model.fake(noise)
    if name == "fake":
        return F.softplus(-model.critic(made)).mean()
    points = (made.detach() + real).requires_grad_()
    slope = 0.0
    if torch.is_grad_enabled():
        (by,) = torch.autograd.grad(model.critic(points).sum(), points, create_graph=True)
        slope = (by.norm(dim=1) - 1).pow(2).sum()
    sums = F.softplus(-model.critic(real)).sum() + F.softplus(model.critic(made.detach())).sum() + slope
    return sums, len(real)


has_servers = shoal.config.job.current().strategy.startswith("ps")
callbacks = [shoal.callbacks.ModelCheckpoint(every_steps=4)]
if not has_servers:
    callbacks.append(shoal.callbacks.WeightAverage("average", of="fake", decay=0.9))
trainer = shoal.Trainer(
    Gan().double(),
    training_step=training_step,
    optimizer={
        "critic": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
        "fake": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.0),
    },
    scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    clip_norm=1.0,
    callbacks=callbacks,
)
data = shoal.Dataset.from_arrays((noise, real)).shuffle(seed=0).batch(10)
trainer.fit(data, epochs=2, resume=resume)
trainer.save(out)
made = trainer.predict(shoal.Dataset.from_arrays(noise).batch(10))
if shoal.rank() == 0:
    print(f"made {tuple(made.shape)}")
