"""Snapshots of models of which every worker holds a part: where all go back to when one of them dies.

Checkpoints in the job's scratch directory, gone with the job; the two newest
are kept, so that one is whole while the other is written.
"""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shoal.runtime import scratch
from shoal.train.checkpoint import saving

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer

EVERY_STEPS = 50
"""Steps between two where neither the script nor --snapshot-every says: at most so many are repeated after a death, or a
multiple of them where snapshots would cost more than SHARE of the time."""

SHARE = 0.02

MOST_STEPS = 2000
"""Between two, whatever they cost."""


def steps_between(*, cost_s: float, step_s: float) -> int:
    """Interval at which snapshots cost at most SHARE of the time."""
    wanted = cost_s / (SHARE * max(step_s, 1e-9))
    return max(min(math.ceil(wanted / EVERY_STEPS) * EVERY_STEPS, MOST_STEPS), EVERY_STEPS)


class Snapshots:
    """Taken after steps that all ranks count alike."""

    def __init__(self, trainer: Trainer) -> None:
        job = trainer.job
        holds_parts = getattr(trainer.strategy, "holds_parts", False)
        self._trainer = trainer
        said = (
            trainer.config.snapshot_every if trainer.config.snapshot_every is not None else job.snapshot_every
        )
        self._every = (trainer.progress.snapshot_steps or EVERY_STEPS) if said is None else said
        self._is_told = said is not None
        is_of_use = job.launched and job.can_recover and job.verify is None and holds_parts
        self._is_on = is_of_use and self._every > 0
        self._taken: list[str] = []
        self._seen_step = trainer.step
        self._since = time.monotonic()

    def after_step(self) -> None:
        """Take one if it is time. Collective."""
        trainer, step = self._trainer, self._trainer.step
        if not self._is_on or step // self._every == self._seen_step // self._every:
            return
        if getattr(trainer.strategy, "has_diverged", False):
            return  # when the workers have one model again
        num_steps, began_at = max(step - self._seen_step, 1), time.monotonic()
        self._seen_step = step
        self._taken.append(saving.save_checkpoint(trainer, str(directory()), is_snapshot=True))
        if not self._is_told:
            self._every = self._agreed(time.monotonic() - began_at, (began_at - self._since) / num_steps)
            trainer.progress.snapshot_steps = self._every
        self._since = time.monotonic()
        while len(self._taken) > 2:
            oldest = self._taken.pop(0)
            saving.remove_rank_local_state(trainer, oldest)
            if trainer.rank == 0:
                shutil.rmtree(oldest, ignore_errors=True)

    def _agreed(self, cost_s: float, step_s: float) -> int:
        """From what all ranks measured, so that all take the next one at the same step."""
        cost_of_all, step_of_all = self._trainer.strategy.reduce(
            torch.tensor([cost_s, step_s], dtype=torch.float64)
        ).tolist()
        return steps_between(cost_s=cost_of_all, step_s=step_of_all)


def directory() -> Path:
    return scratch.directory("snapshots")
