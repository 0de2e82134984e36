"""Models that a parameter server treats in its own ways, in float64; what comes of each is written down by every rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import shoal

OUT = Path(sys.argv[1])
N = 37  # with batches of 10: a last one of 7; with 4 workers, slices of 1 and 2


def seeded(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = seeded(N, 6, seed=1)
LABEL = torch.arange(N) * 5 % 4
IDS = torch.arange(N * 3).reshape(N, 3) * 7 % 20
FAR = 10**15  # ids of a HashEmbedding may be anything
SPOILT = X.clone()
SPOILT[13] = float("nan")


class Rows(nn.Module):
    """A table, and what is made of its rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "hash":
            self.table: Any = shoal.nn.HashEmbedding(5, scale=1.0, dtype=torch.float64)
        elif kind in ("sum", "mean", "weighted"):
            self.table = nn.EmbeddingBag(20, 5, mode="mean" if kind == "mean" else "sum")
        else:
            self.table = nn.Embedding(20, 5, padding_idx=3 if kind == "padded" else None)
        torch.manual_seed(3)  # whatever the table drew
        self.head = nn.Linear(5, 20 if kind == "tied" else 4)
        if kind == "tied":
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.kind in ("sum", "mean"):
            rows = self.table(ids)
        elif self.kind == "hash":
            rows = self.table(ids * FAR - FAR).sum(1)
        elif self.kind == "weighted":
            rows = self.table(ids, per_sample_weights=(ids + 1).double() / 20)
        else:
            rows = self.table(ids).sum(1)
        if self.kind == "outside":
            rows = rows + self.table.weight.mean(0)
        if self.kind == "twice":
            rows = rows + self.table(ids.flip(1) // 2)[:, 0]
        return self.head(rows)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.never = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always(x)


class Large(nn.Module):
    """Parameters of several chunks, one of them cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 1100), nn.Tanh(), nn.Linear(1100, 500), nn.Linear(500, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def groups(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.SGD([{"params": params[:1], "lr": 0.2}, {"params": params[1:]}], lr=0.05, momentum=0.9)


ADAGRAD = dict(optimizer=lambda p: torch.optim.Adagrad(p, lr=0.1))
SGD = dict(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
ADAMW = dict(
    optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
    scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
)
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "hash": (lambda: Rows("hash"), IDS, dict(clip_norm=0.5, **ADAGRAD)),
    "momentum": (mlp, X, dict(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))),
    "adamw": (mlp, X, dict(clip_norm=0.05, **ADAMW)),
    "groups": (mlp, X, dict(optimizer=groups, accumulate=2)),
    "large": (Large, X, ADAMW),
    "adagrad rows": (lambda: Rows("plain"), IDS, dict(clip_norm=0.5, **ADAGRAD)),
    "sgd rows": (lambda: Rows("plain"), IDS, dict(scheduler=ADAMW["scheduler"], **SGD)),
    "padded": (lambda: Rows("padded"), IDS, ADAGRAD),
    "twice": (lambda: Rows("twice"), IDS, dict(accumulate=2, **ADAGRAD)),
    "sum": (lambda: Rows("sum"), IDS, ADAGRAD),
    "mean": (lambda: Rows("mean"), IDS, SGD),
    "weighted": (lambda: Rows("weighted"), IDS, ADAGRAD),
    "tied": (lambda: Rows("tied"), IDS, ADAGRAD),
    "outside": (lambda: Rows("outside"), IDS, ADAGRAD),
    "adam rows": (lambda: Rows("plain"), IDS, ADAMW),
    "unused": (Sometimes, X, ADAMW),
    "spoilt": (mlp, SPOILT, dict(on_nonfinite="skip", **ADAMW)),
}


def run(name: str, results: dict[str, torch.Tensor], report: dict[str, Any]) -> None:
    factory, inputs, settings = CASES[name]
    torch.manual_seed(3)
    model = factory().double()
    data = shoal.Dataset.from_arrays((inputs, LABEL))
    trainer = shoal.Trainer(model, seed=5, loss=F.cross_entropy, metrics=["accuracy"], **settings)
    history = trainer.fit(data.shuffle(seed=4).batch(10), epochs=2, validation_data=data.batch(8))
    report[name] = {"history": dict(history), "evaluated": trainer.evaluate(data.batch(6))}
    results |= {f"{name}/{key}": tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    results[f"{name}/predicted"] = trainer.predict(data.batch(9)).contiguous()


if __name__ == "__main__":
    torch.set_num_threads(1)  # small sums: more threads only wait for each other
    results: dict[str, torch.Tensor] = {}
    report: dict[str, Any] = {}
    for name in sys.argv[2:] or CASES:
        run(name, results, report)
    save_file({k: v.contiguous() for k, v in results.items()}, OUT / f"rank-{shoal.rank()}.safetensors")
    (OUT / f"rank-{shoal.rank()}.json").write_text(json.dumps(report))
