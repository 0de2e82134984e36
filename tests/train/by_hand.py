"""Plain PyTorch to compare the Trainer with, and small models and data for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shoal

N = 37  # with batches of 10 the last one has 7


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


X = numbers(N, 6, seed=1)
LABEL = torch.arange(N) * 5 % 4
IDS = torch.arange(N * 3).reshape(N, 3) * 7 % 20


def dataset(*arrays: Any) -> shoal.Dataset:
    return shoal.Dataset.from_arrays(arrays if arrays else (X, LABEL))


def batches(size: int = 10, *arrays: Any) -> Any:
    return dataset(*arrays).shuffle(seed=4).batch(size)


def mlp(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()


class Rows(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.head = nn.Embedding(20, 5, sparse=sparse), nn.Linear(5, 4)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids).sum(1))
        return out


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def trainer(model: Any = None, **options: Any) -> shoal.Trainer:
    settings = {"loss": nn.CrossEntropyLoss(), "optimizer": sgd, "progress": False, **options}
    return shoal.Trainer(model if model is not None else mlp(), **settings)


def train(
    model: nn.Module,
    data: Any,
    *,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Tensor] = nn.functional.cross_entropy,
    epochs: int = 2,
    after_backward: Callable[[], object] = lambda: None,
    after_step: Callable[[Tensor], object] = lambda value: None,
    after_epoch: Callable[[], object] = lambda: None,
) -> list[float]:
    """The loop everybody writes; returns the loss of each step."""
    losses = []
    model.train()
    for _ in range(epochs):
        for inputs, target in data:
            optimizer.zero_grad()
            value = loss(model(inputs), target)
            value.backward()  # type: ignore[no-untyped-call]
            after_backward()
            optimizer.step()
            after_step(value.detach())
            losses.append(float(value.detach()))
        after_epoch()
    return losses


def assert_same(one: nn.Module, other: nn.Module, *, tolerance: float = 1e-12) -> None:
    theirs = other.state_dict()
    assert one.state_dict().keys() == theirs.keys()
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=tolerance, atol=tolerance, msg=name)


def assert_same_bits(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
