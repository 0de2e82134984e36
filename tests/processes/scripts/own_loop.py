"""A loop of the user's own with BatchNorm, dropout, a scheduler and sums between epochs: OUT."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import nn

import shoal

out = Path(sys.argv[1])
generator = torch.Generator().manual_seed(1)
x = torch.randn(70, 6, generator=generator)
data = shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).shuffle(seed=0).batch(10)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, batches = shoal.setup(model, optimizer, data)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
sums = []
for _ in range(3):
    for features, target in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features), target).backward()
        optimizer.step()
        scheduler.step()
    sums.append(round(shoal.reduce(1.0), 6))
    print(f"epoch of {sums[-1]} workers")

digest = hashlib.sha256()
for name, tensor in model.state_dict().items():
    digest.update(name.encode() + tensor.numpy().tobytes())
(out / f"{shoal.rank()}.json").write_text(
    json.dumps({"weights": digest.hexdigest(), "lr": scheduler.get_last_lr(), "sums": sums})
)
