"""A pass without updates: exact over all samples, in the order of the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import LABEL, N, X, assert_same_bits, dataset, mlp, numbers, trainer, weights
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.data.slice import bounds
from shoal.errors import EmptyDataset, TrainingError
from shoal.train.evaluation import _in_data_order


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), num_workers=st.integers(1, 5))
def test_rows_of_all_ranks_are_laid_back_into_the_order_of_the_data(
    sizes: list[int], num_workers: int
) -> None:
    whole = torch.arange(sum(sizes))
    parts, own_sizes = [], []
    for rank in range(num_workers):
        own = [part[slice(*bounds(len(part), rank, num_workers))] for part in whole.split(sizes)]
        parts.append(torch.cat(own))
        own_sizes.append([len(part) for part in own])
    assert torch.equal(_in_data_order(parts, own_sizes), whole)


@pytest.mark.parametrize("size", [1, 7, 10, 37, 100])
def test_evaluate_is_the_mean_over_all_samples_at_any_batch_size(size: int) -> None:
    masked = LABEL.clone()
    masked[::5] = -100
    weight = torch.tensor([0.1, 1.0, 2.0, 5.0]).double()
    run = trainer(loss=nn.CrossEntropyLoss(weight=weight), optimizer=None)
    with torch.no_grad():
        expected = float(F.cross_entropy(run.model(X), masked, weight=weight))
    assert run.evaluate(dataset(X, masked).batch(size))["loss"] == pytest.approx(expected, rel=1e-12)


def test_evaluating_changes_nothing_and_draws_the_same_every_time() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(mlp(), nn.BatchNorm1d(4).double(), nn.Dropout(0.5))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x)
            return out + torch.randn_like(out)

    model = Draws()
    run = trainer(model, metrics=["accuracy"])
    before = weights(model)
    first, predicted = run.evaluate(dataset().batch(10)), run.predict(dataset().batch(10))
    torch.manual_seed(123)
    assert run.evaluate(dataset().batch(10)) == first
    assert torch.equal(run.predict(dataset().batch(10)), predicted)
    assert_same_bits(weights(model), before)
    assert not predicted.requires_grad


def test_predict_keeps_the_shape_of_what_the_model_returns() -> None:
    class Returns(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"twice": x * 2, "pair": (x[:, 0], [x.long()]), "name": "kept"}

    run = trainer(Returns(), loss=lambda output: output["twice"].mean(), optimizer=None)
    predicted = run.predict(shoal.Dataset.from_arrays(X).batch(8))
    assert torch.equal(predicted["twice"], X * 2)
    assert torch.equal(predicted["pair"][0], X[:, 0])
    assert torch.equal(predicted["pair"][1][0], X.long())
    assert predicted["name"] == "kept"


def test_outputs_without_a_row_per_sample_cannot_be_put_in_order() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    with pytest.raises(TrainingError, match=r"shape \(\) for 10 samples.*one row per sample"):
        trainer(Mean(), loss=lambda output: output, optimizer=None).predict(
            shoal.Dataset.from_arrays(X).batch(10)
        )


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_an_empty_dataset_is_named_by_the_call_it_was_given_to(call: str) -> None:
    empty = dataset(numbers(0, 6, seed=1), torch.zeros(0, dtype=torch.int64)).batch(10)
    with pytest.raises(EmptyDataset) as raised:
        getattr(trainer(), call)(empty)
    assert raised.value.what == call
    assert f"given to {call} has no samples" in str(raised.value)


def test_an_empty_validation_set_is_named_before_the_first_step() -> None:
    run = trainer()
    with pytest.raises(EmptyDataset, match="given to validation_data has no samples"):
        run.fit(dataset().batch(10), validation_data=dataset(X[:0], LABEL[:0]).batch(10))
    assert run.step == 0


def test_more_samples_than_one_batch_are_all_counted_once() -> None:
    run = trainer(loss=lambda output, target: (target.double() * 0 + 1).mean(), optimizer=None)
    assert run.evaluate(dataset().batch(8))["loss"] == pytest.approx(1.0)
    assert run.predict(dataset().batch(8)).shape == (N, 4)
