"""Writes the learning rate beside the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.train.callbacks.base import Callback, StepLogs

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


class LearningRateMonitor(Callback):
    """Puts the learning rate into each step's line of metrics.jsonl: `lr`, or `lr_0`, `lr_1`, ... by parameter group."""

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        """Log what the next step will use."""
        for name, rate in named_rates(trainer.learning_rates).items():
            trainer.log(name, rate)


def named_rates(rates: list[float]) -> dict[str, float]:
    """Learning rates by the names under which they are logged."""
    if len(rates) == 1:
        return {"lr": rates[0]}
    return {f"lr_{group}": rate for group, rate in enumerate(rates)}
