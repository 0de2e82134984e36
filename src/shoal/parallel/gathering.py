"""`shoal.gather`: the rows of all workers' slices, for losses over a whole batch (in-batch negatives).

Its backward sums the gradients of every worker's loss for the rows that a worker contributed. Both
are numbered exchanges, so a replaced worker replays them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.collectives.reducer import gather_any, sum_in_rank_order
from shoal.config import job as jobs
from shoal.config import strategy as strategies
from shoal.config.job import Job
from shoal.data.slice import Slice
from shoal.errors import ConfigError
from shoal.recovery.elastic_group import elastic_group


@dataclass(slots=True)
class GatherScope:
    """Slice that a loss is computed on; as a context, for its forward and loss."""

    num_local: int
    weight: float
    """Factor by which this worker's gradients are multiplied after backward."""

    num_micro: int = 1
    is_used: bool = False

    def __enter__(self) -> GatherScope:
        enter(self)
        return self

    def __exit__(self, *raised: object) -> None:
        enter(None)


_scope: GatherScope | None = None


def enter(scope: GatherScope | None) -> None:
    """Set the slice that gathered tensors belong to, in a script's own loop."""
    global _scope
    _scope = scope


def current() -> GatherScope | None:
    return _scope


def over(part: Slice, *, num_micro: int = 1) -> GatherScope:
    """Context for forward and loss of this slice."""
    return GatherScope(part.num_local, 1.0, num_micro)


def gather(tensor: Tensor) -> Tensor:
    """Rows of `tensor` of all workers, in the order of the batch: what one process has for the whole batch.

    For a loss that compares samples of a batch with each other: `loss(shoal.gather(queries),
    shoal.gather(keys))`. It is differentiable. Every worker calls it at the same point; the first
    dimension holds the samples of the slice.
    """
    job, scope = jobs.current(), _scope
    _refuse(job, scope)
    if scope is not None:
        scope.is_used = True
    if job.num_workers == 1:
        return tensor
    assert scope is not None
    num_rows = max(scope.num_local, 1)
    if tensor.dim() == 0 or len(tensor) != num_rows:
        raise ConfigError(
            f"shoal.gather was given a tensor of shape {tuple(tensor.shape)}, and this worker's slice has {num_rows} samples: rows of "
            "the workers would not come in the order of the batch. Nothing of this step was applied; gather tensors with one "
            "row for each sample."
        )
    # A borrowed sample is gathered from its owner.
    rows = tensor if scope.num_local else tensor[:0]
    gathered: Tensor = _Gather.apply(rows, scope.weight)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: float) -> Tensor:
        parts = elastic_group().run(lambda group: gather_any(group, rows), "a gathering")
        ctx.weight, ctx.begin = weight, sum(len(part) for part in parts[: jobs.rank()])
        ctx.num_rows = len(rows)
        return torch.cat([part.to(rows.device).reshape(-1, *rows.shape[1:]) for part in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        mine = gradient * ctx.weight
        total = elastic_group().run(lambda group: sum_in_rank_order(group, mine), "a sum over the workers")
        own = total.to(gradient.device)[ctx.begin : ctx.begin + ctx.num_rows]
        return (own / ctx.weight if ctx.weight else torch.zeros_like(own)), None


def _refuse(job: Job, scope: GatherScope | None) -> None:
    name = strategies.parse(job.strategy)
    axes = name.axes
    why = None
    if job.verify is not None and job.verify.num_slices > 1:
        why = "`shoal verify` runs this model slice by slice in one process, which has no other worker's rows"
    elif scope is not None and scope.num_micro > 1:
        why = "with accumulate= above 1 a loss is of a part of the batch, so a gathered batch would not be whole: leave accumulate out"
    elif job.num_workers > 1 and name.has_servers:
        why = f"the workers of '{job.strategy}' have no connection to each other: use --strategy ddp"
    elif job.num_workers > 1 and axes is not None and (axes.tp != 1 or axes.pp != 1):
        why = f"under '{job.strategy}' several workers compute the same part of a batch: use --strategy ddp or fsdp"
    elif job.sync_every is not None:
        why = f"with --sync-every {job.sync_every} workers train apart: leave it out"
    elif job.num_workers > 1 and job.batchnorm == "sync":
        why = "--batchnorm sync runs a forward again when a worker dies, which a gathering cannot be: leave it out"
    elif job.num_workers > 1 and scope is None:
        why = "it was called outside of a training step: call it in the loss or in the model's forward"
    if why is not None:
        raise ConfigError(
            f"shoal.gather cannot gather the rows of all workers here: {why}. Nothing of this step was applied."
        )
