"""The recipe of CIFAR-10: ResNet-18, crops and flips, batch 32 per device, learning rate times devices.

Crop of 32 with padding 4, flip, normalise; SGD with momentum 0.9 and weight decay 5e-4; MultiStepLR at half the epochs; a
checkpoint per epoch; top-1 and top-5. --data is the folder of the binary version's files (data_batch_1.bin, ...,
test_batch.bin); without it the pictures are generated.

    python examples/cifar10.py
    shoal run -n 4 examples/cifar10.py --data cifar-10-batches-bin --epochs 200 --width 64
    shoal run -n 2 --batchnorm sync examples/cifar10.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from resnet import resnet18
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import MultiStepLR

import shoal
from shoal.callbacks import ModelCheckpoint
from shoal.data import generated

MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
RECORD = 1 + 3 * 32 * 32  # a label, and the picture's red, green and blue


def from_files(folder: Path, *names: str) -> shoal.Dataset:
    records = np.concatenate([np.fromfile(folder / name, dtype=np.uint8) for name in names])
    records = records.reshape(-1, RECORD)
    return shoal.Dataset.from_arrays((records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)))


def scaled(picture: Tensor) -> Tensor:
    return picture.float() / 255 if picture.dtype == torch.uint8 else picture


def normalised(sample: Any) -> Any:
    picture, label = sample
    return (scaled(picture) - MEAN) / STD, label


def augmented(sample: Any, generator: torch.Generator) -> Any:
    picture, label = sample
    top, left = torch.randint(0, 9, (2,), generator=generator).tolist()
    picture = F.pad(scaled(picture), (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
    flip = torch.rand((), generator=generator) < 0.5
    return normalised((picture.flip(2) if flip else picture, label))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a ResNet-18 by the recipe of CIFAR-10.")
    parser.add_argument("--data", type=Path, default=None, help="folder of CIFAR-10's binary files")
    parser.add_argument("--samples", type=int, default=2000, help="generated pictures, without --data")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.02, help="of one device")
    parser.add_argument("--width", type=int, default=8, help="of the first stage; 64 is the full size")
    options = parser.parse_args()

    if options.data is not None:
        train = from_files(options.data, *(f"data_batch_{number}.bin" for number in range(1, 6)))
        test = from_files(options.data, "test_batch.bin")
    else:
        train, test = generated.images(options.samples, size=32).split(0.8, 0.2, seed=0)

    torch.manual_seed(0)  # the same first weights at every start
    trainer = shoal.Trainer(
        resnet18(options.width),
        loss="cross_entropy",
        optimizer="sgd",
        lr=options.lr,
        optimizer_options={"momentum": 0.9, "weight_decay": 5e-4},
        scale_lr="linear",
        scheduler=lambda optimizer: MultiStepLR(optimizer, milestones=[max(options.epochs // 2, 1)]),
        scheduler_every="epoch",
        metrics=["accuracy", "top5"],
        callbacks=[ModelCheckpoint(every_epochs=1)],
        params={"lr": options.lr, "width": options.width, "epochs": options.epochs},
    )
    history = trainer.fit(
        train.augment(augmented, seed=0).shuffle(seed=0).batch(32, per_worker=True),
        epochs=options.epochs,
        validation_data=test.map(normalised).batch(256),
    )
    if shoal.rank() == 0:
        for epoch, logs in enumerate(history.epochs, start=1):
            top1, top5 = logs["val_accuracy"], logs["val_top5"]
            print(f"epoch {epoch}: loss {logs['loss']:.4f}, top-1 {top1:.3f}, top-5 {top5:.3f}")


if __name__ == "__main__":
    main()
