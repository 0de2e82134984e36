"""Local SGD, `ddp --sync-every k`: every worker makes k steps of its own on its slices, then the models are averaged.

In between nothing is sent. A sync sends each worker's difference to the last
common model (the anchor) through the buckets, the compressor and the exchange
of `ddp`. The average difference is the gradient of an outer optimizer: plain
SGD of rate 1 for the average itself, Nesterov momentum for DiLoCo. See
docs/adr/0022.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.collectives.compression.compressor import compressor
from shoal.collectives.gradients import GradientExchange, Sums
from shoal.collectives.reducer import gather_any
from shoal.config.choices import OUTERS
from shoal.config.job import Job
from shoal.data.slice import Slice
from shoal.errors import ConfigError, TrainingError
from shoal.parallel import residuals
from shoal.parallel.ddp import Ddp
from shoal.parallel.local_sgd import optimizers as own_optimizers
from shoal.parallel.local_sgd.early_sync import EarlySync
from shoal.parallel.protocol import ControlFlags, LossSum, Piece, PieceReader, StepResult, TrainJob
from shoal.parallel.state import state_pieces
from shoal.parallel.step_result import contribution, decide
from shoal.parallel.update import clip, drop_gradients, gradients_of, scale


@dataclass(slots=True)
class SyncRound:
    """A worker's sums since the last sync."""

    num_steps: int = 0
    num_global: int = 0
    """Samples of all workers' slices."""

    num_local: float = 0.0
    """Samples of this worker's."""

    loss_total: float = 0.0
    count: float = 0.0
    """The count of this worker's losses: its weight in the average."""

    num_skipped: int = 0
    wants_checkpoint: bool = False


