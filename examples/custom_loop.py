"""An ordinary training loop, spread over workers without the Trainer.

Four lines are not plain PyTorch's:

    + import shoal
      model = nn.Sequential(...)
      optimizer = torch.optim.Adam(model.parameters())
      data = DataLoader(dataset, batch_size=64, shuffle=True)       # or Dataset.batch(64), as below
    + model, optimizer, data = shoal.setup(model, optimizer, data)
      for x, y in data:                  # this worker's slice of each batch of 64
          optimizer.zero_grad()
          loss = loss_fn(model(x), y)
          loss.backward()
          optimizer.step()               # exchanges the gradients: one update, the same on every worker
          total += loss.item() * len(y)
    +     if shoal.should_stop(): break  # Ctrl-C: true after the same step on every worker
    + total = shoal.reduce(total)        # the sum over all workers

    python examples/custom_loop.py
    shoal run -n 2 examples/custom_loop.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import shoal
from shoal.data import generated


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on generated pictures with a loop of your own.")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="samples of one update, over all workers")
    options = parser.parse_args()

    torch.manual_seed(0)  # the same first weights at every start
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = generated.images(options.samples, size=16).shuffle(seed=0).batch(options.batch)

    model, optimizer, data = shoal.setup(model, optimizer, data)
    print(f"rank {shoal.rank()} of {shoal.num_workers()}")

    for epoch in range(options.epochs):
        total = torch.zeros(3)  # loss, right answers, samples
        for pictures, labels in data:
            optimizer.zero_grad()
            output = model(pictures)
            loss = loss_fn(output, labels)
            loss.backward()
            optimizer.step()
            right = (output.argmax(dim=1) == labels).sum()
            total += torch.tensor([loss.item() * len(labels), right, len(labels)])
            if shoal.should_stop():
                break
        loss_sum, num_right, num_samples = shoal.reduce(total).tolist()
        print(f"epoch {epoch}: loss {loss_sum / num_samples:.4f}, accuracy {num_right / num_samples:.3f}")
        if shoal.should_stop():
            break


if __name__ == "__main__":
    main()
