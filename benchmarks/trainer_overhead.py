"""Overhead of the Trainer in one process, against the same loop written by hand. Aim: at most 3 % slower."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.harness import Report, alternate, timed
from benchmarks.plain_models import ClickModel, click_arrays, image_arrays, resnet18
from benchmarks.scripts.job import ByName


def hand_written(
    model: nn.Module, loss: Any, optimizer: Any, inputs: Any, target: Any, batch: int, steps: int
) -> None:
    model.train()
    num_samples = target.shape[0]
    order = torch.randperm(num_samples)
    for step in range(steps):
        begin = step * batch % (num_samples - batch + 1)
        chosen = order[begin : begin + batch]
        x = {name: tensor.index_select(0, chosen) for name, tensor in inputs.items()}
        y = target.index_select(0, chosen)
        optimizer.zero_grad()
        value = loss(model(**x), y)
        value.backward()
        optimizer.step()
        value.item()


def compare(
    report: Report,
    name: str,
    build: Any,
    loss: Any,
    optimizer: Any,
    arrays: Any,
    batch: int,
    steps: int,
    rounds: int,
) -> None:
    inputs, target = arrays
    torch.manual_seed(0)
    theirs_model = build()
    theirs_optimizer = optimizer(theirs_model.parameters())
    torch.manual_seed(0)
    trainer = shoal.Trainer(build(), loss=loss, optimizer=optimizer, device="cpu", progress=False)
    data = shoal.Dataset.from_arrays((inputs, target)).shuffle(seed=0).batch(batch)
    values = alternate(
        lambda: timed(lambda: trainer.fit(data, max_steps=steps)),
        lambda: timed(
            lambda: hand_written(theirs_model, loss, theirs_optimizer, inputs, target, batch, steps)
        ),
        rounds=rounds,
    )
    report.add(
        name, values, batch=batch, steps_per_round=steps, threads=torch.get_num_threads(), aim="ratio <= 1.03"
    )


def main(quick: bool = False) -> None:
    report = Report("trainer_overhead")
    dense, ids, label = click_arrays(100_000)
    compare(
        report,
        "click model: Trainer / hand-written loop",
        ClickModel,
        nn.BCEWithLogitsLoss(),
        lambda params: torch.optim.Adagrad(params, lr=0.02),
        ({"dense": dense, "ids": ids}, label),
        batch=1024,
        steps=20 if quick else 60,
        rounds=3 if quick else 12,
    )
    images, labels = image_arrays(512)
    compare(
        report,
        "ResNet-18 (32x32): Trainer / hand-written loop",
        lambda: ByName(resnet18()),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        ({"image": images}, labels),
        batch=32,
        steps=2 if quick else 6,
        rounds=2 if quick else 10,
    )
    report.save()


if __name__ == "__main__":
    main()
