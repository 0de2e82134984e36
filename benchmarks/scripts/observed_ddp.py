"""For observe_cost: stretches of steps, observed and not in turn; rank 0 writes (observed, not) pairs of seconds.

observed_ddp.py OUT STEPS ROUNDS [together]   "together": beside spans also reports of progress, and OUT.look is there while
                                              somebody should look at the dashboard
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from threading import get_ident

import torch
from torch import nn

import shoal
from shoal.runtime.recorder import RECORDER
from shoal.train import loop

is_together = sys.argv[4:] == ["together"]
out, steps, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
inputs = torch.randn(40_000, 128, generator=torch.Generator().manual_seed(0))
data = shoal.Dataset.from_arrays((inputs, inputs.sum(1, keepdim=True))).shuffle(seed=0).batch(256)
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
trainer = shoal.Trainer(
    model, loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.001), seed=0
)


def stretch(*, is_recorded: bool) -> float:
    RECORDER.owner = get_ident() if is_recorded else 0
    if is_together:
        loop._REPORT_EVERY_S = 0.1 if is_recorded else math.inf
        look = out.with_suffix(".look")
        if shoal.rank() == 0:
            look.touch() if is_recorded else look.unlink(missing_ok=True)
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
