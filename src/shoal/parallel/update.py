"""The end of a commit where a rank holds the whole gradient: correct, clip, decide, update.

The same for one process and for `ddp`: both hold the summed gradient by now,
divided by the samples of the global batch. Rows of HashEmbeddings come with it
where they are in this process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.parallel.hashed_rows import HashedRows
from shoal.parallel.protocol import TrainJob, Verdict
from shoal.parallel.sharded_tensors import norm_of


def update(
    job: TrainJob,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    verdict: Verdict,
    num_global: int,
    rows: HashedRows | None = None,
    norm_of: Callable[[], float] | None = None,
) -> Verdict:
    """Apply the step, or leave it out; the gradients are gone afterwards.

    `norm_of` where other ranks have gradients of other parameters: the norm over all of them.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if verdict.applied:
        # Backward divided by samples. What the loss really counted travelled with it; mostly it is the same.
        factor = num_global / verdict.count if verdict.count else 0.0
        if job.clip_norm is not None or job.on_nonfinite == "skip":
            squares = rows.sum_of_squares() if rows is not None else 0.0
            norm = factor * (norm_of() if norm_of is not None else gradient_norm(gradients, squares))
            verdict = dataclasses.replace(verdict, grad_norm=norm, applied=math.isfinite(norm))
            factor *= clip_factor(job, norm)
    if verdict.applied:
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        if rows is not None:
            rows.apply(factor)  # before whatever follows the optimizer by a hook of its own
        optimizer.step()
    elif rows is not None:
        rows.drop_gradients()
    for parameter in parameters:
        parameter.grad = None
    return verdict


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
