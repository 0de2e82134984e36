"""What a fit has written into the job's ledger: where it began, how far it came, and what each worker had of it.

Rank 0 tells for all: how a batch is cut over the workers is known to each of
them. Counted since the last begin of an epoch or a fit, in the position, so a
replacement goes on counting, and a resumed run knows what was counted before
it. Where ranges are leased the coordinator knows better, and nothing is told.
A loop of the user's own tells the same of its data.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

from shoal.cluster.ledger.entries import TrainedStretch, TrainingBegan, TrainingReached
from shoal.cluster.worker import session
from shoal.config.job import Job
from shoal.data.batches import Batches
from shoal.train.position import Position

TELL_EVERY_S = 5.0
"""At most; epochs' ends and checkpoints are told at once. What was trained since is not known of a job that is killed."""


def data_identity(description: dict[str, Any]) -> str:
    """The same for the same data."""
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).hexdigest()[:12]


class Trains(Protocol):
    """Whoever trains on some data: a Trainer, or a loop of the user's own."""

    position: Position
    number: int

    @property
    def job(self) -> Job:
        """What this process knows of its job."""

    @property
    def rank(self) -> int:
        """Of this worker."""

    @property
    def num_workers(self) -> int:
        """That cut a batch among them."""

    @property
    def data_description(self) -> dict[str, Any]:
        """Which data it is."""


class Part(Protocol):
    """A batch, and how it was cut over the workers."""

    @property
    def start(self) -> int:
        """Of the epoch's samples, its first."""

    @property
    def num_global(self) -> int:
        """Samples in it."""

    @property
    def cuts(self) -> Sequence[int]:
        """Where each worker's part begins, and the end; empty: all of them had all of it."""


class LedgerNotes:
    """The notes of one fit, or of the epochs of a loop over some data."""

    def __init__(self, trainer: Trains, batches: Batches) -> None:
        self._trainer, self._batches = trainer, batches
        self._call = session.num_calls()
        self._is_on = trainer.job.launched
        self._tells = self._is_on and trainer.rank == 0
        self._told_at = 0.0

    def begin(self, *, is_inherited: bool, again: dict[int, int]) -> None:
        """The fit trains from the position on; a replacement's is under way. `again`: samples by epoch that had been trained."""
        position, trainer = self._trainer.position, self._trainer
        if not self._is_on or is_inherited:
            return
        before, position.stretch = position.stretch, None
        num_samples = self._batches.num_samples
        num_left_out = self._batches.num_left_out(trainer.num_workers)
        if self._tells:
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
        self._told_at = time.monotonic()

    def count(self, part: Part) -> None:
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
        # Anew, not in place: an anchor may hold the old one.
        position.stretch = {
            "start": before["start"],
            "samples": [had + size for had, size in zip(before["samples"], sizes, strict=True)],
            "batches": [had + (size > 0) for had, size in zip(before["batches"], sizes, strict=True)],
        }

    def reached(self, *, is_end: bool = False) -> None:
        """Tell how far it has come; `is_end`: of the epoch, and the position is still in it."""
        position = self._trainer.position
        if self._tells and position.stretch is not None:
            self._told_at = time.monotonic()
            stretch = _stretch(position.stretch, position.next_index)
            session.note(
                TrainingReached(call=self._call, epoch=position.epoch, stretch=stretch, is_end=is_end)
            )
        if is_end:
            position.stretch = None

    def now_and_then(self, now: float) -> None:
        """Tell how far it has come, if it is time to."""
        if self._tells and now >= self._told_at + TELL_EVERY_S:
            self.reached()


def _stretch(kept: dict[str, Any], stop: int) -> TrainedStretch:
    return TrainedStretch(kept["start"], stop, list(kept["samples"]), list(kept["batches"]))
