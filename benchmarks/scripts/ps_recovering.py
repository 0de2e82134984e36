"""A job with servers and light set-up that can tell what was lost or doubled: SAMPLES EPOCHS OUT ROWS.

Beside a small network with a table of ROWS rows it trains a row per sample, whose gradient is the same
whatever the weights are, with a learning rate that makes one update exactly
-1: at the end every row must be -EPOCHS. Every rank appends the moment of each
commit to a file, which outlives it, and hashes what it ended with.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import shoal

num_samples, epochs, out, num_rows = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
BATCH = 256
DIM, NUM_COLUMNS = 16, 26


class Counted(nn.Module):
    """A classifier over values and ids, and a row per sample that goes into the loss as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64 + DIM, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )
        self.rows = nn.EmbeddingBag(num_rows, DIM, mode="mean", sparse=True)
        self.seen = nn.Embedding(num_samples, 1, sparse=True)
        nn.init.zeros_(self.seen.weight)

    def forward(self, x: Tensor, ids: Tensor, number: Tensor) -> Tensor:
        features = torch.cat([x, self.rows(ids)], dim=1)
        return torch.cat([self.layers(features), self.seen(number)], dim=1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output[:, :10], target) + output[:, 10].mean()


class Clock(shoal.callbacks.Callback):
    """Writes down when each step was committed."""

    ranks = "every"

    def __init__(self) -> None:
        self._file = open(out / f"commits-{shoal.rank()}", "a", buffering=1)  # noqa: SIM115  until the end

    def on_step_end(self, trainer: shoal.Trainer, logs: object) -> None:
        self._file.write(f"{time.time()}\n")


torch.manual_seed(0)
model = Counted()
x = torch.randn(num_samples, 64, generator=torch.Generator().manual_seed(1))
number = torch.arange(num_samples)
ids = (number[:, None] * 7_368_787 + torch.arange(NUM_COLUMNS) * 15_485_863) % num_rows
inputs = {"x": x, "ids": ids, "number": number}
trainer = shoal.Trainer(
    model,
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(
        [
            {"params": [p for p in params if p is not model.seen.weight]},
            {"params": [model.seen.weight], "lr": float(BATCH)},
        ],
        lr=0.05,
    ),
    callbacks=[Clock()],
    seed=0,
    device="cpu",
)
trainer.fit(
    shoal.Dataset.from_arrays((inputs, x[:, :10].argmax(1))).shuffle(seed=0).batch(BATCH), epochs=epochs
)
counts = model.seen.weight.detach()
told = {
    "weights": hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest(),
    "lost": int((counts > -epochs).sum()),
    "doubled": int((counts < -epochs).sum()),
}
(out / f"{shoal.rank()}.json").write_text(json.dumps(told))
