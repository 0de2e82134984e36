"""One figure of `benchmarks.two_trees`, by name; writes seconds to the file that TWO_TREES_OUT names."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal

clock = time.process_time if os.environ.get("TWO_TREES_CPU") else time.perf_counter


class Steps(shoal.callbacks.Callback):
    """Median of the seconds between steps, without the first ones."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, trainer: Any, logs: Any) -> None:
        self.times.append(clock())

    def median(self, warm: int) -> float:
        gaps = sorted(b - a for a, b in zip(self.times[warm:], self.times[warm + 1 :], strict=False))
        return gaps[len(gaps) // 2] if gaps else 0.0  # on rank 0 alone


class Clicks(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(rows, 16, sparse=True, mode="sum")
        self.head = nn.Sequential(
            nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(ids))[:, 0]


def fit(model: nn.Module, data: Any, loss: nn.Module, optimizer: Any, *, steps: int, warm: int) -> float:
    steps_seen = Steps()
    trainer = shoal.Trainer(
        model, loss=loss, optimizer=optimizer, callbacks=[steps_seen], seed=0, progress=False
    )
    trainer.fit(data, max_steps=steps, epochs=1000)
    return steps_seen.median(warm)


def measured(what: str) -> float:
    torch.manual_seed(0)
    x, y = torch.randn(20_000, 64), torch.randn(20_000, 1)
    mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    adam = lambda params: torch.optim.Adam(params, lr=1e-3)  # noqa: E731
    batches = shoal.Dataset.from_arrays((x, y)).shuffle(seed=0).batch(256)
    match what:
        case "first":
            return fit(mlp, batches, nn.MSELoss(), adam, steps=2, warm=0)
        case "trainer" | "ddp":
            return fit(mlp, batches, nn.MSELoss(), adam, steps=800, warm=200)
        case "click":
            ids = torch.randint(200_000, (100_000, 26))
            data = shoal.Dataset.from_arrays((ids, (ids.sum(1) % 2).float())).shuffle(seed=0).batch(1024)
            adagrad = lambda params: torch.optim.Adagrad(params, lr=0.02)  # noqa: E731
            return fit(Clicks(200_000), data, nn.BCEWithLogitsLoss(), adagrad, steps=600, warm=150)
        case "arrays":
            big = shoal.Dataset.from_arrays((torch.randn(1_000_000, 39), torch.randn(1_000_000))).shuffle(
                seed=0
            )
            return _epoch(big.batch(1024))
        case "parquet":
            import numpy as np
            import pyarrow as pa
            import pyarrow.parquet as pq

            drawn = np.random.default_rng(0)
            columns = {f"c{n}": drawn.standard_normal(400_000).astype(np.float32) for n in range(20)}
            pq.write_table(pa.table(columns), "data.parquet", row_group_size=50_000)
            return _epoch(shoal.Dataset.from_parquet("data.parquet", label="c0").shuffle(seed=0).batch(1024))
    raise SystemExit(f"no figure '{what}'")


def _epoch(batches: Any) -> float:
    began = clock()
    for _ in batches:
        pass
    return clock() - began


if __name__ == "__main__":
    seconds = measured(sys.argv[1])
    if shoal.rank() == 0:
        Path(os.environ["TWO_TREES_OUT"]).write_text(json.dumps(seconds))
