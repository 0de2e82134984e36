"""`ps:drop=K` and `ps:stale-ok`: common steps that do not wait for the slowest workers.

The batch is divided over the workers as in `ps`, and a step is summed as soon as all but K
contributions have arrived. A late contribution is dropped, or replaces its worker's next one, and
is counted. A worker that was overtaken skips the steps it missed without computing them.

No process has the whole gradient, so every worker clips the mean gradient of its own part. The
step's gradient is a mean of those, so its norm is at most `clip_norm` too, whichever worker is left
out.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.cluster.worker import session
from shoal.config.job import Job
from shoal.data.slice import Slice
from shoal.errors import TrainingError
from shoal.parallel.protocol import LossSum, StepResult
from shoal.parallel.ps.exact import Ps
from shoal.parallel.ps.served_model import ServedModel
from shoal.parallel.step import clip_factor
from shoal.ps.client.step import PushStep
from shoal.ps.server.steps import LOSSES


class PsDrop(Ps):
    """The parameter server, without waiting for stragglers."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._passed = 0  # the servers' newest step, as far as this worker knows
        self._is_passing = False
        self._last: NDArray[np.float64] | None = None
        self._count = 0.0  # count of this worker's loss
        self._norm: float | None = None
        self.num_late = 0  # contributions of this worker that came too late, on one server at least
        self.num_missed = 0  # steps that were over before this worker had begun them

    def forward_backward(self, batch: Slice) -> LossSum:
        """Compute this rank's gradients, unless the others have finished the step."""
        self._lay_out(batch)
        self._is_passing = self._session.updates < self._passed and not self._session.next_is_known
        if self._is_passing:
            self._num_global, self._share = batch.num_global, batch.share
            return LossSum(torch.zeros(()), 0.0, None)
        return super().forward_backward(batch)

    def commit(self) -> StepResult:
        if self._is_passing:
            return self._pass_by()
        step = self._end_step() if not self._session.next_is_known else None
        vector = self._session.commit(step)
        if step is not None:
            assert step.committed is not None
            step.release()
            self._last, self._passed = vector, max(self._passed, step.committed.updates)
            self.num_late += step.is_late
            # The vector is of the servers' newest step; up to there this worker has no results of its own.
            if self._session.updates < self._passed:
                vector = _neutral(vector, self._num_workers)
        return self._conclude(vector)

    @property
    def _wants_norm(self) -> bool:
        return False  # about the sum: servers do not wait for all of it, and each waits for others

    @property
    def _looks_at_its_own(self) -> bool:
        return self._job.clip_norm is not None or self._job.on_nonfinite == "skip"

    def _contribute(self, loss: LossSum) -> None:
        super()._contribute(loss)
        # Statistics are a mean over the contributions in the step: only the sum tells how much of the batch
        # that was.
        self._vector = np.append(self._vector, [self._share, float(self._rank == 0)])
        self._count, self._norm = loss.count, None
        if self._looks_at_its_own:
            assert self._model is not None
            self._model.dense.disarm()  # nothing is sent before the whole gradient is known

    def _end_step(self) -> PushStep:
        if self._looks_at_its_own:
            assert self._model is not None
            assert self._current is not None
            self._look_at_own(self._model)
            self._model.dense.arm(self._current)
        return super()._end_step()

    def _look_at_own(self, model: ServedModel) -> None:
        """Clip this worker's gradient. A non-finite one is marked in the loss, and so in every step that includes it."""
        if not math.isfinite(self._vector[LOSSES + self._rank]):
            return
        for module in model.rows:
            module.merge_gradients()
        # Backward divided by the samples of all workers: this is the mean over this worker's.
        scale = self._num_global / self._count if self._count else 0.0
        norm = self._norm = scale * self._own_norm(module.gradients for module in model.rows)
        if not math.isfinite(norm):
            if self._job.on_nonfinite != "skip":
                raise TrainingError(
                    f"the norm of rank {self._rank}'s gradient became {norm} at step {self.step + 1} though its loss was "
                    "finite. Its part was not applied. Lower the learning rate, or leave such steps out with "
                    "on_nonfinite='skip'."
                )
            self._vector[LOSSES + self._rank] = math.nan
            return
        factor = clip_factor(self._job, norm)
        if factor < 1.0:
            for module in model.rows:
                module.scale(factor)
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _conclude(self, vector: NDArray[np.float64]) -> StepResult:
        norm, self._norm = self._norm, None
        return dataclasses.replace(super()._conclude(vector), grad_norm=norm)

    def _conclude_buffers(self, flat: Tensor) -> None:
        total_share, has_first = flat[-2:].tolist()
        if total_share:
            self._buffers.conclude(
                flat[:-2],
                self.reduce,
                share=self._share,
                rank=self._rank,
                total_share=total_share,
                has_first=bool(has_first),
            )
        else:
            self._buffers.restore()

    def pull_weights(self) -> None:
        super().pull_weights()
        session.bent(staleness={}, num_late=self.num_late, num_missed=self.num_missed)
        self.num_late = self.num_missed = 0

    def _pass_by(self) -> StepResult:
        assert self._last is not None
        self.num_missed += 1
        is_last = self._session.updates + 1 == self._passed
        vector = self._last if is_last else _neutral(self._last, self._num_workers)
        self._session.pass_by(vector)
        result = self._conclude(vector)
        return dataclasses.replace(result, loss_total=0.0, count=0.0)


def _neutral(vector: NDArray[np.float64], num_workers: int) -> NDArray[np.float64]:
    """The same without control flags: those belong to another step."""
    changed = vector.copy()
    changed[1:4] = 0.0
    return changed
