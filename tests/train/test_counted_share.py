"""The share of a slice that a loss counts, read off its graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.errors import ConfigError
from shoal.train.custom.counted_share import counted_share

LABELS = torch.tensor([0, 1, -100, 2, 3, -100, 1, -100])
KEPT = LABELS >= 0
ROWS = KEPT.nonzero()[:, 0]
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])
SHARE_OF_WEIGHTS = float(WEIGHTS[LABELS[KEPT]].sum()) / 8


def each(output: Tensor) -> Tensor:
    return F.cross_entropy(output, LABELS, reduction="none")


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
    "a root": (lambda o: F.mse_loss(o, o.detach() + 1).sqrt(), 1.0),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_loss_counts_a_share_of_the_slice(name: str) -> None:
    loss, expected = COUNTED[name]
    output = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).requires_grad_() * 1.0
    assert counted_share([loss(output)], 8) == pytest.approx(expected, rel=1e-6)


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "a penalty": lambda o: F.cross_entropy(o, LABELS) + o.square().mean(),
    "two heads": lambda o: F.cross_entropy(o, LABELS) + F.cross_entropy(o, LABELS.roll(1).clamp(min=0)),
    "in a stack": lambda o: torch.stack([F.cross_entropy(o, LABELS), o.mean()]).sum(),
    "in a root": lambda o: F.cross_entropy(o, LABELS).sqrt(),
    "a product": lambda o: F.cross_entropy(o, LABELS) * o.square().mean(),
    "of no sample": lambda o: F.cross_entropy(torch.cat([o, o[:3] + 1]), LABELS.clamp(min=0).repeat(2)[:11]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_loss_of_parts_that_count_differently_is_refused(name: str) -> None:
    output = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).requires_grad_() * 1.0
    with pytest.raises(ConfigError, match=r"shoal\.mean\(sum, count\)"):
        counted_share([UNKNOWN[name](output)], 8)
