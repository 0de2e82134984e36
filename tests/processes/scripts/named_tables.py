"""A model and a table of shoal.ps.connect() beside it. Arguments: directory, value of the first push, checkpoint to go on from."""

import sys

import torch
from torch import nn

import shoal

out, value, *resume = sys.argv[1:]
kv = shoal.ps.connect()
kv.table("counts", dim=2, rule="add")
if shoal.rank() == 0:
    kv.push("counts", [7, -4], [[float(value), 1.0], [2.0, 3.0]])
    kv.wait()
x = torch.arange(24.0).reshape(24, 1) / 24
trainer = shoal.Trainer(nn.Linear(1, 1), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
data = shoal.Dataset.from_arrays((x, 2 * x)).batch(4)
trainer.fit(data, epochs=2 if resume else 1, resume=resume[0] if resume else None)
if shoal.rank() == 0:
    kv.wait(kv.push("counts", [7], [[10.0, 0.0]]))
    print("counts", kv.wait(kv.pull("counts", [-4, 7, 8])).tolist(), flush=True)
trainer.save_checkpoint(out)
kv.close()
