"""Two fits with an evaluate, a predict to files and a save between them; a stop in the second: OUT FOLDER [whole]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import shoal

out, kind = Path(sys.argv[1]), sys.argv[2]
x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
data = shoal.Dataset.from_arrays((x, (x.sum(1) > 0).long()))
torch.manual_seed(0)
trainer = shoal.Trainer(
    nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    callbacks=[shoal.callbacks.ModelCheckpoint(every_steps=2)],
    progress=False,
)
before = trainer.evaluate(data.batch(16))
trainer.fit(data.batch(8), epochs=1)
between = trainer.evaluate(data.batch(16))
predicted = trainer.predict(data.batch(16), **({} if kind == "gathered" else {"out": out / "predicted"}))
trainer.save(out / "between")
stop = Path(sys.argv[1]).parent / "stop"  # steps of the second fit after which it stops, in the first launch
trainer.fit(data.batch(8), max_steps=int(stop.read_text()) if stop.exists() else 8)
after = trainer.evaluate(data.batch(16))
if shoal.rank() == 0:
    report = {"before": before, "between": between, "after": after, "rows": len(x)}
    (out / "report").write_text(json.dumps(report))
