"""Saves while training: by steps, by time, by epochs; keeps the last few and the best.

Decides when, and which may go; the Trainer knows what has to be in a
checkpoint, `checkpoint.py` how old ones are removed.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoal.errors import ConfigError
from shoal.train.callbacks.base import Callback, Mode, Monitor, StepLogs
from shoal.train.checkpoint.checkpoint import prune, step_path

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


class ModelCheckpoint(Callback):
    """Writes checkpoints from which a run goes on, mid-epoch and at any number of workers.

    Args:
        every_steps: after every so many steps.
        every_s: when so many seconds have passed since the last one; decided by rank 0's clock, for all ranks.
        every_epochs: after every so many epochs; 1 when no other rhythm is given.
        keep_last: how many of the newest stay.
        best: a value of the epochs, as "val_loss". The checkpoint of its best epoch stays, too.
        mode: whether `best` is the lowest ("min") or the highest ("max"); "auto" goes by its name.
        directory: a path or an fsspec URL; by default `checkpoints` in the run directory.

    `best_path` and `best_value` say where the best one is.
    """

    # Saving is collective: every rank comes to the same point, or none.
    ranks: ClassVar[Literal["zero", "every"]] = "every"
    runs_last: ClassVar[bool] = True

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        every_epochs: int | None = None,
        keep_last: int = 3,
        best: str | None = None,
        mode: Mode = "auto",
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, value in (
            ("every_steps", every_steps),
            ("every_epochs", every_epochs),
            ("keep_last", keep_last),
        ):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"ModelCheckpoint's {name} must be a positive integer, got {value!r}.")
        if every_s is not None and not every_s > 0:
            raise ConfigError(
                f"ModelCheckpoint's every_s must be a positive number of seconds, got {every_s!r}."
            )
        if every_steps is None and every_s is None and every_epochs is None:
            every_epochs = 1
        self.directory = os.fspath(directory) if directory is not None else None
        self.best_path: str | None = None
        self._every_steps, self._every_s, self._every_epochs = every_steps, every_s, every_epochs
        self._keep_last = keep_last
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
        """Save by steps; wish for it by time."""
        before, self._seen_step = self._seen_step, trainer.step
        every = self._every_steps
        if (
            every is not None and trainer.step // every > before // every
        ):  # others' steps may have come between
            if getattr(trainer.strategy, "has_diverged", False):
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
        """Save by epochs, and the best."""
        best = self._monitor is not None and bool(self._monitor.improved(logs))
        if best:  # before saving, so that the checkpoint knows that it is the best
            self.best_path = step_path(self._directory(trainer), trainer.step)
        if best or (self._every_epochs is not None and trainer.epoch % self._every_epochs == 0):
            self._save(trainer)

    def on_checkpoint(self, trainer: Trainer, path: str) -> None:
        """One that was wished for is there: start the clock again, and let old ones go."""
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
        return self.directory or str(trainer.run_dir / "checkpoints")

    def _save(self, trainer: Trainer) -> None:
        path = step_path(self._directory(trainer), trainer.step)
        # Resumed from one that was saved after an epoch's last step, that epoch's end is simply run again.
        if self._saved_path != path:
            path = trainer.save_checkpoint(self._directory(trainer))
        self._saved(trainer, path)

    def _saved(self, trainer: Trainer, path: str) -> None:
        self._saved_path = path
        self._saved_at_s = time.monotonic()
        if trainer.rank == 0:
            directory = path.rstrip("/").rpartition("/")[0]
            prune(directory, self._keep_last, protect={self.best_path} if self.best_path is not None else ())
