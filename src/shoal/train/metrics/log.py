"""metrics.jsonl: one line per step, written by rank 0."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, Any

_written_here: set[Path] = set()
"""Files that this process has begun: a second Trainer of a script adds to what the first one wrote."""


class MetricsLog:
    """Appends lines; the first of a process drops those after the step it goes on from, which an earlier run left."""

    def __init__(self, path: Path, *, from_step: int) -> None:
        self._path = path
        self.dropped: dict[int, int] = {}
        """By epoch: samples of steps that an earlier run had trained, and that are trained again."""

        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path not in _written_here:
            self.dropped = _drop_after(path, from_step)
        _written_here.add(path)
        # By lines: what a killed worker wrote is written.
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)

    def write(self, line: dict[str, Any]) -> None:
        """Add one step. What is not a finite number is null: NaN is no JSON."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in line.items()
        }
        self._file.write(json.dumps(finite) + "\n")

    def make_up_for(self, line: dict[str, Any]) -> None:
        """Write the line of a step, unless it is there."""
        written = self._path.read_text(encoding="utf-8").rstrip().rpartition("\n")[2]
        if not written or json.loads(written)["step"] < line["step"]:
            self.write(line)

    def close(self) -> None:
        """Flush and end."""
        self._file.close()


def _drop_after(path: Path, step: int) -> dict[int, int]:
    kept: list[str] = []
    dropped: dict[int, int] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            told = json.loads(line)
            if told["step"] <= step:
                kept.append(line + "\n")
            else:
                dropped[told["epoch"]] = dropped.get(told["epoch"], 0) + told["samples"]
        except (ValueError, KeyError, TypeError):
            continue  # a line torn by a kill
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
    return dropped
