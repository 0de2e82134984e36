"""The share of a slice that a loss counts, read off its graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.errors import ConfigError
from shoal.train.custom.counted_share import LossCounts

LABELS = torch.tensor([0, 1, -100, 2, 3, -100, 1, -100])
KEPT = LABELS >= 0
ROWS = KEPT.nonzero()[:, 0]
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])
SHARE_OF_WEIGHTS = float(WEIGHTS[LABELS[KEPT]].sum()) / 8


def each(output: Tensor) -> Tensor:
    return F.cross_entropy(output, LABELS, reduction="none")


WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


def penalty(weight: Tensor) -> Tensor:
    apart = (weight @ weight.T - torch.eye(4)).square().sum() + weight.norm() + weight.abs().sum()
    return apart + (weight - weight.detach()).pow(2).sum() + torch.stack([weight.norm(), weight.sum()]).norm()


def outputs(num_samples: int = 8) -> Tensor:
    """Of a layer: numbers times weights."""
    weight = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return torch.eye(num_samples) @ weight


def square(output: Tensor) -> Tensor:
    return output.square()


COUNTED: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "ignored": (lambda o: F.cross_entropy(o, LABELS), 5 / 8),
    "nll": (lambda o: F.nll_loss(o.log_softmax(-1), LABELS), 5 / 8),
    "scaled": (lambda o: 64.0 * F.cross_entropy(o, LABELS) / 3, 5 / 8),
    "smoothed": (lambda o: F.cross_entropy(o, LABELS, label_smoothing=0.1), 5 / 8),
    "in bfloat16": (lambda o: F.cross_entropy(o.bfloat16(), LABELS).float(), 5 / 8),
    "class weights": (lambda o: F.cross_entropy(o, LABELS, WEIGHTS), SHARE_OF_WEIGHTS),
    "smoothed class weights": (
        lambda o: F.cross_entropy(o, LABELS, WEIGHTS, label_smoothing=0.1),
        SHARE_OF_WEIGHTS,
    ),
    "two dimensions": (
        lambda o: F.cross_entropy(o.reshape(2, 4, 4).mT, LABELS.reshape(2, 4)),
        5 / 8,
    ),
    "nothing kept": (lambda o: F.cross_entropy(o, torch.full((8,), -100)), 0.0),
    "rows by mask": (lambda o: F.cross_entropy(o[KEPT], LABELS[KEPT]), 5 / 8),
    "rows by number": (lambda o: F.cross_entropy(o[ROWS], LABELS[ROWS]), 5 / 8),
    "rows selected": (lambda o: F.mse_loss(o.index_select(0, ROWS), o.detach()[ROWS]), 5 / 8),
    "elements by mask": (lambda o: each(o)[KEPT].mean(), 5 / 8),
    "elements selected": (lambda o: each(o).masked_select(KEPT).mean(), 5 / 8),
    "mask multiplied": (lambda o: (each(o) * KEPT).sum() / KEPT.sum(), 5 / 8),
    "mask filled": (lambda o: each(o).masked_fill(~KEPT, 0).sum() / float(KEPT.sum()), 5 / 8),
    "sum divided": (lambda o: F.cross_entropy(o, LABELS, reduction="sum") / 5, 5 / 8),
    "parts that count alike": (
        lambda o: F.cross_entropy(o, LABELS) + 0.5 * (each(o) * KEPT).sum() / KEPT.sum(),
        5 / 8,
    ),
    "whole": (lambda o: F.cross_entropy(o, LABELS.clamp(min=0)), 1.0),
    "whole with a penalty": (lambda o: F.cross_entropy(o, LABELS.clamp(min=0)) + o.square().mean(), 1.0),
    "one of each row": (lambda o: -o.log_softmax(-1)[range(8), LABELS.clamp(min=0)].mean(), 1.0),
    "a mean": (lambda o: square(o).mean(), 1.0),
    "a mean of means": (lambda o: torch.stack([square(o).mean(), o.mean()]).mean(), 1.0),
    "a mean of samples one by one": (
        lambda o: sum(F.cross_entropy(o[i : i + 1], LABELS[i : i + 1].clamp(min=0)) for i in range(8)) / 8,
        1.0,
    ),
    "a stack of samples one by one": (
        lambda o: torch.stack([F.mse_loss(row, row.detach() + 1) for row in o]).mean(),
        1.0,
    ),
    "a sum over the samples": (lambda o: square(o).sum() / len(o), 1.0),
    "a sum over the elements": (lambda o: F.mse_loss(o, o.detach() + 1, reduction="sum") * (1 / 32), 1.0),
    "a sum over what counts": (lambda o: square(o).sum() / KEPT.sum(), 5 / 32),
    "weights divided by their sum": (lambda o: (each(o) * KEPT / KEPT.sum()).sum(), 5 / 8),
    "a mask with a penalty": (lambda o: F.cross_entropy(o, LABELS) + 0.1 * penalty(WEIGHT), 5 / 8),
    "by a learned factor": (lambda o: F.cross_entropy(o, LABELS) * WEIGHT.sum().exp() + WEIGHT.sum(), 5 / 8),
    "a root of each sample": (
        lambda o: torch.stack([F.mse_loss(row, row.detach() + 1).sqrt() for row in o]).mean(),
        1.0,
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_loss_counts_a_share_of_the_slice(name: str) -> None:
    loss, expected = COUNTED[name]
    output = outputs()
    counted = LossCounts().read([loss(output)], (8, 24))
    assert counted.share == pytest.approx(expected, rel=1e-6)
    assert counted.sums == []


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "of elements": lambda o: square(o).sum(),
    "of rows": lambda o: square(o).mean(1).sum(),
    "of torch's own loss": lambda o: F.mse_loss(o, o.detach() + 1, reduction="sum"),
    "of labels": lambda o: F.cross_entropy(o, LABELS, reduction="sum"),
    "of few": lambda o: each(o)[KEPT].sum(),
    "masked": lambda o: (each(o) * KEPT).sum(),
    "by a factor": lambda o: 0.05 * square(o).sum(),
    "by a tensor": lambda o: torch.tensor(0.125) * square(o).sum(),
    "divided by the batch": lambda o: square(o).sum() / 24,
    "labels divided by the batch": lambda o: F.cross_entropy(o, LABELS, reduction="sum") / 24,
    "divided by a constant": lambda o: square(o).sum() / 2.5,
    "of two": lambda o: F.binary_cross_entropy_with_logits(o, o.detach().sigmoid(), reduction="sum") - 0.5 * (1 + o - o.exp()).sum(),
    "a product": lambda o: torch.dot(o.view(-1), o.view(-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_samples_is_that_of_the_batch(name: str) -> None:
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    alone, in_slice = data.clone().requires_grad_(), data.clone().requires_grad_()
    SUMS[name](torch.eye(8) @ alone).backward()
    loss = SUMS[name](torch.eye(8) @ in_slice)
    counted = LossCounts().read([loss], (8, 24))
    assert (counted.share, counted.is_sum) == (1.0, True)
    with counted.whole_sums(3.0):
        loss.backward(retain_graph=True)
    torch.testing.assert_close(in_slice.grad, 3 * alone.grad)
    in_slice.grad = None
    loss.backward()
    torch.testing.assert_close(in_slice.grad, alone.grad)


def test_a_sum_beside_a_mean_and_a_penalty_is_taken_by_itself() -> None:
    output = outputs()
    loss = F.cross_entropy(output, LABELS.clamp(min=0)) + 0.1 * square(output).sum() + penalty(WEIGHT)
    counted = LossCounts().read([loss], (8, 24))
    assert (counted.share, len(counted.sums), counted.is_sum) == (1.0, 1, False)


def test_a_factor_that_was_constant_before_is_no_number_of_samples() -> None:
    counts = LossCounts()
    for num_samples in (8, 2):
        output = outputs(num_samples)
        assert counts.read([-0.5 * output.exp().sum()], (num_samples, 24)).is_sum


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "a penalty": lambda o: F.cross_entropy(o, LABELS) + o.square().mean(),
    "two heads": lambda o: F.cross_entropy(o, LABELS) + F.cross_entropy(o, LABELS.roll(1).clamp(min=0)),
    "in a stack": lambda o: torch.stack([F.cross_entropy(o, LABELS), o.mean()]).sum(),
    "a root": lambda o: F.mse_loss(o, o.detach() + 1).sqrt(),
    "a norm": lambda o: o.norm(),
    "a ratio": lambda o: 1 - 2 * o.sigmoid().sum() / (o.sigmoid() + 1).sum(),
    "a power": lambda o: o.mean() ** 2,
    "an exponential": lambda o: F.cross_entropy(o, LABELS.clamp(min=0)).exp(),
    "the largest": lambda o: square(o).max(),
    "the largest of sums": lambda o: torch.logsumexp(square(o).sum(1), 0),
    "weights that add up to one": lambda o: (square(o) * (torch.arange(32.0).view(8, 4) / 496)).sum(),
    "times what may be one over a count": lambda o: 0.125 * square(o).sum(),
    "divided by what may be a count": lambda o: square(o).sum() / 7,
    "samples one by one, not divided": lambda o: sum(F.mse_loss(row, row.detach() + 1) for row in o),
    "pairs of samples": lambda o: F.cross_entropy(o @ o.T, torch.arange(8)),
    "pairs with a constant": lambda o: F.cross_entropy(o @ o.detach().T / 0.1, torch.arange(8)),
    "of the mean sample": lambda o: (o.mean(0) - torch.arange(4.0)).square().sum(),
    "in a root": lambda o: F.cross_entropy(o, LABELS).sqrt(),
    "a product": lambda o: F.cross_entropy(o, LABELS) * o.square().mean(),
    "of no sample": lambda o: F.cross_entropy(torch.cat([o, o[:3] + 1]), LABELS.clamp(min=0).repeat(2)[:11]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_loss_of_parts_that_count_differently_is_refused(name: str) -> None:
    output = outputs()
    with pytest.raises(ConfigError, match=r"shoal\.(mean\(sum, count\)|gather)"):
        LossCounts().read([UNKNOWN[name](output)], (8, 24))


def test_classes_are_no_samples_and_an_unknown_loss_is_named() -> None:
    output = outputs(4)
    assert LossCounts().read([F.cross_entropy(output @ WEIGHT, torch.arange(4))], (4, 8)).share == 1.0

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

    assert LossCounts().read([2 * Own.apply(output)], (4, 8)).unknown == "OwnBackward"
