"""A table of the epochs, or of the steps, as CSV."""

from __future__ import annotations

import csv
import os
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
        """Keep the rows up to here."""
        self._path = Path(self._given) if self._given is not None else trainer.run_dir / "log.csv"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for row in self._read() if _belongs(row, self._every, trainer)]
        self._columns = list(rows[0]) if rows else []
        self._rewrite(rows)

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        """A row for the step."""
        if self._every == "step":
            self._append(asdict(logs))

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        """A row for the epoch that is over."""
        if self._every == "epoch":
            self._append({"epoch": trainer.epoch - 1, "step": trainer.step, **logs})

    def _append(self, row: dict[str, Any]) -> None:
        new = [name for name in row if name not in self._columns]
        if new:  # the first row, or a value that was not measured before: earlier rows leave it empty
            rows = self._read()
            self._columns += new
            self._rewrite(rows)
        # Opened for each row: what is written is there, whatever becomes of this process.
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


def _belongs(row: dict[str, Any], every: str, trainer: Trainer) -> bool:
    try:
        step, epoch = int(row["step"]), int(row["epoch"])
    except (KeyError, TypeError, ValueError):
        return False  # torn by a kill
    # An epoch whose end comes again, because the checkpoint was saved just before it, is written again.
    return None not in row.values() and step <= trainer.step and (every == "step" or epoch < trainer.epoch)
