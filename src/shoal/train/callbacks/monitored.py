"""Callbacks that watch values: checkpoints, early stopping, convergence, learning rates on a plateau; a last step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoal.errors import ConfigError
from shoal.parallel.protocol import has_diverged
from shoal.train.callbacks.base import Callback, Mode, Monitor, StepLogs
from shoal.train.checkpoint import saving
from shoal.train.checkpoint.checkpoint import prune, spaced_by_hours, step_path

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


MOST_IN_CHAIN = 100


class ModelCheckpoint(Callback):
    """Writes checkpoints from which a run goes on, mid-epoch and at any number of workers.

    Args:
        every_steps: after every so many steps.
        every_s: when so many seconds have passed since the last one; decided by rank 0's clock, for all ranks.
        every_epochs: after every so many epochs; 1 when no other rhythm is given.
        keep_last: how many of the newest stay.
        keep_every_hours: of the older ones, one stays for every so many hours between the times they were written.
        best: a value of the epochs, as "val_loss". The checkpoint of its best epoch stays, too.
        mode: whether `best` is the lowest ("min") or the highest ("max"); "auto" goes by its name.
        directory: a path or an fsspec URL; by default `checkpoints` in the run directory.
        full_every: of so many checkpoints one holds tables on servers whole, if they are large; the others hold the rows that
            changed since the one before, which they need beside them. 1: all are whole; at most 100.

    `best_path` and `best_value` say where the best one is.
    """

    # Saving is collective: every rank takes part, or none.
    ranks: ClassVar[Literal["zero", "every"]] = "every"
    runs_last: ClassVar[bool] = True

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        every_epochs: int | None = None,
        keep_last: int = 3,
        keep_every_hours: float | None = None,
        best: str | None = None,
        mode: Mode = "auto",
        directory: str | os.PathLike[str] | None = None,
        full_every: int = 10,
    ) -> None:
        for name, value in (
            ("every_steps", every_steps),
            ("every_epochs", every_epochs),
            ("keep_last", keep_last),
            ("full_every", full_every),
        ):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"ModelCheckpoint's {name} must be a positive integer, got {value!r}.")
        if full_every > MOST_IN_CHAIN:
            raise ConfigError(
                f"ModelCheckpoint's full_every must be at most {MOST_IN_CHAIN}, got {full_every}: all checkpoints back to the last "
                "whole one are read to go on from the newest, and one that is damaged spoils those after it."
            )
        for name, unit, amount in (
            ("every_s", "seconds", every_s),
            ("keep_every_hours", "hours", keep_every_hours),
        ):
            if amount is not None and not amount > 0:
                raise ConfigError(
                    f"ModelCheckpoint's {name} must be a positive number of {unit}, got {amount!r}."
                )
        if every_steps is None and every_s is None and every_epochs is None:
            every_epochs = 1
        self.checkpoint_directory = os.fspath(directory) if directory is not None else None
        self.full_every = full_every
        self.best_path: str | None = None
        self._every_steps, self._every_s, self._every_epochs = every_steps, every_s, every_epochs
        self._keep_last, self._keep_every_hours = keep_last, keep_every_hours
        self._monitor = Monitor(best, mode=mode) if best is not None else None
        self._saved_path: str | None = None
        self._saved_at_s = 0.0
        self._seen_step = 0

    @property
    def best_value(self) -> float | None:
        """The best value so far of what `best` names."""
        return self._monitor.best if self._monitor is not None and self.best_path is not None else None

    def on_fit_begin(self, trainer: Trainer) -> None:
        self._saved_at_s = time.monotonic()
        self._saved_path = None
        self._seen_step = trainer.step

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        before, self._seen_step = self._seen_step, trainer.step
        every = self._every_steps
        # Other workers' steps may have come between.
        if every is not None and trainer.step // every > before // every:
            if has_diverged(trainer.strategy):
                trainer.wish_checkpoint()  # when the workers have one model again
            else:
                self._save(trainer)
        elif (
            self._every_s is not None
            and trainer.rank == 0
            and time.monotonic() - self._saved_at_s >= self._every_s
        ):
            trainer.wish_checkpoint()

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        best = self._monitor is not None and bool(self._monitor.improved(logs))
        if best:  # before saving, so that the checkpoint records that it is the best
            self.best_path = step_path(self._directory(trainer), trainer.step)
        if best or (self._every_epochs is not None and trainer.epoch % self._every_epochs == 0):
            self._save(trainer)

    def on_checkpoint(self, trainer: Trainer, path: str) -> None:
        self._saved(trainer, path)

    def state(self) -> dict[str, Any]:
        return {
            "best_path": self.best_path,
            "monitor": self._monitor.state() if self._monitor is not None else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        monitored = state["monitor"]
        if self._monitor is not None and monitored is not None and monitored["name"] == self._monitor.name:
            self._monitor.load_state(monitored)
            self.best_path = state["best_path"]

    def _directory(self, trainer: Trainer) -> str:
        return self.checkpoint_directory or str(trainer.run_dir / "checkpoints")

    def _save(self, trainer: Trainer) -> None:
        path = step_path(self._directory(trainer), trainer.step)
        # Resumed from a checkpoint after an epoch's last step, the end of that epoch is run again.
        if self._saved_path != path:
            path = trainer.save_checkpoint(self._directory(trainer), background=True)
        self._saved(trainer, path)

    def _saved(self, trainer: Trainer, path: str) -> None:
        self._saved_path = path
        self._saved_at_s = time.monotonic()
        if trainer.rank == 0:
            directory = path.rstrip("/").rpartition("/")[0]
            protect = {self.best_path} if self.best_path is not None else ()
            every = self._keep_every_hours
            trainer.checkpoints.then(partial(_prune, directory, self._keep_last, protect, every))


def _prune(directory: str, keep_last: int, protect: Collection[str], keep_every_hours: float | None) -> None:
    spaced = spaced_by_hours(directory, keep_every_hours) if keep_every_hours is not None else []
    prune(directory, keep_last, protect=[*protect, *spaced])


class EarlyStopping(Callback):
    """Stops after `patience` epochs in which `monitor` did not improve.

    Args:
        monitor: a value of the epochs, as "val_loss".
        patience: how many epochs in a row may pass without improvement.
        min_delta: by how much a value must be better to count as better.
        mode: whether better is lower ("min") or higher ("max"); "auto" goes by the name.
        restore_best: end with the weights of the best epoch. They are kept in `best` in the run directory, which
            `trainer.load` can read, too.
    """

    # The logs are equal on every rank, so all decide alike; restoring is collective.
    ranks: ClassVar[Literal["zero", "every"]] = "every"

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Mode = "auto",
        restore_best: bool = False,
    ) -> None:
        if not isinstance(patience, int) or patience < 1:
            raise ConfigError(
                f"EarlyStopping's patience must be a positive number of epochs, got {patience!r}."
            )
        self._monitor = Monitor(monitor, mode=mode, min_delta=min_delta)
        self._patience, self._restore_best = patience, restore_best
        self.num_epochs_without = 0
        self.stopped_at_epoch: int | None = None
        self._best_step: int | None = None

    @property
    def best_value(self) -> float:
        """The best value so far; nan before the first epoch."""
        return self._monitor.best

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        improved = self._monitor.improved(logs)
        if improved:
            self.num_epochs_without = 0
            self._best_step = trainer.step
            if self._restore_best:
                saving.save_model(trainer, self._path(trainer))
        elif improved is not None:
            self.num_epochs_without += 1
            if self.num_epochs_without >= self._patience:
                self.stopped_at_epoch = trainer.epoch
                trainer.stop()

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._restore_best and self._best_step not in (None, trainer.step):
            saving.load_model(trainer, self._path(trainer))

    def state(self) -> dict[str, Any]:
        return {
            "monitor": self._monitor.state(),
            "num_epochs_without": self.num_epochs_without,
            "best_step": self._best_step,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._monitor.load_state(state["monitor"])
        self.num_epochs_without = state["num_epochs_without"]
        self._best_step = state["best_step"]

    def _path(self, trainer: Trainer) -> str:
        return str(trainer.run_dir / "best")


class StopAtStep(Callback):
    """Stops once the step of that number, counted over all fits of the run, is done.

    Announced in advance: `trainer.stop()` is decided with the next commit, which would be one step
    late.
    """

    ranks: ClassVar[Literal["zero", "every"]] = "every"

    def __init__(self, step: int) -> None:
        if not isinstance(step, int) or step < 1:
            raise ConfigError(f"StopAtStep's step must be a positive integer, got {step!r}.")
        self.last_step = step


class StopAtConvergence(Callback):
    """Stops once the loss of the steps, smoothed, has not fallen for `steps` steps.

    Args:
        steps: how many steps in a row may pass without a lower value.
        min_delta: by how much it must be lower to count as lower.
        smoothing: of the value that is watched: smoothing * what it was + (1 - smoothing) * the step's loss.
    """

    ranks: ClassVar[Literal["zero", "every"]] = "every"

    def __init__(self, steps: int, *, min_delta: float = 0.0, smoothing: float = 0.9) -> None:
        if not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"StopAtConvergence's steps must be a positive integer, got {steps!r}.")
        if not 0 <= smoothing < 1:
            raise ConfigError(
                f"StopAtConvergence's smoothing must be at least 0 and below 1, got {smoothing!r}."
            )
        self._monitor = Monitor("loss", min_delta=min_delta)
        self._steps, self._smoothing = steps, smoothing
        self.num_steps_without = 0
        self.value = math.nan
        """The smoothed loss."""

        self.stopped_at_step: int | None = None

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        if not math.isfinite(logs.loss):
            return
        kept = self._smoothing if math.isfinite(self.value) else 0.0
        self.value = (kept * self.value if kept else 0.0) + (1 - kept) * logs.loss
        if self._monitor.improved({"loss": self.value}):
            self.num_steps_without = 0
            return
        self.num_steps_without += 1
        if self.num_steps_without >= self._steps:
            self.stopped_at_step = self.stopped_at_step or trainer.step
            trainer.stop()

    def state(self) -> dict[str, Any]:
        return {
            "monitor": self._monitor.state(),
            "num_steps_without": self.num_steps_without,
            "value": self.value,
            "stopped_at_step": self.stopped_at_step,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._monitor.load_state(state["monitor"])
        self.num_steps_without, self.value = state["num_steps_without"], state["value"]
        self.stopped_at_step = state["stopped_at_step"]


class ReduceLROnPlateau(Callback):
    """Multiplies learning rates by `factor` after `patience` epochs in which `monitor` did not improve.

    torch's own of that name is a scheduler, and fits Trainer(scheduler=...) too.

    Args:
        monitor: a value of the epochs, as "val_loss".
        factor: of the learning rates, above 0 and below 1.
        patience: how many epochs in a row may pass without improvement.
        min_delta: by how much a value must be better to count as better.
        cooldown: epochs after a reduction that are not counted.
        min_lr: no learning rate falls below it.
        mode: whether better is lower ("min") or higher ("max"); "auto" goes by the name.
    """

    ranks: ClassVar[Literal["zero", "every"]] = "every"

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
        mode: Mode = "auto",
    ) -> None:
        if not 0 < factor < 1:
            raise ConfigError(f"ReduceLROnPlateau's factor must be above 0 and below 1, got {factor!r}.")
        if not isinstance(patience, int) or patience < 1:
            raise ConfigError(
                f"ReduceLROnPlateau's patience must be a positive number of epochs, got {patience!r}."
            )
        self._monitor = Monitor(monitor, mode=mode, min_delta=min_delta)
        self._factor, self._patience, self._cooldown, self._min_lr = factor, patience, cooldown, min_lr
        self.num_epochs_without = 0
        self.num_reductions = 0
        self._cooling = 0

    def on_fit_begin(self, trainer: Trainer) -> None:
        if trainer.scheduler is not None:
            raise ConfigError(
                f"the callback ReduceLROnPlateau and scheduler={type(trainer.scheduler).__name__} would both set learning rates. Nothing "
                "was trained; leave one of them out."
            )

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        improved = self._monitor.improved(logs)
        if improved is None:
            return
        self._cooling = max(self._cooling - 1, 0)
        self.num_epochs_without = 0 if improved or self._cooling else self.num_epochs_without + 1
        if self.num_epochs_without < self._patience:
            return
        self.num_epochs_without, self._cooling = 0, self._cooldown + 1 if self._cooldown else 0
        self.num_reductions += 1
        optimizer = trainer.strategy.optimizer
        assert optimizer is not None
        for group in optimizer.param_groups:
            group["lr"] = max(group["lr"] * self._factor, self._min_lr)

    def state(self) -> dict[str, Any]:
        return {
            "monitor": self._monitor.state(),
            "num_epochs_without": self.num_epochs_without,
            "num_reductions": self.num_reductions,
            "cooling": self._cooling,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._monitor.load_state(state["monitor"])
        self.num_epochs_without, self._cooling = state["num_epochs_without"], state["cooling"]
        self.num_reductions = state["num_reductions"]
