"""Ends a fit after a given step."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from shoal.core.errors import ConfigError
from shoal.train.callbacks.base import Callback, StepLogs

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


class StopAtStep(Callback):
    """Stops once the step of that number, counted over all fits of the run, is done."""

    ranks: ClassVar[Literal["zero", "every"]] = "every"

    def __init__(self, step: int) -> None:
        if not isinstance(step, int) or step < 1:
            raise ConfigError(f"StopAtStep's step must be a positive integer, got {step!r}.")
        self.step = step

    def on_fit_begin(self, trainer: Trainer) -> None:
        """The first step may be the last."""
        self._stop_after_next(trainer)

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        """Wish to stop one step ahead: a wish is decided with the next commit, and that step is still run."""
        self._stop_after_next(trainer)

    def _stop_after_next(self, trainer: Trainer) -> None:
        if trainer.step + 1 >= self.step:
            trainer.stop()
