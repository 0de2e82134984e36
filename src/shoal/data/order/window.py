"""The first samples, or all but the first: `take` and `skip`."""

from __future__ import annotations

from typing import Any

from shoal.data.order.order import Indices, Order, Positions, Stage, shifted


class Window(Stage):
    """A range of another order."""

    def __init__(self, parent: Order, *, begin: int = 0, num_samples: int | None = None) -> None:
        """From `begin` on; at most `num_samples`, where that is given."""
        super().__init__(parent)
        self.name = "skip" if num_samples is None else "take"
        self._begin, self._num_samples = begin, num_samples
        self.changes_set = parent.changes_set or parent.varies
        self.is_endless = parent.is_endless and num_samples is None

    def length(self, epoch: int) -> int:
        """What there is of the range."""
        left = max(self.parent.length(epoch) - self._begin, 0)
        return left if self._num_samples is None else min(left, self._num_samples)

    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The parent's, so much further on."""
        return self.parent.indices(shifted(positions, self._begin), epoch)

    def settings(self) -> dict[str, Any]:
        """Where the range begins, or how long it is."""
        if self._num_samples is None:
            return {"num_samples": self._begin}
        return {"num_samples": self._num_samples} | ({"begin": self._begin} if self._begin else {})
