"""`ps:hybrid[,ssp=K]`: dense parameters summed by all-reduce at every step, rows on servers without waiting.

As in Persia, which found that this loses almost nothing: the large and sparse part of a recommender
may be a little stale, the small and dense part is exact. Workers are a group, as under `ddp`, and
also clients of the servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shoal.collectives.compression import Traffic, compressor
from shoal.collectives.gradients import GradientExchange
from shoal.config.job import Job
from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.errors import ConfigError
from shoal.parallel.compute import place
from shoal.parallel.ddp import Ddp, sparse_parameters
from shoal.parallel.protocol import LayerPlace, LossSum, Piece, PieceReader, StepResult, TrainJob
from shoal.parallel.ps.relaxed import report_staleness
from shoal.parallel.ps.rows import RowModule
from shoal.parallel.ps.served_model import ServedModel
from shoal.parallel.ps.session import ps_session
from shoal.parallel.step import StepExchange, drop_gradients
from shoal.ps.client.bulk_transfer import RowStamps
from shoal.ps.client.step import PushStep
from shoal.recovery.state_transfer import Part


class PsHybrid(Ddp):
    """Data parallel for dense parameters, a parameter server for rows.

    A step's rows are pushed before any rank can commit its dense part: a worker that dies in
    between is run again, and its push is deduplicated by name. Gradients are sent while backward
    runs, so the losses, without which no rank can end the step, wait for the push.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._launched = job
        self._session = ps_session()
        self._rows: ServedModel | None = None
        self._saved: PieceReader | None = None
        self._laid_out_at: int | None = None
        self._next_batch: Slice | None = None
        self._pushed: PushStep | None = None
        # Number of pulls, by their distance ahead of the slowest worker.
        self.staleness: Counter[int] = Counter()

    def prepare(self, job: TrainJob) -> None:
        if job.is_own_loop:
            raise ConfigError(
                f"'{self._launched.strategy}' keeps embedding rows on servers and sums the rest over the workers. Which of the "
                "embeddings are rows, it learns from a batch before the first forward, and a loop of the script's own shows it none. "
                "Nothing was trained; use shoal.Trainer, or --strategy ps or ps:async."
            )
        super().prepare(job)

    def _refuse_rows(self, model: nn.Module) -> None:
        """Nothing to refuse: rows are on the servers."""

    def _make_gradients(self, model: nn.Module) -> GradientExchange | None:
        return None  # the first batch shows which parameters are rows

    def _make_exchange(self, model: nn.Module) -> StepExchange:
        return StepExchange(
            model, self._buckets, rank=self._rank, num_workers=self._num_workers, losses_last=True
        )

    @property
    def traffic(self) -> Traffic | None:
        """Bytes of the dense part; and of pushes and pulls of rows, where they are compressed."""
        compression, dense = self._session.group.compression, super().traffic
        if not compression.push or dense is None:
            return compression.traffic if compression.push else dense
        rows = compression.traffic
        return Traffic(
            sent_bytes=rows.sent_bytes + dense.sent_bytes,
            raw_bytes=rows.raw_bytes + dense.raw_bytes,
            num_sums=rows.num_sums,
        )

    def forward_backward(self, batch: Slice) -> LossSum:
        """Compute this rank's gradients; the dense ones leave while backward runs."""
        self._lay_out(batch)
        if not self._group.next_is_known:
            self._look_up(training=True)
        return super().forward_backward(batch)

    def prefetch(self, batch: Slice) -> None:
        self._next_batch = batch

    def commit(self) -> StepResult:
        """Push the rows, then sum the dense part with the others."""
        if not self._group.next_is_known:
            self._push()
        result = super().commit()
        for module in self._modules:
            module.release()
        return result

    def forward(self, batch: Slice) -> Tree:
        self._look_up(training=False)
        outputs = super().forward(batch)
        for module in self._modules:
            module.release()
        return outputs

    def places(self) -> Iterator[LayerPlace]:
        served = {each.layer: each for each in self._rows.places()} if self._rows is not None else {}
        for each in super().places():
            yield served.get(each.layer, each)

    def state(self) -> Iterator[Piece]:
        return self._state(None)

    def state_with_changes(self, changes: RowStamps) -> Iterator[Piece]:
        return self._state(changes)

    def _state(self, changes: RowStamps | None) -> Iterator[Piece]:
        given: set[str] = set()
        if self._rows is not None and self._rank == 0:
            self._rows.pull_weights(0, with_rows=changes is None)
            for piece in (*self._rows.optimizer_pieces(changes), *self._rows.table_pieces(changes)):
                given.add(piece.name)
                yield piece
        # The optimizer here may have state for rows too, which is not trained: some create it at
        # construction.
        yield from (piece for piece in super().state() if piece.name not in given)

    def load(self, pieces: PieceReader) -> None:
        """Load weights and optimizer state; rows when they are put on the servers."""
        super().load(pieces)
        if self._rows is None:
            self._saved = pieces
            return
        self._rows.clear_cache()
        if self._rank == 0:
            self._rows.write(pieces, keeps_state=pieces.optimizer_settings is None)

    def refresh_copy(self) -> None:
        if self._rows is not None:
            before = [(each, each.clock, each.is_training) for each in self._modules]
            self._rows.pull_weights(0)
            for each, clock, is_training in before:  # a loss may read rows between forward and backward
                each.clock, each.is_training = clock, is_training

    def pull_weights(self) -> None:
        if self._rows is not None:
            self._finish_push()
            self.reduce(torch.zeros(1))
            self._rows.pull_weights(0)
        report_staleness(self.staleness, self._modules)

    def export_state(self) -> Part:
        """State of a worker of ddp, and the layout of the rows on the servers, if they are there."""
        part = super().export_state()
        layout = self._rows.layout if self._rows is not None else None
        return Part({**part.plain, "laid_out_at": self._laid_out_at, "layout": layout}, part.tensors)

    def import_state(self, part: Part) -> None:
        self._laid_out_at = part.plain["laid_out_at"]
        self.step, self._prepared_at = part.plain["step"], part.plain["prepared_at"]
        pieces = PieceReader(part.tensors, part.plain["optimizer"])
        super().load(pieces)  # the dense part: the donor's own rows are old, those on the servers count
        self._exchange.forget_buffers()
        drop_gradients(self._parameters)
        if self._rows is not None:
            return
        self._saved = pieces
        # It may never see a batch: the others may have finished training, and evaluate.
        if self._laid_out_at is not None and self._laid_out_at <= self._group.anchored_at:
            self._lay_out(None, part.plain["layout"])

    def _lay_out(self, batch: Slice | None, layout: dict[str, Any] | None = None) -> None:
        """Put the rows on the servers, once a batch has shown which those are; or find them where the donor knows them."""
        if self._rows is not None or self.optimizer is None:
            return
        job, group = self._job, self._session.group
        group.declare(self._session.mode)
        rows = ServedModel(job, self.optimizer, group, self._launched, rows_only=True)
        if layout is not None:
            rows.lay_out_as(layout)
        else:
            assert batch is not None
            rows.lay_out(
                place(batch.batch, job.device, job.cast_inputs),
                lambda: self._compute.try_out(batch, rank=self._rank),
            )
        rows.declare()
        taken = {module.taken.name for module in rows.rows}
        trainable = [
            (name, p) for name, p in job.model.named_parameters() if p.requires_grad and name not in taken
        ]
        self._buckets = GradientExchange(
            trainable, sparse=sparse_parameters(job.model) - taken, compressor=compressor(self._compress)
        )
        self._exchange.gradients = self._buckets
        done = self._laid_out_at
        if done is None or done > self._group.anchored_at:
            if self._rank == 0 and not self._group.next_is_known:
                rows.write(self._saved)
            self.reduce(torch.zeros(1))
            self._laid_out_at = self._group.num_finished
        rows.install()
        self._saved, self._rows = None, rows

    @property
    def _modules(self) -> list[RowModule]:
        return self._rows.rows if self._rows is not None else []

    def _look_up(self, *, training: bool) -> None:
        for module in self._modules:
            module.clock, module.is_training = self.step if training else 0, training

    def _push(self) -> None:
        assert self._rows is not None
        self._finish_push()
        step = PushStep(self._session.group, stream=self._rank + 1, seq=self.step + 1)
        self._rows.push_rows(step)
        _, table_settings = self._rows.settings()
        step.end(self._exchange.vector.numpy()[:4], b"", rank=self._rank, table_settings=table_settings)
        self._pushed = step
        batch_ahead, self._next_batch = self._next_batch, None
        if batch_ahead is not None:
            self._rows.pull_rows_ahead(batch_ahead.batch, self.step + 1)
        self._session.group.finish(step)

    def _finish_push(self) -> None:
        step, self._pushed = self._pushed, None
        if step is not None:
            step.release()
