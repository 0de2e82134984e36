"""A contrastive loss over whole batches, in the Trainer and in a loop: OUT KIND."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import shoal

out, kind = Path(sys.argv[1]), sys.argv[2]
generator = torch.Generator().manual_seed(1)
x = torch.randn(41, 6, dtype=torch.float64, generator=generator)
# The last batch has one sample: of several workers all but one borrow it.
data = shoal.Dataset.from_arrays({"a": x, "b": x.flip(1)}).shuffle(seed=0).batch(10)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = (
            nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.ones(1))
        self.double()

    def forward(self, a, b):
        return F.normalize(self.left(a), dim=1), F.normalize(self.right(b), dim=1), self.scale.expand(len(a))


def of_batch(output):
    """The loss of the batch, the same on every worker."""
    left, right = shoal.gather(output[0]), shoal.gather(output[1])
    return F.cross_entropy(left @ right.T * output[2][0].exp(), torch.arange(len(left)))


def of_slice(output):
    """This worker's rows against those of all workers: the mean over its own."""
    right = shoal.gather(output[1])
    start = int((right.detach() - output[1][:1].detach()).norm(dim=1).argmin())
    return F.cross_entropy(output[0] @ right.T * output[2][0].exp(), start + torch.arange(len(output[0])))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02)


results = {}
for name, loss in (("batch", of_batch), ("slice", of_slice)):
    if kind == "trainer":
        trainer = shoal.Trainer(Towers(), loss=loss, optimizer=adam)
        history = trainer.fit(data, epochs=2, validation_data=data)
        results[f"{name}/loss"] = torch.tensor([*history["loss"], *history["val_loss"]], dtype=torch.float64)
        model = trainer.model
    else:
        model = Towers()
        model, optimizer, batches = shoal.setup(model, adam(model.parameters()), data)
        for _ in range(2):
            for batch in batches:
                optimizer.zero_grad()
                loss(model(**batch)).backward()
                optimizer.step()
    results |= {
        f"{name}/{key}": value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for key, value in model.state_dict().items()
    }

if shoal.rank() == 0:
    save_file({key: value.contiguous() for key, value in results.items()}, out)
