"""Training progress: the position in the data and the values of each epoch. No I/O, no collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


class History(Mapping[str, list[float]]):
    """Loss and metrics of every epoch, equal on every rank: `history["val_loss"][-1]`."""

    def __init__(self, epochs: list[dict[str, float]] | None = None) -> None:
        self.epochs: list[dict[str, float]] = list(epochs or [])

    def append(self, logs: dict[str, float]) -> None:
        """Add one epoch."""
        self.epochs.append(dict(logs))

    def __getitem__(self, name: str) -> list[float]:
        values = [logs[name] for logs in self.epochs if name in logs]
        if not values:
            raise KeyError(name)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for logs in self.epochs for name in logs))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"History({dict(self)!r})"
