"""`ps:drop=K` and `ps:stale-ok`: steps in common that do not wait for the slowest workers.

The batch is cut over the workers as in `ps`, and a step is summed as soon as
all but K contributions are there. What comes late is left out, or stands in
for its worker's next one, and is counted. A worker that was passed by runs
through the steps it missed without computing them.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.cluster import session
from shoal.core.errors import ConfigError
from shoal.core.job import Job
from shoal.data.slice import Slice
from shoal.strategies.protocol import LossSum, TrainJob, Verdict
from shoal.strategies.ps import Ps


class PsDrop(Ps):
    """The parameter server, without waiting for stragglers."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._passed = 0  # the servers' newest step, as far as this worker has heard
        self._is_passing = False
        self._last: NDArray[np.float64] | None = None
        self.num_late = 0
        """Contributions of this worker that came too late to count."""

        self.num_missed = 0
        """Steps that were over before this worker had begun them."""

    def prepare(self, job: TrainJob) -> None:
        """Refuse what needs every worker's gradient before it can be decided."""
        if job.clip_norm is not None or job.on_nonfinite == "skip":
            raise ConfigError(
                f"'{self._launched.strategy}' updates before it has every gradient, so there is no norm to clip by or to look "
                "at. Nothing was trained; leave clip_norm and on_nonfinite='skip' out, or use --strategy ps."
            )
        super().prepare(job)

    def forward_backward(self, batch: Slice) -> LossSum:
        """Compute this rank's gradients, unless the others are through with the step."""
        self._lay_out(batch)
        self._is_passing = self._served.updates < self._passed and not self._served.next_is_known
        if self._is_passing:
            self._num_global, self._share = batch.num_global, batch.share
            return LossSum(torch.zeros(()), 0.0, None)
        return super().forward_backward(batch)

    def commit(self) -> Verdict:
        """Say that all is pushed; wait until enough of the others have."""
        if self._is_passing:
            return self._pass_by()
        step = self._end_step() if not self._served.next_is_known else None
        vector = self._served.commit(step)
        if step is not None:
            assert step.committed is not None
            step.release()
            self._last, self._passed = vector, max(self._passed, step.committed.updates)
            if step.committed.late:
                self.num_late += 1
                # The vector is of the servers' newest step; until there this worker knows nothing of its own.
                if self._served.updates < self._passed:
                    vector = _neutral(vector, self._num_workers)
        return self._conclude(vector)

    def bring_home(self) -> None:
        """Have what was trained, and tell what was left out of it."""
        super().bring_home()
        session.bent(staleness={}, num_late=self.num_late, num_missed=self.num_missed)
        self.num_late = self.num_missed = 0

    def _pass_by(self) -> Verdict:
        assert self._last is not None
        self.num_missed += 1
        is_last = self._served.updates + 1 == self._passed
        vector = self._last if is_last else _neutral(self._last, self._num_workers)
        self._served.pass_by(vector)
        verdict = self._conclude(vector)
        return dataclasses.replace(verdict, loss_total=0.0, count=0.0)


def _neutral(vector: NDArray[np.float64], num_workers: int) -> NDArray[np.float64]:
    """The same without anybody's wishes: those belong to another step."""
    changed = vector.copy()
    changed[1:4] = 0.0
    return changed
