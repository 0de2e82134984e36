"""Gradients summed over the ranks while backward runs, each in its place of the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lockstep import with_ranks
from torch import Tensor, nn

from shoal.collectives.gradients import GradientExchange
from shoal.errors import TrainingError


class Net(nn.Module):
    """Some weights are used by every rank, some by one, one by none; of two precisions, and rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4).double()
        self.single = nn.Linear(4, 4)
        self.on_rank_1 = nn.Linear(4, 4).double()
        self.never = nn.Parameter(torch.ones(5))
        self.table = nn.Embedding(6, 4, sparse=True).double()
        self.unseen = nn.Embedding(6, 4, sparse=True).double()

    def forward(self, x: Tensor, ids: Tensor, rank: int) -> Tensor:
        out = self.first(x).tanh() + self.table(ids)
        out = out + self.single(out.float()).double()
        if rank == 1:
            out = self.on_rank_1(out)
        return out.pow(2).sum()


def net() -> Net:
    """The same weights every time, also when ranks build it at once: threads share torch's generator."""
    model, generator = Net(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def inputs(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, 6, (5,), generator=generator)
    return torch.randn(5, 3, dtype=torch.float64, generator=generator), ids


def exchange_of(model: nn.Module, sparse: tuple[str, ...] = ("table.weight", "unseen.weight")) -> Any:
    return GradientExchange(list(model.named_parameters()), sparse=frozenset(sparse))


def summed(num_workers: int, step: int) -> dict[str, Tensor | None]:
    """What one process gets from all ranks' losses together."""
    model = net()
    for rank in range(num_workers):
        model(*inputs(rank, step), rank).backward()
    return {name: p.grad.to_dense() if p.grad is not None else None for name, p in model.named_parameters()}


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_every_rank_holds_the_sum_and_none_where_nobody_had_a_gradient(num_workers: int) -> None:
    def run(group: Any) -> list[dict[str, Tensor | None]]:
        model = net()
        exchange = exchange_of(model)
        steps = []
        for step in range(3):
            exchange.arm(group)
            model(*inputs(group.rank, step), group.rank).backward()
            exchange.finish()
            steps.append(
                {
                    n: p.grad.to_dense().clone() if p.grad is not None else None
                    for n, p in model.named_parameters()
                }
            )
            for parameter in model.parameters():
                parameter.grad = None
        return steps

    for steps in with_ranks(num_workers, run):
        for step, gradients in enumerate(steps):
            for name, expected in summed(num_workers, step).items():
                found = gradients[name]
                if expected is None:
                    assert found is None, name
                else:
                    assert found is not None
                    torch.testing.assert_close(found, expected, msg=name)


def test_only_what_comes_after_arming_is_sent() -> None:
    def run(group: Any) -> Tensor:
        model = net()
        exchange = exchange_of(model)
        model(*inputs(group.rank, 0), group.rank).backward()  # accumulates; nothing leaves yet
        exchange.arm(group)
        model(*inputs(group.rank, 0), group.rank).backward()
        exchange.finish()
        assert model.first.weight.grad is not None
        return model.first.weight.grad.clone()

    expected = summed(2, 0)["first.weight"]
    assert expected is not None
    for found in with_ranks(2, run):
        torch.testing.assert_close(found, 2 * expected)


def test_a_rank_that_ran_no_backward_sends_nothing_and_gets_the_sum() -> None:
    def run(group: Any) -> dict[str, Tensor | None]:
        model = net()
        exchange = exchange_of(model)
        exchange.arm(group)
        if group.rank == 0:
            model(*inputs(0, 0), 0).backward()
        exchange.finish()
        return {n: p.grad.to_dense() if p.grad is not None else None for n, p in model.named_parameters()}

    for gradients in with_ranks(3, run):
        for name, expected in summed(1, 0).items():
            if expected is None:
                assert gradients[name] is None, name
            else:
                torch.testing.assert_close(gradients[name], expected, msg=name)


def test_a_rank_keeps_its_own_contribution_apart_from_the_sum() -> None:
    def run(group: Any) -> bool:
        weight = nn.Parameter(torch.ones(2))
        exchange = GradientExchange([("w", weight)], sparse=frozenset())
        exchange.arm(group)
        (weight * (group.rank + 1)).sum().backward()
        mine = weight.grad
        assert mine is not None
        exchange.finish()
        assert weight.grad is not None
        return mine.tolist() == [group.rank + 1.0] * 2 and weight.grad.tolist() == [3.0, 3.0]

    assert with_ranks(2, run) == [True, True]


def test_gradients_that_cannot_be_laid_out_are_refused_by_name() -> None:
    def dense_for_sparse(group: Any) -> None:
        model = net()
        exchange = exchange_of(model)
        exchange.arm(group)
        model.table.weight.sum().backward()
        exchange.finish()

    def sparse_for_dense(group: Any) -> None:
        model = net()
        exchange = exchange_of(model, sparse=())
        exchange.arm(group)
        model(*inputs(0, 0), 0).backward()

    with pytest.raises(TrainingError, match=r"'table.weight' is the weight of an embedding with sparse=True"):
        with_ranks(1, dense_for_sparse)
    with pytest.raises(TrainingError, match=r"gradient of 'table.weight' is sparse"):
        with_ranks(1, sparse_for_dense)


def test_a_gradient_that_was_sent_cannot_change_any_more() -> None:
    def twice(group: Any) -> None:
        weight = nn.Parameter(torch.ones(2))
        exchange = GradientExchange([("w", weight)], sparse=frozenset())
        exchange.arm(group)
        weight.sum().backward()
        weight.sum().backward()

    with pytest.raises(TrainingError, match=r"'w' was finished twice.*use_reentrant=False"):
        with_ranks(1, twice)


def test_closed_it_leaves_the_parameters_alone() -> None:
    def run(group: Any) -> int:
        weight = nn.Parameter(torch.ones(2))
        exchange = GradientExchange([("w", weight)], sparse=frozenset())
        exchange.close()
        exchange.arm(group)
        weight.sum().backward()
        weight.sum().backward()
        return len(weight._post_accumulate_grad_hooks or {})  # type: ignore[attr-defined]

    assert with_ranks(1, run) == [0]
