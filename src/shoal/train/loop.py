"""The loop of one fit, top to bottom: epochs, steps, counting, and the end.

No rank decides alone: every step's result is the same on all ranks, so all of them stop, save and
leave at the same step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from shoal.cluster.worker import session
from shoal.config.faults import BEFORE_FORWARD
from shoal.data.batches import Batches
from shoal.data.cache.cache_plan import emit_figures
from shoal.data.slice import Slice
from shoal.errors import ConfigError, EmptyDataset, Interrupted, NonFiniteLoss, TrainingError
from shoal.parallel.compute import place
from shoal.parallel.protocol import (
    Leased,
    LooksAhead,
    LossSum,
    PeriodicSync,
    RunsRounds,
    StepResult,
    WeightsFollow,
    weights_are_ahead,
)
from shoal.parallel.step import merge_turns
from shoal.runtime import recorder
from shoal.runtime.failpoints import failpoint
from shoal.train.callbacks.base import StepLogs
from shoal.train.calls import asked_to_leave
from shoal.train.checkpoint.saving import Snapshots, is_there
from shoal.train.load_balance import LoadBalance
from shoal.train.profiling import PROFILER
from shoal.train.progress import BEFORE_A_STEP, FitStart, History, LoopPlace, note_anchor
from shoal.train.reports import LedgerReport, MetricsLog, TrafficReport

if TYPE_CHECKING:
    from shoal.train.leasing import Leasing
    from shoal.train.trainer import Trainer

_REPORT_EVERY_S = 0.1


class FitLoop:
    """Runs one fit of a Trainer from its position to the end."""

    def __init__(
        self,
        trainer: Trainer,
        batches: Batches,
        start: FitStart,
        *,
        last_epoch: int | None,
        last_step: int | None,
        validation: Batches | None,
        validate_every: int | None = None,
        validation_steps: int | None = None,
    ) -> None:
        self._trainer, self._batches, self._validation = trainer, batches, validation
        self._validate_every, self._validation_steps = validate_every, validation_steps
        self._strategy, self._callbacks = trainer.strategy, trainer.callbacks
        self._progress, self._position = trainer.progress, trainer.progress.position
        self._rank, self._num_workers = trainer.data_rank, trainer.job.tasks or trainer.num_workers
        if trainer.job.task is not None:
            self._validation = self._validate_every = None  # the driver measures, between rounds
        self._runs_rounds = isinstance(self._strategy, RunsRounds)
        if self._runs_rounds and validate_every is not None:
            raise ConfigError(
                "validate_every measures the model between steps, and under mapreduce there is one model after each round alone. Nothing "
                "was trained; leave it out: validation_data is measured after each epoch."
            )
        self._counts_samples = trainer.job.counts_samples
        self._start, self._history = start, start.history
        self._last_epoch = last_epoch
        limits = trainer.callbacks.last_steps + ([last_step] if last_step is not None else [])
        self._last_step = min(limits, default=None)
        self._over = start.place.over
        self._log: MetricsLog | None = None
        self._epoch_log: MetricsLog | None = None
        self._measured_epoch = 0
        """The epoch of this fit that was measured last, from 1."""

        self._step_loss: float | None = None
        self._snapshots = Snapshots(trainer)
        self._traffic = TrafficReport(trainer.job, self._strategy, self._position)
        self.leasing = self._lease()
        """In relaxed strategies batches come by lease; otherwise workers compute each together."""

        self.ledger: LedgerReport | None = None
        self._balance: LoadBalance | None = None
        # Leases prefetch themselves: the next one may not be available before this worker has finished its
        # part.
        self._looks_ahead: LooksAhead | None = None
        if self.leasing is None and not self._runs_rounds:
            self._balance = LoadBalance(trainer.job, self._strategy, self._position, batches)
            self.ledger = LedgerReport(trainer, batches)
            # With several optimizers the next commit is of the same batch.
            looks = isinstance(self._strategy, LooksAhead) and len(trainer.turns) == 1
            self._looks_ahead = self._strategy if looks else None  # type: ignore[assignment]
        self._started_at = self._reported_at = time.monotonic()
        self._started_samples, self._first_step = self._position.samples, self._position.step

    def run(self) -> History:
        """Train until the epochs, the steps, a callback or a signal end it."""
        trainer, position = self._trainer, self._position
        if trainer.job.launched and trainer.rank == 0:
            self._log = MetricsLog(trainer.run_dir / "metrics.jsonl", from_step=position.step)
            # The end of an epoch that was not measured yet is written again.
            is_measured = position.measured_at == position.step
            self._epoch_log = MetricsLog(
                trainer.run_dir / "epochs.jsonl", from_step=position.step - (not is_measured)
            )
            if self._progress.last_line is not None:
                # Rank 0 may have died before writing a step it had committed.
                self._log.make_up_for(self._progress.last_line)
        held = contextlib.ExitStack()  # reader processes stay until the fit is over
        try:
            for batches in (self._batches, self._validation):
                if batches is not None:
                    held.enter_context(batches.held())
            if self.ledger is not None:
                again = self._log.dropped if self._log is not None else {}
                self.ledger.begin(is_inherited=self._start.is_inherited, again=again)
            if self._balance is not None and not self._start.is_inherited:
                self._balance.begin()
            self._callbacks.call("on_fit_begin", trainer)
            if self._start.place.is_epoch_end:  # the others are there already
                self._end_epoch(halfway=self._start.place.halfway)
            while not self._over and not self._reached_the_end():
                self._run_epoch()
            if position.next_index and position.measured_at != position.step:
                self._finish_epoch()  # resumed from a checkpoint of the very last step: only the epoch's end is left
            self._callbacks.call("on_fit_end", trainer)
            trainer.checkpoints.wait()
        except BaseException as error:
            # shoal's own tasks and trials end a fit by leaving with code 0: no failure.
            if not isinstance(error, SystemExit) or error.code:
                self._callbacks.failed(trainer, error)
            raise
        finally:
            trainer.checkpoints.abandon()
            PROFILER.finish()
            trainer.close_graph()
            self._traffic.report()
            held.close()
            for log in (self._log, self._epoch_log):
                if log is not None:
                    log.close()
            if self.leasing is not None:
                self.leasing.close()
        return self._history

    def _lease(self) -> Leasing | None:
        if not isinstance(self._strategy, Leased):
            return None
        from shoal.train.leasing import Leasing

        first = self._start.first
        return Leasing(
            self._strategy,  # type: ignore[arg-type]  # those are relaxed
            self._batches,
            call=session.num_calls(),
            first=first,
            num_epochs=self._last_epoch - first[0] if self._last_epoch is not None else None,
            num_workers=self._num_workers,
            position=self._position,
            trainer=self._trainer.number,
            kept=self._start.leases,
        )

    def _reached_the_end(self) -> bool:
        position = self._position
        if self._last_step is not None and position.step >= self._last_step:
            return True
        return self._last_epoch is not None and position.epoch >= self._last_epoch

    def _run_epoch(self) -> None:
        while self._run_stretch() and not self._over:
            pass
        if self._position.next_index == 0 and self.leasing is None:
            raise EmptyDataset(what="fit")
        self._finish_epoch()

    def _run_stretch(self) -> bool:
        """Run the steps for which the workers' shares hold; returns whether the epoch may have more."""
        if self._runs_rounds:
            return self._run_round()
        strategy = self._strategy
        with strategy.followed() if isinstance(strategy, WeightsFollow) else contextlib.nullcontext():
            return self._run_steps()

    def _run_steps(self) -> bool:
        limit = self._balance.begin_stretch() if self._balance is not None else None
        parts, num_run = itertools.islice(self._parts(), limit), 0
        with recorder.READ:
            part = next(parts, None)
        while part is not None:
            num_run += 1
            note_anchor(self._trainer, BEFORE_A_STEP)
            coming = None
            if self._looks_ahead is not None:
                with recorder.READ:
                    coming = next(parts, None)
                if coming is not None:
                    self._looks_ahead.prefetch(coming)
            with recorder.STEP:
                self._run_step(part)
            if self._over:
                break
            if self._looks_ahead is not None:
                part = coming
            else:
                with recorder.READ:
                    part = next(parts, None)
        return num_run == limit

    def _run_round(self) -> bool:
        """Run a round of steps made by tasks; returns whether the epoch has more."""
        trainer, strategy, position = self._trainer, self._strategy, self._position
        assert isinstance(strategy, RunsRounds)
        left = self._batches.num_steps(self._num_workers, start=position.next_index)
        if left == 0:
            return False
        until = self._last_step - position.step if self._last_step is not None else None
        bounds = [each for each in (left, until, strategy.sync_every) if each is not None]
        if left is None and (strategy.sync_every is None or not self._batches.is_endless):
            raise ConfigError(
                "mapreduce cuts an epoch into rounds, and the number of samples of this data is not known. Nothing was trained; give data "
                "of a known size, or repeat() with --sync-every K and max_steps."
            )
        note_anchor(trainer, BEFORE_A_STEP)
        failpoint(BEFORE_FORWARD, position.step + 1)
        with recorder.STEP:
            done = strategy.run_round(min(bounds))
        trainer.control.checkpoint = False
        # Asked while the tasks ran: they finish their round, as a worker finishes its step.
        result = dataclasses.replace(done.result, leave=asked_to_leave() is not None)
        start = position.next_index
        position.loss_total += result.loss_total
        position.loss_count += result.count
        self._progress.num_skipped_steps += result.num_skipped
        position.step += done.num_steps
        position.next_index = done.next_index
        position.samples += done.num_samples
        for _ in range(done.num_steps):
            trainer.advance_scheduler("step", {"loss": result.loss})
        recorder.RECORDER.done(position.step, done.num_samples)
        self._write_down(Slice((), 0, done.num_samples, epoch=position.epoch, start=start), result)
        self._apply(result)
        return left is None or left > done.num_steps

    def _parts(self) -> Iterator[Slice]:
        position = self._position
        if self.leasing is not None:
            return self.leasing.slices(position.epoch)
        parts = self._batches.slices(
            epoch=position.epoch, start=position.next_index, rank=self._rank, num_workers=self._num_workers
        )
        return self._balance.timed(parts) if self._balance is not None and self._balance.measures else parts

    def _sync(self) -> None:
        """Workers that train apart sync at the end of an epoch or of the fit."""
        strategy = self._strategy
        result = strategy.sync() if isinstance(strategy, PeriodicSync) else None
        if result is not None:
            self._position.loss_total += result.loss_total
            self._position.loss_count += result.count
            self._progress.num_skipped_steps += result.num_skipped
            self._apply(result)

    def _finish_epoch(self) -> None:
        failpoint("worker: epoch ended")
        self._sync()
        if self.leasing is not None:
            counted = self._position.step
            self._over = self.leasing.epoch_is_over(self._position, over=self._over)
            mean = self._position.loss_total / self._position.loss_count if self._position.loss_count else 0.0
            for _ in range(self._position.step - counted):  # the others' steps after this worker's last
                self._trainer.advance_scheduler("step", {"loss": mean})
        # Stopped halfway, the position stays: the next fit, or a resumed job, continues from there.
        ended = self._over or self._reached_the_end()
        left = self._batches.num_steps(self._num_workers, start=self._position.next_index)
        halfway = ended and left != 0
        note_anchor(self._trainer, LoopPlace(is_epoch_end=True, halfway=halfway, over=self._over))
        self._end_epoch(halfway=halfway)

    def _run_step(self, part: Slice) -> None:
        trainer, strategy, position = self._trainer, self._strategy, self._position
        trainer.control.leave = asked_to_leave() is not None
        began_at = time.monotonic()  # before the failpoint, which may slow a worker down
        failpoint(BEFORE_FORWARD, position.step + 1)
        results = []
        for turn in trainer.turns:
            trainer.train_job.turn = turn
            with recorder.COMPUTE:
                contributed = strategy.forward_backward(part)
            if self._balance is not None and self._balance.measures:
                self._balance.ran(part, contributed, began_at)
            failpoint("worker: before commit")
            results.append(strategy.commit())
            failpoint("worker: committed")
            if not results[-1].applied:
                self._leave_out(part, results[-1])
            if (scale := trainer.train_job.loss_scale) is not None:
                scale.after(applied=results[-1].applied)
            if turn is not None:
                trainer.log(f"loss_{turn.name}", results[-1].loss)
        trainer.control.checkpoint = False
        result = merge_turns(results)
        if result.applied:
            self._count(part, contributed, result)
        self._progress.num_skipped_steps += result.num_skipped
        if self.leasing is not None:
            num_new = self.leasing.trained(part, position, last_step=self._last_step)
        else:
            num_new = 1
            position.step += 1
            position.next_index = part.start + part.num_global
            position.samples += part.num_global
            if self.ledger is not None:
                self.ledger.count(part)
        for _ in range(num_new if result.applied else 0):
            trainer.advance_scheduler("step", {"loss": result.loss})
        recorder.RECORDER.done(position.step, part.num_local if self._counts_samples else 0)
        PROFILER.after_step()
        trainer.write_graph(num_local=part.num_local)
        self._write_down(part, result, is_update=num_new > 0)
        if trainer.verification is not None:
            trainer.verification.count(strategy, result.loss)
        self._apply(result)

    def _apply(self, result: StepResult) -> None:
        """Save, stop or leave, by the step's result, which is equal on all ranks."""
        trainer = self._trainer
        trainer.checkpoints.check()
        if result.checkpoint:
            # A user's callback finds it written.
            path = trainer.save_checkpoint(background=not self._callbacks.has_own("on_checkpoint"))
            # That of a replayed step may have been removed since.
            if not weights_are_ahead(self._strategy) or is_there(path):
                self._callbacks.call("on_checkpoint", trainer, path)
        else:
            self._snapshots.after_step()
        self._over = result.stop or self._reached_the_end()
        if self.leasing is not None and (self._over or result.leave):
            self.leasing.end()
        if result.leave:
            self._leave()

    def _count(self, part: Slice, contributed: LossSum, result: StepResult) -> None:
        position, trainer = self._position, self._trainer
        position.loss_total += result.loss_total
        position.loss_count += result.count
        if trainer.train_metrics and contributed.outputs is not None:
            target = place(part.target, trainer.train_job.device, trainer.train_job.cast_inputs)
            trainer.train_metrics.update(contributed.outputs, target, part.num_local)

    def _leave_out(self, part: Slice, result: StepResult) -> None:
        """Handle a step that is not finite: refuse it by name, or skip and count it."""
        trainer = self._trainer
        scale = trainer.train_job.loss_scale
        if trainer.train_job.on_nonfinite == "skip" or (scale is not None and scale.can_fall):
            self._progress.num_skipped_steps += 1
            return
        step = self._position.step + 1
        if not result.nonfinite:
            raise TrainingError(
                f"the gradient's norm became {result.grad_norm} at step {step} though the loss was finite "
                f"({result.loss:.6g}). The step was not applied. Lower the learning rate, or leave such steps out with "
                "on_nonfinite='skip'."
            )
        self._refuse_spoilt_weights(step)
        rank, total = result.nonfinite[0]
        raise NonFiniteLoss(
            rank=rank,
            step=step,
            value=total,
            samples=[int(index) for index in self._indices_of(rank, part)],
            checkpoint=self._progress.newest_checkpoint,
        )

    def _refuse_spoilt_weights(self, step: int) -> None:
        """Refuse weights spoilt by an earlier step: the present samples are not the cause."""
        named = self._trainer.local_model.named_parameters()
        spoilt = next(
            (name for name, parameter in named if not (parameter.is_meta or parameter.isfinite().all())), None
        )
        if spoilt is not None:
            raise TrainingError(
                f"the loss of step {step} is not finite because the weights are not ('{spoilt}' first): an earlier step "
                "had a finite loss and a gradient that was not, and nobody looked at it. Checkpoints since then hold "
                "these weights; go on from an older one, with clip_norm=1.0 or on_nonfinite='skip', which look at gradients."
            )

    def _indices_of(self, rank: int, part: Slice) -> list[int]:
        if rank == self._rank:
            return list(part.indices)
        theirs = self._batches.slices(
            epoch=part.epoch,
            start=part.start,
            stop=part.start + 1,
            rank=rank,
            num_workers=self._num_workers,
        )
        found = next(iter(theirs), None)
        return list(found.indices) if found is not None else []

    def _write_down(self, part: Slice, result: StepResult, *, is_update: bool = True) -> None:
        trainer, position = self._trainer, self._position
        self._step_loss = result.loss
        logs = StepLogs(
            epoch=position.epoch,
            step=position.step,
            loss=result.loss,
            samples=part.num_global,
            lr=trainer.learning_rates[0],
            grad_norm=result.grad_norm,
        )
        self._callbacks.call("on_step_end", trainer, logs)
        for name, value in result.named:
            trainer.log(name, value)
        extra = trainer.take_logged() | self._validate()
        self._progress.last_line = {
            "step": position.step,
            "epoch": position.epoch,
            "loss": result.loss,
            "samples": part.num_global,
            "time": time.time(),
            **extra,
        }
        if self._log is not None and is_update:
            self._log.write(self._progress.last_line)
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = now
            if position.step != self._num_steps():  # the last one is reported with the metrics of its epoch
                self._report(now)
            if self.ledger is not None:
                self.ledger.now_and_then(now)

    def _validate(self) -> dict[str, float]:
        """Loss and metrics of the validation data, if due after this step."""
        every, position = self._validate_every, self._position
        if every is None or self._validation is None or (position.step - self._start.first[1]) % every:
            return {}
        return self._measure_validation()

    def _report(self, now: float, *, epoch: int | None = None) -> None:
        """Report progress. `epoch`: from 0, if it is not the position's."""
        position, loss = self._position, self._step_loss
        samples = position.samples - self._started_samples
        rate = samples / max(now - self._started_at, 1e-9)
        num_steps = self._num_steps()
        remaining = num_steps - position.step if num_steps is not None else None
        per_step = (now - self._started_at) / max(position.step - self._first_step, 1)
        session.report(
            phase="fit",
            epoch=min(
                (position.epoch if epoch is None else epoch) + 1, self._last_epoch or position.epoch + 1
            ),
            num_epochs=self._last_epoch,
            step=position.step,
            num_steps=num_steps,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            metrics=self._history.epochs[-1] if self._history.epochs else {},
            samples=samples,
            samples_per_s=rate,
            eta_s=remaining * per_step if remaining is not None else None,
            metrics_epoch=self._measured_epoch,
        )

    def _num_steps(self) -> int | None:
        """Expected last step of this fit."""
        position = self._position
        in_epoch = self._batches.num_steps(self._num_workers)
        rest = self._batches.num_steps(self._num_workers, start=position.next_index)
        ends = [self._last_step] if self._last_step is not None else []
        if self.leasing is not None:
            if in_epoch is not None and self._last_epoch is not None:
                first_epoch, first_step = self._start.first
                ends.append(first_step + in_epoch * (self._last_epoch - first_epoch))
            return min(ends, default=None)
        if in_epoch is not None and rest is not None and self._last_epoch is not None:
            epochs_left = self._last_epoch - position.epoch
            ends.append(position.step + (rest + in_epoch * (epochs_left - 1) if epochs_left > 0 else 0))
        return min(ends) if ends else None

    def _end_epoch(self, *, halfway: bool) -> None:
        trainer, position = self._trainer, self._position
        logs, epoch = self._measure_epoch(), position.epoch
        self._measured_epoch = epoch + 1
        if self._epoch_log is not None:
            self._epoch_log.write({"epoch": epoch, "step": position.step, "time": time.time(), **logs})
        self._history.append(logs)
        position.measured_at = position.step
        if self.ledger is not None:
            self.ledger.reached(is_end=not halfway)
        if not halfway:
            trainer.train_metrics.reset()
            emit_figures(epoch=position.epoch)
            position.loss_total = position.loss_count = 0.0
            position.epoch += 1
            position.next_index = 0
            trainer.advance_scheduler("epoch", logs)
            self._callbacks.call("on_epoch_end", trainer, logs)
        self._report(time.monotonic(), epoch=epoch)
        self._agree_to_end()

    def _measure_epoch(self) -> dict[str, float]:
        trainer, position = self._trainer, self._position
        total, count = position.loss_total, position.loss_count
        if self.leasing is not None:  # each rank only knows its own batches
            sums = torch.tensor([total, count], dtype=torch.float64)
            total, count = self._strategy.reduce(sums).tolist()
            self.leasing.share_statistics()
        logs = {"loss": total / count if count else math.nan}
        if not self._runs_rounds:
            logs |= trainer.train_metrics.compute(self._strategy.gather)
        return logs | self._measure_validation()

    def _measure_validation(self) -> dict[str, float]:
        if self._validation is None:
            return {}
        measured = self._trainer.measure(
            self._validation, num_batches=self._validation_steps, tick=lambda part: None
        )
        logs = {f"val_{name}": value for name, value in measured.items()}
        self._callbacks.call("on_validation_end", self._trainer, logs)
        return logs

    def _agree_to_end(self) -> None:
        """Ask the other ranks whether any wants to stop or leave: between epochs there is no commit."""
        asked = [float(self._trainer.control.stop), float(asked_to_leave() is not None)]
        stop, leave = self._strategy.reduce(torch.tensor(asked)).tolist()
        if leave:
            self._leave()
        self._over = self._over or stop > 0

    def _leave(self) -> None:
        path = self._trainer.save_checkpoint()
        raise Interrupted(signal_name=asked_to_leave() or "SIGINT", step=self._position.step, checkpoint=path)
