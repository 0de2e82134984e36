"""Local SGD, `ddp --sync-every k`: every worker makes k steps of its own on its slices, then the models are averaged.

In between nothing is sent. A sync sends each worker's difference to the last
common model (the anchor) through the buckets, the compressor and the exchange
of `ddp`. The average difference is the gradient of an outer optimizer: plain
SGD of rate 1 for the average itself, Nesterov momentum for DiLoCo. See
docs/adr/0022. Pieces in a checkpoint:

    optimizer/<parameter>/<key>                   the average of all: for other strategies, other numbers of workers
    workers/<rank>/optimizer/<parameter>/<key>    each worker's own
    workers/number                                how many they were
    outer/<parameter>                             the outer optimizer's momentum
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.cluster.worker import session
from shoal.collectives.compression import compressor
from shoal.collectives.gradients import GradientExchange
from shoal.collectives.reducer import gather_any, gather_json
from shoal.config.choices import OUTERS
from shoal.config.job import Job
from shoal.data.slice import Slice
from shoal.errors import ClusterError, ConfigError, TrainingError
from shoal.parallel.ddp import Ddp
from shoal.parallel.protocol import (
    ControlFlags,
    LayerPlace,
    LossSum,
    Piece,
    PieceReader,
    StepResult,
    TrainJob,
)
from shoal.parallel.state import OPTIMIZER, LazyTensors, optimizer_pieces, residual_pieces, state_pieces
from shoal.parallel.step import clip, contribution, decide, drop_gradients, gradients_of, scale
from shoal.recovery import rendezvous
from shoal.recovery.rendezvous import ShoalStore
from shoal.runtime import recorder

TIMEOUT_S = 10.0
"""Time for the other workers to finish their step. Beyond it all finish their round: not every worker was asked."""

LOOK_EVERY_S = 0.02


def agree(
    store: ShoalStore,
    *,
    where: str,
    rank: int,
    num_workers: int,
    num_steps: int,
    last_step: int,
    is_over: Callable[[float], bool],
) -> int:
    """The step of the round after which all sync; `last_step` where not every worker reports in time."""
    everybody = [f"{where}/{each}" for each in range(num_workers)]
    decision, began_at = f"{where}/decision", time.monotonic()
    store.set(everybody[rank], str(num_steps))
    while True:
        if store.check([decision]):
            return int(store.multi_get([decision])[0])
        if store.check(everybody):
            furthest = max(int(each) for each in store.multi_get(everybody))
            return int(store.compare_set(decision, "", str(furthest)))
        if is_over(time.monotonic() - began_at):
            return int(store.compare_set(decision, "", str(last_step)))
        time.sleep(LOOK_EVERY_S)


class EarlySync:
    """Early sync of one round of one worker. Also the timeout hook of the exchange in which it syncs."""

    def __init__(self, *, name: str, rank: int, num_workers: int, last_step: int) -> None:
        self._name, self._rank, self._num_workers, self._last_step = name, rank, num_workers, last_step
        self._num_steps = last_step
        self._has_reported = False
        self._sync_after: int | None = None

    def is_now(self, num_steps: int) -> bool:
        """Whether all sync after this step of the round. Once this worker is asked to leave, waits for the others."""
        self._num_steps = num_steps
        if self._sync_after is None and session.stop_requested() is not None and num_steps < self._last_step:
            kept = rendezvous.kept_for_view()
            if kept is not None:
                store, prefix = kept
                try:
                    self._sync_after = agree(
                        store,
                        where=f"{prefix}/{self._name}",
                        rank=self._rank,
                        num_workers=self._num_workers,
                        num_steps=num_steps,
                        last_step=self._last_step,
                        is_over=lambda waited_s: waited_s > TIMEOUT_S or rendezvous.is_broken(),
                    )
                except (ClusterError, RuntimeError):  # the view is over, which the next sync will notice
                    self._sync_after = self._last_step
        return num_steps >= (self._last_step if self._sync_after is None else self._sync_after)

    def begin(self, number: int) -> None:
        pass  # the exchange waits for the others at their sync

    def look(self) -> None:
        """While the exchange waits: report this worker's step to workers that were asked within their round."""
        kept = rendezvous.kept_for_view()
        if session.stop_requested() is None or self._has_reported or kept is None:
            return
        self._has_reported = True
        store, prefix = kept
        # The view is over, which the waiting thread will notice.
        with contextlib.suppress(ClusterError, RuntimeError):
            store.set(f"{prefix}/{self._name}/{self._rank}", str(self._num_steps))


