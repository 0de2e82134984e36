"""Ends a fit after a given step."""

from __future__ import annotations

from typing import ClassVar, Literal

from shoal.errors import ConfigError
from shoal.train.callbacks.base import Callback


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
