"""A loss cut over slices is the loss of the whole batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from shoal.errors import ConfigError, LossDoesNotRecombine, TrainingError
from shoal.parallel.loss import loss_rule

N, C = 12, 5


def logits() -> torch.Tensor:
    return torch.randn(N, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def labels(*, masked: bool = False) -> torch.Tensor:
    made = torch.arange(N) * 7 % C
    if masked:
        made[::3] = -100
    return made


def classes() -> torch.Tensor:
    return torch.linspace(0.1, 2.0, C, dtype=torch.float64)


def probabilities() -> torch.Tensor:
    return logits().flip(0).softmax(1)


CASES = {
    "cross entropy": (nn.CrossEntropyLoss(), logits(), labels()),
    "cross entropy, masked": (nn.CrossEntropyLoss(), logits(), labels(masked=True)),
    "cross entropy, masked, weighted": (nn.CrossEntropyLoss(weight=classes()), logits(), labels(masked=True)),
    "cross entropy, smoothed": (
        nn.CrossEntropyLoss(weight=classes(), label_smoothing=0.1),
        logits(),
        labels(masked=True),
    ),
    "cross entropy of probabilities": (nn.CrossEntropyLoss(), logits(), probabilities()),
    "cross entropy over positions": (
        nn.CrossEntropyLoss(ignore_index=0),
        logits().unsqueeze(2).repeat(1, 1, 4),
        labels().unsqueeze(1).repeat(1, 4),
    ),
    "nll": (nn.NLLLoss(weight=classes()), logits().log_softmax(1), labels(masked=True)),
    "bce": (nn.BCELoss(), logits().sigmoid(), logits().flip(0).sigmoid().round()),
    "bce with logits": (nn.BCEWithLogitsLoss(pos_weight=classes()), logits(), probabilities().round()),
    "mse": (nn.MSELoss(), logits(), logits().flip(0)),
    "l1": (nn.L1Loss(), logits(), logits().flip(0)),
    "huber": (nn.HuberLoss(), logits(), logits().flip(0)),
    "smooth l1": (nn.SmoothL1Loss(), logits(), logits().flip(0)),
    "poisson": (nn.PoissonNLLLoss(), logits(), probabilities()),
    "kl, batchmean": (nn.KLDivLoss(reduction="batchmean"), logits().log_softmax(1), probabilities()),
    "soft margin": (nn.SoftMarginLoss(), logits(), logits().flip(0).sign()),
    "multi margin": (nn.MultiMarginLoss(), logits(), labels()),
    "multilabel soft margin": (nn.MultiLabelSoftMarginLoss(), logits(), probabilities().round()),
    "sum": (nn.MSELoss(reduction="sum"), logits(), logits().flip(0)),
    "functional": (F.cross_entropy, logits(), labels(masked=True)),
    "a callable": (lambda output, target: ((output - target) ** 2).mean(), logits(), logits().flip(0)),
    "a pair": (
        lambda output, target: (((output - target) ** 2)[:, :2].sum(), output.shape[0] * 2),
        logits(),
        logits().flip(0),
    ),
}


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(1, N - 1), max_size=3))
def test_sums_of_slices_divided_by_their_counts_give_the_loss_of_the_batch(case: str, cuts: set[int]) -> None:
    loss, output, target = CASES[case]
    rule = loss_rule(loss)
    edges = [0, *sorted(cuts), N]
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for begin, end in itertools.pairwise(edges):
        part, counted = rule(output[begin:end], target[begin:end], end - begin, N)
        total, count = total + part, count + counted
    whole = loss(output, target)
    whole = whole[0] / whole[1] if isinstance(whole, tuple) else whole
    torch.testing.assert_close(total / count, whole, rtol=1e-12, atol=1e-12)


def test_a_masked_mean_of_the_users_own_is_refused_with_the_cure() -> None:
    def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept = target != -100
        return F.cross_entropy(output[kept], target[kept])

    uneven = labels()
    uneven[:4] = -100
    with pytest.raises(LossDoesNotRecombine, match=r"return a pair \(sum, count\)") as caught:
        loss_rule(masked).check(logits(), uneven, N)
    assert caught.value.name == "masked"
    assert caught.value.whole != pytest.approx(caught.value.recombined)


def test_a_plain_mean_of_the_users_own_passes_the_check() -> None:
    rule = loss_rule(lambda output, target: ((output - target) ** 2).mean())
    rule.check(logits(), logits().flip(0), N)
    assert rule(logits(), logits(), N, N)[1] == N


def test_a_loss_over_something_that_cannot_be_cut_is_refused() -> None:
    rule = loss_rule(lambda output, target: output.mean())
    with pytest.raises(TrainingError, match="cannot be cut"):
        rule.check(torch.zeros(()), labels(), N)


def test_a_loss_of_the_whole_output_needs_no_target() -> None:
    rule = loss_rule(lambda output: (output[0] - output[1]).pow(2).mean())
    total, count = rule((logits(), logits().flip(0)), None, N, N)
    assert count == N
    assert total == pytest.approx(float((logits() - logits().flip(0)).pow(2).mean()) * N)


def test_a_loss_per_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match="reduction='none'"):
        loss_rule(nn.MSELoss(reduction="none"))
    with pytest.raises(TrainingError, match="one number"):
        loss_rule(lambda output, target: (output - target).sum(1))(logits(), logits(), N, N)


def test_something_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be callable"):
        loss_rule("mse")


def test_class_weights_follow_the_model_to_its_precision() -> None:
    rule = loss_rule(nn.CrossEntropyLoss(weight=classes().float()))
    total, count = rule(logits(), labels(), N, N)
    expected = F.cross_entropy(logits(), labels(), weight=classes().float().double())
    torch.testing.assert_close(total / count, expected)
