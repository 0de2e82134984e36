"""One step's exchange, decision and update of summed gradients.

`StepExchange` is the sum over a group's ranks that commits a step: a small vector (losses, counts,
control flags, flags of changed buffers) and BatchNorm's running statistics are sent before backward
and overlap with it; gradients are sent bucket by bucket while it runs; changed buffers follow. A
rank's contribution stays apart from the sums, so a broken exchange is retried from it. `decide` is
pure; every rank's loss has its own place in the vector, so a NaN names its rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.collectives.gradients import GradientExchange
from shoal.collectives.reducer import Reducer
from shoal.errors import ConfigError, PeerLost
from shoal.parallel.buffers import ChangingBuffers, RunningStatistics, have_buffers
from shoal.parallel.protocol import ControlFlags, LossSum, StepResult, TrainJob
from shoal.parallel.state import norm_of

_COUNT, _STOP, _CHECKPOINT, _LEAVE, _LOSSES = range(5)


def contribution(
    *, rank: int, num_workers: int, loss_total: float, count: float, control: ControlFlags
) -> Tensor:
    """One rank's vector; `decide` reads the sum of all."""
    losses = [0.0] * num_workers
    losses[rank] = loss_total
    return torch.tensor(
        [count, float(control.stop), float(control.checkpoint), float(control.leave), *losses],
        dtype=torch.float64,
    )


def decide(vector: Tensor) -> StepResult:
    """StepResult from the summed vector."""
    values = vector.tolist()
    losses = values[_LOSSES:]
    count = values[_COUNT]
    # Added in rank order: the same bits on every rank, whichever route the vector took.
    nonfinite: tuple[tuple[int, float], ...] = ()
    if all(map(math.isfinite, losses)):
        total = math.fsum(losses)
    else:
        total = sum(losses)
        nonfinite = tuple((rank, loss) for rank, loss in enumerate(losses) if not math.isfinite(loss))
    return StepResult(
        loss=total / count if count else math.nan if nonfinite else 0.0,
        loss_total=total,
        count=count,
        applied=not nonfinite and math.isfinite(count),
        grad_norm=None,  # `clip` knows it, where it is measured
        stop=values[_STOP] > 0,
        checkpoint=values[_CHECKPOINT] > 0,
        leave=values[_LEAVE] > 0,
        nonfinite=nonfinite,
    )


_MOST_BATCHES = 1 << 24


def as_loss(run_back: tuple[int, int] | None) -> Tensor:
    """`Slice.run_back` in the place of a loss, which a loop of the script's own does not tell; 0 if it is not known."""
    taken, run = run_back or (0, 0)
    return torch.tensor(float(taken * _MOST_BATCHES + run), dtype=torch.float64)


def decide_in_loop(vector: Tensor) -> StepResult:
    """`decide` where ranks sent `as_loss`: refuses a backward, or a step, that some ranks left out."""
    told = {
        rank: divmod(int(value), _MOST_BATCHES)
        for rank, value in enumerate(vector[_LOSSES:].tolist())
        if value and math.isfinite(value)
    }
    first = min(told, default=0)
    for rank, (taken, run) in told.items():
        if (taken, run) != told[first]:
            raise ConfigError(
                f"since the last step worker {first} took {told[first][0]} batches and ran backward() on {told[first][1]} of them, and worker {rank} "
                f"took {taken} and ran it on {run}: a backward or a step was left out by what a worker's own slice gives (`if loss.item() < 2: "
                "loss.backward()`, say), where one process decides once for the whole batch. Nothing was saved; decide by a number that all "
                "workers have, shoal.reduce(...) of it, or run backward() on every worker, of loss * 0 where a slice is to count nothing."
            )
    without = vector.clone()
    without[_LOSSES:] *= 0.0  # what is not finite stays so
    return decide(without)