def average(trained: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """A full step to the average of the workers' models (local SGD)."""
    return torch.optim.SGD(trained, lr=1.0)


def nesterov(trained: Sequence[nn.Parameter], lr: float, momentum: float) -> torch.optim.Optimizer:
    """A step with Nesterov momentum towards that average (DiLoCo)."""
    return torch.optim.SGD(trained, lr=lr, momentum=momentum, nesterov=True)


class LocalSgd(Ddp):
    """Weights and buffers are equal on all ranks where `has_diverged` is False; the state of inner optimizers never is."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        assert job.sync_every is not None
        self.holds_parts = True
        self._sync_every = job.sync_every
        self._outer_choice = OUTERS.parse(job.outer)
        self._round = SyncRound()
        self._early_sync: EarlySync
        self._trained: list[nn.Parameter] = []
        self._anchor: list[Tensor] = []
        self._outer: torch.optim.Optimizer | None = None

    @property
    def has_diverged(self) -> bool:
        """Whether weights differ from worker to worker at present."""
        return self._round.num_steps > 0

    def _build(self, job: TrainJob, *, borrowed_run_back: bool = False) -> None:
        super()._build(job, borrowed_run_back=borrowed_run_back)
        self._trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if self._trained and self._outer is None:
            choice, settings = self._outer_choice
            self._outer = choice.load()(self._trained, **settings)

    def _make_gradients(self, model: nn.Module) -> Sums:
        # Of differences, which are dense where gradients may be rows.
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return GradientExchange(trained, sparse=frozenset(), compressor=compressor(self._compress))

    # ---- a step, alone --------------------------------------------------------------------------

    def forward_backward(self, batch: Slice) -> LossSum:
        """Compute this worker's gradients, for itself."""
        if not self.has_diverged:
            self._exchange.watch_buffers()
            self._save_anchor()
            self._early_sync = self._next_early_sync()
        self._exchange.keep_buffers()
        self._batch = batch
        self._mine = self._compute.forward_backward(batch, rank=self._data_rank, step=self.step)
        if self._job.on_nonfinite == "skip" and not math.isfinite(self._mine.read()):
            return dataclasses.replace(self._mine, outputs=None)  # left out: nor do metrics count it
        return self._mine

    def commit(self) -> StepResult:
        """Step alone; after the last step of a round, meet."""
        assert self.optimizer is not None
        control, mine = self._job.control, self._round
        mine.wants_checkpoint |= control.checkpoint
        vector = contribution(
            rank=self._rank,
            num_workers=self._num_workers,
            loss_total=self._mine.read(),
            count=self._mine.count,
            control=ControlFlags(),  # those are heard when all meet
        )
        gradients = gradients_of(self._parameters)
        alone, factor = clip(self._job, decide(vector), gradients, self._batch.num_global)
        if alone.applied:
            scale(gradients, factor)
            self.optimizer.step()
        drop_gradients(self._parameters)
        if not alone.applied:
            self._exchange.restore_buffers()
            if self._job.on_nonfinite == "raise":
                return alone  # which ends the job: nobody waits to meet
        self._count(alone)
        if not self._early_sync.is_now(mine.num_steps):
            # The others go on whatever happened here; sums are told once all are known.
            return dataclasses.replace(alone, loss_total=0.0, count=0.0, applied=True, nonfinite=())
        control.leave |= mine.num_steps < self._sync_every  # or nobody would meet by now
        return dataclasses.replace(self._sync(), grad_norm=alone.grad_norm)

    def _count(self, alone: StepResult) -> None:
        mine = self._round
        mine.num_steps += 1
        mine.num_global += self._batch.num_global
        mine.num_local += self._batch.share * self._batch.num_global
        if alone.applied:
            mine.loss_total += alone.loss_total
            mine.count += alone.count
        else:
            mine.num_skipped += 1
        self._exchange.forget_buffers()
        self.step += 1

    def _next_early_sync(self) -> EarlySync:
        return EarlySync(
            name=f"leaving/{self._job.number}/{self.step}",
            rank=self._rank,
            num_workers=self._num_workers,
            last_step=self._sync_every,
        )

    def _save_anchor(self) -> None:
        with torch.no_grad():
            if not self._anchor:
                self._anchor = [parameter.detach().clone() for parameter in self._trained]
            else:
                torch._foreach_copy_(self._anchor, [parameter.detach() for parameter in self._trained])

    # ---- meeting --------------------------------------------------------------------------------

    def sync(self) -> StepResult | None:
        """Have one model now, whatever is left of the round; None where there is one already."""
        return self._sync() if self.has_diverged else None

    def _sync(self) -> StepResult:
        mine, control = self._round, self._job.control
        control.checkpoint |= mine.wants_checkpoint
        # As gradients do, differences leave divided by samples; what was really counted corrects it afterwards.
        weight = mine.count / mine.num_global
        with torch.no_grad():
            for parameter, anchor in zip(self._trained, self._anchor, strict=True):
                parameter.grad = (anchor - parameter).mul_(weight)
        self._refuse_nonfinite()
        total = torch.tensor(mine.loss_total, dtype=torch.float64)
        loss = LossSum(total, mine.count, None)
        self._exchange.contribute(
            loss, mine.num_local / mine.num_global, control, besides=[float(mine.num_skipped)]
        )
        sync = self._group.exchange("a step", timeout=self._early_sync)
        for attempt in sync.attempts():
            with attempt as group:
                self._exchange.start(group)
                self._exchange.finish(group)
            if attempt.is_broken:
                self._exchange.abandon()
        verdict: StepResult = sync.result if sync.is_replayed else sync.finish(self._step_from_anchor())
        control.checkpoint = False
        return verdict

    def _step_from_anchor(self) -> StepResult:
        """Step from the anchor by the average difference: the same bits on every rank."""
        vector = self._exchange.write_buffers()
        verdict = dataclasses.replace(decide(vector[:-1]), num_skipped=int(vector[-1]))
        factor = self._round.num_global / verdict.count if verdict.count else 0.0
        with torch.no_grad():
            for parameter, anchor in zip(self._trained, self._anchor, strict=True):
                parameter.copy_(anchor)
                if parameter.grad is not None and factor != 1.0:
                    parameter.grad.mul_(factor)
        if self._outer is not None:
            self._outer.step()
        drop_gradients(self._parameters)
        self._round = SyncRound()
        return verdict

    def _refuse_nonfinite(self) -> None:
        """One worker's weights that are not finite would spoil everybody's."""
        for name, parameter in self._job.model.named_parameters():
            if parameter.requires_grad and not parameter.isfinite().all():
                raise TrainingError(
                    f"the weights of worker {self._rank} are not finite at step {self.step} ('{name}' first): one of its last "
                    f"{self._round.num_steps} steps had a gradient that was not. Nothing was averaged, so checkpoints hold none of "
                    "it; go on from the newest with clip_norm=1.0, a lower learning rate or on_nonfinite='skip'."
                )

    # ---- state ----------------------------------------------------------------------------------

    def common_pieces(self) -> Iterator[Piece]:
        """Weights, buffers, the outer optimizer's momentum, and what a compressor keeps. Collective."""
        if self.has_diverged:
            raise ConfigError(
                f"a checkpoint was asked for {self._round.num_steps} steps after the workers last met, where each has weights of "
                "its own. Nothing was written; call trainer.wish_checkpoint() instead, which saves when they meet."
            )
        yield from state_pieces(self._job.model, None)
        if self._outer is not None:
            yield from own_optimizers.outer_pieces(self._job.model, self._outer)
        if self._buckets is not None and self._buckets.compressor is not None:
            yield from residuals.pieces(self._buckets.compressor, self.gather)

    def own_pieces(self) -> Iterator[Piece]:
        """The state of this worker's optimizer."""
        if self.optimizer is not None:
            yield from own_optimizers.pieces(
                self._job.model, self.optimizer, rank=self._rank, num_workers=self._num_workers
            )

    def state(self) -> Iterator[Piece]:
        """The common state and every worker's optimizer, on rank 0. Collective."""
        yield from self.common_pieces()
        yield from own_optimizers.gathered(
            self.own_pieces(), self._gather_for_disk, rank=self._rank, num_workers=self._num_workers
        )

    def load(self, pieces: PieceReader) -> None:
        """This worker's own optimizer state where there were as many workers; else the average of all."""
        self._round = SyncRound()
        tensors = own_optimizers.of_rank(pieces.tensors, self._rank, self._num_workers)
        super().load(dataclasses.replace(pieces, tensors=tensors))
        if self._outer is not None and pieces.optimizer_settings is not None:
            own_optimizers.load_outer(self._job.model, self._outer, pieces.tensors)

    def _gather_for_disk(self, value: Tensor | None) -> list[Tensor]:
        """As `gather`, but kept for nobody: whoever dies takes all back to a snapshot."""
        exchange, gathered = self._group.exchange(), list[Tensor]()
        for attempt in exchange.attempts():
            with attempt as group:
                gathered = gather_any(group, value)
        if not exchange.is_replayed:
            exchange.finish(None)
        return gathered
