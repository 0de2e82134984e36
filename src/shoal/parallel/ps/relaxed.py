"""`ps:ssp=K` and `ps:async`: every push is one update; workers wait for the slowest up to K clocks, or never.

One worker computes one whole batch, so batch size, learning rate and schedule mean what they mean
in one process; the coordinator assigns batches by leases. The staleness of the weights is counted
and reported.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal import system
from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.cluster.ledger.trained_file import PushOutcome, TrainedFile
from shoal.cluster.worker import session
from shoal.config.job import Job
from shoal.data.slice import Slice
from shoal.embedding.lookup import merged
from shoal.errors import LinkLost
from shoal.parallel.protocol import LossSum, Piece, PieceReader, StepResult
from shoal.parallel.ps.exact import Ps
from shoal.parallel.ps.rows import RowModule
from shoal.parallel.step import clip_factor, contribution, decide
from shoal.ps.client.aggregator import Aggregator, AggregatorGroup, leader_of, name_of
from shoal.ps.client.bulk_transfer import RowStamps, read_applied_seqs, write_applied_seqs
from shoal.ps.client.step import DensePull, PushStep
from shoal.ps.server.progress import LEAVE, STOP
from shoal.ps.server.steps import LOSSES
from shoal.recovery.state_transfer import Part
from shoal.runtime.failpoints import failpoint
from shoal.runtime.transport.messages.client_server import Hold, Rest

MARKS = (
    "marks/triples"  # piece of a checkpoint: which sequence number of which lease is applied in which slot
)

NO_LEASE = 1 << 31  # in a stream's number: its pushes belong to no batch

NEWEST = -3  # instead of a clock: whatever weights the servers had


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def report_staleness(counts: Counter[int], rows: Sequence[RowModule], *, num_late: int = 0) -> None:
    """Number of pulls by their distance ahead of the slowest worker, and of pushes left out, since the last report."""
    for module in rows:
        counts.update(module.staleness)
        module.staleness.clear()
    session.bent(staleness=counts, num_late=num_late, num_missed=0)
    counts.clear()


@dataclass(slots=True)
class Naming:
    """Names of the running fit's pushes: the lease, and the batch within it."""

    call: int
    num_leases: int
    samples_per_lease: int
    first_epoch: int
    done_below: int = 0
    push_every: int = 1
    num_samples: int = 0
    # Leases in progress at a checkpoint: slots may have applied different batches of them.
    singly: frozenset[int] = frozenset()
    # By lease, at the last query: number of its batches applied in slot 0, and in all slots.
    counted: dict[int, tuple[int, int]] = field(default_factory=dict)

    def name(self, batch: Slice, batch_size: int) -> tuple[int, int]:
        lease, within = divmod(batch.start, self.samples_per_lease)
        number = (batch.epoch - self.first_epoch) * self.num_leases + lease
        return self.stream(number), within // batch_size + 1

    def ends_group(self, batch: Slice, batch_size: int) -> bool:
        """True where accumulated gradients are pushed: after the same batches, whichever worker runs the lease.

        So two pushes of a lease have the same batches or none in common, and sequence marks detect
        repeats.
        """
        stream, seq = self.name(batch, batch_size)
        every = 1 if (stream & 0xFFFF_FFFF) - 1 in self.singly else self.push_every
        stop = batch.start + batch.num_global
        return not seq % every or not stop % self.samples_per_lease or stop >= self.num_samples

    def stream_of_residuals(self, rank: int) -> int:
        """Stream for top-k residuals of a worker, beyond all leases."""
        return (self.call << 32) | NO_LEASE | rank

    def stream(self, lease: int) -> int:
        """A lease's stream: leases of one fit are not those of another."""
        return (self.call << 32) | (lease + 1)

    def heard(self, marks: NDArray[np.int64]) -> None:
        """Servers forget the marks of leases once all are done; a worker may not know yet that they are."""
        for stream in marks[marks[:, 2] == 0, 1].tolist():
            if stream >> 32 == self.call:
                self.done_below = max(self.done_below, (stream & 0xFFFF_FFFF) - 1)
        is_lease = (marks[:, 1] & NO_LEASE) == 0
        of_call = marks[(marks[:, 2] > 0) & is_lease & (marks[:, 1] >= self.stream(self.done_below))]
        self.counted = {}
        for stream in np.unique(of_call[:, 1]).tolist():
            if stream >> 32 == self.call:
                own = of_call[of_call[:, 1] == stream]
                everywhere = int(own[:, 2].min()) if len(own) == NUM_SLOTS else 0
                in_slot_0 = int(own[own[:, 0] == 0, 2].max(initial=0))
                self.counted[(stream & 0xFFFF_FFFF) - 1] = (in_slot_0, everywhere)


