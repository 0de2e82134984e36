"""State of a run at this moment, as plain values: progress, and where each process spends its time.

Reads the ends of a run's files, so one look costs the same after a week as after a minute.
`cli/inspect/live.py` draws it; a finished run is shown over all of its time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.observe import figures, record, runs
from shoal.observe.record import Totals

WINDOW_S = 10.0
"""Of a running job: over how long shares and rates are taken."""

TAIL_BYTES = 16 * 1024
WHOLE_BYTES = 4 << 20
"""More than a file of activity holds, which is halved when it is long."""

SILENT_AFTER_S = 5.0
"""A process of a running job that has told nothing for so long is marked."""


@dataclass(slots=True)
class ProcessNow:
    """One process."""

    name: str
    incarnation: int
    step: int | None
    totals: Totals
    newest: dict[str, Any]
    silent_s: float | None = None
    """How long nothing was heard of it; None where that means nothing."""

    times_slower: float | None = None
    """Than the other workers, where it is a straggler."""

    def per_s(self, amount: float) -> float:
        return amount / self.totals.interval_s if self.totals.interval_s else 0.0


@dataclass(slots=True)
class RunNow:
    """A run at one moment."""

    name: str
    state: runs.RunState
    step: int | None = None
    num_steps: int | None = None
    epoch: int | None = None
    num_epochs: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None
    processes: list[ProcessNow] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def look(path: Path, now: float | None = None) -> RunNow:
    """A run as its files tell it; what they do not is None, or said in `missing`."""
    now = time.time() if now is None else now
    run = runs.read(path)
    is_alive = run.state is runs.RunState.ALIVE
    found = RunNow(run.name, run.state, run.step, loss=run.loss, samples_per_s=run.samples_per_s)
    if is_alive:
        files = sorted((path / "activity").glob("*.jsonl"), key=lambda each: record.by_number(each.stem))
        tails = {file.stem: _timed(runs.last_lines(file, tail_bytes=TAIL_BYTES)) for file in files}
        lines = {name: _recent(tail, now) for name, tail in tails.items()}
        # An evaluation may be longer than a tail: then the fit's last report is further up.
        if files and not any(map(_newest_of_fit, tails.values())):
            tails[files[0].stem] = _timed(runs.last_lines(files[0], tail_bytes=WHOLE_BYTES))
    else:
        whole = record.read_activity(path)
        lines = {
            name: record.while_training(each) if name.startswith("worker-") else each
            for name, each in whole.items()
        }
        tails = lines
    for name, each in lines.items():
        if each:
            process = ProcessNow(
                name,
                int(each[-1].get("incarnation") or 0),
                each[-1].get("step"),
                record.totals(each),
                each[-1],
            )
            if is_alive and not each[-1].get("end") and now - each[-1]["at"] > SILENT_AFTER_S:
                process.silent_s = now - each[-1]["at"]
            found.processes.append(process)
    workers = {each.name: each.totals for each in found.processes if each.name.startswith("worker-")}
    slow = figures.stragglers(workers)
    for process in found.processes:
        process.times_slower = slow.get(process.name)
    if is_alive and workers:
        found.samples_per_s = sum(w.samples / w.interval_s for w in workers.values() if w.interval_s) or None
    _progress(found, tails)
    if not found.processes:
        found.missing.append(
            "no process has told its activity: the run has just begun, or is of a version that recorded none"
        )
    return found


def _recent(lines: list[dict[str, Any]], now: float) -> list[dict[str, Any]]:
    return [line for line in lines if line["at"] > now - WINDOW_S] or lines[-1:]


def _timed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if isinstance(line.get("at"), (int, float))]


def _newest_of_fit(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    told = (line for line in reversed(lines) if line.get("num_steps") or line.get("epoch"))
    return next(filter(record.is_of_fit, told), None)


def _progress(found: RunNow, lines: dict[str, list[dict[str, Any]]]) -> None:
    """Progress as the first worker that knows it reported; a custom loop knows less."""
    for process in found.processes:
        if newest := _newest_of_fit(lines[process.name]):
            found.num_steps, found.num_epochs = newest.get("num_steps"), newest.get("num_epochs")
            found.epoch = newest.get("epoch")
            if newest.get("loss") is not None and (newest.get("step") or 0) >= (found.step or 0):
                found.loss = newest["loss"]
            found.step = max(found.step or 0, process.step or 0) or None
            if found.num_steps is not None and found.step == found.num_steps:
                found.epoch = found.num_epochs
            if found.state is runs.RunState.ALIVE and isinstance(newest.get("eta_s"), (int, float)):
                found.eta_s = newest["eta_s"]
            return
