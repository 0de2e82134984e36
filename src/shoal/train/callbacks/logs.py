"""Callbacks that log: CSV and JSON files, and the learning rate beside the loss."""

from __future__ import annotations

import csv
import json
import math
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.errors import ConfigError
from shoal.train.callbacks.base import Callback, StepLogs

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


class CSVLog(Callback):
    """Writes a row per epoch (epoch, step, loss, metrics, val_*), or per step.

    A resumed run drops the rows beyond the step it goes on from, so that none
    is there twice; a run that begins at step 0 begins the file anew.

    Args:
        path: the file; by default log.csv in the run directory.
        every: "epoch" or "step".
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, every: Literal["epoch", "step"] = "epoch"
    ) -> None:
        if every not in ("epoch", "step"):
            raise ConfigError(f"CSVLog's every must be 'epoch' or 'step', got {every!r}.")
        self._given, self._every = path, every
        self._path = Path()
        self._columns: list[str] = []

    def on_fit_begin(self, trainer: Trainer) -> None:
        self._path = Path(self._given) if self._given is not None else trainer.run_dir / "log.csv"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for row in self._read() if _keeps_row(row, self._every, trainer)]
        self._columns = list(rows[0]) if rows else []
        self._rewrite(rows)

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        if self._every == "step":
            self._append(asdict(logs))

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        if self._every == "epoch":
            self._append({"epoch": trainer.epoch - 1, "step": trainer.step, **logs})

    def _append(self, row: dict[str, Any]) -> None:
        new = [name for name in row if name not in self._columns]
        if new:  # the first row, or a value that was not measured before: earlier rows leave it empty
            rows = self._read()
            self._columns += new
            self._rewrite(rows)
        # Opened for each row, so that every written row survives this process.
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def _read(self) -> list[dict[str, str]]:
        if not self._path.exists():
            return []
        with self._path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        temporary = self._path.with_name(self._path.name + ".tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            if self._columns:
                writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self._path)


def _keeps_row(row: dict[str, Any], every: str, trainer: Trainer) -> bool:
    try:
        step, epoch = int(row["step"]), int(row["epoch"])
    except (KeyError, TypeError, ValueError):
        return False  # truncated by a kill
    # An epoch whose end is repeated, because the checkpoint was saved just before it, is written again.
    return None not in row.values() and step <= trainer.step and (every == "step" or epoch < trainer.epoch)


class JSONLog(Callback):
    """Writes {"event": "step", ...} for every step and {"event": "epoch", ...} for every epoch, one per line.

    A resumed run drops the lines beyond the step it goes on from, so that none is there twice; a
    run that begins at step 0 begins the file anew. Non-finite numbers are null.

    Args:
        path: the file; by default log.jsonl in the run directory.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given = path
        self._path = Path()

    def on_fit_begin(self, trainer: Trainer) -> None:
        self._path = Path(self._given) if self._given is not None else trainer.run_dir / "log.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        kept = [line + "\n" for line in lines if _keeps_line(line, trainer)]
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self._path)

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        self._append({"event": "step", **asdict(logs)})

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        self._append({"event": "epoch", "epoch": trainer.epoch - 1, "step": trainer.step, **logs})

    def _append(self, values: dict[str, Any]) -> None:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        # Opened for each line, so that every written line survives this process.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")


def _keeps_line(line: str, trainer: Trainer) -> bool:
    try:
        values = json.loads(line)
        # An epoch whose end is repeated, because the checkpoint was saved just before it, is written again.
        over = values["event"] == "step" or values["epoch"] < trainer.epoch
        return bool(values["step"] <= trainer.step and over)
    except (ValueError, KeyError, TypeError):
        return False  # truncated by a kill


class LearningRateMonitor(Callback):
    """Puts the learning rate into each step's line of metrics.jsonl: `lr`, or `lr_0`, `lr_1`, ... by parameter group."""

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        for name, rate in named_rates(trainer.learning_rates).items():
            trainer.log(name, rate)


def named_rates(rates: list[float]) -> dict[str, float]:
    if len(rates) == 1:
        return {"lr": rates[0]}
    return {f"lr_{group}": rate for group, rate in enumerate(rates)}


class StepInterval:
    """Whether a step is reported: the first at or after every multiple, because rounds of mapreduce
    end many steps at once.
    """

    def __init__(self, callback: Callback, every_steps: int) -> None:
        if not isinstance(every_steps, int) or every_steps < 1:
            raise ConfigError(
                f"{type(callback).__name__}'s every_steps must be a positive integer, got {every_steps!r}."
            )
        self._every, self._next = every_steps, every_steps

    def begin(self, step: int) -> None:
        """The next step to come is the one after `step`."""
        self._next = step - step % self._every + self._every

    def is_due(self, step: int) -> bool:
        if step < self._next:
            return False
        self.begin(step)
        return True


class TensorBoard(Callback):
    """Writes what `tensorboard --logdir` shows: the loss and learning rates of steps, the metrics of epochs.

    Args:
        directory: where to; by default `tensorboard` in the run directory.
        every_steps: write every so many steps.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, every_steps: int = 1) -> None:
        self._interval = StepInterval(self, every_steps)
        self._directory = os.fspath(directory) if directory is not None else None
        self._writer: Any = None

    def on_fit_begin(self, trainer: Trainer) -> None:
        directory = self._directory or str(trainer.run_dir / "tensorboard")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own deprecation warnings do not concern the user
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigError(
                    f"the TensorBoard callback needs the tensorboard package, which is not installed ({error}). Nothing was "
                    "trained; install it with `pip install tensorboard`, or use CSVLog or JSONLog."
                ) from None
            self._writer = SummaryWriter(directory, purge_step=trainer.step + 1)
        self._interval.begin(trainer.step)

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        if self._interval.is_due(logs.step):
            self._write("step/loss", logs.loss, logs.step)
            if logs.grad_norm is not None:
                self._write("step/grad_norm", logs.grad_norm, logs.step)
            for name, rate in named_rates(trainer.learning_rates).items():
                self._write(f"step/{name}", rate, logs.step)

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        for name, value in logs.items():
            self._write(f"epoch/{name}", value, trainer.step)
        self._writer.flush()

    def on_fit_end(self, trainer: Trainer) -> None:
        self._writer.close()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        if self._writer is not None:
            self._writer.close()  # its last two minutes are in memory

    def _write(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)
