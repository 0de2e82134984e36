"""`ps:ssp=K` and `ps:async`: every push is one update, and nobody waits for the slowest, or only so far.

One worker computes one whole batch, so batch size, learning rate and schedule
mean what they mean in one process; which batches, the coordinator says by
leases. What is bent (how stale the weights were) is counted and reported.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.cluster.ledger.trained_file import PushOutcome, TrainedFile
from shoal.cluster.worker import session
from shoal.config.job import Job
from shoal.data.slice import Slice
from shoal.errors import ConfigError
from shoal.parallel.protocol import LossSum, Piece, PieceReader, StepResult
from shoal.parallel.ps.exact import Ps
from shoal.parallel.ps.rows import RowModule
from shoal.parallel.step import clip_factor, contribution, decide
from shoal.ps.client.bulk_transfer import read_marks, write_marks
from shoal.ps.client.step import DensePull, PushStep
from shoal.ps.server.progress import LEAVE, STOP
from shoal.recovery.state_transfer import Part
from shoal.runtime.failpoints import failpoint
from shoal.runtime.transport.messages.client_server import Hold, Rest

MARKS = "marks/triples"  # the piece of a checkpoint that says what of which lease counts in which slot

NEWEST = -3  # instead of a clock: the weights are whatever the servers had


def needs_trainer(strategy: str) -> ConfigError:
    """Why a loop of the script's own is refused."""
    return ConfigError(
        f"'{strategy}' gives every worker whole batches of its own, which only shoal.Trainer can do; this script has a loop "
        "of its own. Nothing was updated; use the Trainer, or an exact strategy (ps, ddp)."
    )


def report_staleness(counts: Counter[int], rows: Sequence[RowModule]) -> None:
    """Number of pulls by their distance ahead of the slowest worker, since the last report."""
    for module in rows:
        counts.update(module.staleness)
        module.staleness.clear()
    session.bent(staleness=counts, num_late=0, num_missed=0)
    counts.clear()


