"""The metrics interface of the loop, and the case that there are none.

torchmetrics is imported when there is something to measure, and not before:
it can take longer than a short script trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from shoal.data.tree import Tree
from shoal.parallel.loss import OutputKind

Gather = Callable[[Tensor | None], list[Tensor]]


class Metrics(Protocol):
    """The metrics of one pass over data."""

    def __len__(self) -> int: ...

    def reset(self) -> None:
        """Forget what was counted."""

    def update(self, outputs: Tree, target: Tree | None, num_local: int) -> None:
        """Count what this rank saw."""

    def compute(self, gather: Gather) -> dict[str, float]:
        """The values over what all ranks saw. Collective."""

    def state(self, gather: Gather) -> dict[str, Tensor]:
        """Counts of all ranks so far. Collective."""

    def load_state(self, tensors: Mapping[str, Tensor], rank: int, num_workers: int | None = None) -> bool:
        """Go on from a state; False when it is of other metrics."""


class NoMetrics:
    """Nothing is measured but the loss."""

    def __len__(self) -> int:
        return 0

    def reset(self) -> None:
        """Nothing to forget."""

    def update(self, outputs: Tree, target: Tree | None, num_local: int) -> None:
        """Nothing to count."""

    def compute(self, gather: Gather) -> dict[str, float]:
        """No values, and nothing to ask the others for."""
        return {}

    def state(self, gather: Gather) -> dict[str, Tensor]:
        return {}

    def load_state(self, tensors: Mapping[str, Tensor], rank: int, num_workers: int | None = None) -> bool:
        return not tensors


def metric_set(
    metrics: Sequence[Any] | dict[str, Any], *, loss_kind: OutputKind, ignore_index: int | None
) -> Metrics:
    """The metrics asked for, by name or as torchmetrics objects."""
    # An empty list or dict; a lone torchmetrics object has a truth of its own, and goes on to be refused or taken.
    if isinstance(metrics, (list, tuple, dict)) and not metrics:
        return NoMetrics()
    from shoal.train.metrics.metrics import MetricSet

    return MetricSet(metrics, loss_kind=loss_kind, ignore_index=ignore_index)
