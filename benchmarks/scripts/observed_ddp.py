"""For observe_cost: stretches of steps, recorded and not in turn; rank 0 writes (recorded, not) pairs of seconds."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from threading import get_ident

import torch
from torch import nn

import shoal
from shoal.runtime.recorder import RECORDER

out, steps, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
inputs = torch.randn(40_000, 128, generator=torch.Generator().manual_seed(0))
data = shoal.Dataset.from_arrays((inputs, inputs.sum(1, keepdim=True))).shuffle(seed=0).batch(256)
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
trainer = shoal.Trainer(
    model, loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.001), seed=0
)


def stretch(*, is_recorded: bool) -> float:
    RECORDER.owner = get_ident() if is_recorded else 0
    began = time.perf_counter()
    trainer.fit(data, max_steps=steps)
    return time.perf_counter() - began


stretch(is_recorded=True)
pairs = []
for number in range(rounds):
    first = stretch(is_recorded=number % 2 == 0)
    second = stretch(is_recorded=number % 2 == 1)
    pairs.append((first, second) if number % 2 == 0 else (second, first))
if shoal.rank() == 0:
    out.write_text(json.dumps(pairs))
