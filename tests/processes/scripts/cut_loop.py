"""Loops over a model that may be cut, each result whole: OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import shoal
from shoal.train.checkpoint.checkpoint import open_checkpoint

out = Path(sys.argv[1])
generator = torch.Generator().manual_seed(1)
x = torch.randn(41, 6, dtype=torch.float64, generator=generator)
# The last batch has one sample: of several workers all but one borrow it.
data = shoal.Dataset.from_arrays((x, torch.arange(41) * 5 % 4)).shuffle(seed=2).batch(10)


def mlp(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4)).double()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


results = {}
for kind in ("plain", "clipped", "accumulated"):
    model = mlp(len(kind))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, batches = shoal.setup(model, optimizer, data)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    norms = []
    for _ in range(2):
        for number, (a, b) in enumerate(batches):
            F.cross_entropy(model(a), b).backward()
            if kind == "accumulated" and number % 2 == 0 and number + 1 < len(batches):
                continue
            if kind == "clipped":
                norms.append(float(whole(clip_grad_norm_(model.parameters(), 0.3))))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    results |= {f"{kind}/{name}": whole(tensor) for name, tensor in model.state_dict().items()}
    results[f"{kind}/norms"] = torch.tensor(norms, dtype=torch.float64)

if any(tensor.is_meta for tensor in results.values()):  # of a model in stages a rank has some layers alone
    saved = open_checkpoint(shoal.checkpoint()).pieces
    for number, kind in enumerate(("plain", "clipped", "accumulated")):
        for name in model.state_dict():
            results[f"{kind}/{name}"] = saved[f"model-{number}/{name}" if number else f"model/{name}"]

if shoal.rank() == 0:
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, out)
