"""Synchronised BatchNorm: mean and variance of the whole batch over all ranks.

torch has one for GPUs alone; this one needs only a sum over the ranks. Forward gathers each rank's
count, mean and squared deviations, backward sums the two terms that go through mean and variance.
Parameters and buffers keep their names: a layer changes its class and nothing else.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal import system
from shoal.collectives.exchanges import TorchP2P
from shoal.collectives.reducer import Native, Reducer, Threaded
from shoal.collectives.schemes import broadcast
from shoal.collectives.shm import Shm
from shoal.config.job import Job
from shoal.errors import ConfigError


class RanksOfBatch:
    """Collectives of the ranks that share a batch, for their BatchNorm layers."""

    def __init__(self, *, rank: int, num_ranks: int, add_up: Callable[[Tensor], None]) -> None:
        """`add_up` sums a float64 tensor of the CPU over the ranks in place, with the same bits on all of them."""
        self.rank, self.num_ranks = rank, num_ranks
        self._add_up = add_up
        self.is_borrowed = False
        """Whether the current sample only keeps this rank in step: then it is not counted."""

    def gather(self, mine: Tensor) -> Tensor:
        """A row of every rank, in their order."""
        rows = torch.zeros(self.num_ranks, mine.numel(), dtype=torch.float64)
        rows[self.rank] = mine
        self._add_up(rows)  # the others contribute zeros: every row stays unchanged
        return rows

    def sum(self, mine: Tensor) -> Tensor:
        total = mine.to("cpu", torch.float64, copy=True)
        self._add_up(total)
        return total


class _Normalised(torch.autograd.Function):
    """Forward and backward of one layer, each with one sum over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: RanksOfBatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        # Half precision is for storing: sums need more.
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        num_here = 0 if ranks.is_borrowed else x.numel() // x.shape[1]
        mean = wide.mean(dims) if num_here else torch.zeros(x.shape[1], dtype=wide.dtype, device=x.device)
        squares = (wide - _wide(mean, x)).square().sum(dims) if num_here else torch.zeros_like(mean)
        mine = torch.cat([torch.tensor([float(num_here)], dtype=torch.float64), *_on_cpu(mean, squares)])
        count, mean64, squares64 = _combined(ranks.gather(mine))
        if count <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {int(count)} over all workers"
            )
        variance = squares64 / count
        inverse = (variance + eps).rsqrt().to(device=x.device, dtype=wide.dtype)
        centred = (wide - _wide(mean64.to(x.device, wide.dtype), x)) * _wide(inverse, x)
        out = centred
        if weight is not None:
            out = out * _wide(weight.to(wide.dtype), x)
        if bias is not None:
            out = out + _wide(bias.to(wide.dtype), x)
        ctx.save_for_backward(centred, inverse, weight)
        ctx.ranks, ctx.count, ctx.is_borrowed = ranks, count, ranks.is_borrowed
        unbiased = squares64 / (count - 1)
        ctx.mark_non_differentiable(mean64, unbiased)
        return out.to(x.dtype), mean64, unbiased

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        centred, inverse, weight = ctx.saved_tensors
        wide = gradient.to(centred.dtype)
        dims = [dim for dim in range(wide.dim()) if dim != 1]
        of_bias, of_weight = wide.sum(dims), (wide * centred).sum(dims)
        mine = torch.cat(_on_cpu(of_bias, of_weight))
        sums = ctx.ranks.sum(torch.zeros_like(mine) if ctx.is_borrowed else mine)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        if ctx.is_borrowed:
            inside = wide  # mean and variance do not depend on it
        else:
            over_all, with_all = (sums / ctx.count).to(wide.device, wide.dtype).chunk(2)
            inside = wide - _wide(over_all, wide) - centred * _wide(with_all, wide)
        of_input = (inside * _wide(scale, wide)).to(gradient.dtype) if ctx.needs_input_grad[0] else None
        # The parameters' gradients are this rank's alone: they are summed with all the others.
        return (
            of_input,
            of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            of_bias if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


class SyncedBatchNorm(_BatchNorm):
    """A synchronised BatchNorm layer, made from a plain one by `synchronise`."""

    ranks: RanksOfBatch

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            # Without running statistics this normalises the local batch: ranks do not evaluate in step.
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        out, mean, variance = _Normalised.apply(input, self.weight, self.bias, self.eps, self.ranks)  # type: ignore[no-untyped-call]
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            factor = 0.0 if self.momentum is None else self.momentum
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if self.momentum is None:
                    factor = 1.0 / float(self.num_batches_tracked)
            with torch.no_grad():
                for running, new in ((self.running_mean, mean), (self.running_var, variance)):
                    running.mul_(1 - factor).add_(new.to(running.device, running.dtype), alpha=factor)
        normalised: Tensor = out
        return normalised


def synchronise(model: nn.Module, ranks: RanksOfBatch) -> list[str]:
    """Convert the model's BatchNorm layers in place; returns their names."""
    names = []
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        kind = type(module)
        if not isinstance(module, SyncedBatchNorm):
            if kind.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                raise ConfigError(
                    f"the layer '{name}' is a {kind.__name__}, a BatchNorm with a forward of its own, so shoal cannot tell what it "
                    "does with the sums of other workers. Nothing was trained; use torch's own BatchNorm there, or leave "
                    "--batchnorm sync out."
                )
            module.__class__ = type(f"Synced{kind.__name__}", (SyncedBatchNorm, kind), {})
        module.ranks = ranks  # type: ignore[assignment]
        names.append(name)
    return names


def _combined(rows: Tensor) -> tuple[float, Tensor, Tensor]:
    """Count, mean and squares about the mean over all ranks, from each rank's; adding squares themselves would cancel."""
    counts = rows[:, :1]
    means, squares = rows[:, 1:].chunk(2, dim=1)
    count = float(counts.sum())
    if not count:
        return 0.0, means[0], squares[0]
    mean = (counts * means).sum(0) / count
    return count, mean, (squares + counts * (means - mean).square()).sum(0)


def _on_cpu(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().to("cpu", torch.float64) for tensor in tensors]


def _wide(channels: Tensor, like: Tensor) -> Tensor:
    """A value per channel, to be used with a batch."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))


_TAG = 1  # of point-to-point messages: apart from what the exchange of gradients sends meanwhile


class BatchNormRanks(RanksOfBatch):
    """Ranks of the data axes, whose reducer is made anew in every view.

    Separate from that of the gradients: buckets are sent when their gradients are ready, which may
    differ between ranks, and collectives are matched by their order.
    """

    def __init__(self, job: Job, ranks: Sequence[int], is_broken: Callable[[], bool]) -> None:
        super().__init__(rank=list(ranks).index(job.rank), num_ranks=len(ranks), add_up=self._over_ranks)
        self._job, self._ranks, self._is_broken = job, list(ranks), is_broken
        self._way: Reducer | None = None
        self._view: int | None = None

    def enter(self, view: int) -> None:
        """Before a forward: drop the reducer of another view. Collective in a new one."""
        if view == self._view:
            return
        self.leave()
        group = Native(rank=self._job.rank, num_workers=self._job.num_workers, is_broken=self._is_broken)
        if self._job.num_hosts == 1 and system.IS_LINUX and platform.machine() in ("x86_64", "AMD64"):
            self._way = Shm.open(self._job, group, self._ranks)
        else:
            p2p = TorchP2P(group, self._ranks, tag=_TAG)
            self._way = Threaded(group, lambda flat: broadcast.all_reduce(p2p, flat))
        self._view = view

    def leave(self) -> None:
        if self._way is not None:
            self._way.close()
        self._way, self._view = None, None

    def _over_ranks(self, tensor: Tensor) -> None:
        assert self._way is not None, "entered before the forward"
        self._way.finish(self._way.start_all_reduce(tensor), "the sums of BatchNorm")