_WORKERS, _NUMBER, _OUTER, _MOMENTUM = "workers/", "workers/number", "outer/", "momentum_buffer"


def gathered_pieces(
    own: Iterator[Piece],
    gather: Callable[[Tensor | None], list[Tensor]],
    *,
    rank: int,
    num_workers: int,
) -> Iterator[Piece]:
    """Every worker's pieces, and their average; on rank 0, one tensor after the other. Collective.

    A worker may lack some: a parameter that none of its samples used has no state there.
    """
    mine = {
        piece.name.removeprefix(f"{_WORKERS}{rank}/"): piece.tensor for piece in own if piece.name != _NUMBER
    }
    names = dict.fromkeys(name for part in gather_json(gather, list(mine)) for name in part)
    if rank == 0 and names:
        yield whole_piece(_NUMBER, torch.tensor(num_workers))
    for name in names:
        rows = gather(mine.get(name))
        if rank:
            continue
        there = {worker: row for worker, row in enumerate(rows) if row.numel()}
        for worker, row in there.items():
            yield whole_piece(f"{_WORKERS}{worker}/{name}", row)
        if there:
            yield whole_piece(name, _average(list(there.values())))


def pieces_of_rank(saved: Mapping[str, Tensor], rank: int, num_workers: int) -> Mapping[str, Tensor]:
    """Pieces for a worker to load: with its own optimizer state, if saved by as many workers."""
    own = f"{_WORKERS}{rank}/"
    if _NUMBER not in saved or int(saved[_NUMBER]) != num_workers:
        return LazyTensors((name for name in saved if not name.startswith(_WORKERS)), saved.__getitem__)
    names = {name: name for name in saved if not name.startswith((_WORKERS, OPTIMIZER))}
    names |= {name.removeprefix(own): name for name in saved if name.startswith(own)}
    return LazyTensors(names, lambda name: saved[names[name]])


def outer_pieces(model: nn.Module, outer: torch.optim.Optimizer) -> Iterator[Piece]:
    for name, parameter in model.named_parameters():
        momentum = outer.state[parameter].get(_MOMENTUM) if parameter in outer.state else None
        if momentum is not None:
            yield whole_piece(_OUTER + name, momentum)


