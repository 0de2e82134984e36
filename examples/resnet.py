"""Image classification with a ResNet-18 for small pictures.

Shows layers that mix the samples of a batch (BatchNorm: each worker normalises its own slice, running statistics
are averaged), a learning rate schedule per step, and validation after each epoch. The pictures are generated: striped
discs, one direction of stripes per class.

    python examples/resnet.py
    shoal run -n 2 examples/resnet.py
    shoal run -n 2 examples/resnet.py --width 64 --samples 20000      the full-size network
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import shoal
from shoal.data import generated


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.around = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.main(x) + self.around(x))


def resnet18(width: int = 64, num_classes: int = 10) -> nn.Module:
    """Four stages of two blocks; the stem keeps the size, as is usual for pictures of 32 pixels."""
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks = []
    for stage in range(4):
        channels = width * 2**stage
        before = channels // 2 if stage else width
        blocks += [Block(before, channels, stride=2 if stage else 1), Block(channels, channels, stride=1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 8, num_classes)]
    return nn.Sequential(*stem, *blocks, *head)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a ResNet-18 on generated pictures.")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="samples of one update, over all workers")
    parser.add_argument(
        "--width", type=int, default=8, help="channels of the first stage; 64 is the full size"
    )
    parser.add_argument("--size", type=int, default=32, help="pixels on a side")
    options = parser.parse_args()

    torch.manual_seed(0)  # the same first weights at every start
    train, test = generated.images(options.samples, size=options.size).split(0.8, 0.2, seed=0)
    batches = train.shuffle(seed=0).batch(options.batch)
    num_steps = options.epochs * -(-int(0.8 * options.samples) // options.batch)

    trainer = shoal.Trainer(
        resnet18(options.width),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-4),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.2, total_steps=num_steps
        ),
        metrics=["accuracy"],
        seed=0,
    )
    history = trainer.fit(batches, epochs=options.epochs, validation_data=test.batch(256))
    for epoch, (loss, accuracy) in enumerate(zip(history["loss"], history["val_accuracy"], strict=True)):
        print(f"epoch {epoch}: loss {loss:.4f}, validation accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
