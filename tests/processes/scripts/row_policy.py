"""A HashEmbedding whose rows are admitted and dropped; leaves a checkpoint. Arguments: directory, epochs, checkpoint to go on from."""

import sys

import torch
from torch import nn

import shoal
from shoal.callbacks import ModelCheckpoint
from shoal.train.checkpoint import saving

saving.TABLE_BYTES = 0  # else such a small table is saved whole each time

POLICY = shoal.nn.RowPolicy(admit_after=2, ttl_steps=3, max_rows=256, keep="recent", sweep_every=2)


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = shoal.nn.HashEmbedding(4, scale=0.5, policy=POLICY)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids).flatten(1)).squeeze(1)


out, epochs, *resume = sys.argv[1:]
generator = torch.Generator().manual_seed(0)
# Some ids in every batch, some now and then, many once or twice: several of them share a slot.
often = torch.randint(12, (144, 1), generator=generator)
seldom = (torch.rand(144, 1, generator=generator).pow(2) * 1500).long() + 100
ids = torch.cat([often, seldom], 1)
target = torch.rand(144, generator=generator)
trainer = shoal.Trainer(
    Clicks(),
    loss=nn.MSELoss(),
    optimizer=lambda params: torch.optim.Adagrad(params, lr=0.1),
    callbacks=[ModelCheckpoint(every_steps=1, keep_last=2, full_every=4, directory=f"{out}/checkpoints")],
)
data = shoal.Dataset.from_arrays((ids, target)).batch(24)
trainer.fit(data, epochs=int(epochs), resume=resume[0] if resume else None)
