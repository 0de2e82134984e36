"""Reads files that not every host has, and trains on them. OUT/rank-N.json: what each rank found.

reading_located.py OUT CENTRAL RESIDENT
    CENTRAL      folder of Parquet files that only the head has to have
    RESIDENT     folder of which every host has some of the files
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.data.remote import blocks


def digest(data: Any) -> str:
    found = hashlib.sha256()
    for columns, label in data.batch(100):
        for name in sorted(columns):
            found.update(columns[name].numpy().tobytes())
        found.update(label.numpy().tobytes())
    return found.hexdigest()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def forward(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.inner(torch.stack([columns["a"], columns["b"]], 1))[:, 0]


def fitted(data: Any) -> list[float]:
    """Weights and running statistics after an epoch."""
    trainer = shoal.Trainer(Net(), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), seed=0)
    trainer.fit(data.shuffle(seed=1).batch(64), epochs=1)
    return torch.cat([each.double().flatten() for each in trainer.model.state_dict().values()]).tolist()


def main() -> None:
    out, central, resident = map(Path, sys.argv[1:4])
    blocks.BLOCK_BYTES = 4096  # several blocks to a small file
    told: dict[str, Any] = {}
    for number, spread in enumerate(("on-demand", "chain", "broadcast")):
        # A folder for each: a block that is held is not sent again.
        where = f"{central}/{number}/*.parquet"
        data = shoal.Dataset.from_parquet(where, label="y", location="central", spread=spread)
        data.stage()
        told[spread] = digest(data)
    own = shoal.Dataset.from_parquet(f"{resident}/*.parquet", label="y", location="resident")
    told["resident"] = digest(own)
    told["near"] = sorted(own.batch(20).near(60))
    told["fitted"] = fitted(data)
    (out / f"rank-{shoal.rank()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
