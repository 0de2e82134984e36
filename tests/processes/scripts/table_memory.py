"""Rows that do not fit into the servers' memory: trained, saved half way and at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import shoal

OUT = Path(sys.argv[1])
NUM_IDS, NUM_SAMPLES = 9_000, 1_600


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.items = nn.EmbeddingBag(NUM_IDS, 8, mode="sum")
        self.users = shoal.nn.HashEmbedding(8, scale=0.5)
        self.head = nn.Linear(8, 1)

    def forward(self, items: torch.Tensor, users: torch.Tensor) -> torch.Tensor:
        return self.head(self.items(items) + self.users(users).sum(1))


torch.set_num_threads(1)
random = torch.Generator().manual_seed(2)
items, users = (torch.randint(NUM_IDS, (NUM_SAMPLES, 24), generator=random) for _ in range(2))
inputs = {"items": items, "users": (users - 500) * 10**12}
data = shoal.Dataset.from_arrays((inputs, (items.sum(1, keepdim=True) % 7).float()))
trainer = shoal.Trainer(
    Model(),
    loss=nn.MSELoss(),
    seed=0,
    clip_norm=5.0,
    optimizer=lambda p: torch.optim.Adagrad(p, lr=0.05),
    callbacks=[shoal.callbacks.ModelCheckpoint(every_steps=4, directory=str(OUT / "half"))],
)
trainer.fit(data.shuffle(seed=4).batch(200), epochs=1)
trainer.save_checkpoint(str(OUT / "end"))
trainer.evaluate(data.batch(400))
trainer.save_checkpoint(str(OUT / "looked"))
