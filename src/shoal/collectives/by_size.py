"""One reducer for small tensors and another for large ones, as a rule of `--exchange auto` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shoal.collectives.native import Native, OverNative
from shoal.collectives.reducer import Reducer


class _Work(NamedTuple):
    by: Reducer
    under: Any


class BySize(OverNative):
    """Sums by the first of `parts` whose limit in bytes a tensor keeps; on a device, and all else, by torch's own.

    A function of the size alone, so that every rank takes the same one.
    """

    def __init__(self, native: Native, parts: Sequence[tuple[float, Reducer]]) -> None:
        self.rank, self.num_workers = native.rank, native.num_workers
        self._native, self._parts = native, list(parts)

    def start_all_reduce(self, tensor: Tensor) -> Any:
        """Begin to sum `tensor` over the ranks, in place."""
        by = self._native if tensor.device.type != "cpu" else self._by(tensor.numel() * tensor.element_size())
        return _Work(by, by.start_all_reduce(tensor))

    def finish(self, work: Any, operation: str) -> None:
        """Wait until the sum is there."""
        work.by.finish(work.under, operation)

    def close(self) -> None:
        """Its view is over."""
        for _, part in self._parts:
            part.close()

    def _by(self, num_bytes: int) -> Reducer:
        return next(part for most, part in self._parts if num_bytes <= most)
