"""Two Trainers of one shape in a row; the second stops early where a file says so: OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import shoal

out = Path(sys.argv[1])
stop = out.parent / "stop"
x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
data = shoal.Dataset.from_arrays((x, (x.sum(1) > 0).long()))
for fold in range(2):
    torch.manual_seed(fold)
    trainer = shoal.Trainer(
        nn.Linear(5, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        callbacks=[shoal.callbacks.ModelCheckpoint(every_steps=2)],
        progress=False,
    )
    trainer.fit(data.batch(8), max_steps=int(stop.read_text()) if fold and stop.exists() else 8)
    trainer.save(out / f"fold-{fold}")
