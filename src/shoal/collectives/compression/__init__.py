"""Gradient compressors, one file each; here their protocol, traffic counters and construction from `--compress`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shoal.collectives.reducer import Reducer
from shoal.config.choices import COMPRESSORS
from shoal.runtime.recorder import RECORDER


class Gradient(NamedTuple):
    """The place of one parameter's gradient in its bucket."""

    offset: int
    shape: tuple[int, ...]


@dataclass(slots=True)
class Traffic:
    """Bytes that one rank has sent, and would have sent uncompressed."""

    sent_bytes: int = 0
    raw_bytes: int = 0
    num_sums: int = 0
    """Number of times that all gradients were summed."""

    def count(self, raw: Tensor, *sent: Tensor) -> None:
        """Count one bucket that was sent as other tensors."""
        self.raw_bytes += raw.numel() * raw.element_size()
        self._sent(sum(tensor.numel() * tensor.element_size() for tensor in sent))

    def count_uncompressed(self, *sent: Tensor) -> None:
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in sent)
        self.raw_bytes += num_bytes
        self._sent(num_bytes)

    def _sent(self, num_bytes: int) -> None:
        self.sent_bytes += num_bytes
        # The sum of the same size comes back.
        RECORDER.sent += num_bytes
        RECORDER.received += num_bytes


class Compressor(Protocol):
    """Sums buckets of gradients approximately.

    `start` and `finish` are called for all buckets in the same order on every rank. Its state
    changes only in `commit`: a broken exchange is retried from the same gradients.
    """

    traffic: Traffic

    def start(self, number: int, flat: Tensor, layout: Sequence[Gradient], reducer: Reducer) -> Any:
        """Start summing bucket `number`, whose elements are `flat`."""

    def finish(self, work: Any, reducer: Reducer, operation: str) -> None:
        """Wait for a started bucket; `flat` then holds the sum."""

    def commit(self) -> None:
        """Keep the residuals: all buckets of the step are summed."""

    def abandon(self) -> None:
        """Drop the residuals: the step is run again."""

    def state(self) -> dict[str, Tensor]:
        """This rank's residuals by name, of equal shapes on every rank."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` gave; the sum of all ranks' residuals where their number has changed."""


class Stateless:
    """Base of compressors that keep nothing between steps."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def commit(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        pass


class ErrorFeedback:
    """Base of compressors that add the unsent rest of a step to the next step's gradient."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._residuals: dict[int, Tensor] = {}
        self._pending: dict[int, Tensor] = {}

    def _add_residual(self, number: int, flat: Tensor) -> None:
        if number in self._residuals:
            flat.add_(self._residuals[number].to(flat.device))  # a checkpoint brings them to the host

    def commit(self) -> None:
        self._residuals |= self._pending
        self.abandon()

    def abandon(self) -> None:
        self._pending = {}

    def state(self) -> dict[str, Tensor]:
        return {str(number): residual for number, residual in sorted(self._residuals.items())}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._residuals = {int(number): residual.clone() for number, residual in state.items()}


def compressor(compress: str) -> Compressor | None:
    """Build what `--compress` names; None for "none"."""
    choice, settings = COMPRESSORS.parse(compress)
    if not choice.implementation:
        return None
    made: Compressor = choice.load()(**settings)
    return made
