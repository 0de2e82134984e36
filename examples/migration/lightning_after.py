"""shoal's Trainer: shoal run -n 2 lightning_after.py"""

import torch
from torch import nn

import shoal

torch.manual_seed(0)
x = torch.randn(4096, 20)
y = (x.sum(1) > 0).long()

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
trainer = shoal.Trainer(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    metrics=["accuracy"],
)
data = shoal.Dataset.from_arrays((x, y))
trainer.fit(data.shuffle(seed=0).batch(64), epochs=3)  # 64 over all workers
measured = trainer.evaluate(data.batch(512))
if shoal.rank() == 0:
    print(f"accuracy {measured['accuracy']:.3f}")
