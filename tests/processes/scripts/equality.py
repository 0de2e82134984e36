"""Trains small models in float64 and writes down all results; run with 1, 2, 3 and 4 workers they must agree."""

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


X, WIDE = seeded(N, 6, seed=1), seeded(N, 3, seed=2)
LABEL = torch.arange(N) * 5 % 4
MASKED = LABEL.clone()
MASKED[: N // 3] = -100
WEIGHTS = torch.arange(N) % 4 * 0.5  # some of them 0
IDS = torch.arange(N * 3).reshape(N, 3) * 7 % 20


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        return self.left(x).tanh() + self.right(wide)


class Wide(nn.Module):
    """Takes the whole dict and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.body = TwoInputs()

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.body(batch["x"], batch["wide"])
        return out, out.mean(1)


class Sometimes(nn.Module):
    """One branch never runs, one only on batches whose first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.always(x)
        if x[0, 0] > 0:
            out = out + self.sometimes(x) * 0.0
        return out


class Rows(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 5, sparse=sparse)
        self.head = nn.Linear(5, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).sum(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def masked_pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = target != -100
    return F.cross_entropy(output[kept], target[kept], reduction="sum"), kept.sum()


def first_of(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[0], target) + output[1].pow(2).mean()


def spoilt(sample: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Raises for some samples, and for a stretch that is the whole share of a worker, or all of a batch of 6."""
    number = int((sample[0] == X).all(1).nonzero())
    if number % 7 == 3 or 17 <= number < 24:
        raise ValueError(f"sample {number} is spoilt")
    return sample


ADAM = dict(optimizer=lambda params: torch.optim.Adam(params, lr=0.01))
SGD = dict(optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "plain": (mlp, (X, LABEL), dict(loss=nn.CrossEntropyLoss(), metrics=["accuracy", "top2"], **ADAM)),
    "masked": (mlp, (X, MASKED), dict(loss=nn.CrossEntropyLoss(), **SGD)),
    "weighted": (
        mlp,
        (X, MASKED),
        dict(loss=nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 2.0, 5.0]).double()), **SGD),
    ),
    "pair": (mlp, (X, MASKED), dict(loss=masked_pair, **SGD)),
    "functional": (mlp, (X, LABEL), dict(loss=F.cross_entropy, **SGD)),
    "regression": (mlp, (X, seeded(N, 4, seed=9)), dict(loss=nn.MSELoss(), **ADAM)),
    "summed": (
        mlp,
        (X, seeded(N, 4, seed=9)),
        dict(loss=nn.MSELoss(reduction="sum"), optimizer=lambda p: torch.optim.SGD(p, lr=1e-3)),
    ),
    "clipped": (mlp, (X, LABEL), dict(loss=nn.CrossEntropyLoss(), clip_norm=0.05, **SGD)),
    "accumulated": (mlp, (X, MASKED), dict(loss=nn.CrossEntropyLoss(), accumulate=3, **ADAM)),
    "scheduled": (
        mlp,
        (X, LABEL),
        dict(
            loss=nn.CrossEntropyLoss(), scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5), **SGD
        ),
    ),
    "keywords": (TwoInputs, ({"x": X, "wide": WIDE}, LABEL), dict(loss=nn.CrossEntropyLoss(), **ADAM)),
    "positional": (TwoInputs, (X, WIDE, LABEL), dict(loss=nn.CrossEntropyLoss(), **ADAM)),
    "dict and tuple": (Wide, ({"x": X, "wide": WIDE}, LABEL), dict(loss=first_of, **ADAM)),
    "unused": (
        Sometimes,
        (X, LABEL),
        dict(loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
    ),
    "dense rows": (lambda: Rows(False), (IDS, LABEL), dict(loss=nn.CrossEntropyLoss(), **ADAM)),
    "sparse rows": (
        lambda: Rows(True),
        (IDS, LABEL),
        dict(loss=nn.CrossEntropyLoss(), clip_norm=1.0, optimizer=lambda p: torch.optim.Adagrad(p, lr=0.1)),
    ),
    "weights of samples": (
        mlp,
        (X, MASKED),
        dict(
            loss=nn.CrossEntropyLoss(), metrics=["accuracy"], stages=lambda d: d.with_weights(WEIGHTS), **SGD
        ),
    ),
    "weights of samples, a callable": (
        mlp,
        (X, seeded(N, 4, seed=9)),
        dict(
            loss=lambda output, target: (output - target).abs().mean(),
            stages=lambda d: d.with_weights(lambda sample: sample[0][0].abs()),
            accumulate=2,
            **SGD,
        ),
    ),
    "skipped samples": (
        mlp,
        (X, LABEL),
        dict(
            loss=nn.CrossEntropyLoss(),
            metrics=["accuracy"],
            stages=lambda d: d.map(spoilt, on_error="skip", max_skips=12),
            **ADAM,
        ),
    ),
    "no target": (mlp, X, dict(loss=lambda output: output.pow(2).mean(), **SGD)),
}


def run(name: str, results: dict[str, torch.Tensor], report: dict[str, Any]) -> None:
    factory, arrays, settings = CASES[name]
    stages = (settings := dict(settings)).pop("stages", lambda data: data)
    torch.manual_seed(3)
    model = factory().double()
    data = stages(shoal.Dataset.from_arrays(arrays))
    trainer = shoal.Trainer(model, seed=5, **settings)
    history = trainer.fit(data.shuffle(seed=4).batch(10), epochs=2, validation_data=data.batch(8))
    report[name] = {"history": dict(history), "evaluated": trainer.evaluate(data.batch(6))}
    predicted = trainer.predict(data.batch(9))
    results |= {f"{name}/{key}": tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    for number, tensor in enumerate(predicted if isinstance(predicted, tuple) else (predicted,)):
        results[f"{name}/predicted {number}"] = tensor.contiguous()
    report[name]["none"] = [
        key for key, p in trainer.model.named_parameters() if not trainer.strategy.optimizer.state.get(p)
    ]


def custom_loop(results: dict[str, torch.Tensor], report: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, data = shoal.setup(
        model, optimizer, shoal.Dataset.from_arrays((X, LABEL)).shuffle(seed=4).batch(10)
    )
    losses = []
    for _ in range(2):
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(shoal.reduce(float(loss.detach()) * 0 + 1.0) / shoal.num_workers())
    results |= {f"custom/{key}": tensor.clone() for key, tensor in model.state_dict().items()}
    report["custom"] = {"steps": len(losses), "ones": losses, "length": len(data)}


if __name__ == "__main__":
    torch.set_num_threads(1)  # small sums: more threads only wait for each other
    results: dict[str, torch.Tensor] = {}
    report: dict[str, Any] = {}
    for name in CASES:
        run(name, results, report)
    custom_loop(results, report)
    # Every rank writes its own, so that the test can see that all hold the same.
    save_file(results, OUT / f"rank-{shoal.rank()}.safetensors")
    (OUT / f"rank-{shoal.rank()}.json").write_text(json.dumps(report))
