"""A sample of weight k counts as k samples, whatever the loss and however the batch is cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loss import CASES, N, labels, logits
from torch import nn

from shoal.errors import TrainingError
from shoal.parallel.loss import loss_rule


def branching(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    error = ((output - target) ** 2).mean()
    return error if float(error.detach()) < 1e9 else error * 0


def knowing(output: torch.Tensor, target: torch.Tensor, sample_weight: Any = None) -> Any:
    each = ((output - target) ** 2).mean(1)
    return each.mean() if sample_weight is None else (each * sample_weight).sum() / sample_weight.sum()


MORE = {
    "a loss that branches on a value": (branching, logits(), logits().flip(0)),
    "a loss that knows of weights": (knowing, logits(), logits().flip(0)),
    "rows of several positions": (
        nn.CrossEntropyLoss(),
        logits().repeat_interleave(3, 0),
        labels(masked=True).repeat_interleave(3),
    ),
    "kl over elements": (nn.KLDivLoss(reduction="mean"), logits().log_softmax(1), logits().softmax(1)),
}


def replicated(tensor: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows = tensor.shape[0] // N
    return tensor.reshape(N, rows, *tensor.shape[1:]).repeat_interleave(weights, 0).flatten(0, 1)


@pytest.mark.parametrize("case", [*CASES, *MORE])
@settings(max_examples=10, deadline=None)
@given(
    weights=st.lists(st.integers(0, 3), min_size=N, max_size=N).filter(sum),
    cuts=st.sets(st.integers(1, N - 1), max_size=2),
)
def test_a_weight_of_k_counts_as_k_samples_also_in_slices(
    case: str, weights: list[int], cuts: set[int]
) -> None:
    loss, output, target = (CASES | MORE)[case]
    rule, weight = loss_rule(loss), torch.tensor(weights)
    more = int(weight.sum())
    expected, count = rule(replicated(output, weight), replicated(target, weight), more, more)
    rows, total, counted = output.shape[0] // N, torch.zeros((), dtype=torch.float64), 0.0
    for begin, end in itertools.pairwise([0, *sorted(cuts), N]):
        one, other = output[begin * rows : end * rows], target[begin * rows : end * rows]
        part, part_count = rule(one, other, end - begin, N, weight[begin:end].double())
        total, counted = total + part, counted + part_count
    torch.testing.assert_close(total / counted, expected / count, equal_nan=True)  # all masked is no number


def test_the_gradient_is_that_of_the_weighted_mean() -> None:
    weight = torch.linspace(0.1, 3, N, dtype=torch.float64)
    for loss in (nn.MSELoss(), lambda output, target: ((output - target) ** 2).mean(), branching):
        output = logits().requires_grad_()
        total, count = loss_rule(loss)(output, logits().flip(0), N, N, weight)
        (total / count).backward()
        by_hand = logits().requires_grad_()
        each = ((by_hand - logits().flip(0)) ** 2).mean(1)
        ((each * weight).sum() / weight.sum()).backward()
        torch.testing.assert_close(output.grad, by_hand.grad)


def test_rows_that_belong_to_no_sample_are_refused() -> None:
    weight = torch.ones(N, dtype=torch.float64)
    with pytest.raises(TrainingError, match="which weight belongs to which"):
        loss_rule(nn.MSELoss())(logits()[:-1], logits()[:-1], N, N, weight)
    with pytest.raises(TrainingError, match="sample_weight"):
        loss_rule(lambda output, target: output.mean())(logits()[:-1], logits()[:-1], N, N, weight)
