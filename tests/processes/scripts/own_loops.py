"""Loops as people write them, each with variables of its own: KIND OUT."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import shoal

kind, out = sys.argv[1], Path(sys.argv[2])
generator = torch.Generator().manual_seed(1)
x = torch.randn(47, 6, dtype=torch.float64, generator=generator)
data = shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).shuffle(seed=0).batch(10)


def set_up(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
    ).double()
    return shoal.setup(model, torch.optim.Adam(model.parameters(), lr=0.01), data)


class Meter:
    def __init__(self):
        self.total, self.count = torch.zeros(2), 0

    def add(self, value):
        self.total += value
        self.count += 1


facts = {}

if kind == "accumulates":
    model, optimizer, batches = set_up()
    steps = []
    for epoch in range(4):
        for i, (a, b) in enumerate(batches):
            (F.mse_loss(model(a), b) / 2).backward()
            if (i + 1) % 2 == 0 or i + 1 == len(batches):
                clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                steps.append((epoch, i))
    facts["steps"] = steps

elif kind == "counts":

    def train(max_iters):
        model, optimizer, batches = set_up()
        step, best, meter, seen = 0, float("inf"), Meter(), {}
        while step < max_iters:
            for a, b in batches:
                optimizer.zero_grad()
                loss = F.mse_loss(model(a), b) * (1 + 0.1 * step)
                loss.backward()
                optimizer.step()
                step += 1
                meter.add(step)
                seen[step % 3] = step
                best = min(best, shoal.reduce(loss.item()))
                if step >= max_iters:
                    break
            torch.save(model.state_dict(), out / f"saved-{shoal.rank()}.pt")
        facts.update(
            step=step, best=best, meter=[meter.total.tolist(), meter.count], seen=list(seen.values())
        )
        return model

    model = train(17)

elif kind == "takes":
    model, optimizer, batches = set_up()
    batch = iter(batches)
    for step in range(18):
        try:
            a, b = next(batch)
        except StopIteration:
            batch = iter(batches)
            a, b = next(batch)
        optimizer.zero_grad()
        (F.mse_loss(model(a), b) * (step + random.random())).backward()
        optimizer.step()

elif kind == "zips":
    model, optimizer, batches = set_up()
    for _ in range(4):
        for (a, b), factor in zip(batches, itertools.count(1)):
            optimizer.zero_grad()
            (F.mse_loss(model(a), b) * factor).backward()
            optimizer.step()

elif kind == "two":  # one backward, a step of each
    model, optimizer, batches = set_up()
    other, second, _ = set_up(1)
    for _ in range(4):
        for a, b in batches:
            optimizer.zero_grad()
            second.zero_grad()
            F.mse_loss(model(a) * other(a), b).backward()
            optimizer.step()
            second.step()
    model = nn.ModuleList([model, other])

elif kind == "averages":  # a copy of the model that shoal does not know
    model, optimizer, batches = set_up()
    average = nn.Linear(6, 8).double()
    with torch.no_grad():
        average.weight.zero_()
    for _ in range(4):
        for a, b in batches:
            optimizer.zero_grad()
            (F.mse_loss(model(a), b) + average(a).square().mean()).backward()
            optimizer.step()
            with torch.no_grad():
                average.weight.lerp_(model[0].weight, 0.1)
    facts["average"] = average.weight.sum().item()

digest = hashlib.sha256()
for name, tensor in model.state_dict().items():
    digest.update(name.encode() + tensor.numpy().tobytes())
(out / f"{shoal.rank()}.json").write_text(json.dumps({"weights": digest.hexdigest(), **facts}))
