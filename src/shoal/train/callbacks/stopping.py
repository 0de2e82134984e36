"""Callbacks that end a fit: when a value no longer improves, or after a given step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoal.errors import ConfigError
from shoal.train.callbacks.base import Callback, Mode, Monitor
from shoal.train.checkpoint import saving

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


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

    # The logs are equal on every rank, so that all come to the same decision; restoring is collective.
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
        """Look at the value, and stop when patience is over."""
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
        """Go back to the best weights, unless the last ones are."""
        if self._restore_best and self._best_step not in (None, trainer.step):
            saving.load_model(trainer, self._path(trainer))

    def state(self) -> dict[str, Any]:
        """The best, and how long ago it was."""
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

    Says so beforehand: `trainer.stop()` is decided with the next commit, which
    would be one step late.
    """

    ranks: ClassVar[Literal["zero", "every"]] = "every"

    def __init__(self, step: int) -> None:
        if not isinstance(step, int) or step < 1:
            raise ConfigError(f"StopAtStep's step must be a positive integer, got {step!r}.")
        self.last_step = step
