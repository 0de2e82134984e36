"""Reports of a fit: the job's ledger, the gradient traffic, and metrics.jsonl.

Rank 0 reports for all ranks: each knows how a batch is divided over the workers. Samples are
counted in the position, so a replacement continues the count and a resumed run knows the earlier
one. With leased ranges the coordinator keeps the ledger, and nothing is reported here.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from shoal.cluster.ledger.entries import TrainedStretch, TrainingBegan, TrainingReached
from shoal.cluster.supervisor import progress_text
from shoal.cluster.worker import session
from shoal.collectives.compression import Traffic
from shoal.config.job import Job
from shoal.data.batches import Batches
from shoal.parallel.protocol import CountsTraffic, Strategy
from shoal.runtime import events
from shoal.train.progress import Position

if TYPE_CHECKING:
    from shoal.data.slice import Slice
    from shoal.train.custom.loop import TakenBatch, WorkerData
    from shoal.train.trainer import Trainer

REPORT_EVERY_S = 5.0
"""Longest interval; ends of epochs and checkpoints are reported at once. A killed job's ledger lacks the samples since."""


def data_identity(description: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).hexdigest()[:12]


class LedgerReport:
    """Ledger entries of one fit, or of the epochs of a custom loop over some data."""

    def __init__(self, trainer: Trainer | WorkerData, batches: Batches) -> None:
        self._trainer, self._batches = trainer, batches
        self._call = session.num_calls()
        self._is_on = trainer.job.launched
        self._reports = self._is_on and trainer.rank == 0
        self._reported_at = 0.0

    def begin(self, *, is_inherited: bool, again: dict[int, int]) -> None:
        """The fit trains from the position on; a replacement's is in progress. `again`: samples by
        epoch that had been trained.
        """
        position, trainer = self._trainer.position, self._trainer
        if not self._is_on or is_inherited:
            return
        before, position.stretch = position.stretch, None
        num_samples = self._batches.num_samples
        num_left_out = self._batches.num_left_out(trainer.num_workers)
        if self._reports:
            session.note(
                TrainingBegan(
                    call=self._call,
                    trainer=trainer.number,
                    data=data_identity(trainer.data_description),
                    epoch=position.epoch,
                    start=position.next_index,
                    num_samples=None if num_samples is None else num_samples - num_left_out,
                    num_left_out=num_left_out,
                    num_workers=trainer.num_workers,
                    sharding=self._batches.sharding.describe(),
                    batch_size=self._batches.batch_size(trainer.num_workers),
                    again=[
                        (epoch, start, start + num_again)
                        for epoch, num_again in sorted(again.items())
                        for start in [position.next_index if epoch == position.epoch else 0]
                    ],
                    before=_stretch(before, position.next_index) if before is not None else None,
                )
            )
        self._reported_at = time.monotonic()

    def count(self, part: Slice | TakenBatch) -> None:
        """A step is committed; the position is behind it."""
        if not self._is_on:
            return
        position, num_workers = self._trainer.position, self._trainer.num_workers
        cuts = part.cuts if len(part.cuts) == num_workers + 1 else (0, *[part.num_global] * num_workers)
        before = position.stretch or {
            "start": part.start,
            "samples": [0] * num_workers,
            "batches": [0] * num_workers,
        }
        sizes = [end - begin for begin, end in itertools.pairwise(cuts)]
        # A new object: an anchor may hold the old one.
        position.stretch = {
            "start": before["start"],
            "samples": [had + size for had, size in zip(before["samples"], sizes, strict=True)],
            "batches": [had + (size > 0) for had, size in zip(before["batches"], sizes, strict=True)],
        }

    def reached(self, *, is_end: bool = False) -> None:
        """Report the position; `is_end`: of the epoch, with the position still in it."""
        position = self._trainer.position
        if self._reports and position.stretch is not None:
            self._reported_at = time.monotonic()
            stretch = _stretch(position.stretch, position.next_index)
            session.note(
                TrainingReached(call=self._call, epoch=position.epoch, stretch=stretch, is_end=is_end)
            )
        if is_end:
            position.stretch = None

    def now_and_then(self, now: float) -> None:
        """Report the position, if due."""
        if self._reports and now >= self._reported_at + REPORT_EVERY_S:
            self.reached()


