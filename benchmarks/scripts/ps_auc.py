"""A click model on generated logs, as fast as its data allows: trains once over SAMPLES, tells the AUC on others.

SEED SAMPLES IDS OUT. Another seed is another world: other samples, other truths behind them, other first weights.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import shoal
from shoal.data import generated

seed, num_samples, num_ids, out = (*map(int, sys.argv[1:4]), Path(sys.argv[4]))
NUM_TEST = 100_000
BATCH, DIM = 1024, 16


class ClickModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(num_ids, DIM, sparse=True)
        nn.init.normal_(self.rows.weight, std=0.05)
        self.layers = nn.Sequential(
            nn.Linear(13 + 26 * DIM, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        return self.layers(torch.cat([dense.log1p(), self.rows(ids).flatten(1)], dim=1)).squeeze(1)


torch.manual_seed(seed)
data = generated.clicks(num_samples + NUM_TEST, seed=seed, num_ids=num_ids)
share = num_samples / (num_samples + NUM_TEST)
train, test = data.split(share, 1 - share, seed=0)
trainer = shoal.Trainer(
    ClickModel(),
    loss=nn.BCEWithLogitsLoss(),
    optimizer=lambda params: torch.optim.Adagrad(params, lr=0.02),
    metrics=["auroc"],
    seed=seed,
    device="cpu",
)
history = trainer.fit(train.shuffle(seed=seed).batch(BATCH), epochs=1)
result = trainer.evaluate(test.batch(4096))
if shoal.rank() == 0:
    digest = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    told = {"auc": result["auroc"], "test_loss": result["loss"], "train_loss": history["loss"][-1]}
    told["weights"] = digest.hexdigest()[:16]
    out.write_text(json.dumps(told))