def merge_turns(results: Sequence[StepResult]) -> StepResult:
    """Result of a step in which several optimizers took turns: the norm is the last one's, the loss the sum of theirs.

    A skipped turn is left out, unless all were skipped.
    """
    if len(results) == 1:
        return results[0]
    last = results[-1]
    counted = [each for each in results if each.applied] or results
    loss, count = sum(each.loss for each in counted), counted[-1].count
    return dataclasses.replace(
        last,
        loss=loss,
        loss_total=loss * count,
        count=count,
        applied=any(each.applied for each in results),
        stop=any(each.stop for each in results),
        checkpoint=any(each.checkpoint for each in results),
        leave=any(each.leave for each in results),
        nonfinite=tuple(one for each in results for one in each.nonfinite),
    )


def besides_of(named: Mapping[str, tuple[float, float]]) -> list[float]:
    """Named parts of a loss, for the vector: the same names on every rank."""
    return [number for name in sorted(named) for number in named[name]]


def with_named(result: StepResult, names: Collection[str], sums: Sequence[float]) -> StepResult:
    """The result, with means of the summed `besides_of`."""
    if not names:
        return result
    pairs = zip(sorted(names), zip(sums[::2], sums[1::2], strict=True), strict=True)
    named = tuple((name, total / count if count else math.nan) for name, (total, count) in pairs)
    return dataclasses.replace(result, named=named)


class StepExchange:
    """Contribution and sums of the present step, of one model on one rank."""

    def __init__(
        self,
        model: nn.Module,
        gradients: GradientExchange | None,
        *,
        rank: int,
        num_workers: int,
        data_rank: int | None = None,
        counts_loss: bool = True,
        counts_buffers: bool = True,
        losses_last: bool = False,
    ) -> None:
        """
        Args:
            gradients: None until the buckets are known, and where backward itself sums (fsdp, tp, pp).
            data_rank: which part of the batch this rank computes, where several ranks compute one.
            counts_loss: of the ranks that compute the same part of a batch, one counts.
            counts_buffers: of the ranks that run the same layers on the same part, one counts.
            losses_last: losses and flags wait for `finish`: without them no other rank can end the step.
        """
        self.gradients = gradients
        self._model, self._rank, self._num_workers = model, rank, num_workers
        self._data_rank = rank if data_rank is None else data_rank
        self._counts_loss, self._counts_buffers, self._losses_last = counts_loss, counts_buffers, losses_last
        self._statistics, self._changing = RunningStatistics(model), ChangingBuffers(model)
        self._modules = list(model.modules())
        self._works: list[Any] = []
        self._are_kept = False
        self.is_broken = False
        """Whether a peer was lost in `start`: backward runs to its end first, then `finish` raises."""
        self.buffers_before: dict[str, Tensor] = {}
        """Buffers as of the last commit: a donor sends these, and a skipped step returns to them."""

    # ---- buffers around a forward ------------------------------------------------------------------

    def begin_step(self) -> None:
        """Before the first forward of a step: keep the buffers, and watch which of them change."""
        if not self._are_kept:  # else another batch of the same step
            self.keep_buffers()
            self.watch_buffers()

    def keep_buffers(self) -> None:
        """Keep the buffers before a forward writes into them."""
        self._are_kept = True
        if not have_buffers(self._modules):
            return
        constants = self._changing.constants()
        self.buffers_before = {
            name: buffer.clone()
            for name, buffer in self._model.named_buffers()
            if id(buffer) not in constants
        }

    def watch_buffers(self) -> None:
        self._changing.look()

    def restore_buffers(self) -> None:
        """Undo the forwards since `keep_buffers`."""
        for name, buffer in self._model.named_buffers():
            if name in self.buffers_before:
                buffer.copy_(self.buffers_before[name])

    def forget_buffers(self) -> None:
        """The step is over."""
        self.buffers_before, self._are_kept = {}, False

    # ---- one exchange ------------------------------------------------------------------------------

    def contribute(
        self,
        loss: LossSum,
        share: float,
        flags: ControlFlags,
        *,
        besides: Sequence[float] = (),
        with_gradients: bool = True,
    ) -> None:
        """Record this rank's contribution: everything but the gradients is known. `besides` is summed with the losses."""
        counted = self._counts_loss
        self.vector = contribution(
            rank=self._rank,
            num_workers=self._num_workers,
            loss_total=loss.read() if counted else 0.0,
            count=loss.count if counted else 0.0,
            control=flags,
        )
        self.names = sorted(loss.named)
        named = besides_of(loss.named) if counted else [0.0] * (2 * len(self.names))
        besides = [*besides, *named, *(self._changing.flags() if self._changing else ())]
        if besides:
            self.vector = torch.cat([self.vector, torch.tensor(besides, dtype=torch.float64)])
        self._share = share if self._counts_buffers else 0.0
        self._my_statistics = (
            self._statistics.contribution(share, counts=self._counts_buffers) if self._statistics else None
        )
        self._with_gradients = with_gradients

    def start(self, group: Reducer) -> None:
        """Send copies of the contribution; from now on gradients are sent as backward makes them."""
        self.is_broken = False
        self._vector_sum = self.vector.clone()
        self._works = [] if self._losses_last else [group.start_all_reduce(self._vector_sum)]
        if self._my_statistics is not None:
            self._statistics_sum = self._my_statistics.clone()
            self._works.append(group.start_all_reduce(self._statistics_sum))
        if self._with_gradients and self.gradients is not None:
            self.gradients.arm(group)

    def finish(self, group: Reducer) -> None:
        """Wait for all sums. Until the last one has arrived, every gradient is this rank's own."""
        if self.is_broken:
            raise PeerLost(rank=self._rank, operation="the exchange of losses", reason="a peer went away")
        for work in self._works:
            group.finish(work, "the exchange of losses and statistics")
        sums = self.gradients if self._with_gradients else None
        if sums is not None:
            sums.send_rest()
        if self._losses_last:
            group.finish(group.start_all_reduce(self._vector_sum), "the exchange of losses")
        # All ranks read from the summed flags which buffers changed on any rank.
        flags = self._vector_sum[len(self._vector_sum) - len(self._changing) :].tolist()
        self._changed = [number for number, flag in enumerate(flags) if flag]
        if self._changed:
            self._changed_sum = self._changing.contribution(
                self._changed, share=self._share, rank=self._data_rank if self._counts_buffers else -1
            )
            group.finish(group.start_all_reduce(self._changed_sum), "the exchange of buffers")
        if sums is not None:
            sums.finish()

    def abandon(self) -> None:
        """Drop every reference to the group; contribution and gradients stay."""
        self._works = []
        if self.gradients is not None:
            self.gradients.abandon()

    def write_buffers(self) -> Tensor:
        """Write the buffers that all ranks agreed on; returns the sum of the other values."""
        self._works = []
        if self._statistics:
            self._statistics.write(self._statistics_sum)
        if self._changed:
            self._changing.write(self._changed, self._changed_sum)
        return self._vector_sum[: len(self._vector_sum) - len(self._changing)]


