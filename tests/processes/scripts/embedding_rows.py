"""A model with an nn.Embedding, saved after every step. Arguments: directory, epochs, checkpoint to go on from."""

import sys

import torch
from torch import nn

import shoal
from shoal.callbacks import ModelCheckpoint
from shoal.train.checkpoint import saving

saving.TABLE_BYTES = 0  # else such a small table is saved whole each time


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(3000, 4)
        self.bag = nn.EmbeddingBag(500, 3, mode="sum", padding_idx=0)
        self.head = nn.Linear(11, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.table(ids).flatten(1), self.bag(ids % 500)], 1)).squeeze(1)


out, epochs, *resume = sys.argv[1:]
generator = torch.Generator().manual_seed(0)
ids, target = torch.randint(3000, (144, 2), generator=generator), torch.rand(144, generator=generator)
trainer = shoal.Trainer(
    Clicks().double(),
    loss=nn.MSELoss(),
    optimizer=lambda params: torch.optim.Adagrad(params, lr=0.1),
    callbacks=[ModelCheckpoint(every_steps=1, keep_last=3, full_every=4, directory=f"{out}/checkpoints")],
)
data = shoal.Dataset.from_arrays((ids, target.double())).batch(24)
trainer.fit(data, epochs=int(epochs), resume=resume[0] if resume else "auto")
