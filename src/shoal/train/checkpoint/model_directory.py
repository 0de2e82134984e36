"""A directory of checkpoints in which Trainers of a script, and jobs, go on one after the other.

A replacement worker and a resumed job run the script from the top. They must
begin where the job began, not at what it saved meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from shoal.config import job as jobs
from shoal.data.batches import Batches
from shoal.errors import CheckpointError
from shoal.train.checkpoint.checkpoint import list_checkpoints, open_checkpoint, step_path
from shoal.train.checkpoint.saving import continues_at, fit_starts, saved_origin
from shoal.train.checkpoint.storage import MANIFEST, Place

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class FitOrigin:
    """Where a fit goes on."""

    resume: str | None
    """Checkpoint to name to fit; None: fit finds its own, or goes on where its Trainer is."""

    position: tuple[int, int]
    """Epoch and step."""

    first: tuple[int, int]
    """Epoch and step from which the limits of the fit count: of a checkpoint those where its own fit began."""


_LAST: dict[str, Trainer] = {}
"""The Trainer of this process that trained last, by directory."""


class ModelDirectory:
    """What this script, its job and the jobs before it have left in a directory."""

    def __init__(self, path: str, *, is_named: bool) -> None:
        """`is_named`: the user chose it; else it is the run's own, which no other job shares."""
        self.path, self._is_named = path, is_named

    def trained(self, trainer: Trainer) -> None:
        """Note who trained last here."""
        if self._is_named:
            _LAST[self.path] = trainer

    def last(self) -> Trainer | None:
        """Who of this script trained last. By its own record: in a launched job files may be newer."""
        return _LAST.get(self.path) if self._is_named and jobs.current().launched else None

    def newest_before_job(self) -> str | None:
        return next((path for path, is_own in self._checkpoints() if not is_own), None)

    def next_fit(self, trainer: Trainer, batches: Batches) -> FitOrigin:
        """Where the first fit of a Trainer goes on."""
        if (last := self.last()) is not None:
            position = (last.epoch, last.step)
            return FitOrigin(step_path(self.path, last.step), position, last.progress.firsts[-1])
        if (own := self._newest_of_job(trainer.number)) is not None:  # which fit finds by itself
            first = fit_starts(own)[0]
            return FitOrigin(None, saved_origin(own) or first, first)
        if (newest := self.newest_before_job()) is not None:
            saved = open_checkpoint(newest).progress
            return FitOrigin(newest, continues_at(saved, batches, trainer.num_workers), fit_starts(saved)[-1])
        return FitOrigin(None, (0, 0), (0, 0))

    def _newest_of_job(self, number: int) -> dict[str, Any] | None:
        """Progress of the checkpoint from which the Trainer of this number goes on in a resumed job, where this job wrote it."""
        for path, is_own in self._checkpoints():
            if is_own and jobs.current().resume:
                # fit reports a damaged one, and takes the one before it
                with contextlib.suppress(CheckpointError):
                    progress = open_checkpoint(path, verify=False).progress
                    if progress["fit"].get("trainer") in (None, number):
                        return progress
        return None

    def _checkpoints(self) -> Iterator[tuple[str, bool]]:
        """Checkpoints, newest first, and whether this job wrote them, in any of its launches."""
        job, began = jobs.current(), psutil.Process().create_time()
        if job.launched and (events := job.run_dir / "events.jsonl").exists():
            with events.open() as lines:
                began = float(json.loads(next(lines, "{}")).get("time", began))
        for path in reversed(list_checkpoints(self.path)):
            place = Place.at(path)
            is_own = job.launched and place.fs.modified(place.file(MANIFEST)).timestamp() >= began
            yield os.fspath(path), is_own
