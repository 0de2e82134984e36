"""Losses that compare samples are told from means over samples by their gradients, in any precision and at any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.data.slice import Slice
from shoal.errors import LossComparesSamples, LossDoesNotRecombine
from shoal.parallel import compute as compute_module
from shoal.parallel.compute import Compute
from shoal.parallel.loss import StepLoss, loss_rule
from shoal.parallel.protocol import TrainJob

C = 6
Loss = Callable[[Tensor, Tensor], Any]


def labels(num: int) -> Tensor:
    return torch.arange(num) * 7 % C


def numbers(num: int) -> Tensor:
    return torch.randn(num, C, generator=torch.Generator().manual_seed(2))


def bits(num: int) -> Tensor:
    return (numbers(num) > 0.8).float()


def signs(num: int) -> Tensor:
    return torch.where(numbers(num) > 0, 1.0, -1.0)


def focal(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output, target, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def dice_of_samples(output: Tensor, target: Tensor) -> Tensor:
    p = output.sigmoid()
    return (1 - (2 * (p * target).sum(1) + 1) / (p.sum(1) + target.sum(1) + 1)).mean()


def triplet(output: Tensor, target: Tensor) -> Tensor:
    target = target.to(output.dtype)
    return F.triplet_margin_loss(output, target, target.roll(1, 1))


def distillation(output: Tensor, target: Tensor) -> Tensor:
    return (
        F.kl_div(
            F.log_softmax(output / 2, 1), F.softmax(target.to(output.dtype) / 2, 1), reduction="batchmean"
        )
        * 4
    )


def quantile(output: Tensor, target: Tensor) -> Tensor:
    error = target - output
    return torch.maximum(0.9 * error, -0.1 * error).mean()


def arcface(output: Tensor, target: Tensor) -> Tensor:
    cosine = F.normalize(output, dim=1)
    margin = F.one_hot(target, C) * 0.5
    return F.cross_entropy(10 * torch.cos(torch.acos(cosine.clamp(-0.999, 0.999)) + margin), target)


def structured(output: Tensor, target: Tensor) -> Tensor:
    """As a linear chain: the score of all paths minus that of the one given."""
    return (torch.logsumexp(output.cumsum(1), 1) - output.gather(1, target[:, None])[:, 0]).mean()


def masked_in_samples(output: Tensor, target: Tensor) -> Tensor:
    kept = target > 0
    return (((output - target) ** 2 * kept).sum(1) / kept.sum(1).clamp(min=1)).mean()


def entropy_of_samples(output: Tensor, target: Tensor) -> Tensor:
    p = output.softmax(1)
    return F.cross_entropy(output, target) + 0.1 * (p * p.log()).sum(1).mean()


def weighted_by_class(output: Tensor, target: Tensor) -> Tensor:
    """Divided by the samples, not by their weights."""
    weight = torch.linspace(0.5, 2, C, dtype=output.dtype)
    return (F.cross_entropy(output, target, reduction="none") * weight[target]).mean()


def ordinal(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, (torch.arange(C) < target[:, None]).to(output.dtype))


def gaussian(output: Tensor, target: Tensor) -> Tensor:
    return F.gaussian_nll_loss(output, target.to(output.dtype), F.softplus(output) + 0.1)


def huge(output: Tensor, target: Tensor) -> Tensor:
    return ((output * 1e3 - target) ** 2).mean()


def converged(output: Tensor, target: Tensor) -> Tensor:
    """Of samples that are all right: in float32 the gradients are rounding."""
    return focal(output + 30 * F.one_hot(target, C), target)


def in_float32(output: Tensor, target: Tensor) -> Tensor:
    return focal(output.float(), target)


def with_constants_in_float32(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float() @ torch.eye(C), target)


def pair(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    kept = target > 1
    return F.cross_entropy(output, target, reduction="none")[kept].sum(), int(kept.sum())


def mean_of(module: nn.Module) -> Loss:
    return lambda output, target: (
        1.0 * module(output, target.to(output.dtype) if target.is_floating_point() else target)
    )


MEANS: dict[str, tuple[Loss, Callable[[int], Tensor]]] = {
    "cross entropy": (mean_of(nn.CrossEntropyLoss()), labels),
    "label smoothing": (mean_of(nn.CrossEntropyLoss(label_smoothing=0.1)), labels),
    "mse": (mean_of(nn.MSELoss()), numbers),
    "l1": (mean_of(nn.L1Loss()), numbers),
    "huber": (mean_of(nn.HuberLoss()), numbers),
    "smooth l1": (mean_of(nn.SmoothL1Loss(beta=0.3)), numbers),
    "bce": (mean_of(nn.BCEWithLogitsLoss()), bits),
    "soft margin": (mean_of(nn.SoftMarginLoss()), signs),
    "hinge embedding": (mean_of(nn.HingeEmbeddingLoss()), signs),
    "poisson": (mean_of(nn.PoissonNLLLoss()), bits),
    "multilabel": (mean_of(nn.MultiLabelSoftMarginLoss()), bits),
    "log cosh": (lambda output, target: torch.log(torch.cosh(output - target)).mean(), numbers),
    "cosine": (
        lambda output, target: (1 - F.cosine_similarity(output, target.to(output.dtype))).mean(),
        numbers,
    ),
    "median": (lambda output, target: (output - target).abs().median(1).values.mean(), numbers),
    "focal": (focal, labels),
    "dice of samples": (dice_of_samples, bits),
    "triplet": (triplet, numbers),
    "distillation": (distillation, numbers),
    "quantile": (quantile, numbers),
    "arcface": (arcface, labels),
    "structured": (structured, labels),
    "masked in samples": (masked_in_samples, numbers),
    "entropy of samples": (entropy_of_samples, labels),
    "weighted by class": (weighted_by_class, labels),
    "ordinal": (ordinal, labels),
    "gaussian": (gaussian, numbers),
    "huge": (huge, numbers),
    "converged": (converged, labels),
    "in float32": (in_float32, labels),
    "constants in float32": (with_constants_in_float32, labels),
    "pair": (pair, labels),
}


def dice(output: Tensor, target: Tensor) -> Tensor:
    p = output.sigmoid()
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


def correlation(output: Tensor, target: Tensor) -> Tensor:
    a, b = output - output.mean(), target - target.mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm())


def concordance(output: Tensor, target: Tensor) -> Tensor:
    a, b = output.mean(), target.mean()
    return 1 - 2 * ((output - a) * (target - b)).mean() / (output.var() + target.var() + (a - b) ** 2)


COMPARING: dict[str, tuple[Loss, Callable[[int], Tensor]]] = {
    "dice": (dice, bits),
    "bce and dice": (lambda o, t: F.binary_cross_entropy_with_logits(o, t.to(o.dtype)) + dice(o, t), bits),
    "correlation": (correlation, numbers),
    "concordance": (concordance, numbers),
    "rmse": (lambda output, target: ((output - target) ** 2).mean().sqrt(), numbers),
    "entropy of the mean": (
        lambda o, t: F.cross_entropy(o, t) + 0.01 * ((q := o.softmax(1).mean(0)) * q.log()).sum(),
        labels,
    ),
    "negatives of the batch": (
        lambda o, t: F.cross_entropy(o, t) + 0.001 * F.cross_entropy(o @ o.T, torch.arange(len(o))),
        labels,
    ),
    "variance": (lambda o, t: ((o - t) ** 2).mean() + 1e-3 * o.var(0).mean(), numbers),
    "a pair of them": (lambda output, target: (dice(output, target) * len(output), len(output)), bits),
}


@pytest.mark.parametrize("num", [5, 64, 1003])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_samples_passes(name: str, dtype: torch.dtype, num: int) -> None:
    loss, target = MEANS[name]
    output = torch.randn(num, C, generator=torch.Generator().manual_seed(1)).to(dtype)
    loss_rule(loss).check(output, target(num), num)


@pytest.mark.parametrize("num", [64, 1024, 8192])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COMPARING)
def test_a_loss_that_compares_samples_is_refused_at_any_size(name: str, dtype: torch.dtype, num: int) -> None:
    loss, target = COMPARING[name]
    if name == "negatives of the batch" and num > 1024:
        num = 1024  # a matrix of them all
    output = torch.randn(num, C, generator=torch.Generator().manual_seed(1)).to(dtype)
    with pytest.raises((LossComparesSamples, LossDoesNotRecombine)):
        loss_rule(loss).check(output, target(num), num)


def test_the_refusal_names_the_loss_its_gap_and_the_cure() -> None:
    with pytest.raises(
        LossComparesSamples, match=r"the loss 'dice' compares.*shoal\.gather\(output\)"
    ) as caught:
        loss_rule(dice).check(torch.randn(512, C, generator=torch.Generator().manual_seed(1)), bits(512), 512)
    assert 1e-5 < caught.value.gap < 0.1


def test_a_loss_that_draws_random_numbers_is_not_judged_by_its_gradients() -> None:
    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2 * (1 + 1e-6 * torch.rand_like(output))).mean()

    loss_rule(noisy).check(torch.randn(64, C), numbers(64), 64)


def test_a_gradient_that_is_not_finite_at_an_edge_says_nothing() -> None:
    loss_rule(lambda output, target: (output - target).pow(2).sum(1).sqrt().mean()).check(
        numbers(8), numbers(8), 8
    )


def test_without_gradients_values_alone_are_compared() -> None:
    with torch.no_grad():
        loss_rule(dice).check(torch.zeros(512, C), bits(512)[:1].expand(512, C), 512)


class Experts(nn.Module):
    """Routes by a softmax; a balance of the experts' load over the batch is added to the loss."""

    def __init__(self, coefficient: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.router = nn.Linear(C, 4)
        self.experts = nn.ModuleList(nn.Linear(C, 4) for _ in range(4))
        self.coefficient = coefficient

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        p = self.router(x).softmax(-1)
        logits = sum((p[:, at : at + 1] * each(x) for at, each in enumerate(self.experts)), torch.zeros(()))
        load = F.one_hot(p.argmax(-1), 4).to(p.dtype).mean(0)
        return {"loss": F.cross_entropy(logits, labels) + self.coefficient * 4 * (p.mean(0) * load).sum()}


@pytest.mark.parametrize(("coefficient", "is_named"), [(1e-2, True), (0.0, False)])
def test_a_balance_of_experts_too_small_to_show_in_the_loss_is_named(
    coefficient: float, is_named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    compute_module._note_drift.cache_clear()
    model, num = Experts(coefficient), 512
    run = Compute(
        TrainJob(model=model, loss=loss_rule("model"), build_optimizer=None),
        check_loss=True,
        check_mixing="ddp",
    )
    run.forward_backward(Slice({"x": numbers(num), "labels": labels(num) % 4}, num, 2 * num), rank=0, step=0)
    assert ("compares samples of a batch" in capsys.readouterr().err) == is_named
    assert all(torch.isfinite(each.grad).all() for each in model.parameters() if each.grad is not None)


def test_a_step_of_the_scripts_own_that_compares_samples_is_refused() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(C, 16), nn.Tanh(), nn.Linear(16, C))

    def training_step(model: nn.Module, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1]) + dice(model(batch[0]), batch[1])

    job = TrainJob(model=model, loss=StepLoss(), build_optimizer=None, training_step=training_step)
    few = 12
    with pytest.raises((LossComparesSamples, LossDoesNotRecombine)):
        Compute(job, check_loss=True).forward_backward(
            Slice((numbers(few), bits(few)), few, 2 * few), rank=0, step=0
        )
