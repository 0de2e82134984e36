"""Sends losses, metrics and learning rates to TensorBoard's files."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError
from shoal.train.callbacks.base import Callback, StepLogs
from shoal.train.callbacks.logs import named_rates

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


class TensorBoard(Callback):
    """Writes what `tensorboard --logdir` shows: the loss and learning rates of steps, the metrics of epochs.

    Args:
        directory: where to; by default `tensorboard` in the run directory.
        every_steps: write every so many steps.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, every_steps: int = 1) -> None:
        if not isinstance(every_steps, int) or every_steps < 1:
            raise ConfigError(f"TensorBoard's every_steps must be a positive integer, got {every_steps!r}.")
        self._directory = os.fspath(directory) if directory is not None else None
        self._every_steps = every_steps
        self._writer: Any = None

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Open the files; what an earlier run wrote beyond this step is marked as gone."""
        directory = self._directory or str(trainer.run_dir / "tensorboard")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own deprecations are not the user's business
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigError(
                    f"the TensorBoard callback needs the tensorboard package, which is not installed ({error}). Nothing was "
                    "trained; install it with `pip install tensorboard`, or use CSVLog or JSONLog."
                ) from None
            self._writer = SummaryWriter(directory, purge_step=trainer.step + 1)

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        if logs.step % self._every_steps == 0:
            self._write("step/loss", logs.loss, logs.step)
            if logs.grad_norm is not None:
                self._write("step/grad_norm", logs.grad_norm, logs.step)
            for name, rate in named_rates(trainer.learning_rates).items():
                self._write(f"step/{name}", rate, logs.step)

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        """Write the epoch's values, and all of it to disk."""
        for name, value in logs.items():
            self._write(f"epoch/{name}", value, trainer.step)
        self._writer.flush()

    def on_fit_end(self, trainer: Trainer) -> None:
        self._writer.close()

    def _write(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)
