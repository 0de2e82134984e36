"""Embedding placement: which become rows on servers, and why the others do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import ConfigError
from shoal.parallel.ps import rows as placement
from shoal.parallel.ps.rows import PlacementPlan


class Looks(nn.Module):
    """One embedding, used as `how` says."""

    def __init__(self, table: nn.Module, how: str = "inside") -> None:
        super().__init__()
        self.table, self.how = table, how
        self.head = nn.Linear(4, 10, bias=False)
        if how == "tied":
            self.head.weight = table.weight  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        if self.how == "functional":
            return nn.functional.embedding(ids, self.table.weight)  # type: ignore[arg-type]
        rows = self.table(ids + 1 - 1 if self.how == "computed" else ids)
        if self.how == "penalty":
            return rows.sum() + self.table.weight.norm()  # type: ignore[operator]
        if self.how == "shown":
            return self.head(rows) + self.table.weight.shape[0]  # type: ignore[union-attr]
        return self.head(rows)


def planned(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> PlacementPlan:
    optimizer = optimizer or torch.optim.Adagrad(model.parameters())
    ids = torch.tensor([[1, 2], [3, 1]])
    found = placement.plan(model, optimizer)

    def run() -> None:
        with torch.no_grad():
            model(ids)

    return placement.watch(found, (ids, torch.ones(2)), run)


def table(**options: Any) -> nn.Embedding:
    return nn.Embedding(10, 4, **options)


@pytest.mark.parametrize("how", ["inside", "shown"])
def test_an_embedding_that_only_looks_up_becomes_rows_whose_ids_are_known_ahead(how: str) -> None:
    found = planned(Looks(table(), how))
    assert [(each.name, each.rule.name, each.leaf) for each in found.taken] == [
        ("table.weight", "adagrad", 0)
    ]
    assert found.dense == {}


def test_ids_that_forward_computes_are_not_known_ahead() -> None:
    found = planned(Looks(table(), "computed"))
    assert [each.leaf for each in found.taken] == [None]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Looks(table(), "tied"), "tied to another layer's"),
        (Looks(table(), "penalty"), "used outside of its own lookup"),
        (Looks(table(max_norm=1.0)), "max_norm changes rows in forward"),
        (Looks(table(scale_grad_by_freq=True)), "looks at the whole batch"),
        (Looks(nn.EmbeddingBag(10, 4, mode="max")), "mode='max'"),
        (Looks(table(dtype=torch.bfloat16)).to(torch.bfloat16), "not bfloat16"),
    ],
)
def test_an_embedding_for_which_rows_would_not_do_stays_dense_with_its_reason(
    model: nn.Module, why: str
) -> None:
    found = planned(model)
    assert found.taken == []
    assert why in found.dense["table.weight"]
    assert any("dense, because" in line and why in line for line in placement.describe(found))


def test_a_frozen_embedding_and_one_the_optimizer_does_not_train_stay_dense() -> None:
    model = Looks(table())
    model.table.weight.requires_grad_(False)
    assert "frozen" in planned(model).dense["table.weight"]
    model = Looks(table())
    found = planned(model, torch.optim.Adagrad(model.head.parameters()))
    assert "does not train it" in found.dense["table.weight"]


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), "sgd"),
        (lambda params: torch.optim.Adagrad(params), "adagrad"),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), None),
        (lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1), None),
        (lambda params: torch.optim.Adam(params), None),
        (lambda params: torch.optim.AdamW(params), None),
    ],
)
def test_only_optimizers_that_leave_rows_without_gradient_alone_have_a_rule(
    build: Any, rule: str | None
) -> None:
    model = Looks(table())
    found = planned(model, build(model.parameters()))
    assert [each.rule.name for each in found.taken] == ([rule] if rule else [])
    assert list(found.dense) == ([] if rule else ["table.weight"])


def test_a_weight_looked_up_by_a_function_is_not_the_modules_own_lookup() -> None:
    # The function would read a weight that nobody trains here.
    found = planned(Looks(table(), "functional"))
    assert "table.weight" in found.dense


def test_a_hash_embedding_is_always_rows_and_refuses_an_optimizer_without_a_rule() -> None:
    model = nn.Sequential(shoal.nn.HashEmbedding(4), nn.Linear(4, 1))
    found = placement.plan(model, torch.optim.Adagrad(model.parameters()))
    assert [(each.name, each.group) for each in found.taken] == [("0.rows", -1)]
    with pytest.raises(ConfigError, match="cannot be trained"):
        placement.plan(model, torch.optim.Adam(model.parameters()))
