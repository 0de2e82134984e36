"""Snapshots of models of which every worker holds a part: where all go back to when one of them dies.

Checkpoints in the job's scratch directory, gone with the job; the two newest
are kept, so that one is whole while the other is written.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core import scratch
from shoal.train import own_parts, saving

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer

EVERY_STEPS = 50
"""Steps between two where neither the script nor --snapshot-every says: at most so many are repeated after a death."""


class Snapshots:
    """Taken after steps that all ranks count alike."""

    def __init__(self, trainer: Trainer) -> None:
        job = trainer.job
        holds_parts = getattr(trainer.strategy, "holds_parts", False)
        self._trainer = trainer
        said = trainer.snapshot_every if trainer.snapshot_every is not None else job.snapshot_every
        self._every = EVERY_STEPS if said is None else said
        is_of_use = job.launched and job.can_recover and job.verify is None and holds_parts
        self._is_on = is_of_use and self._every > 0
        self._taken: list[str] = []
        self._seen_step = trainer.step

    def after_step(self) -> None:
        """Take one if it is time. Collective."""
        trainer, step = self._trainer, self._trainer.step
        if not self._is_on or step // self._every == self._seen_step // self._every:
            return
        if getattr(trainer.strategy, "is_apart", False):
            return  # when the workers have one model again
        self._seen_step = step
        self._taken.append(saving.save_checkpoint(trainer, str(directory()), is_snapshot=True))
        while len(self._taken) > 2:
            oldest = self._taken.pop(0)
            own_parts.remove(trainer, oldest)
            if trainer.rank == 0:
                shutil.rmtree(oldest, ignore_errors=True)


def directory() -> Path:
    """Where they are."""
    return scratch.directory("snapshots")