@dataclass(slots=True)
class Naming:
    """Names of the running fit's pushes: the lease, and the batch within it."""

    call: int
    num_leases: int
    samples_per_lease: int
    first_epoch: int
    done_below: int = 0
    # By lease, when servers were last asked: how many of its batches count in slot 0, and in all slots.
    counted: dict[int, tuple[int, int]] = field(default_factory=dict)

    def name(self, batch: Slice, batch_size: int) -> tuple[int, int]:
        lease, within = divmod(batch.start, self.samples_per_lease)
        number = (batch.epoch - self.first_epoch) * self.num_leases + lease
        return self.stream(number), within // batch_size + 1

    def stream(self, lease: int) -> int:
        """A lease's stream: leases of one fit are not those of another."""
        return (self.call << 32) | (lease + 1)

    def heard(self, marks: NDArray[np.int64]) -> None:
        """Servers have forgotten the marks of leases that all are done; a worker may not have heard that they are."""
        for stream in marks[marks[:, 2] == 0, 1].tolist():
            if stream >> 32 == self.call:
                self.done_below = max(self.done_below, (stream & 0xFFFF_FFFF) - 1)
        of_call = marks[(marks[:, 2] > 0) & (marks[:, 1] >= self.stream(self.done_below))]
        self.counted = {}
        for stream in np.unique(of_call[:, 1]).tolist():
            if stream >> 32 == self.call:
                own = of_call[of_call[:, 1] == stream]
                everywhere = int(own[:, 2].min()) if len(own) == NUM_SLOTS else 0
                in_slot_0 = int(own[own[:, 0] == 0, 2].max(initial=0))
                self.counted[(stream & 0xFFFF_FFFF) - 1] = (in_slot_0, everywhere)


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
        self._unheard: PushStep | None = None  # the last push, kept until every copy of its slots has it
        self._wishes = 0  # of all workers, as of the last answer
        # Number of pulls, by their distance ahead of the slowest worker.
        self.staleness: Counter[int] = Counter()
        self.updates = 0  # updates of all workers, as far as this one has heard
        self.waited_s = 0.0  # for weights that are fresh enough: for the slowest worker, that is

    def lease_by(self, naming: Naming, batch_size: int) -> None:
        self._naming, self._batch_size, self._wishes = naming, batch_size, 0

    @property
    def is_laid_out(self) -> bool:
        return self._model is not None

    def lay_out(self, batch: Slice) -> None:
        self._lay_out(batch)

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

    def adopt(self, batch: Slice) -> None:
        """A loop of the script's own cuts every batch over the workers, which a relaxed strategy does not."""
        raise needs_trainer(self._launched.strategy)

    def about_to_run(self) -> None:
        """Have weights that are fresh enough, and keep the buffers."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._model is not None:
            began_at = time.monotonic()
            self._session.group.finish(ahead)
            self.waited_s += time.monotonic() - began_at
            self.staleness[ahead.staleness] += 1
            self._model.dense.take(ahead)
            self._weights_at = self._clock
        super().about_to_run()

    def _refresh(self, *, is_whole: bool = False) -> None:
        if is_whole:
            self._have_newest()
        elif self._model is not None and self._weights_at != self._clock:
            self._model.dense.refresh(self._session.group, self._clock)
            self._weights_at = self._clock

    def _have_newest(self) -> int:
        self.settle()
        # At clock 0 nobody is waited for: others may have come less far, and be waiting for us by now.
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
        self._current = PushStep(self._session.group, *name)

    def _contribute_alone(self, loss: LossSum) -> None:
        assert self._model is not None
        assert self._current is not None
        self._loss = loss
        vector = contribution(
            rank=0, num_workers=1, loss_total=loss.read(), count=loss.count, control=self._job.control
        )
        self._verdict = decide(vector)
        self._vector = vector.numpy()
        if self._verdict.applied and not self._wants_norm:
            self._model.dense.arm(self._current)
        # Else nothing leaves before the whole gradient is known, or nothing at all.

    def commit(self) -> StepResult:
        """Push what is left. With replicas its answer is waited for before the next push counts, not before the next batch."""
        assert self._model is not None
        assert self._current is not None
        self.settle()
        verdict, step = self._verdict, self._current
        factor = self._num_global / verdict.count if verdict.count else 0.0
        rows = [(module, module.take_gradients()) for module in self._model.rows]
        if verdict.applied and self._wants_norm:
            norm = factor * self._own_norm([held for _, held in rows])
            verdict = dataclasses.replace(verdict, grad_norm=norm, applied=math.isfinite(norm))
            factor *= clip_factor(self._job, norm)
            if verdict.applied:
                self._model.dense.arm(step)
        if verdict.applied:
            self._model.dense.send_rest()
            for module, held in rows:
                if held is not None and len(held[0]):
                    step.push_rows(module.spec.number, *held)
        else:
            self._model.dense.disarm()
        settings, table_settings = self._model.settings()
        self._note_push()
        step.end(
            self._vector,
            self._session.note_of_step(is_needed=False),
            rank=self._rank,
            anchored_at=self._session.anchored_at,
            settings=settings,
            model=self._job.number,
            table_settings=table_settings,
            factor=factor if verdict.applied else 0.0,
            done_below=self._naming.stream(self._naming.done_below) if self._naming else 0,
        )
        self._current, self._unheard = None, step
        self._clock += 1
        self._ahead = self._pull_ahead(self._clock)
        if self._launched.num_replicas == 1 or verdict.stop or verdict.leave or verdict.checkpoint:
            self.settle()
        self._end(verdict)
        return dataclasses.replace(
            verdict,
            stop=verdict.stop or bool(self._wishes & STOP),
            leave=verdict.leave or bool(self._wishes & LEAVE),
            checkpoint=verdict.checkpoint and self._rank == 0,
        )

    def settle(self) -> None:
        """Wait until the last push counts in every copy of its slots."""
        step, self._unheard = self._unheard, None
        if step is None:
            return
        self._session.group.finish(step)
        failpoint("worker: committed, not counted")
        committed = step.committed
        assert committed is not None
        self._note_outcome(step)
        step.release()
        # A replacement begins at 0, and is as far as the slowest: servers let it in there.
        self._clock = max(self._clock, committed.slowest)
        self._session.updates = self.updates = step.num_updates
        self._wishes = committed.wishes

    def _note_push(self) -> None:
        """From here on the push may count, and this worker may die before it hears."""
        if self._naming is None or self._batch is None:
            return
        if self._trained is None:
            self._trained = TrainedFile(self._launched)
        part, self._batch = self._batch, None
        stop = part.start + part.num_global
        self._trained.pushing(call=self._naming.call, epoch=part.epoch, start=part.start, stop=stop)

    def _note_outcome(self, step: PushStep) -> None:
        if self._naming is not None and self._trained is not None:
            # Sent again after a server was lost: what counted before may have been this very push.
            is_other = PushOutcome.PUSHED if step.was_sent_again else PushOutcome.KNOWN
            self._trained.heard(PushOutcome.COUNTED if step.is_new else is_other)

    def state(self) -> Iterator[Piece]:
        """Model and optimizer, whole, and the marks that belong to them. Rank 0 reads while no push counts."""
        if self._model is None or self._rank != 0:
            yield from super().state()
            return
        self.settle()
        group = self._session.group
        group.tell(lambda view: Hold(view, True))
        try:
            pieces = list(super().state())
            marks = torch.from_numpy(read_marks(group))
        finally:
            group.tell(lambda view: Hold(view, False))
        if self._naming is not None:
            self._naming.heard(marks.numpy())
        yield from pieces
        yield Piece(MARKS, marks, tuple(marks.shape), (0, 0))

    def _write_marks(self, saved: PieceReader | None) -> None:
        if saved is not None and saved.optimizer_settings is not None and MARKS in saved.tensors:
            write_marks(self._session.group, saved.tensors[MARKS].numpy())

    def import_state(self, part: Part) -> None:
        super().import_state(part)
        self.updates = self._session.updates

    def gather(self, value: Tensor | None) -> list[Tensor]:
        self.settle()
        return super().gather(value)

    def share_statistics(self) -> None:
        """Average what BatchNorm has counted on every worker; all of them call it."""
        self._buffers.average(lambda flat: self.reduce(flat) / self._num_workers)

    def rest(self) -> None:
        """This worker has nothing to do for now: nobody has to wait for it."""
        self.settle()
        if self._model is not None:
            self._session.group.tell(lambda view: Rest(view, self._rank))

    def pull_weights(self) -> None:
        """Put the trained weights into the model of this process: all workers are through by now."""
        self.settle()
        if self._model is not None:
            self._session.exchange(b"")  # nobody pushes any more
            self._pull_weights()
        report_staleness(self.staleness, self._rows)

    def _pull_weights(self) -> None:
        assert self._model is not None
        self._model.pull_weights(0)
        self._weights_at = -1 if self._session.group.compression.pull else NEWEST
