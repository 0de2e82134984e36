"""What every compressor offers to the exchange of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shoal.collectives.reducer import Reducer


class Gradient(NamedTuple):
    """Where a parameter's gradient lies in its bucket."""

    offset: int
    shape: tuple[int, ...]


@dataclass(slots=True)
class Traffic:
    """What one rank has sent, and what it would have sent."""

    sent_bytes: int = 0
    raw_bytes: int = 0
    num_sums: int = 0
    """How often all gradients were summed."""

    def count(self, raw: Tensor, *sent: Tensor) -> None:
        """One bucket more."""
        self.raw_bytes += raw.numel() * raw.element_size()
        self.sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in sent)

    def count_as_it_is(self, *sent: Tensor) -> None:
        """What travels as it is."""
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in sent)
        self.raw_bytes, self.sent_bytes = self.raw_bytes + num_bytes, self.sent_bytes + num_bytes


class Compressor(Protocol):
    """Sums buckets of gradients, nearly.

    `start` and `finish` are called for all buckets in the same order on every
    rank. Nothing of its state changes before `commit`: an exchange that broke
    is run again from the same gradients.
    """

    traffic: Traffic

    def start(self, number: int, flat: Tensor, layout: Sequence[Gradient], reducer: Reducer) -> Any:
        """Begin to sum bucket `number`, whose elements are `flat`."""

    def finish(self, work: Any, reducer: Reducer, operation: str) -> None:
        """Wait for it; `flat` then holds the sum."""

    def commit(self) -> None:
        """All buckets of the step are summed: keep what was left out."""

    def abandon(self) -> None:
        """The step is run again: keep nothing of it."""

    def state(self) -> dict[str, Tensor]:
        """What this rank has to remember, by name. Of equal shapes on every rank."""

    def load(self, state: Mapping[str, Tensor], num_ranks_before: int) -> None:
        """Take over what `state` gave; the sum of what so many ranks remembered where their number is another now."""
