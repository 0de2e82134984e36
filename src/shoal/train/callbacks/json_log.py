"""A line of JSON per step and per epoch."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.train.callbacks.base import Callback, StepLogs

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


class JSONLog(Callback):
    """Writes {"event": "step", ...} for every step and {"event": "epoch", ...} for every epoch, one per line.

    A resumed run drops the lines beyond the step it goes on from, so that none
    is there twice; a run that begins at step 0 begins the file anew. What is
    not a finite number is null.

    Args:
        path: the file; by default log.jsonl in the run directory.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given = path
        self._path = Path()

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Keep the lines up to here."""
        self._path = Path(self._given) if self._given is not None else trainer.run_dir / "log.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        kept = [line + "\n" for line in lines if _belongs(line, trainer)]
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self._path)

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        """A line for the step."""
        self._append({"event": "step", **asdict(logs)})

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        """A line for the epoch that is over."""
        self._append({"event": "epoch", "epoch": trainer.epoch - 1, "step": trainer.step, **logs})

    def _append(self, values: dict[str, Any]) -> None:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        # Opened for each line: what is written is there, whatever becomes of this process.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")


def _belongs(line: str, trainer: Trainer) -> bool:
    try:
        values = json.loads(line)
        # An epoch whose end comes again, because the checkpoint was saved just before it, is written again.
        over = values["event"] == "step" or values["epoch"] < trainer.epoch
        return bool(values["step"] <= trainer.step and over)
    except (ValueError, KeyError, TypeError):
        return False  # torn by a kill