def clip(
    job: TrainJob,
    result: StepResult,
    divisor: float,
    norm: Callable[[], float],
) -> tuple[StepResult, float]:
    """Decide whether the step is applied; returns the factor that corrects and clips its gradients.

    `norm` measures the whole gradient, where the job asks for it.
    """
    if not result.applied:
        return result, 0.0
    # Backward divided by samples. The loss's real count was exchanged with it; mostly it is the same.
    factor = correction(job, divisor, result.count)
    if job.measures_norm:
        measured = factor * norm()
        result = dataclasses.replace(result, grad_norm=measured, applied=math.isfinite(measured))
        factor *= clip_factor(job, measured)
    return result, factor


def correction(job: TrainJob, divisor: float, count: float) -> float:
    """Factor for a gradient that backward divided by `divisor`, the samples mostly, and multiplied by the loss scale."""
    return divisor / count / job.scale if count else 0.0


def scale(gradients: Iterable[Tensor], factor: float) -> None:
    if factor != 1.0:
        for gradient in gradients:
            # A factor is the same for every part, and each operation on a DTensor costs its dispatch.
            (gradient._local_tensor if isinstance(gradient, DTensor) else gradient).mul_(factor)


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def gradient_norm(gradients: Iterable[Tensor], squares_of_rows: float = 0.0) -> float:
    """Norm of the whole gradient: of tensors, and of rows whose sum of squares is known."""
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
    """Factor for a gradient of this norm, as in torch.nn.utils.clip_grad_norm_."""
    return min(1.0, job.clip_norm / (norm + 1e-6)) if job.clip_norm is not None else 1.0
