"""Where training stands: what a checkpoint must hold to go on, at any number of workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Position:
    """A place in the data, and what was counted on the way there."""

    epoch: int = 0
    next_index: int = 0
    """Position within the epoch of the first sample not trained yet."""

    step: int = 0
    samples: int = 0
    loss_total: float = 0.0
    """Sum and count of the running epoch's loss."""

    loss_count: float = 0.0
    measured_at: int = -1
    """The step up to which the running epoch, whole or cut short, is in the history."""

    weights: list[float] = field(default_factory=list)
    """Shares by measured speed, and the step before which they were agreed on. Replaced, never changed in place."""

    weights_at: int = -1
    stretch: dict[str, Any] | None = None
    """What each worker has had of the epoch since it, or this launch, began: start, samples and batches by rank."""
