"""`single`: one process, no exchange. The reference for every exact strategy."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shoal.config.job import Job
from shoal.data.slice import Slice
from shoal.data.tree import Tree, concatenate
from shoal.parallel.buffers import ChangingBuffers, RunningStatistics
from shoal.parallel.compute import Compute
from shoal.parallel.protocol import LossSum, Piece, PieceReader, StepResult, TrainJob
from shoal.parallel.state import HashedRows, load_state, state_pieces
from shoal.parallel.step import (
    besides_of,
    clip,
    contribution,
    decide,
    drop_gradients,
    gradient_norm,
    gradients_of,
    scale,
    with_named,
)
from shoal.recovery.replay_log import ReplayLog
from shoal.runtime import recorder


def for_job(job: Job) -> Single:
    """The strategy of one process; under `shoal verify`, the reference for several workers."""
    return Single(num_slices=job.verify.num_slices if job.verify else 1)


class Single:
    """Trains in this process alone.

    With `num_slices` above one it runs every batch as that many workers would: slice by slice, with
    the workers' seeds and each slice's own batch statistics. That is the reference for layers that
    mix the batch or draw random numbers.
    """

    def __init__(self, *, num_slices: int = 1, rank: int = 0) -> None:
        self._num_slices, self._rank = num_slices, rank
        self.optimizer: torch.optim.Optimizer | None = None
        self._rows: HashedRows | None = None
        self.step = 0
        self.replay_log: ReplayLog | None = None

    def prepare(self, job: TrainJob) -> None:
        self._job = job
        job.model.to(job.device)
        is_divided = self._num_slices > 1 or job.num_micro > 1
        self._compute = Compute(job, check_loss=is_divided, divides_by_count=not is_divided)
        self._statistics = RunningStatistics(job.model)
        self._changing = ChangingBuffers(job.model)
        self._kept: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self._parameters = list(job.model.parameters())
        if job.build_optimizer is not None and self.optimizer is None:
            self.optimizer = job.build_optimizer(job.model)
            self._rows = HashedRows(job.model, self.optimizer, number=job.number)

    def forward_backward(self, batch: Slice) -> LossSum:
        if self._statistics and self._job.may_skip:
            self._kept = self._statistics.keep()
        if self._num_slices == 1:
            self._contributed = self._compute.forward_backward(batch, rank=self._rank, step=self.step)
        else:
            self._contributed = self._slice_by_slice(batch)
        self._divisor = self._compute.divisor(self._contributed.count, batch.num_global)
        return self._contributed

    def about_to_run(self) -> None:
        """Nothing to keep: no other process needs this one's state."""

    def weigh(self, batch: Slice) -> None:
        """Every slice is the whole batch."""

    def sum_gradients(self, batch: Slice) -> None:
        """This process has the whole gradient."""

    def adopt(self, batch: Slice) -> None:
        """Take gradients that the user's own backward computed."""
        self._contributed = LossSum(torch.zeros(()), float(batch.num_global if batch.num_local else 0), None)
        self._divisor = batch.num_global

    def commit(self) -> StepResult:
        assert self.optimizer is not None
        job, contributed = self._job, self._contributed
        vector = contribution(
            rank=0,
            num_workers=1,
            loss_total=contributed.read(),
            count=contributed.count,
            control=job.control,
        )
        rows, gradients = self._rows, gradients_of(self._parameters)
        assert rows is not None
        squares = rows.sum_of_squares() if job.measures_norm else 0.0
        decided = with_named(decide(vector), contributed.named, besides_of(contributed.named))
        result, factor = clip(job, decided, self._divisor, lambda: gradient_norm(gradients, squares))
        if result.applied:
            with recorder.APPLY:
                scale(gradients, factor)
                rows.apply(factor)  # before any hook that follows the optimizer
                self.optimizer.step()
        else:
            rows.drop_gradients()
            if self._kept is not None:
                self._statistics.take_back(self._kept)
        if not job.is_own_loop:  # a loop clears them itself, and may read them before
            drop_gradients(self._parameters)
        self.step += 1
        return result

    def forward(self, batch: Slice) -> Tree:
        return self._compute.forward(batch, rank=0)

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values.detach().clone()

    def gather(self, value: torch.Tensor | None) -> list[torch.Tensor]:
        return [value.detach() if value is not None else torch.empty(0)]

    def state(self) -> Iterator[Piece]:
        return state_pieces(self._job.model, self.optimizer)

    def load(self, pieces: PieceReader) -> None:
        load_state(self._job.model, self.optimizer, pieces)

    def _slice_by_slice(self, batch: Slice) -> LossSum:
        statistics, changing = self._statistics, self._changing
        everything = list(range(len(changing)))
        kept = changing.contribution(everything, share=1.0, rank=0) if changing else None
        changed, merged = set[int](), torch.zeros_like(kept) if kept is not None else None
        before = statistics.flat() if statistics else None
        averaged = torch.zeros_like(before) if before is not None else None
        counts = statistics.counts()
        results = []
        for rank, part in enumerate(batch.by_worker(self._num_slices)):
            if before is not None:
                statistics.write(before)
                statistics.write_counts(counts)
            if kept is not None:
                changing.write(everything, kept)
                changing.look()
            results.append(self._compute.forward_backward(part, rank=rank, step=self.step))
            if merged is not None:
                changed |= {number for number, flag in enumerate(changing.flags()) if flag}
                merged += changing.contribution(everything, share=part.share, rank=rank)
            if averaged is not None:
                averaged += statistics.flat() * part.share
        if averaged is not None:
            statistics.write(averaged)
        if kept is not None and merged is not None:
            changing.write(everything, merged if changed else kept)
        outputs = [result.outputs for result in results if result.outputs is not None]
        return LossSum(
            total=torch.stack([result.total for result in results]).sum(),
            count=sum(result.count for result in results),
            outputs=concatenate(outputs),
        )
