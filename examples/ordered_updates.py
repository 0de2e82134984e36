"""Updates in a fixed order: each replica updates after the one before it, on its result.

python examples/ordered_updates.py
shoal run -n 3 examples/ordered_updates.py      # the same weights, to the bit

Nothing is averaged, so nothing is lost to stale gradients; the price is that one replica computes at a time. Every
replica keeps an optimizer of its own: only weights are passed on.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import shoal


class Replica:
    """A part of the data, a model, and an optimizer that no other replica has."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.03)
        generator = torch.Generator().manual_seed(number)
        self.x = torch.randn(128, 6, generator=generator, dtype=torch.float64)
        self.y = (self.x[:, :1] * self.x[:, 1:2]).sin()

    def update(self, weights: Tensor, step: int) -> tuple[Tensor, float]:
        """One update, on these weights; what comes of it, and the loss before."""
        vector_to_parameters(weights.clone(), self.model.parameters())
        chosen = torch.arange(16 * step, 16 * (step + 1)) % len(self.x)
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.x[chosen]), self.y[chosen])
        loss.backward()
        self.optimizer.step()
        return parameters_to_vector(self.model.parameters()).detach(), float(loss.detach())


def in_turn(num_replicas: int, num_steps: int, *, alone: bool) -> tuple[Tensor, list[float]]:
    """All updates in their order: by all workers, each for its replicas, or `alone` by this process."""
    num_workers = 1 if alone else shoal.num_workers()
    mine = {
        number: Replica(number)
        for number in range(num_replicas)
        if alone or number % num_workers == shoal.rank()
    }
    weights = parameters_to_vector(Replica(0).model.parameters()).detach()
    losses = []
    for step in range(num_steps):
        for number in range(num_replicas):
            told = torch.cat([weights, torch.zeros(1, dtype=weights.dtype)])
            if number in mine:
                weights, loss = mine[number].update(weights, step)
                told = torch.cat([weights, torch.tensor([loss], dtype=weights.dtype)])
            if not alone:  # the others wait here for whoever's turn it is
                told = shoal.collectives.broadcast(told, root=number % num_workers, timeout_s=120)
            weights = told[:-1]
            losses.append(float(told[-1]))
    return weights, losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train replicas one after the other.")
    parser.add_argument("--replicas", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    weights, losses = in_turn(args.replicas, args.steps, alone=False)
    expected, _ = in_turn(args.replicas, args.steps, alone=True)
    print(
        f"{len(losses)} updates in turn, by {args.replicas} replicas; equal to one process: {weights.equal(expected)}"
    )
    n = args.replicas
    print(f"loss {sum(losses[:n]) / n:.4f} at first, {sum(losses[-n:]) / n:.4f} at last")
    print(f"weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
