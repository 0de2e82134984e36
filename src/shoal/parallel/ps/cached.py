"""`ps --row-cache N` with one worker: rows, optimizer and step on the worker's device, written back to
the servers behind it.

The worker is the only writer, so nothing has to be exchanged before the next step. The servers hold
a recovery point: rows that changed since the last one and a note with all other state are committed
there together, as one step. A dead worker is replaced at that point and repeats the steps since
then. See docs/adr/0060-rows-on-the-workers-device.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from shoal.config import placement
from shoal.config.job import Job
from shoal.data.slice import Slice
from shoal.embedding.rules import RULES
from shoal.errors import ConfigError
from shoal.parallel.compute import place
from shoal.parallel.protocol import LayerPlace, LossSum, Piece, PieceReader, StepResult, TrainJob
from shoal.parallel.ps.exact import Ps
from shoal.parallel.ps.rows import PlacedEmbedding, RowModule, describe
from shoal.parallel.ps.served_model import ServedModel
from shoal.parallel.ps.session import PsSession, ps_session
from shoal.parallel.ps.worker_rows import WorkerRows
from shoal.parallel.single import Single
from shoal.parallel.state import (
    MODEL,
    OPTIMIZER,
    hash_embeddings,
    layers_of,
    load_local,
    load_optimizer,
    optimizer_settings,
    parameter_of,
    plain_tensors,
    saved_state,
    state_pieces,
)
from shoal.ps.client.bulk_transfer import RowStamps
from shoal.ps.client.kv import declared_tables
from shoal.ps.client.step import Decision, PushStep
from shoal.recovery.replay_log import ReplayLog
from shoal.recovery.state_transfer import Part
from shoal.runtime import memory, recorder
from shoal.runtime.failpoints import failpoint
from shoal.runtime.transport.arena import ArenaConfig
from shoal.runtime.transport.envelope import REPLY_BYTES

MIN_INTERVAL_S = 2.0
"""Minimum interval between recovery points, unless --snapshot-every is given. A death repeats about as
many seconds of steps.
"""

SHARE_OF_TIME = 0.25
"""Largest share of time for writing: a recovery point that takes longer delays the next one."""

LEAST_CHANGED_BYTES, SHARE_OF_MEMORY = 256 << 20, 8
"""Changed rows are copied on the device and in memory shared with the servers until these have them:
at most an eighth of the free memory of either at the worker's start.
"""

MOST_CHANGED_BYTES, MOST_REPLICATED_BYTES = 3 << 30, 512 << 20
"""And no more than the transport takes: a server maps 8 GiB of one client, and a repeated point
occupies it twice. A replica receives a whole point as one message, of 1 GiB between hosts.
"""

PIECE_BYTES = 64 << 20
"""Rows pushed at a time: buffers of one size are reused."""

NOTE_BYTES = REPLY_BYTES - (1 << 20)
"""Limit of a recovery point without its rows: a replacement receives it as one answer."""


def for_job(job: Job) -> Ps | PsCached:
    return Ps(job) if job.row_cache is None else PsCached(job)


class CachedModel(ServedModel):
    """Tables on the servers, with their rows in this process."""

    def __init__(self, strategy: PsCached, *args: Any) -> None:
        super().__init__(*args, rows_only=True)
        self._strategy = strategy

    def _row_module(self, taken: PlacedEmbedding, number: int) -> RowModule:
        assert self._launched.row_cache is not None
        weight = getattr(taken.module, "weight", None)
        try:
            return WorkerRows(
                taken,
                number,
                self._group,
                seed=self._job.seed,
                capacity=self._launched.row_cache,
                device=torch.device(self._job.device),
                held=self._optimizer.state.get(weight, {}) if weight is not None else {},
                write_back=self._strategy.write_back,
                settle=self._strategy.settle,
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"--row-cache {self._launched.row_cache} does not fit on {self._job.device} with the rows of '{taken.name}': "
                f"{str(error).splitlines()[0]} Nothing was trained; give fewer rows."
            ) from None


class _Tables:
    """Rows of all tables, as `Single.commit` knows those of hash embeddings."""

    def __init__(self, model: CachedModel, num_updates: int) -> None:
        self.model, self.num_updates = model, num_updates
        self.modules = [module for module in model.rows if isinstance(module, WorkerRows)]

    def sum_of_squares(self) -> float:
        return sum(module.sum_of_squares() for module in self.modules)

    def apply(self, factor: float) -> None:
        _, settings = self.model.settings()
        self.num_updates += 1
        for module in self.modules:
            given = module.take_sum()
            if given is not None and len(given[0]):
                number = module.spec.number
                module.rows.update(
                    *given, factor=factor, settings=settings.get(number, {}), step=self.num_updates
                )

    def drop_gradients(self) -> None:
        for module in self.modules:
            module.end_step()


class PsCached(Single):
    """The parameter server behind one worker that holds the rows."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._launched = job
        self._session: PsSession = ps_session()
        self.replay_log: ReplayLog | None = self._session
        self._saved: PieceReader | None = None
        self._tables: _Tables | None = None
        self._is_ahead = False  # something was committed that the servers do not have
        self._since_anchor: list[StepResult] = []
        # Steps after the anchor that the received state includes.
        self._given: list[StepResult] = []
        self._step_at_anchor = self._num_steps = 0
        # Held while a forward may write into the rows, and while they are written back.
        self._buffers_before: dict[str, torch.Tensor] = {}
        self._most_bytes = _room_for_changes(job)
        self._most_note_bytes = NOTE_BYTES - (MOST_REPLICATED_BYTES if job.num_replicas > 1 else 0)
        self._session.group.arena = ArenaConfig(limit_bytes=max(4 << 30, 2 * self._most_bytes + REPLY_BYTES))
        self._writing: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._wrote_at: float | None = None
        self._wrote_for_s = 0.0

    def prepare(self, job: TrainJob) -> None:
        if job.is_own_loop:
            raise ConfigError(
                f"--row-cache {self._launched.row_cache} with --strategy ps keeps the rows with the worker that trains them, and which of the "
                "embeddings are rows it learns from a batch before the first forward: a loop of the script's own shows it none. Nothing was "
                "trained; use shoal.Trainer, or leave --row-cache out."
            )
        # A script may read its model before its first call: a replacement's state must be loaded by then.
        self._session._ensure_joined()
        super().prepare(job)
        self._session.hold(job.number, self)

    # ---- a step ---------------------------------------------------------------------------------

    def forward_backward(self, batch: Slice) -> LossSum:
        if self._given:  # committed before this process started
            return LossSum(torch.zeros(()), 0.0, None)
        self._have_others_written()
        self._lay_out(batch)
        assert self._tables is not None
        for module in self._tables.modules:
            module.next_step()
        if not all(module.is_resident for module in self._tables.modules):
            self._buffers_before = {
                MODEL + name: buffer.clone() for name, buffer in self._job.model.named_buffers()
            }
        return super().forward_backward(batch)

    def commit(self) -> StepResult:
        if self._given:
            self.step += 1
            result = self._given.pop(0)
        else:
            result = super().commit()
            self._is_ahead, self._buffers_before = True, {}
            for module in self._tables.modules if self._tables is not None else ():
                module.end_step()
            self._num_steps += 1
        self._since_anchor.append(result)
        return result

    def anchored(self) -> None:
        """A replacement can start here, so this is the place for a recovery point."""
        self._step_at_anchor, self._since_anchor = self.step, []
        if self._is_ahead and self._is_due():
            self.write_back()

    def _is_due(self) -> bool:
        assert self._tables is not None
        if self._has_changed_more_than(self._most_bytes):
            return True
        if self._wrote_at is None or not self._session.is_inside_call:
            return True
        if self._writing is not None and self._writing.is_alive():
            return False
        every = self._launched.snapshot_every
        if every is not None:
            return 0 < every <= self._num_steps
        return time.monotonic() - self._wrote_at >= max(MIN_INTERVAL_S, self._wrote_for_s / SHARE_OF_TIME)

    def _has_changed_more_than(self, num_bytes: int) -> bool:
        assert self._tables is not None
        rows = [module.rows for module in self._tables.modules]
        if sum(each.num_changes * each.row_bytes for each in rows) <= num_bytes:
            return False
        for each in rows:  # a row may have changed several times
            each.num_changes = int(each.is_changed.sum())
        return sum(each.num_changes * each.row_bytes for each in rows) > num_bytes

    # ---- the recovery point ---------------------------------------------------------------------

    def write_back(self) -> None:
        """Send changed state to the servers, in the background of the following steps."""
        self.settle()
        if not self._is_ahead or self._tables is None:
            return
        session, tables, device = self._session, self._tables, torch.device(self._job.device)
        session.have_two_phases()
        seq, num_updates = session.updates + 1, tables.num_updates
        step = PushStep(session.group, stream=0, seq=seq, decide=lambda vector, norm: Decision(1.0, True))
        # Copies on the device: the following steps change the rows.
        changed = [(module.spec.number, *module.take_changed()) for module in tables.modules]
        note = session.note(updates=seq)
        if len(note) > self._most_note_bytes:
            raise ConfigError(
                f"--row-cache {self._launched.row_cache} keeps all but the rows with the worker alone, and a recovery point has all of it in "
                f"one message: {len(note):,} bytes, where {self._most_note_bytes:,} are allowed. The servers hold what they held before; leave "
                "--row-cache out, and they hold the rest too."
            )
        self._is_ahead, self._num_steps = False, 0
        self._wrote_at = began_at = time.monotonic()
        stream = _stream_beside(device)

        def write() -> None:
            try:
                with stream:
                    for number, keys, rows in changed:
                        length = max(1, PIECE_BYTES // (rows.shape[1] * rows.element_size()))
                        for at in range(0, len(keys), length):
                            piece = slice(at, at + length)
                            step.push_whole(number, keys[piece], rows[piece])
                vector = np.array([1.0, 0.0, 0.0, 0.0, 0.0])  # one sample, with a finite loss
                where = {"exchange": seq - 1, "anchored_at": seq, "model": self._job.number}
                step.end(vector, note, rank=0, whole_after=num_updates, **where)
                failpoint("worker: exchange begun")
                session.group.finish(step)
                failpoint("worker: exchange finished, not committed")
                step.release()
                session.updates = seq
            except BaseException as error:  # `settle` raises it, in the training thread
                self._problem = error
            changed.clear()
            self._wrote_for_s = time.monotonic() - began_at

        self._writing = threading.Thread(target=write, name="shoal-write-back")
        self._writing.start()

    def settle(self) -> int:
        """Wait until the servers have the written state; returns their clock. Call it before any other request to them.

        For any model of the script: they share the servers' clock, and two concurrent writes would
        take the same number.
        """
        for each in (self, *self._models()):
            each._join_write()
        return self._session.updates

    def _models(self) -> list[PsCached]:
        return [holder for holder in self._session.holders if isinstance(holder, PsCached)]

    def _have_others_written(self) -> None:
        """A note has the state of all models, so at most one may be ahead of the servers."""
        for other in self._models():
            if other is not self:
                other.write_back()
                other.settle()

    def _join_write(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            with recorder.WAIT:
                writing.join()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    # ---- preparing ------------------------------------------------------------------------------

    def _lay_out(self, batch: Slice | None, layout: dict[str, Any] | None = None) -> None:
        """Declare the tables on the servers, once a batch has shown which those are; or find them there."""
        if self._tables is not None or self.optimizer is None:
            return
        job = self._job
        model = CachedModel(self, job, self.optimizer, self._session.group, self._launched)
        if layout is not None:
            model.lay_out_as(layout)
        else:
            assert batch is not None
            model.lay_out(
                place(batch.batch, job.device, job.cast_inputs), lambda: self._compute.try_out(batch, rank=0)
            )
        model.declare()
        tables = _Tables(model, 0)
        if layout is None:
            model.write(self._saved)
            for line in describe(model.plan):
                print(f"note: {line}", file=sys.stderr, flush=True)
        for module in tables.modules:
            state, step, _ = saved_state(module.taken.name, module.spec, self._saved)
            tables.num_updates = max(tables.num_updates, step)
            if layout is not None:
                module.read_from_servers()
            elif module.is_resident and state is not None:
                module.rows.state.copy_(torch.from_numpy(state))
        model.install()
        self._saved, self._tables, self._rows = None, tables, tables  # type: ignore[assignment]  # in the place of HashedRows

    # ---- state ----------------------------------------------------------------------------------

    def state(self) -> Iterator[Piece]:
        return self._state(None)

    def state_with_changes(self, changes: RowStamps) -> Iterator[Piece]:
        return self._state(changes)

    def _state(self, changes: RowStamps | None) -> Iterator[Piece]:
        given: set[str] = set()
        if self._tables is not None:
            for piece in (*self._resident_pieces(), *self._served_pieces(changes)):
                given.add(piece.name)
                yield piece
        # The optimizer may have created state for the weights of tables, which it does not train.
        yield from (piece for piece in super().state() if piece.name not in given)

    def _resident_pieces(self) -> Iterator[Piece]:
        """Optimizer state of tables that are completely here, as their weight is."""
        assert self._tables is not None
        for module in self._tables.modules:
            if module.is_resident:
                tensors = {
                    key: module.rows.state[:, span]
                    for key, span in RULES[module.spec.rule].state_columns(module.dim).items()
                }
                if tensors:
                    tensors["step"] = torch.tensor(float(self._tables.num_updates))
                for key, tensor in tensors.items():
                    name = f"{OPTIMIZER}{module.taken.name}/{key}"
                    yield Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())

    def _served_pieces(self, changes: RowStamps | None) -> Iterator[Piece]:
        """From the servers: tables of which a part is here, and tables declared by the script."""
        assert self._tables is not None
        if all(module.is_resident for module in self._tables.modules) and not declared_tables():
            return
        model = self._tables.model
        self._pull_all_weights()
        yield from model.optimizer_pieces()
        yield from model.table_pieces(changes)

    def _pull_all_weights(self) -> None:
        self.write_back()
        clock = self.settle()
        assert self._tables is not None
        self._tables.model.pull_weights(clock)

    def load(self, pieces: PieceReader) -> None:
        tables = self._tables
        if tables is None:
            super().load(pieces)
            self._saved = pieces
            return
        # Write a point of the old state before any of it is overwritten: a replacement that starts there
        # loads again. Not in a replacement on its way to such a point: it has nothing newer to write.
        self._have_others_written()
        self._is_ahead |= not self._given and self._session.pending_anchor() is None
        self.write_back()
        self.settle()
        super().load(pieces)
        keeps_state = pieces.optimizer_settings is None
        saved = {module: saved_state(module.taken.name, module.spec, pieces) for module in tables.modules}
        if not keeps_state:
            tables.num_updates = max((step for _, step, _ in saved.values()), default=tables.num_updates)
        # Complete tables go with the next point, if that has the capacity.
        whole = [module for module in tables.modules if module.is_resident]
        if sum(module.rows.row_bytes * len(module.rows.values) for module in whole) > self._most_bytes:
            whole = []
        tables.model.write(pieces, keeps_state=keeps_state, but=whole)
        for module in tables.modules:
            if module in whole:
                if not keeps_state:
                    module.rows.set_state(saved[module][0])
                module.rows.change_all()
            else:
                module.drop_changes()
                module.read_from_servers()
        # The note there is outdated: the next anchor is a recovery point.
        self._is_ahead, self._wrote_at = (True, None)

    def pull_weights(self) -> None:
        """At the end of a call: a table that is completely here becomes its module's weight."""
        self.refresh_copy()

    def refresh_copy(self) -> None:
        if self._tables is not None and not all(module.is_resident for module in self._tables.modules):
            self._pull_all_weights()

    def places(self) -> Iterator[LayerPlace]:
        taken = {}
        if self._tables is not None:
            taken = {
                module.taken.name.rpartition(".")[0]: module.is_resident for module in self._tables.modules
            }
        for layer in layers_of(self._job.model):
            how = "" if layer not in taken else "all rows" if taken[layer] else "rows used last"
            yield LayerPlace(layer, "worker 0", how)

    # ---- state transfer -------------------------------------------------------------------------

    def export_state(self) -> Part:
        """All state but the rows, which are committed on the servers together with the note that contains this."""
        tables = self._tables
        taken = {module.taken.name for module in tables.modules} if tables is not None else set()
        tensors = {
            piece.name: piece.tensor
            for piece in state_pieces(self._job.model, self.optimizer)
            if parameter_of(piece.name) not in taken
        }
        tensors |= {name: buffer for name, buffer in self._buffers_before.items() if name in tensors}
        plain = {
            "step": self._step_at_anchor,
            "since_anchor": [dataclasses.asdict(result) for result in self._since_anchor],
            "optimizer": optimizer_settings(self._job.model, self.optimizer) if self.optimizer else None,
            "layout": tables.model.layout if tables is not None else None,
            "num_updates": tables.num_updates if tables is not None else 0,
        }
        return Part(plain, tensors)

    def import_state(self, part: Part) -> None:
        plain = part.plain
        self.step = self._step_at_anchor = plain["step"]
        self._given = [_result(each) for each in plain["since_anchor"]]
        model, pieces = self._job.model, part.tensors
        with torch.no_grad():
            for name, tensor in plain_tensors(model).items():
                if MODEL + name in pieces:
                    tensor.copy_(pieces[MODEL + name])
        if self.optimizer is not None and plain["optimizer"] is not None:
            load_optimizer(
                model, self.optimizer, pieces, plain["optimizer"], elsewhere=hash_embeddings(model)
            )
        if plain["layout"] is None:
            load_local(model, PieceReader(pieces, plain["optimizer"]))
            return
        self._session.have_two_phases()  # servers may have joined since the job began
        if self._session.mode.two_phase:
            # The worker that wrote it back may have died before it had told every server to commit.
            self._session.commit_again(Decision(1.0, True))
        self._lay_out(None, plain["layout"])
        assert self._tables is not None
        self._tables.num_updates = plain["num_updates"]
        if self._session.is_between_calls:
            self.pull_weights()


def _room_for_changes(job: Job) -> int:
    free = [memory.available_bytes()]
    device = torch.device(placement.of_job(job).devices[job.rank])
    if device.type == "cuda":
        free.append(torch.cuda.mem_get_info(device)[0])
    most = MOST_REPLICATED_BYTES if job.num_replicas > 1 else MOST_CHANGED_BYTES
    return min(most, max(LEAST_CHANGED_BYTES, min(free) // SHARE_OF_MEMORY))


def _result(plain: dict[str, Any]) -> StepResult:
    pairs = {name: tuple(tuple(each) for each in plain[name]) for name in ("nonfinite", "named")}
    return StepResult(**{**plain, **pairs})


def _stream_beside(device: torch.device) -> AbstractContextManager[Any]:
    """Copy out of a device in parallel to its kernels, once everything queued so far is done."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch types it in part
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