def load_outer_pieces(model: nn.Module, outer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Load the result of `outer_pieces`; without it the outer optimizer starts afresh."""
    outer.state.clear()
    for name, parameter in model.named_parameters():
        if _OUTER + name in saved:
            outer.state[parameter][_MOMENTUM] = torch.empty_like(parameter, requires_grad=False).copy_(
                saved[_OUTER + name]
            )


def average_state(states: Sequence[Mapping[str, Tensor]]) -> Iterator[Piece]:
    """Every worker's pieces and their average, computed from all of them."""
    if states:
        yield whole_piece(_NUMBER, torch.tensor(len(states)))
    for name in dict.fromkeys(name for state in states for name in state):
        there = {worker: state[name] for worker, state in enumerate(states) if name in state}
        for worker, row in there.items():
            yield whole_piece(f"{_WORKERS}{worker}/{name}", row)
        yield whole_piece(name, _average(list(there.values())))


def _average(rows: list[Tensor]) -> Tensor:
    if not rows[0].is_floating_point():
        return rows[0]
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total / len(rows)


def whole_piece(name: str, tensor: Tensor) -> Piece:
    return Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


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
    return torch.optim.SGD(trained, lr=1.0)


def nesterov(trained: Sequence[nn.Parameter], lr: float, momentum: float) -> torch.optim.Optimizer:
    """Step with Nesterov momentum towards that average (DiLoCo)."""
    return torch.optim.SGD(trained, lr=lr, momentum=momentum, nesterov=True)


class LocalSgd(Ddp):
    """Local SGD. Weights and buffers are equal on all ranks while `has_diverged` is False; inner
    optimizer state never is.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        assert job.sync_every is not None
        self.holds_parts = True
        self._cut_by = None  # no batch over all workers is promised
        self._sync_every = job.sync_every
        self._outer_choice = OUTERS.parse(job.outer)
        self._round = SyncRound()
        self._early_sync: EarlySync
        self._divisor = 1  # divisor of the present gradients
        self._is_running = False  # a step of a loop of the user's own
        self._trained: list[nn.Parameter] = []
        self._anchor: list[Tensor] = []
        self._outer: torch.optim.Optimizer | None = None

    def places(self) -> Iterator[LayerPlace]:
        said = f"average of models, every {self._sync_every} steps"
        for place in super().places():
            yield dataclasses.replace(place, sends=((said, {"parameters": 1.0 / self._sync_every}),))

    @property
    def has_diverged(self) -> bool:
        return self._round.num_steps > 0

    def _build(self, job: TrainJob) -> None:
        super()._build(job)
        self._trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if self._trained and self._outer is None:
            choice, settings = self._outer_choice
            self._outer = choice.load()(self._trained, **settings)

    def _make_gradients(self, model: nn.Module) -> GradientExchange:
        # Differences are dense where gradients may be rows.
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return GradientExchange(trained, sparse=frozenset(), compressor=compressor(self._compress))

    # ---- a step, alone --------------------------------------------------------------------------

    def forward_backward(self, batch: Slice) -> LossSum:
        self._begin_step()
        self._batch, self._divisor = batch, batch.num_global
        self._mine = self._compute.forward_backward(batch, rank=self._data_rank, step=self.step)
        if self._job.on_nonfinite == "skip" and not math.isfinite(self._mine.read()):
            # A skipped step: metrics do not count it either.
            return dataclasses.replace(self._mine, outputs=None)
        return self._mine

    def _begin_step(self) -> None:
        """Keep the anchor at the first step of a round, and the buffers at every step."""
        if not self.has_diverged:
            self._exchange.watch_buffers()
            self._save_anchor()
            self._early_sync = EarlySync(
                name=f"leaving/{self._job.number}/{self.step}",
                rank=self._rank,
                num_workers=self._num_workers,
                last_step=self._sync_every,
            )
        self._exchange.keep_buffers()

    def commit(self) -> StepResult:
        """Step locally; after the last step of a round, sync."""
        assert self.optimizer is not None
        control, mine = self._job.control, self._round
        mine.wants_checkpoint |= control.checkpoint
        vector = contribution(
            rank=self._rank,
            num_workers=self._num_workers,
            loss_total=self._mine.read(),
            count=self._mine.count,
            control=ControlFlags(),  # flags are exchanged at the sync
        )
        gradients = gradients_of(self._parameters)
        alone, factor = clip(self._job, decide(vector), self._divisor, lambda: self._norm(gradients))
        if alone.applied:
            with recorder.APPLY:
                scale(gradients, factor)
                self.optimizer.step()
        drop_gradients(self._parameters)
        if self._own is not None:
            self._own.forget()
        if not alone.applied:
            self._exchange.restore_buffers()
            if self._job.on_nonfinite == "raise":
                return alone  # it ends the job: no sync follows
        self._count(alone)
        if not self._early_sync.is_now(mine.num_steps):
            # The other workers go on whatever happened here; totals are reported at the sync.
            return dataclasses.replace(alone, loss_total=0.0, count=0.0, applied=True, nonfinite=())
        control.leave |= mine.num_steps < self._sync_every  # or no other worker would sync by now
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

    def _save_anchor(self) -> None:
        with torch.no_grad():
            if not self._anchor:
                self._anchor = [parameter.detach().clone() for parameter in self._trained]
            else:
                torch._foreach_copy_(self._anchor, [parameter.detach() for parameter in self._trained])

    # ---- a loop of the user's own ------------------------------------------------------------------

    def about_to_run(self) -> None:
        if not self._is_running:  # else another batch of the same step
            self._is_running = True
            self._begin_step()

    def weigh(self, batch: Slice) -> None:
        """A worker steps by the mean over its own slice; a borrowed sample contributes nothing."""
        assert self._own is not None
        self._own.weight = 1.0 if batch.num_local else 0.0

    def sum_gradients(self, batch: Slice) -> None:
        """Between two syncs a worker clips its own gradients, as the Trainer does."""

    def adopt(self, batch: Slice) -> None:
        assert self._own is not None
        self._own.drop_borrowed()
        self._is_running = False
        self._batch, self._divisor = batch, batch.num_local
        self._mine = LossSum(torch.zeros(()), float(batch.num_local), None)

    # ---- meeting --------------------------------------------------------------------------------

    def sync(self) -> StepResult | None:
        """Sync now, whatever is left of the round; None if the models are equal already."""
        return self._sync() if self.has_diverged else None

    def _sync(self) -> StepResult:
        mine, control = self._round, self._job.control
        control.checkpoint |= mine.wants_checkpoint
        # Like gradients, differences are divided by samples first; the real count corrects it afterwards.
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
            with attempt as group, recorder.EXCHANGE:
                self._exchange.start(group)
                self._exchange.finish(group)
            if attempt.is_broken:
                self._exchange.abandon()
        result: StepResult = sync.result if sync.is_replayed else sync.finish(self._step_from_anchor())
        control.checkpoint = False
        return result

    def _step_from_anchor(self) -> StepResult:
        """Step from the anchor by the average difference: the same bits on every rank."""
        vector = self._exchange.write_buffers()
        result = dataclasses.replace(decide(vector[:-1]), num_skipped=int(vector[-1]))
        factor = self._round.num_global / result.count if result.count else 0.0
        with torch.no_grad():
            for parameter, anchor in zip(self._trained, self._anchor, strict=True):
                parameter.copy_(anchor)
                if parameter.grad is not None and factor != 1.0:
                    parameter.grad.mul_(factor)
        if self._outer is not None:
            self._outer.step()
        drop_gradients(self._parameters)
        self._round = SyncRound()
        return result

    def _refuse_nonfinite(self) -> None:
        """Refuse weights that are not finite: one worker's would spoil all."""
        for name, parameter in self._job.model.named_parameters():
            if parameter.requires_grad and not parameter.isfinite().all():
                raise TrainingError(
                    f"the weights of worker {self._rank} are not finite at step {self.step} ('{name}' first): one of its last "
                    f"{self._round.num_steps} steps had a gradient that was not. Nothing was averaged, so checkpoints hold none of "
                    "it; go on from the newest with clip_norm=1.0, a lower learning rate or on_nonfinite='skip'."
                )

    # ---- state ----------------------------------------------------------------------------------

    def common_pieces(self) -> Iterator[Piece]:
        """Weights, buffers, the outer optimizer's momentum, and residuals of a compressor. Collective."""
        if self.has_diverged:
            raise ConfigError(
                f"a checkpoint was asked for {self._round.num_steps} steps after the workers last met, where each has weights of "
                "its own. Nothing was written; call trainer.wish_checkpoint() instead, which saves when they meet."
            )
        yield from state_pieces(self._job.model, None)
        if self._outer is not None:
            yield from outer_pieces(self._job.model, self._outer)
        if self._buckets is not None and self._buckets.compressor is not None:
            yield from residual_pieces(self._buckets.compressor, self.gather)

    def own_pieces(self) -> Iterator[Piece]:
        if self.optimizer is not None:
            yield whole_piece(_NUMBER, torch.tensor(self._num_workers))
            for piece in optimizer_pieces(self._job.model, self.optimizer):
                yield whole_piece(f"{_WORKERS}{self._rank}/{piece.name}", piece.tensor)

    def state(self) -> Iterator[Piece]:
        """The common state and every worker's optimizer, on rank 0. Collective."""
        yield from self.common_pieces()
        yield from gathered_pieces(
            self.own_pieces(), self._gather_for_disk, rank=self._rank, num_workers=self._num_workers
        )

    def load(self, pieces: PieceReader) -> None:
        """This worker's own optimizer state if there were as many workers; else the average of all."""
        self._round = SyncRound()
        tensors = pieces_of_rank(pieces.tensors, self._rank, self._num_workers)
        super().load(dataclasses.replace(pieces, tensors=tensors))
        if self._outer is not None and pieces.optimizer_settings is not None:
            load_outer_pieces(self._job.model, self._outer, pieces.tensors)

    def _gather_for_disk(self, value: Tensor | None) -> list[Tensor]:
        """As `gather`, without a copy for replay: a death takes all ranks back to a snapshot."""
        exchange, gathered = self._group.exchange(), list[Tensor]()
        for attempt in exchange.attempts():
            with attempt as group:
                gathered = gather_any(group, value)
        if not exchange.is_replayed:
            exchange.finish(None)
        return gathered
