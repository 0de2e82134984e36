"""`ps`: parameters and optimizer live on servers, workers compute gradients; exact, as in one process.

A step: weights and rows are pulled, backward pushes chunk by chunk, commit marks the end. The
servers sum in rank order and update; a worker's model afterwards is a copy. Workers have no
connection to each other, and hold nothing that a replacement would need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.collectives.compression import Traffic
from shoal.config import strategy as strategies
from shoal.config.job import Job
from shoal.config.row_policy import refuse_seconds
from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.errors import ConfigError, TrainingError
from shoal.parallel.buffers import BufferSync
from shoal.parallel.compute import Compute, place
from shoal.parallel.own_gradients import OwnGradients
from shoal.parallel.protocol import (
    LayerPlace,
    LossSum,
    Piece,
    PieceReader,
    StepResult,
    TrainJob,
)
from shoal.parallel.ps.arriving import ArrivingWeights, can_follow
from shoal.parallel.ps.rows import RowModule, describe
from shoal.parallel.ps.served_model import ServedModel
from shoal.parallel.ps.session import PsSession, ps_session
from shoal.parallel.state import (
    hash_embeddings,
    load_settings,
    load_state,
    plain_tensors,
    refuse_different_models,
    refuse_stepped,
    state_pieces,
)
from shoal.parallel.step import (
    as_loss,
    clip_factor,
    contribution,
    correction,
    decide,
    decide_in_loop,
    gradient_norm,
)
from shoal.ps.client.bulk_transfer import RowStamps
from shoal.ps.client.step import Decision, DensePull, PushStep
from shoal.ps.layout import check_optimizer
from shoal.recovery import state_transfer
from shoal.recovery.replay_log import ReplayLog
from shoal.recovery.state_transfer import Part
from shoal.runtime.failpoints import failpoint
from shoal.runtime.serialization import decode, encode, raw_bytes


class Ps:
    """The parameter server, exact."""

    def __init__(self, job: Job) -> None:
        self._launched = job
        self._rank, self._num_workers = job.rank, job.num_workers
        is_cut = job.num_workers > 1 and strategies.parse(job.strategy).is_exact
        self._cut_by = job.strategy if is_cut else None
        self.optimizer: torch.optim.Optimizer | None = None
        self.step = 0
        self._step_at_anchor = 0  # a replacement counts the steps since then again
        self._session: PsSession = ps_session()
        self.replay_log: ReplayLog | None = self._session
        self._model: ServedModel | None = None
        self._saved: PieceReader | None = None
        self._prepared_at: int | None = None
        self._laid_out_at: int | None = None
        self._current: PushStep | None = None
        self._arriving = ArrivingWeights()
        self._home_at = -1  # clock as of which the whole model is in this process
        self._weights_at = -1  # clock of this process's copy of the weights
        self._is_whole = True  # the copy equals the servers' weights; compressed pulls round it
        self._next_batch: Slice | None = None
        self._has_looked = False
        self._own: OwnGradients | None = None  # in a loop of the script's own

    # ---- preparing ------------------------------------------------------------------------------

    def prepare(self, job: TrainJob) -> None:
        """Check that all ranks built the same model; layout waits for the first batch."""
        self._job = job
        if strategies.parse(self._launched.strategy).is_exact:
            for name, module in hash_embeddings(job.model).items():
                refuse_seconds(name, module.policy, f"under '{self._launched.strategy}'")
        job.model.to(job.device)
        self._session._ensure_joined()  # a script may read its model before its first call
        waiting = self._session.pending_state(job.number)
        done = waiting.plain["prepared_at"] if waiting is not None else None
        is_past = done is not None and done <= self._session.anchored_at
        if not is_past:
            refuse_different_models(job.model, self.gather)
            self._prepared_at = self._session.num_finished
        self._compute = Compute(job, check_loss=True, check_mixing=self._cut_by)
        self._buffers = BufferSync(job.model)
        self._parameters = list(job.model.parameters())
        if job.is_own_loop:
            self._own = OwnGradients(job.model)
        if job.build_optimizer is not None and self.optimizer is None:
            optimizer = job.build_optimizer(job.model)
            check_optimizer(optimizer)
            refuse_stepped(optimizer, f"under '{self._launched.strategy}' its state is on servers")
            optimizer._opt_called = True  # type: ignore[attr-defined]  # it never steps here, and schedulers would warn
            self.optimizer = optimizer
        self._session.hold(job.number, self)

    def _lay_out(self, batch: Slice | None, layout: dict[str, Any] | None = None) -> None:
        """Put the model on the servers, once everything that forward uses is known."""
        if self._model is not None or self.optimizer is None:
            return
        group, job = self._session.group, self._job
        self._session._ensure_joined()
        if self._wants_norm:
            mode = msgspec.structs.replace(self._session.mode, two_phase=True, wants_norm=True)
            group.declare(mode)
        model = ServedModel(job, self.optimizer, group, self._launched)
        if layout is not None:
            model.lay_out_as(layout)
        else:
            placed = place(batch.batch, job.device, job.cast_inputs) if batch is not None else None
            model.lay_out(placed, lambda: self._compute.try_out(batch, rank=self._rank) if batch else None)
        model.declare()
        if layout is None:
            if self._rank == 0 and not self._session.next_is_known:
                model.write(self._saved)
                self._write_applied_seqs(self._saved)
                for line in describe(model.plan):
                    print(f"note: {line}", file=sys.stderr, flush=True)
            self._session.exchange(b"")
            self._laid_out_at = self._session.num_finished
        self._saved = None
        model.install()
        model.keep_state_there()
        self._model = model

    def _write_applied_seqs(self, saved: PieceReader | None) -> None:
        """Exact steps have no sequence numbers to continue."""

    @property
    def _wants_norm(self) -> bool:
        return self._job.measures_norm

    # ---- a step ---------------------------------------------------------------------------------

    def forward_backward(self, batch: Slice) -> LossSum:
        """Compute this rank's gradients; they are sent chunk by chunk while backward runs."""
        self._lay_out(batch)
        self._num_global, self._share = batch.num_global, batch.share
        if self._session.next_is_known:
            return LossSum(torch.zeros(()), 0.0, None)  # committed before this process started
        self._has_looked = False
        self.about_to_run()
        self._begin()
        return self._compute.forward_backward(
            batch, rank=self._rank, step=self.step, before_backward=self._contribute
        )

    def about_to_run(self) -> None:
        """Pull the weights of the last commit, and keep the buffers: forward writes into them."""
        self._lay_out(None)  # in a script's own loop no batch is known
        # A Trainer looks for writes through `.data` after each of its callbacks, and before the first step of a fit.
        is_due = self._home_at == self._session.updates
        if self._own is not None:
            is_due = not self._has_looked and self.step.bit_count() == 1
        self._refuse_changed_copy(is_due=is_due)
        self._refresh()
        self._look_up(self._weights_at, training=True)
        if not self._has_looked:  # else another batch of the same step
            self._has_looked = True
            self._buffers.look()

    def weigh(self, batch: Slice) -> None:
        """Weight the user's own backward from now on by this slice's share of the global batch."""
        assert self._own is not None
        self._own.weight = weight = batch.num_counted / batch.num_global
        for module in self._rows:
            module.weight = weight

    def sum_gradients(self, batch: Slice) -> None:
        """Every rank reads every rank's gradients and sums them as the servers would; at commit one of them pushes."""
        assert self._own is not None
        if self._own.is_summed:
            return
        if not self._session.next_is_known:
            self._own.check(self.optimizer)
        mine = {
            "count": float(batch.num_local),
            "counted": batch.num_counted,
            "gradients": [
                p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad
                for p in self._own.parameters
            ],
        }
        ranks = [
            state_transfer.from_bytes(raw) for raw in self._session.exchange(state_transfer.to_bytes(mine))
        ]
        if sum(rank["count"] for rank in ranks) != batch.num_global:
            raise TrainingError(
                f"samples of a batch of {batch.num_global} were left out, and gradients of the parameter server are divided by the "
                "rest only when it updates, after they were clipped. Nothing of this step was applied; repair the data, or use "
                "--strategy ddp."
            )
        counted = sum(rank["counted"] for rank in ranks)
        factor = batch.num_global / counted if counted else 0.0  # labels were ignored
        sums: list[Tensor | None] = []
        for parts in zip(*(rank["gradients"] for rank in ranks), strict=True):
            there = [part for part in parts if part is not None]
            total = functools.reduce(torch.add, there) if there else None
            sums.append(total if total is None or factor == 1.0 else total * factor)
        own = self._own.parameters
        self._own.summed([g.to(p.device) if g is not None else None for p, g in zip(own, sums, strict=True)])

    def adopt(self, batch: Slice) -> None:
        """Take the gradients that the user's own backward left since the last commit."""
        assert self._own is not None
        self._num_global, self._share = batch.num_global, batch.share
        self._has_looked = False
        if self._session.next_is_known:
            self._buffers.restore()
            for module in self._rows:
                module.forget()
            self._own.forget()
            return
        self._own.check(self.optimizer)
        self._refuse_changed_copy()
        self._begin()
        if self._own.is_summed and self._rank:
            self._own.forget()  # rank 0 pushes the sum
        # Where a step does not wait for all, a rank's place may have what it sent for another one.
        run_back = batch.run_back if self._session.mode.kind == "exact" else None
        self._contribute(LossSum(as_loss(run_back), batch.num_counted, None))

    def prefetch(self, batch: Slice) -> None:
        """Note the next batch: its rows can be requested as soon as this step is pushed."""
        self._next_batch = batch

    def commit(self) -> StepResult:
        step = self._end_step() if not self._session.next_is_known else None
        if step is not None:
            ahead = self._pull_ahead(self._session.updates + 1)
        vector = self._session.commit(step)
        failpoint("worker: committed, not counted")
        if step is not None:
            step.release()
        else:
            self._buffers.was_computed_elsewhere()
            self._weights_at = -1  # a copy pulled before may be of this step or of a later one
            self._session.have_two_phases()
            if self._session.mode.two_phase:
                # The worker that committed it may have died before it had told every server.
                self._session.commit_again(self._decision_of(vector))
        result = self._conclude(vector)
        if step is not None:
            assert self._model is not None
            dense = self._model.dense
            self._arriving.follow(
                [functools.partial(self._take_in, pull) for _, pull in ahead],
                [dense.parameters_of(some) for some, _ in ahead],
            )
            self._weights_at, self._is_whole = self._session.updates, not self._session.group.compression.pull
        return result

    def _take_in(self, pull: DensePull) -> None:
        assert self._model is not None
        self._session.group.finish(pull)
        self._model.dense.take(pull)

    def followed(self) -> contextlib.AbstractContextManager[None]:
        """Between hosts a forward may begin before all weights have arrived."""
        is_exact = self._session.mode.kind == "exact" and self._launched.num_hosts > 1
        can = is_exact and not self._job.compile and can_follow(self._job.model)
        return self._arriving.watched() if can else contextlib.nullcontext()

    @property
    def traffic(self) -> Traffic | None:
        """Bytes of this worker's pushes and pulls, where they are compressed."""
        compression = self._session.group.compression
        return compression.traffic if compression.is_on else None

    @property
    def _rows(self) -> list[RowModule]:
        return self._model.rows if self._model is not None else []

    def _look_up(self, clock: int, *, training: bool) -> None:
        for module in self._rows:
            module.clock, module.is_training = clock, training

    def _begin(self) -> None:
        self._session.have_two_phases()
        updates = self._session.updates
        self._look_up(updates, training=True)
        self._current = PushStep(
            self._session.group,
            stream=self._rank,
            seq=updates + 1,
            decide=self._decide,
            wants_norm=self._wants_norm,
        )

    def _contribute(self, loss: LossSum) -> None:
        assert self._model is not None
        assert self._current is not None
        vector = contribution(
            rank=self._rank,
            num_workers=self._num_workers,
            loss_total=loss.read(),
            count=loss.count,
            control=self._job.control,
        )
        parts = [vector, *self._buffers.contribution(share=self._share, rank=self._rank)]
        self._vector = torch.cat(parts).numpy()
        self._arriving.settle()  # weights that forward did not use
        self._model.dense.arm(self._current)

    def _end_step(self) -> PushStep:
        assert self._model is not None
        assert self._current is not None
        step, self._current = self._current, None
        self._model.dense.send_rest()
        self._model.push_rows(step)
        settings, table_settings = self._model.settings()
        step.end(
            self._vector,
            self._session.note_of_step(is_needed=bool(self._buffers)),
            rank=self._rank,
            exchange=self._session.num_finished,
            anchored_at=self._session.anchored_at,
            settings=settings,
            model=self._job.number,
            table_settings=table_settings,
            factor=float(self._num_global),
            is_spoilt=self._has_seen_more_than(step.seq - 1),
        )
        return step

    def _pull_ahead(self, clock: int) -> list[tuple[range, DensePull]]:
        """Request what the next step needs, in order of need: rows, then waves of chunks. Servers answer in that order."""
        assert self._model is not None
        batch_ahead, self._next_batch = self._next_batch, None
        if batch_ahead is not None:
            self._model.pull_rows_ahead(batch_ahead.batch, clock)
        dense, group = self._model.dense, self._session.group
        waves = dense.waves() if self._arriving.is_watched else [range(len(dense.specs))]
        pulls = [(some, dense.pull(clock, group.compression.pull, some=some)) for some in waves]
        for _, pull in pulls:
            group.start(pull)
        return pulls

    def _decide(self, vector: NDArray[np.float64], norm: float) -> Decision:
        """Decide a summed step, in two phases; the same on every rank."""
        result = decide(torch.from_numpy(vector[: 4 + self._num_workers].copy()))
        factor = correction(self._job, self._num_global, result.count)
        if not result.applied or not self._wants_norm:
            return Decision(factor, result.applied)
        norm = factor * norm
        factor *= clip_factor(self._job, norm)
        return Decision(factor, math.isfinite(norm), norm)

    def _decision_of(self, vector: NDArray[np.float64]) -> Decision:
        factor = correction(self._job, self._num_global, float(vector[0]))
        apply, norm = bool(vector[-2]), float(vector[-1])
        if apply:
            factor *= clip_factor(self._job, norm)
        return Decision(float(factor), apply, norm)

    def _own_norm(self, rows: Iterable[tuple[NDArray[np.int64], NDArray[Any]] | None]) -> float:
        """Norm of this worker's own gradient, rows included."""
        squares = sum(float(np.vdot(held[1], held[1])) for held in rows if held is not None)
        return gradient_norm((p.grad for p in self._parameters if isinstance(p.grad, Tensor)), squares)

    def _has_seen_more_than(self, updates: int) -> bool:
        """True if this step ran on weights of a later one: another worker was lost, and a server with it."""
        assert self._model is not None
        seen = [self._model.dense.newest, *(module.newest for module in self._rows)]
        return max(seen) > updates

    def _conclude(self, vector: NDArray[np.float64]) -> StepResult:
        """The servers have updated; do the local part of the step's end."""
        flat = torch.from_numpy(vector.copy())
        told, at = flat[-2:].tolist(), 4 + self._num_workers
        result = (decide_in_loop if self._own is not None else decide)(flat[:at])
        norm = told[1] if self._wants_norm and result.applied else None
        if norm is not None or bool(told[0]) != result.applied:
            result = dataclasses.replace(result, applied=bool(told[0]), grad_norm=norm)
        if result.applied:
            self._conclude_buffers(flat[at:-2])
        self._end(result)
        return result

    def _end(self, result: StepResult) -> None:
        """Drop everything of the step but its update."""
        if not result.applied:
            self._buffers.restore()
        self._buffers.forget()
        for module in self._rows:
            module.release()
        if self._own is not None:
            self._own.keep()
        else:
            for parameter in self._parameters:
                parameter.grad = None
        self._has_looked = False
        self.step += 1

    def _conclude_buffers(self, flat: Tensor) -> None:
        """Write statistics and buffers from the sum of the ranks' vectors."""
        self._buffers.conclude(flat, self.reduce, share=self._share, rank=self._rank)

    # ---- beside the steps -----------------------------------------------------------------------

    @property
    def weights_are_ahead(self) -> bool:
        return self._session.knows_a_commit

    def forward(self, batch: Slice) -> Tree:
        if self._model is None:
            self._equalize()
        else:
            self._look_up(self._have_newest(), training=False)
        outputs = self._compute.forward(batch, rank=self._rank)
        for module in self._rows:
            module.release()
        return outputs

    def reduce(self, values: Tensor) -> Tensor:
        parts = self.gather(values)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.to(values.device)

    def gather(self, value: Tensor | None) -> list[Tensor]:
        contributions = self._session.exchange(b"" if value is None else encode(value))
        tensors = [decode(raw) if raw else None for raw in contributions]
        known = next((tensor for tensor in tensors if tensor is not None), torch.empty(0))
        empty = torch.empty([0, *known.shape[1:]], dtype=known.dtype)
        return [tensor if tensor is not None else empty for tensor in tensors]

    def places(self) -> Iterator[LayerPlace]:
        if self._model is not None:
            yield from self._model.places()

    def state(self) -> Iterator[Piece]:
        """Model and optimizer, whole. Rank 0 reads them; no update can happen before it goes on."""
        return self._state(None)

    def state_with_changes(self, changes: RowStamps) -> Iterator[Piece]:
        return self._state(changes)

    def _state(self, changes: RowStamps | None) -> Iterator[Piece]:
        if self._model is None:
            yield from state_pieces(self._job.model, self.optimizer)
        elif self._rank == 0:
            self._pull_weights(with_rows=changes is None)
            pieces = [*self._model.optimizer_pieces(changes), *self._model.table_pieces(changes)]
            given = {piece.name for piece in pieces}
            yield from (piece for piece in self._model.model_pieces() if piece.name not in given)
            yield from pieces

    def load(self, pieces: PieceReader) -> None:
        """Load weights and optimizer state: here now, on the servers at layout."""
        load_state(self._job.model, None, pieces)
        if self.optimizer is not None and pieces.optimizer_settings is not None:
            load_settings(self._job.model, self.optimizer, pieces.optimizer_settings, path=pieces.path)
        if self._model is None:
            self._saved = pieces
            return
        if self._rank == 0:
            self._model.write(pieces, keeps_state=pieces.optimizer_settings is None)
        self._home_at = self._weights_at = -1
        for module in self._rows:
            module.note_copy()
        self._model.clear_cache()
        self._session.exchange(b"")

    def pull_weights(self) -> None:
        if self._model is not None:
            self._pull_weights()

    def refresh_copy(self) -> None:
        if self._current is not None:
            return  # within a step: it runs on this copy, and its rows are yet to be pushed
        self._arriving.settle()
        if self._rows:
            self._refuse_changed_copy()
            self._pull_weights()
        else:
            self._refresh(is_whole=True)

    def _pull_weights(self, *, with_rows: bool = True) -> None:
        """Refuses no changed copy: at the end of a call a second Trainer of the model may have written it."""
        assert self._model is not None
        self._arriving.settle()
        if self._home_at != self._session.updates:
            self._model.pull_weights(self._session.updates, with_rows=with_rows)
            self._weights_at, self._is_whole = self._session.updates, True
            if with_rows:
                self._home_at = self._session.updates

    # ---- state transfer -------------------------------------------------------------------------

    def anchored(self) -> None:
        self._step_at_anchor = self.step

    def export_state(self) -> Part:
        """State of this rank that is not on the servers: its position, and the buffers as of the last commit."""
        synced, buffers = self._buffers.export_state()
        plain = {
            "step": self._step_at_anchor,
            "prepared_at": self._prepared_at,
            "laid_out_at": self._laid_out_at,
            "layout": self._model.layout if self._model is not None else None,
            "buffers": synced,
        }
        return Part(plain, buffers)

    def import_state(self, part: Part) -> None:
        self.step = self._step_at_anchor = part.plain["step"]
        self._prepared_at, self._laid_out_at = part.plain["prepared_at"], part.plain["laid_out_at"]
        self._buffers.import_state(part.plain["buffers"], part.tensors)
        self._home_at = self._weights_at = -1
        self._has_looked = False
        if self._laid_out_at is not None and self._laid_out_at <= self._session.anchored_at:
            self._lay_out(None, part.plain["layout"])
            if self._session.is_between_calls:
                self._pull_weights()

    # ---- small things ---------------------------------------------------------------------------

    def _refresh(self, *, is_whole: bool = False) -> None:
        """Pull the newest weights, as training uses them: rounded if pulls are compressed. `is_whole`:
        as the servers hold them.

        After a read of whole weights training pulls its own again, so a read does not change
        training.
        """
        is_whole = is_whole or not self._session.group.compression.pull
        has_them = self._weights_at == self._session.updates and self._is_whole == is_whole
        if self._model is not None and not has_them:
            self._arriving.settle()
            self._refuse_changed_copy()
            self._model.dense.refresh(self._session.group, self._session.updates, is_whole=is_whole)
            self._weights_at, self._is_whole = self._session.updates, is_whole
            if not is_whole:
                self._home_at = -1

    def _refuse_changed_copy(self, *, is_due: bool = False) -> None:
        """Refuse weights that the script or a callback has written: the next pull would undo it without a word.

        Values are compared where torch counted a write, or if it `is_due`: a script may restore what it
        changed. Meanwhile the servers hold what was pulled last.
        """
        is_exact = self._session.mode.kind == "exact"
        if self._model is None or self._weights_at < 0 or not is_exact or self._session.next_is_known:
            return
        if not (is_due or self._model.is_written):
            return
        self._arriving.settle()
        changed = self._model.changed_name(self._session.updates, is_whole=self._is_whole)
        if changed is not None:
            raise ConfigError(
                f"the weights '{changed}' were changed by something besides optimizer.step(), and under '{self._launched.strategy}' they live "
                f"on servers: the change of a worker's copy would be lost. Nothing was trained after step {self.step}; use --strategy ddp."
            )

    def _have_newest(self) -> int:
        """Pull the newest weights for a forward that does not train; returns the clock for reading rows."""
        self._refresh(is_whole=True)
        return self._session.updates

    def _equalize(self) -> None:
        """Before the model is on the servers: broadcast rank 0's weights."""
        if self._weights_at == -2:
            return
        tensors = list(plain_tensors(self._job.model).values())
        mine = b"".join(raw_bytes(tensor) for tensor in tensors) if self._rank == 0 else b""
        raw, at = self._session.exchange(mine)[0], 0
        with torch.no_grad():
            for tensor in tensors:
                size = tensor.numel() * tensor.element_size()
                part = torch.frombuffer(bytearray(raw[at : at + size]) or bytearray(1), dtype=torch.uint8)
                if size:
                    tensor.copy_(part.view(tensor.dtype).reshape(tensor.shape))
                at += size
        self._weights_at = -2
