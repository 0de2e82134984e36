"""Script of jobs over hosts: a Trainer, then a loop of its own; every rank writes what it ended with.

training.py OUT [--gate STEP]    at that step of the Trainer each rank touches OUT/at-gate-RANK, and waits for OUT/go
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.config import job

N = 37  # with batches of 10: a last one of 7


class Gate(shoal.callbacks.Callback):
    """Holds every rank at one step, so that a test can act while it is known where they are."""

    ranks = "every"

    def __init__(self, out: Path, step: int) -> None:
        self.out, self.step = out, step

    def on_step_end(self, trainer: Any, logs: Any) -> None:
        time.sleep(
            0.03
        )  # progress is reported every 0.1 s: the supervisor has to know of the fit by the gate
        if logs.step == self.step + 1 and shoal.rank() == 0:
            (self.out / "after-gate").touch()
        if logs.step == self.step:
            (self.out / f"at-gate-{shoal.rank()}").touch()
            while not (self.out / "go").exists():
                time.sleep(0.01)


def seeded(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model(width: int = 16) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, width),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 4),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--gate", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--loop", action="store_true", help="then train by a loop of its own, where the strategy can"
    )
    parser.add_argument("--keep", action="store_true", help="write checkpoints")
    parser.add_argument("--directory", help="of them; by default the run's own")
    parser.add_argument("--width", type=int, default=16, help="of its hidden layers: 900 are 3.3 MB")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    x, label = seeded(N, 6, seed=1), torch.arange(N) * 5 % 4
    data = shoal.Dataset.from_arrays((x, label)).shuffle(seed=4).batch(10)
    trainer = shoal.Trainer(
        model(asked.width),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
        seed=5,
        clip_norm=1.0,
        callbacks=[
            *([Gate(asked.out, asked.gate)] if asked.gate else []),
            *(
                [shoal.callbacks.ModelCheckpoint(every_steps=2, directory=asked.directory)]
                if asked.keep
                else []
            ),
        ],
    )
    history = trainer.fit(data, max_steps=asked.steps)
    weights = {piece.name: piece.tensor.detach().to("cpu", copy=True) for piece in trainer.strategy.state()}
    told: dict[str, Any] = {"history": dict(history), "evaluated": trainer.evaluate(data)}
    if asked.loop and job.current().strategy == "ddp":
        told["loop"] = own_loop(data)
    if shoal.rank() == 0:
        torch.save(weights, asked.out / "weights.pt")
    (asked.out / f"rank-{shoal.rank()}.json").write_text(json.dumps(told))
    print(f"rank {shoal.rank()} has ended")


def own_loop(data: Any) -> list[list[float]]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, optimizer, batches = shoal.setup(net, optimizer, data)
    for _ in range(2):
        for inputs, target in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), target).backward()
            optimizer.step()
    return [p.detach().double().flatten().tolist() for p in net.parameters()]


main()
