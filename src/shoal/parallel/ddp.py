"""`ddp`: every worker holds the whole model, computes a slice of the batch, and gradients are summed.

One step is `forward_backward`, which sends while it computes, and `commit`,
which waits for the sums, decides and updates. A lost peer is a retry inside
`commit` (docs/adr/0007-recovery.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shoal.collectives.compression import Traffic, compressor
from shoal.collectives.gradients import BETWEEN_HOSTS_BYTES, BUCKET_BYTES, GradientExchange
from shoal.collectives.reducer import Reducer, gather_any, sum_in_rank_order
from shoal.collectives.sync_batchnorm import BatchNormRanks, synchronise
from shoal.config.choices import compressor_keeps_state
from shoal.config.job import Job
from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.embedding import fused_updates
from shoal.errors import ConfigError, PeerLost
from shoal.parallel.compute import Compute
from shoal.parallel.own_gradients import OwnGradients
from shoal.parallel.protocol import LayerPlace, LossSum, Piece, PieceReader, StepResult, TrainJob
from shoal.parallel.state import (
    MODEL,
    hash_embeddings,
    layer_of,
    layers_of,
    load_residuals,
    load_state,
    optimizer_settings,
    plain_tensors,
    refuse_different_models,
    residual_pieces,
    state_pieces,
)
from shoal.parallel.step import (
    StepExchange,
    as_loss,
    clip,
    decide,
    decide_in_loop,
    drop_gradients,
    gradient_norm,
    gradients_of,
    scale,
    with_named,
)
from shoal.parallel.tensor_parallel.dtensor_update import on_local_tensors
from shoal.recovery.elastic_group import elastic_group
from shoal.recovery.rendezvous import is_broken
from shoal.recovery.replay_log import ReplayLog
from shoal.recovery.state_transfer import Part
from shoal.runtime import recorder


class Ddp:
    """Data parallel over one process group; all ranks hold equal weights after every commit."""

    def __init__(self, job: Job) -> None:
        self._rank, self._num_workers, self._data_rank = job.rank, job.num_workers, job.data_rank
        self._cut_by = job.strategy if job.num_data_ranks > 1 else None
        self.optimizer: torch.optim.Optimizer | None = None
        self.step = 0
        self.replay_log: ReplayLog | None = elastic_group()
        self._group = elastic_group()
        self._buckets: GradientExchange | None = None
        self._exchange: StepExchange  # once prepared
        self._compress, self._is_between_hosts = job.compress, job.num_hosts > 1
        self.holds_parts = compressor_keeps_state(job.compress)
        """Whether this rank has state that no other has."""
        self._ranks: BatchNormRanks | None = None
        if job.batchnorm == "sync" and len(job.batch_ranks) > 1:
            self._ranks = BatchNormRanks(job, job.batch_ranks, is_broken)
        self._prepared_at: int | None = None
        self._has_started = True  # the step's exchange has begun, while backward runs
        self._own: OwnGradients | None = None  # in a loop of the user's own

    @property
    def traffic(self) -> Traffic | None:
        """Bytes of gradients this rank has sent; None where backward itself sends them."""
        return self._buckets.traffic if self._buckets is not None else None

    def prepare(self, job: TrainJob) -> None:
        """Check that all ranks built the same model, broadcast rank 0's weights, lay out the buckets."""
        self._job = job
        if job.build_optimizer is not None:
            self._refuse_rows(job.model)
        job.model.to(job.device)
        self._synchronise(job.model)
        waiting = self._group.pending_state(job.number)
        done = waiting.plain["prepared_at"] if waiting is not None else None
        # A replacement: the others compared their models and shared their weights before the anchor it starts from.
        is_past = done is not None and done <= self._group.anchored_at
        if not is_past:
            refuse_different_models(job.model, self.gather)
        self._build(job)
        self._group.hold(job.number, self)
        if not is_past:
            self._group.run(self._broadcast)
            self._prepared_at = self._group.num_finished

    def _build(self, job: TrainJob) -> None:
        """Build what runs, sums and updates the model in its present form."""
        self._compute = self._make_compute(job)
        self._parameters = list(job.model.parameters())
        self._has_dtensors = any(isinstance(parameter, DTensor) for parameter in self._parameters)
        if job.is_own_loop:
            self._watch_own_loop(job.model)
        if job.build_optimizer is not None and self.optimizer is None:
            self.optimizer = job.build_optimizer(job.model)
            self._buckets = self._make_gradients(job.model)
        self._exchange = self._make_exchange(job.model)

    def _synchronise(self, model: nn.Module) -> None:
        """Synchronise BatchNorm over the ranks, if requested and there is any."""
        if self._ranks is not None and not synchronise(model, self._ranks):
            self._ranks = None

    def _refuse_rows(self, model: nn.Module) -> None:
        """Refuse rows that are no parameters: they are in no bucket, so every worker would train its own."""
        for name in hash_embeddings(model):
            raise ConfigError(
                f"the rows of the HashEmbedding '{layer_of(name)}' cannot be trained with 'ddp': they are no parameters, so "
                "nothing sums their gradients over the workers, and each would train rows of its own. Nothing was "
                "trained; run the script with --strategy ps, which keeps the rows on servers, or in one process."
            )

    def _make_compute(self, job: TrainJob) -> Compute:
        return Compute(job, check_loss=True, check_mixing=self._cut_by, ranks=self._ranks)

    def _make_gradients(self, model: nn.Module) -> GradientExchange | None:
        """Exchange of this model's gradients; None if it is only known after the first batch."""
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        # Residuals of a compressor are saved by bucket, so its buckets must not depend on where a run
        # continues.
        is_small = self._is_between_hosts and not self.holds_parts
        return GradientExchange(
            trainable,
            sparse=sparse_parameters(model),
            compressor=compressor(self._compress),
            bucket_bytes=BETWEEN_HOSTS_BYTES if is_small else BUCKET_BYTES,
        )

    def _make_exchange(self, model: nn.Module) -> StepExchange:
        return StepExchange(model, self._buckets, rank=self._rank, num_workers=self._num_workers)

    def forward_backward(self, batch: Slice) -> LossSum:
        """Compute this rank's gradients; they leave bucket by bucket while backward runs."""
        if self._group.pass_up_to(StepResult):
            return LossSum(torch.zeros(()), 0.0, None)  # committed before this process started
        self._exchange.forget_buffers()
        self._exchange.begin_step()
        self._num_global = batch.num_global
        if self._ranks is None:
            return self._run(batch)
        # Ranks wait for each other within the model: all of them run a broken step again from its
        # beginning.
        self._batch = batch
        for attempt in self._group.retries():
            with attempt:
                loss = self._run(batch)
            if attempt.is_broken:
                self._undo_forward()
        return loss

    def _run(self, batch: Slice) -> LossSum:
        if self._ranks is not None:
            self._ranks.enter(self._group.view)
        return self._compute.forward_backward(
            batch,
            rank=self._data_rank,
            step=self.step,
            before_backward=lambda loss: self._contribute(loss, batch.share),
        )

    def _contribute(self, loss: LossSum, share: float, *, with_gradients: bool = True) -> None:
        """Send everything but the gradients, so that it overlaps with backward."""
        self._exchange.contribute(loss, share, self._job.control, with_gradients=with_gradients)
        self._has_started = not self._compute.gathers
        if not self._has_started:  # backward exchanges, and a view may end within it
            return
        try:
            self._exchange.start(self._group.reducer)
        except PeerLost:
            self._exchange.is_broken = True  # finish backward first: commit sends everything again

    def commit(self) -> StepResult:
        """Exchange, decide, update. A lost peer means another attempt in the next view, from the same contribution."""
        step = self._group.exchange("a step")
        for attempt in step.attempts():
            with attempt as group, recorder.EXCHANGE:
                if (attempt.is_retry or not self._has_started) and self._ranks is None:
                    self._exchange.start(group)
                elif attempt.is_retry:
                    self._run(self._batch)  # recompute collectively with the replaced rank
                self._exchange.finish(group)
            if attempt.is_broken:
                self._exchange.abandon()
                if self._ranks is not None:
                    self._undo_forward()
        if step.is_replayed:  # the donor's state holds this step already
            replayed: StepResult = step.result
            return replayed
        sums = self._exchange.write_buffers()
        names, at = self._exchange.names, len(sums) - 2 * len(self._exchange.names)
        decided = (decide_in_loop if self._job.is_own_loop else decide)(sums[:at])
        return step.finish(self._apply(with_named(decided, names, sums[at:].tolist())))

    def _apply(self, result: StepResult) -> StepResult:
        """Update the weights, or skip the step without side effects; alike on every rank."""
        assert self.optimizer is not None
        gradients = gradients_of(self._parameters)
        # Gradients summed before the commit are divided by the count known then.
        divisor = int(result.count) if self._is_summed else self._num_global
        result, factor = clip(self._job, result, divisor, lambda: self._norm(gradients))
        if result.applied:
            with recorder.APPLY:
                scale(gradients, factor)
                fused_updates.update(self.optimizer)
                with on_local_tensors(self.optimizer) if self._has_dtensors else contextlib.nullcontext():
                    self.optimizer.step()
        else:
            self._exchange.restore_buffers()
        if self._own is not None:
            self._own.keep()
        else:
            drop_gradients(self._parameters)
        self._exchange.forget_buffers()
        self.step += 1
        return result

    def _norm(self, gradients: list[torch.Tensor]) -> float:
        """Norm of the whole gradient, which every rank has here."""
        return gradient_norm(gradients)

    def _undo_forward(self) -> None:
        """Restore the state before the step's forward, which is run again."""
        assert self._ranks is not None
        self._ranks.leave()
        self._exchange.abandon()
        self._exchange.restore_buffers()
        drop_gradients(self._parameters)

    # ---- a loop of the user's own ------------------------------------------------------------------

    def _watch_own_loop(self, model: nn.Module) -> None:
        self._own = OwnGradients(model)

    def about_to_run(self) -> None:
        self._exchange.begin_step()

    def weigh(self, batch: Slice) -> None:
        """Weight the user's own backward from now on by this slice's share of the global batch."""
        assert self._own is not None
        self._own.weight = batch.num_counted / batch.num_global

    def sum_gradients(self, batch: Slice) -> None:
        """Exchange the gradients of the user's own backward now: `commit` then only updates."""
        assert self._own is not None
        if self._own.is_summed:
            return
        if not self._group.next_is_known:
            self._own.check(self.optimizer)
        own, num_global = self._own, batch.num_global

        exchange, buckets = self._group.exchange("a sum of gradients"), self._buckets
        assert buckets is not None
        for attempt in exchange.attempts():
            with attempt as group:
                count = torch.tensor([batch.num_counted], dtype=torch.float64)
                work = group.start_all_reduce(count)
                buckets.arm(group)
                buckets.finish()
                group.finish(work, "the exchange of counts")
            if attempt.is_broken:
                buckets.abandon()
        if not exchange.is_replayed:
            # Copies: buckets are filled again by the next step, and a replacement may need this one's.
            exchange.result = exchange.finish(
                {"count": float(count), "gradients": [_kept(p.grad) for p in own.parameters]}
            )
        result: dict[str, Any] = exchange.result
        # Backward divided by samples; bad ones may have been skipped, or labels ignored.
        factor = num_global / result["count"] if result["count"] else 0.0
        gradients = [
            given.to(p.device) if (given := _given(kept)) is not None else None
            for p, kept in zip(own.parameters, result["gradients"], strict=True)
        ]
        own.summed([g if factor == 1.0 or g is None else g * factor for g in gradients])

    def adopt(self, batch: Slice) -> None:
        """Take the gradients that the user's own backward left since the last commit."""
        assert self._own is not None
        if self._group.next_is_known:
            # The donor's state includes this step: undo the forward that the user's loop ran.
            self._exchange.restore_buffers()
            self._exchange.forget_buffers()
            self._own.forget()
            return
        self._own.check(self.optimizer)
        self._num_global = batch.num_global
        loss = LossSum(as_loss(batch.run_back), batch.num_counted, None)
        self._contribute(loss, batch.share, with_gradients=not self._is_summed)

    @property
    def _is_summed(self) -> bool:
        return self._own is not None and self._own.is_summed

    # ---- evaluation and state ------------------------------------------------------------------

    def forward(self, batch: Slice) -> Tree:
        return self._compute.forward(batch, rank=self._data_rank)

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        with recorder.EXCHANGE:
            return self._group.run(lambda group: sum_in_rank_order(group, values), "a sum over the workers")

    def gather(self, value: torch.Tensor | None) -> list[torch.Tensor]:
        with recorder.EXCHANGE:
            return self._group.run(lambda group: gather_any(group, value), "a gathering")

    def state(self) -> Iterator[Piece]:
        yield from state_pieces(self._job.model, self.optimizer)
        if self._buckets is not None and self._buckets.compressor is not None:
            yield from residual_pieces(self._buckets.compressor, self.gather)

    def load(self, pieces: PieceReader) -> None:
        """Take over weights and optimizer state; every rank reads the same pieces."""
        load_state(self._job.model, self.optimizer, pieces)
        if self._buckets is not None and self._buckets.compressor is not None:
            load_residuals(self._buckets.compressor, pieces, self._rank, self._num_workers)

    def pull_weights(self) -> None:
        """Every rank holds all of the model anyway."""

    def places(self) -> Iterator[LayerPlace]:
        """Every worker has all of the model."""
        rows = {name.rpartition(".")[0] for name in sparse_parameters(self._job.model)}
        dense, sparse = (
            ("all-reduce of gradients", {"parameters": 1.0}),
            ("gather of touched rows", dict[str, float]()),
        )
        for layer in layers_of(self._job.model):
            yield LayerPlace(layer, "each worker", sends=(sparse if layer in rows else dense,))

    # ---- state transfer -------------------------------------------------------------------------

    def export_state(self) -> Part:
        """Weights, optimizer and buffers as of the last commit."""
        # Not `self.state()`: rows on servers stay there.
        tensors = {piece.name: piece.tensor for piece in state_pieces(self._job.model, self.optimizer)}
        tensors |= {
            MODEL + name: buffer
            for name, buffer in self._exchange.buffers_before.items()
            if MODEL + name in tensors
        }
        settings = optimizer_settings(self._job.model, self.optimizer) if self.optimizer is not None else None
        return Part({"step": self.step, "prepared_at": self._prepared_at, "optimizer": settings}, tensors)

    def import_state(self, part: Part) -> None:
        self.step, self._prepared_at = part.plain["step"], part.plain["prepared_at"]
        self.load(PieceReader(part.tensors, part.plain["optimizer"]))
        self._exchange.forget_buffers()
        drop_gradients(self._parameters)

    def _broadcast(self, reducer: Reducer) -> None:
        with torch.no_grad():
            for tensor in plain_tensors(self._job.model).values():
                reducer.broadcast(tensor)


def _kept(gradient: torch.Tensor | None) -> Any:
    """Copy of a gradient for the replay log: dense tensors."""
    if gradient is None or gradient.layout is not torch.sparse_coo:
        return gradient.clone() if gradient is not None else None
    gradient = gradient.coalesce()
    return {
        "indices": gradient.indices().clone(),
        "values": gradient.values().clone(),
        "shape": list(gradient.shape),
    }


def _given(kept: Any) -> torch.Tensor | None:
    """Gradient restored from the result of `_kept`."""
    if not isinstance(kept, dict):
        return kept.clone() if kept is not None else None
    rows = torch.sparse_coo_tensor(
        kept["indices"].clone(), kept["values"].clone(), kept["shape"], check_invariants=False
    )
    return rows.coalesce()


def sparse_parameters(model: nn.Module) -> frozenset[str]:
    """Names of parameters whose gradients are rows: weights of embeddings built with sparse=True."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return frozenset(
        names[id(module.weight)]
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and module.sparse
        and id(module.weight) in names
    )