@dataclass(slots=True)
class HeldGradients:
    """Gradients of some batches of one lease, accumulated until they are pushed as one."""

    stream: int = 0
    seq: int = 0  # the last of them
    num_batches: int = 0
    first: Slice | None = None
    last: Slice | None = None
    is_applied: bool = False  # at least one of them has a gradient
    rows: dict[int, list[tuple[NDArray[np.int64], NDArray[Any]]]] = field(default_factory=dict)
    dense: list[Tensor | None] = field(default_factory=list)

    def add(
        self,
        name: tuple[int, int],
        batch: Slice,
        factor: float | None,
        rows: dict[int, tuple[NDArray[np.int64], NDArray[Any]]],
        dense: list[Tensor | None],
    ) -> None:
        """Add a batch's gradients times `factor`; None: a skipped batch, which counts all the same."""
        self.stream, self.seq = name
        self.num_batches += 1
        self.first, self.last = self.first or batch, batch
        if factor is None:
            return
        self.is_applied = True
        for number, (keys, values) in rows.items():
            self.rows.setdefault(number, []).append((keys, values if factor == 1.0 else values * factor))
        self.dense = self.dense or [None] * len(dense)
        for at, gradient in enumerate(dense):
            if gradient is not None:
                held = self.dense[at]
                scaled = gradient if factor == 1.0 else gradient * factor
                self.dense[at] = scaled if held is None else held.add_(scaled)

    def merged_rows(self) -> dict[int, tuple[NDArray[np.int64], NDArray[Any]]]:
        return {number: merged(parts) for number, parts in self.rows.items()}


