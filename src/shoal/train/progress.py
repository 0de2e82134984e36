"""Training progress: the position in the data, the values of each epoch, and what a running fit counts from.

Plain data, no I/O, no collectives. `checkpoint/saving.py` writes it to
checkpoints and `anchors.py` hands it to a replaced worker.
"""

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


@dataclass(frozen=True, slots=True)
class LoopPlace:
    """The place of an anchor in the loop: before a step, unless it says otherwise."""

    is_epoch_end: bool = False
    halfway: bool = False
    """The epoch ends early."""

    over: bool = False
    """The fit ends with this epoch."""


BEFORE_A_STEP = LoopPlace()


@dataclass(frozen=True, slots=True, kw_only=True)
class FitStart:
    """The start of a fit: anew, from a checkpoint, or where the other workers are."""

    history: History
    first: tuple[int, int]
    """Epoch and step at which the fit had begun, from which its limits count."""

    began_s: float
    """By the monotonic clock of this process."""

    began_samples: int
    place: LoopPlace = BEFORE_A_STEP
    is_inherited: bool = False
    """The others are in the midst of it, and this worker replaces one of them."""

    leases: dict[str, Any] | None = None
    """Leases of a checkpoint of a relaxed strategy; see `leasing.py`."""

    is_finished: bool = False
    """The checkpoint is of a later fit of the script: this one is over, with this history."""


@dataclass(slots=True)
class TrainingProgress:
    """Everything a Trainer has counted. The loop, checkpoints and anchors write here and nowhere else in the Trainer."""

    position: Position = field(default_factory=Position)
    histories: list[History] = field(default_factory=list)
    """One per fit of the script, the running one last."""

    fit_first: tuple[int, int] = (0, 0)
    """Epoch and step at which the running fit began; it may have been before a resume."""

    fit_began_s: float = 0.0
    fit_began_samples: int = 0
    num_skipped_steps: int = 0
    """Steps left out because their loss or gradient was not finite."""

    newest_checkpoint: str | None = None
    last_line: dict[str, Any] | None = None
    """The newest line of metrics.jsonl: rank 0 may die before it is written."""

    data_description: dict[str, Any] = field(default_factory=dict)
    snapshot_steps: int | None = None
    """Steps between two snapshots, as an earlier fit found them worth their cost."""

    def begin_fit(self, start: FitStart) -> None:
        self.histories.append(start.history)
        self.fit_first = start.first
        self.fit_began_s, self.fit_began_samples = start.began_s, start.began_samples
