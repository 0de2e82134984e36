"""Clipping and correction of summed gradients, at the end of a commit.

The same for every strategy that holds the summed gradient, divided by the
samples of the global batch. Applies nothing: the strategy calls the optimizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.parallel.protocol import StepResult, TrainJob
from shoal.parallel.sharded_tensors import norm_of


def clip(
    job: TrainJob,
    verdict: StepResult,
    gradients: Sequence[Tensor],
    num_global: int,
    *,
    squares_of_rows: float = 0.0,
    norm: Callable[[], float] | None = None,
) -> tuple[StepResult, float]:
    """Decide whether the step is applied; returns the factor that corrects and clips its gradients.

    `norm` where other ranks hold gradients of other parameters: the norm over all of them.
    """
    if not verdict.applied:
        return verdict, 0.0
    # Backward divided by samples. What the loss really counted travelled with it; mostly it is the same.
    factor = num_global / verdict.count if verdict.count else 0.0
    if job.measures_norm:
        measured = factor * (norm() if norm is not None else gradient_norm(gradients, squares_of_rows))
        verdict = dataclasses.replace(verdict, grad_norm=measured, applied=math.isfinite(measured))
        factor *= clip_factor(job, measured)
    return verdict, factor


def scale(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply in place; a factor of 1 costs nothing."""
    if factor != 1.0:
        for gradient in gradients:
            gradient.mul_(factor)


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Those that there are."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """After a commit no parameter has a gradient."""
    for parameter in parameters:
        parameter.grad = None


def gradient_norm(gradients: Iterable[Tensor], squares_of_rows: float = 0.0) -> float:
    """The norm of all of it: of tensors, and of rows whose sum of squares is known."""
    dense = [
        gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
        for gradient in gradients
    ]
    if any(isinstance(gradient, DTensor) for gradient in dense):
        norm = norm_of(dense)
    else:
        norm = float(nn.utils.get_total_norm(dense)) if dense else 0.0
    return math.sqrt(norm**2 + squares_of_rows) if squares_of_rows else norm


def clip_factor(job: TrainJob, norm: float) -> float:
    """What to multiply a gradient of this norm with, as torch.nn.utils.clip_grad_norm_ does."""
    return min(1.0, job.clip_norm / (norm + 1e-6)) if job.clip_norm is not None else 1.0
