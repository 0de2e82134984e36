"""Training as map and reduce: stateless tasks run SGD over their partitions, and a round ends with the average model.

python examples/map_reduce_training.py
shoal run -n 4 examples/map_reduce_training.py
shoal run -n 4 examples/map_reduce_training.py --fail-task 3      # that one alone is run again, by another worker
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import shoal

MAX_ATTEMPTS = 3


class TaskFailed(Exception):
    """What a task may die of: here because it was asked to."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def partition(task: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(task)
    x = torch.randn(256, 8, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] * x[:, 1] + x[:, 2] > 0).long()


def train(weights: Tensor, task: int, number: int, fails: bool) -> Tensor:
    """One task: whoever runs it, and however often, the result depends on its arguments alone."""
    model = build()
    vector_to_parameters(weights.clone(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, y = partition(task)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * number + task))
    for batch, chosen in enumerate(order.split(32)):
        if fails and batch == 4:
            raise TaskFailed(f"task {task} failed in round {number}, after {batch} batches")
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def run_round(weights: Tensor, number: int, args: argparse.Namespace, runs: Counter[int]) -> Tensor:
    """Map: every task once, those that failed again, by the next worker. Reduce: the average, in the order of tasks."""
    done: dict[int, Tensor] = {}
    for attempt in range(MAX_ATTEMPTS):
        left = (task for task in range(args.tasks) if task not in done)
        mine = [task for task in left if (task + attempt) % shoal.num_workers() == shoal.rank()]
        rows = [torch.empty(0, 1 + len(weights), dtype=weights.dtype)]
        for task in mine:
            runs[task] += 1
            fails = (task, number, attempt) == (args.fail_task, 1, 0)
            try:
                trained = train(weights, task, number, fails)
            except TaskFailed as failed:
                print(f"{failed} on worker {shoal.rank()}; it is run again", file=sys.stderr)
                continue
            rows.append(torch.cat([torch.tensor([task], dtype=weights.dtype), trained])[None])
        for part in shoal.collectives.all_gather(torch.cat(rows), timeout_s=120):
            done |= {int(row[0]): row[1:] for row in part}
        if len(done) == args.tasks:
            return torch.stack([done[task] for task in range(args.tasks)]).mean(0)
    raise SystemExit(f"some tasks failed {MAX_ATTEMPTS} times")


def main() -> None:
    parser = argparse.ArgumentParser(description="Average models that tasks train over their partitions.")
    parser.add_argument("--tasks", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--fail-task", type=int, help="have this task fail once, in the first round")
    args = parser.parse_args()

    model, runs = build(), Counter[int]()
    weights = parameters_to_vector(model.parameters()).detach()
    x, y = (torch.cat(parts) for parts in zip(*map(partition, range(args.tasks)), strict=True))
    for number in range(1, args.rounds + 1):
        weights = run_round(weights, number, args, runs)
        vector_to_parameters(weights.clone(), model.parameters())
        print(f"round {number}: loss {nn.functional.cross_entropy(model(x), y).item():.4f}")
    times = shoal.collectives.all_reduce(torch.tensor([runs[task] for task in range(args.tasks)]))
    again = {task: count - args.rounds for task, count in enumerate(times.tolist()) if count > args.rounds}
    print(f"{args.tasks} tasks, each run {args.rounds} times; run again: {again or 'none'}")
    print(f"weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
