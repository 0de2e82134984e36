"""Many small trainings in one job. Every rank writes down what it saw: weights and facts, by name.

training.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shoal
from shoal.callbacks import Callback, EarlyStopping

OUT = Path(sys.argv[1])
N = 37
RANK = shoal.rank()

generator = torch.Generator().manual_seed(1)
x = torch.randn(N, 6, dtype=torch.float64, generator=generator)
label = torch.arange(N) * 5 % 4
data = shoal.Dataset.from_arrays((x, label))
weights: dict[str, torch.Tensor] = {}
facts: dict[str, Any] = {}


def mlp(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *extra, nn.Linear(16, 4)).double()


def build(model: Any = None, **options: Any) -> shoal.Trainer:
    settings: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "seed": 5}
    settings["optimizer"] = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
    return shoal.Trainer(mlp() if model is None else model, **(settings | options))


def keep(name: str, trainer: shoal.Trainer, **more: Any) -> None:
    weights.update({f"{name}/{key}": tensor.clone() for key, tensor in trainer.model.state_dict().items()})
    facts[name] = {"step": trainer.step, "epoch": trainer.epoch, "skipped": trainer.num_skipped_steps, **more}


def stop_on_one_rank() -> None:
    class Stops(Callback):
        def on_step_end(self, trainer: shoal.Trainer, logs: Any) -> None:
            if logs.step == 5:
                trainer.stop()  # a callback of rank 0 alone

    trainer = build(callbacks=[Stops()])
    history = trainer.fit(data.batch(10), epochs=9)
    keep("stopped", trainer, history=history.epochs)


def stop_between_epochs() -> None:
    trainer = build(callbacks=[EarlyStopping("val_loss", patience=2, min_delta=100.0)])
    trainer.fit(data.batch(10), epochs=9, validation_data=data.batch(8))
    keep("early", trainer)


def other_beginnings() -> None:
    torch.manual_seed(100 + RANK)
    model = nn.Sequential(nn.Linear(6, 4)).double()
    if RANK == 0:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 4)).double()
    trainer = build(model)
    trainer.fit(data.batch(10), max_steps=2)
    keep("rank 0's weights", trainer)


def factory() -> None:
    torch.manual_seed(100 + RANK)
    trainer = build(lambda: nn.Sequential(nn.Linear(6, 4)).double())
    trainer.fit(data.batch(10), max_steps=2)
    keep("factory", trainer)


def skipped() -> None:
    poisoned = x.clone()
    poisoned[13] = torch.nan  # with three workers, on rank 1 alone
    trainer = build(mlp(nn.BatchNorm1d(16)), on_nonfinite="skip")
    trainer.fit(shoal.Dataset.from_arrays((poisoned, label)).batch(12, drop_last=True), epochs=2)
    keep("skipped", trainer)


def frozen() -> None:
    model = mlp(nn.BatchNorm1d(16))
    model[2].eval()  # type: ignore[index]
    trainer = build(model, clip_norm=0.1, accumulate=2)
    trainer.fit(data.batch(10), epochs=2, validation_data=data.batch(10))
    keep("frozen", trainer)


def fewer_samples_than_workers() -> None:
    # 32 = 3 * 10 + 2: with three workers the last batch leaves one without a sample of its own.
    trainer = build(mlp(nn.LayerNorm(16)), metrics=["accuracy"])
    few = shoal.Dataset.from_arrays((x[:32], label[:32])).batch(10)
    history = trainer.fit(few, epochs=2)
    predicted = trainer.predict(few)
    keep("few", trainer, history=history.epochs, evaluated=trainer.evaluate(few))
    weights["few/predicted"] = predicted


def two_fits() -> None:
    trainer = build(optimizer=lambda params: torch.optim.Adam(params, lr=0.01))
    trainer.fit(data.shuffle(seed=1).batch(10), max_steps=6)
    trainer.fit(data.shuffle(seed=1).batch(10), epochs=1)
    keep("two fits", trainer)


def loaders() -> None:
    dataset = TensorDataset(x, label)
    trainer = build(metrics=["accuracy", torchmetrics.classification.MulticlassAUROC(num_classes=4)])
    shuffled: DataLoader[Any] = DataLoader(dataset, batch_size=10, shuffle=True, num_workers=2)
    history = trainer.fit(shuffled, epochs=2, validation_data=DataLoader(dataset, batch_size=8))
    weights["loader/predicted"] = trainer.predict(DataLoader(dataset, batch_size=9, num_workers=2))
    keep("loader", trainer, history=history.epochs)


def distributed_sampler() -> None:
    dataset = TensorDataset(x, label)
    workers = shoal.num_workers()
    sampler: Any = DistributedSampler(dataset, num_replicas=workers, rank=RANK, shuffle=False)
    # What the script meant for each worker: 12 over three of them, 12 alone.
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=12 // workers, sampler=sampler)
    trainer = build()
    history = trainer.fit(loader, epochs=1)
    weights["sampler"] = trainer.predict(loader)[:N]
    keep("sampler", trainer, history=history.epochs, samples=trainer.position.samples // 12)


def bf16() -> None:
    trainer = build(mlp().float(), precision="bf16", loss=lambda o, t: nn.functional.cross_entropy(o, t))
    history = trainer.fit(shoal.Dataset.from_arrays((x.float(), label)).batch(10), epochs=5)
    facts["bf16"] = history["loss"][-1] < 0.9 * history["loss"][0]


SCENARIOS: list[Callable[[], None]] = [
    stop_on_one_rank, stop_between_epochs, other_beginnings, factory, skipped, frozen, fewer_samples_than_workers,
    two_fits, loaders, distributed_sampler, bf16,
]  # fmt: skip

if __name__ == "__main__":
    for scenario in SCENARIOS:
        scenario()
    save_file({name: t.contiguous() for name, t in weights.items()}, OUT / f"rank-{RANK}.safetensors")
    (OUT / f"rank-{RANK}.json").write_text(json.dumps(facts))