class PsRelaxed(Ps):
    """The parameter server, bounded or asynchronous."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._clock = 0  # steps this worker has finished
        self._naming: Naming | None = None
        self._batch_size = 1
        self._batch: Slice | None = None
        self._trained: TrainedFile | None = None
        self._ahead: DensePull | None = None
        self._unused: list[DensePull] = []  # the servers may still write into their memory
        self._unheard: PushStep | None = None  # last push, kept until every copy of its slots has it
        self._control_flags = 0  # control flags of all workers, as of the last answer
        self.push_every, self._pull_every = job.push_every or 1, job.pull_every or 1
        self._held = HeldGradients()
        self._aggregator: AggregatorGroup | None = None
        self._aggregates: Aggregator | None = None  # set if this worker is the first of its group
        mode = self._session.mode
        self._bound = mode.bound if mode.kind == "ssp" else None
        self._pulled_at = self._slowest_then = 0  # clocks of this worker and of the slowest at the last pull
        self.left_out: set[int] = set()  # leases with a push that was dropped: some of it counted already
        self._num_left_out = self._num_residuals = 0
        # Number of pulls, by their distance ahead of the slowest worker.
        self.staleness: Counter[int] = Counter()
        self.updates = 0  # updates of all workers, as far as this one knows
        self.waited_s = 0.0  # time spent waiting for fresh enough weights, that is, for the slowest worker

    def lease_by(self, naming: Naming, batch_size: int) -> None:
        self._naming, self._batch_size, self._control_flags = naming, batch_size, 0

    @property
    def is_laid_out(self) -> bool:
        return self._model is not None

    def lay_out(self, batch: Slice | None) -> None:
        self._lay_out(batch)

    @property
    def _pushes_at_once(self) -> bool:
        """True where gradients are sent while backward runs: nothing is accumulated here or merged with others'."""
        has_residual = self._session.group.compression.has_residual
        return self.push_every == 1 and self._launched.fan_in is None and not has_residual

    def _lay_out(self, batch: Slice | None, layout: dict[str, Any] | None = None) -> None:
        super()._lay_out(batch, layout)
        fan_in = self._launched.fan_in
        if fan_in is None or self._model is None or self._aggregator is not None:
            return
        leader = leader_of(self._launched, fan_in)
        if leader == self._rank:
            self._aggregates = Aggregator(
                self._launched, fan_in, self._session.group.compression, self._job.number
            )
        address = system.address_of(name_of(self._launched, leader, self._job.number))
        self._aggregator = AggregatorGroup(self._launched, address)
        for message in self._model.declarations():
            self._aggregator.declare(message)

    @property
    def session(self):  # type: ignore[no-untyped-def]
        return self._session.session

    def forward_backward(self, batch: Slice) -> LossSum:
        self._lay_out(batch)
        self.about_to_run()
        self._begin_alone(batch)
        return self._compute.forward_backward(
            batch, rank=self._rank, step=self.step, before_backward=self._contribute_alone
        )

    def sum_gradients(self, batch: Slice) -> None:
        """A batch is one worker's alone, and so is its gradient."""

    def adopt(self, batch: Slice) -> None:
        """Push the gradients of the user's own backward, for a whole batch."""
        assert self._own is not None
        self._has_looked = False
        self._begin_alone(batch)
        self._contribute_alone(LossSum(torch.zeros(()), float(batch.num_local), None))

    def about_to_run(self) -> None:
        """Pull weights that are fresh enough, and keep the buffers."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._model is not None:
            began_at = time.monotonic()
            self._session.group.finish(ahead)
            self.waited_s += time.monotonic() - began_at
            self._take(ahead)
        elif self._may_reuse():
            self._weights_at = self._clock
            self.staleness[self._clock - self._slowest_then] += 1
        super().about_to_run()

    def _take(self, pull: DensePull) -> None:
        assert self._model is not None
        self.staleness[pull.staleness] += 1
        self._pulled_at, self._slowest_then = pull.clock, pull.clock - pull.staleness
        for unused in self._unused:
            pull.take_along(unused)
        self._unused = []
        self._model.dense.take(pull)
        self._weights_at = self._clock

    def _may_reuse(self) -> bool:
        """True if the weights of the last pull are fresh enough for one more step."""
        return (
            self._weights_at >= 0
            and self._clock - self._pulled_at < self._pull_every
            and (self._bound is None or self._clock - self._slowest_then <= self._bound)
        )

    def _refresh(self, *, is_whole: bool = False) -> None:
        if is_whole:
            self._have_newest()
        elif self._model is not None and self._weights_at != self._clock:
            pull = self._pull_dense()
            self._session.group.run(pull)
            self._take(pull)

    def _pull_dense(self) -> DensePull:
        assert self._model is not None
        codec = self._session.group.compression.pull
        return self._model.dense.pull(self._clock, codec, self._held.num_batches)

    def _look_up(self, clock: int, *, training: bool) -> None:
        super()._look_up(clock, training=training)
        for module in self._rows:
            module.unpushed = self._held.num_batches

    def _have_newest(self) -> int:
        self.settle()
        # At clock 0 no worker is waited for: others may be behind, and waiting for this one by now.
        if self._model is not None and self._weights_at != NEWEST:
            self._drop_ahead()
            self._model.dense.refresh(self._session.group, 0, is_whole=True)
            self._weights_at = NEWEST
        return 0

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._unused.append(ahead)

    def _begin_alone(self, batch: Slice) -> None:
        self._batch, self._num_global = batch, batch.num_global
        self._look_up(self._clock, training=True)
        name = (self._rank + 1, self._clock + 1)
        if self._naming is not None:
            name = self._naming.name(batch, self._batch_size)
        if self._held.num_batches and self._held.stream != name[0]:
            self._held = HeldGradients()  # another worker was faster with that lease, and has pushed them
        self._current = PushStep(self._session.group, *name)

    def _contribute_alone(self, loss: LossSum) -> None:
        assert self._model is not None
        assert self._current is not None
        self._loss = loss
        vector = contribution(
            rank=0, num_workers=1, loss_total=loss.read(), count=loss.count, control=self._job.control
        )
        self._result = decide(vector)
        self._vector = vector.numpy()
        if self._result.applied and not self._wants_norm and self._pushes_at_once:
            self._model.dense.arm(self._current)
        # Else nothing is sent before the whole gradient is known, or nothing at all.

    def commit(self) -> StepResult:
        """Push the rest. With replicas its answer is awaited before the next push counts, not before the next batch."""
        assert self._model is not None
        assert self._current is not None
        assert self._batch is not None
        self.settle()
        result, step, batch = self._result, self._current, self._batch
        self._current = self._batch = None
        factor = self._num_global / result.count if result.count else 0.0
        taken = ((module.spec.number, module.take_gradients()) for module in self._model.rows)
        rows = {number: held for number, held in taken if held is not None and len(held[0])}
        if result.applied and self._wants_norm:
            norm = factor * self._own_norm(rows.values())
            result = dataclasses.replace(result, grad_norm=norm, applied=math.isfinite(norm))
            factor *= clip_factor(self._job, norm)
        if self._pushes_at_once:
            if result.applied and self._wants_norm:
                self._model.dense.arm(step)
            note = self._session.note_of_step(is_needed=False)
            self._push(step, batch, batch, rows if result.applied else None, factor, note=note, num_batches=1)
        else:
            dense = [_dense(parameter.grad) for parameter in self._parameters]
            name = (step.stream, step.seq)
            self._held.add(name, batch, factor if result.applied else None, rows, dense)
            if self._naming is None or self._naming.ends_group(batch, self._batch_size):
                self.flush()
        self._clock += 1
        self._ahead = self._ask_ahead()
        if self._launched.num_replicas == 1 or result.stop or result.leave or result.checkpoint:
            self.settle()
        self._end(result)
        return dataclasses.replace(
            result,
            stop=result.stop or bool(self._control_flags & STOP),
            leave=result.leave or bool(self._control_flags & LEAVE),
            checkpoint=result.checkpoint and self._rank == 0,
        )

    def flush(self) -> None:
        """Push accumulated gradients, at the end of a fit also before the group is complete."""
        held, self._held = self._held, HeldGradients()
        if not held.num_batches:
            return
        assert self._model is not None
        assert held.first is not None
        assert held.last is not None
        self.settle()
        if held.is_applied:
            # The vector is of the last batch alone, which may be a skipped one.
            self._vector[LOSSES:] = np.nan_to_num(self._vector[LOSSES:], nan=0.0, posinf=0.0, neginf=0.0)
        rows = held.merged_rows() if held.is_applied else None
        note, group = self._session.note_of_step(is_needed=False), self._session.group
        # Notes and control flags only concern the servers, and a push without changes is no update.
        is_plain = held.is_applied and not note and not self._vector[1:LOSSES].any()
        by_aggregator = self._aggregator is not None and is_plain
        for way in (self._aggregator, group) if by_aggregator else (group,):
            assert way is not None
            step = PushStep(way, held.stream, held.seq)
            for parameter, gradient in zip(self._parameters, held.dense, strict=False):
                parameter.grad = gradient
            try:
                if held.is_applied:
                    self._model.dense.arm(step)
                self._push(step, held.first, held.last, rows, 1.0, note=note, num_batches=held.num_batches)
                break
            except LinkLost:
                if way is group:
                    raise
        for parameter in self._parameters:
            parameter.grad = None

    def push_residuals(self) -> None:
        """Push everything that top-k held back: at an epoch's end, and before this worker reads a checkpoint."""
        self.settle()  # the last push may not count, and then leaves no residual
        residuals = self._session.group.compression.take_residuals()
        if not residuals or self._model is None or self._naming is None:
            return
        job = self._launched
        self._num_residuals += 1
        # Names are unique, also against those of a predecessor and of a run before `shoal resume`.
        seq = job.launch << 40 | job.incarnation << 20 | self._num_residuals
        step = PushStep(self._session.group, self._naming.stream_of_residuals(self._rank), seq)
        for spec in self._model.dense.specs:
            if spec.number in residuals:
                values = residuals[spec.number]
                np.frombuffer(step.chunk_memory(spec.number, spec.slot, values.nbytes), values.dtype)[:] = (
                    values
                )
                step.push_dense(spec.number, [])
        settings, table_settings = self._model.settings()
        step.end(
            np.zeros(LOSSES + 1),
            b"",
            rank=self._rank,
            settings=settings,
            model=self._job.number,
            table_settings=table_settings,
            num_batches=0,
        )
        self._session.group.finish(step)
        step.release()

    def _push(
        self,
        step: PushStep,
        first: Slice,
        last: Slice,
        rows: dict[int, tuple[NDArray[np.int64], NDArray[Any]]] | None,
        factor: float,
        *,
        note: bytes,
        num_batches: int,
    ) -> None:
        """Push the gradients of the batches from `first` to `last`; without `rows` they count, and change nothing."""
        assert self._model is not None
        if rows is not None:
            self._model.dense.send_rest()
            for number, held in rows.items():
                step.push_rows(number, *held)
        else:
            self._model.dense.disarm()
        settings, table_settings = self._model.settings()
        self._note_push(first, last)
        step.end(
            self._vector,
            note,
            rank=self._rank,
            anchored_at=self._session.anchored_at,
            settings=settings,
            model=self._job.number,
            table_settings=table_settings,
            factor=factor if rows is not None else 0.0,
            done_below=self._naming.stream(self._naming.done_below) if self._naming else 0,
            num_batches=num_batches,
        )
        self._unheard = step

    def _ask_ahead(self) -> DensePull | None:
        """Request the next batch's rows, and the weights if the present ones are too old for it."""
        assert self._model is not None
        pull = None
        if not self._may_reuse():
            pull = self._pull_dense()
            self._session.group.start(pull)
        batch_ahead, self._next_batch = self._next_batch, None
        if batch_ahead is not None:
            for module in self._rows:
                module.unpushed = self._held.num_batches
            self._model.pull_rows_ahead(batch_ahead.batch, self._clock)
        return pull

    def settle(self) -> None:
        """Wait until the last push is applied in every copy of its slots."""
        step, self._unheard = self._unheard, None
        if step is None:
            return
        if self._aggregator is not None and step.group is self._aggregator:
            self._aggregator.finish_or_hand_over(step, self._session.group)
        else:
            self._session.group.finish(step)
        failpoint("worker: committed, not counted")
        committed = step.committed
        assert committed is not None
        self._note_outcome(step)
        counts = not step.is_late and (step.is_new or step.was_sent_again)
        self._session.group.compression.heard(counts=counts)
        if step.is_late:
            self.left_out.add(step.stream)
            self._num_left_out += 1
        step.release()
        # A replacement begins at 0 and counts as far as the slowest: servers admit it there.
        self._clock = max(self._clock, committed.slowest)
        self._session.updates = self.updates = step.num_updates
        self._control_flags = committed.control_flags

    def _note_push(self, first: Slice, last: Slice) -> None:
        """Record the push: from here on it may count, and this worker may die before the answer."""
        if self._naming is None:
            return
        if self._trained is None:
            self._trained = TrainedFile(self._launched)
        stop = last.start + last.num_global
        self._trained.pushing(call=self._naming.call, epoch=first.epoch, start=first.start, stop=stop)

    def _note_outcome(self, step: PushStep) -> None:
        if self._naming is not None and self._trained is not None:
            # Repeated after a server was lost: the batch that counted before may have been this very push.
            is_other = PushOutcome.PUSHED if step.was_sent_again else PushOutcome.KNOWN
            self._trained.heard(PushOutcome.COUNTED if step.is_new else is_other)

    def _state(self, changes: RowStamps | None) -> Iterator[Piece]:
        """Model and optimizer, and their sequence marks. Rank 0 reads while no push is applied."""
        if self._model is None or self._rank != 0:
            yield from super()._state(changes)
            return
        self.push_residuals()
        self.settle()
        group = self._session.group
        group.tell(lambda view: Hold(view, True))
        try:
            pieces = list(super()._state(changes))
            marks = torch.from_numpy(read_applied_seqs(group))
        finally:
            group.tell(lambda view: Hold(view, False))
        if self._naming is not None:
            self._naming.heard(marks.numpy())
        yield from pieces
        yield Piece(MARKS, marks, tuple(marks.shape), (0, 0))

    def _write_applied_seqs(self, saved: PieceReader | None) -> None:
        if saved is not None and saved.optimizer_settings is not None and MARKS in saved.tensors:
            write_applied_seqs(self._session.group, saved.tensors[MARKS].numpy())

    def import_state(self, part: Part) -> None:
        super().import_state(part)
        self.updates = self._session.updates

    def gather(self, value: Tensor | None) -> list[Tensor]:
        self.settle()
        return super().gather(value)

    def share_statistics(self) -> None:
        """Average BatchNorm's statistics over all workers. Collective."""
        self._buffers.average(lambda flat: self.reduce(flat) / self._num_workers)

    def rest(self) -> None:
        """Mark this worker idle, so that no other waits for it."""
        self.settle()
        if self._model is not None:
            self._session.group.tell(lambda view: Rest(view, self._rank))

    def pull_weights(self) -> None:
        """Put the trained weights into this process's model: all workers have finished by now."""
        self.settle()
        if self._model is not None:
            self._session.exchange(b"")  # after this no worker pushes
            self._pull_weights()
        report_staleness(self.staleness, self._rows, num_late=self._num_left_out)
        if self._aggregates is not None:
            session.merged(num_pushes=self._aggregates.num_pushes, num_sent=self._aggregates.num_sent)
            self._aggregates.num_pushes = self._aggregates.num_sent = 0
        self._num_left_out = 0

    def _pull_weights(self, *, with_rows: bool = True) -> None:
        assert self._model is not None
        self._model.pull_weights(0, with_rows=with_rows)
        self._weights_at = -1 if self._session.group.compression.pull else NEWEST
