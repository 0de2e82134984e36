"""Step result: one small vector per rank, summed and decoded.

Pure: the strategy carries the vector, this file writes and reads it. Every
rank's loss has a place of its own, so that a NaN names who had it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.parallel.protocol import ControlFlags, StepResult

_COUNT, _STOP, _CHECKPOINT, _LEAVE, _LOSSES = range(5)


def contribution(
    *, rank: int, num_workers: int, loss_total: float, count: float, control: ControlFlags
) -> Tensor:
    """One rank's vector; the sum of all is what `decide` reads."""
    losses = [0.0] * num_workers
    losses[rank] = loss_total
    return torch.tensor(
        [count, float(control.stop), float(control.checkpoint), float(control.leave), *losses],
        dtype=torch.float64,
    )


def decide(vector: Tensor, *, grad_norm: float | None = None) -> StepResult:
    """The verdict of a step from the summed vector, and the gradient's norm where one was asked for."""
    values = vector.tolist()
    losses = values[_LOSSES:]
    count = values[_COUNT]
    # Added in rank order: the same bits on every rank, whichever way the vector travelled.
    total = math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)
    nonfinite = tuple((rank, loss) for rank, loss in enumerate(losses) if not math.isfinite(loss))
    finite = not nonfinite and math.isfinite(count) and (grad_norm is None or math.isfinite(grad_norm))
    return StepResult(
        loss=total / count if count else math.nan if nonfinite else 0.0,
        loss_total=total,
        count=count,
        applied=finite,
        grad_norm=grad_norm,
        stop=values[_STOP] > 0,
        checkpoint=values[_CHECKPOINT] > 0,
        leave=values[_LEAVE] > 0,
        nonfinite=nonfinite,
    )