def _stretch(kept: dict[str, Any], stop: int) -> TrainedStretch:
    return TrainedStretch(kept["start"], stop, list(kept["samples"]), list(kept["batches"]))


class TrafficReport:
    """Bytes that one fit sent over the group for its gradients: this rank's own, the same on every rank."""

    def __init__(self, job: Job, strategy: Strategy, position: Position) -> None:
        self._job, self._strategy = job, strategy
        self._position, self._first_step = position, position.step
        before = self._traffic()
        self._before = (before.raw_bytes, before.sent_bytes, before.num_sums) if before else (0, 0, 0)

    def report(self) -> None:
        """Report at the end of the fit, successful or not. Rank 0 only."""
        job, traffic = self._job, self._traffic()
        if traffic is None or job.rank != 0:
            return
        raw, sent, num_sums = (
            now - then
            for now, then in zip(
                (traffic.raw_bytes, traffic.sent_bytes, traffic.num_sums), self._before, strict=True
            )
        )
        num_steps = num_sums if job.num_servers else self._position.step - self._first_step
        if not num_sums or not sent or num_steps < 1:
            return
        facts = {
            "exchange": _exchange(job),
            "compress": job.compress,
            "steps": num_steps,
            # Bytes of a step's gradients, and bytes a worker handed to the exchange.
            "raw_bytes_per_step": round(raw / num_sums),
            "sent_bytes_per_step": round(sent / num_steps),
            "ratio": round(raw / num_sums * num_steps / sent, 2),
            "loss_curve": "metrics.jsonl",
        }
        events.emit("exchanged", **facts)
        if facts["ratio"] != 1:
            print(f"note: {progress_text.exchanged(facts)}", file=sys.stderr, flush=True)

    def _traffic(self) -> Traffic | None:
        return self._strategy.traffic if isinstance(self._strategy, CountsTraffic) else None


def _exchange(job: Job) -> str:
    if job.num_servers:
        return "servers"
    return job.exchange_rule if job.exchange == "auto" and job.exchange_rule else job.exchange


_written_here: set[Path] = set()
"""Files begun by this process: a second Trainer of a script appends to the first one's."""


class MetricsLog:
    """Appends lines; the first write of a process drops lines of an earlier run after the step it continues from.

    A full disk costs lines, never a step.
    """

    def __init__(self, path: Path, *, from_step: int) -> None:
        self._path = path
        self.dropped: dict[int, int] = {}
        """Samples of steps that an earlier run had trained and that are trained again, by epoch."""

        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path not in _written_here:
            self.dropped = _drop_after(path, from_step)
        _written_here.add(path)
        # Line-buffered, so that lines of a killed worker are kept.
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)

    def write(self, line: dict[str, Any]) -> None:
        """Add one step. Non-finite numbers are null: JSON has no NaN."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in line.items()
        }
        with contextlib.suppress(OSError):
            self._file.write(json.dumps(finite) + "\n")

    def make_up_for(self, line: dict[str, Any]) -> None:
        """Write the line of a step, unless it exists."""
        try:
            written = self._path.read_text(encoding="utf-8").rstrip().rpartition("\n")[2]
            is_there = bool(written) and json.loads(written)["step"] >= line["step"]
        except (OSError, ValueError, KeyError, TypeError):
            is_there = False  # the last line is truncated
        if not is_there:
            self.write(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _drop_after(path: Path, step: int) -> dict[int, int]:
    kept: list[str] = []
    dropped: dict[int, int] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
            if values["step"] <= step:
                kept.append(line + "\n")
            else:
                dropped[values["epoch"]] = dropped.get(values["epoch"], 0) + values["samples"]
        except (ValueError, KeyError, TypeError):
            continue  # a line truncated by a kill
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(path)
    except OSError:  # a full disk, in a replacement: then the lines are duplicated
        with contextlib.suppress(OSError):
            temporary.unlink()
    return dropped
