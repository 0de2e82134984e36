"""`bf16` and `fp16`: half the bytes; the sum is added in that precision, and nothing is remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.compression.compressor import Gradient, Traffic
from shoal.collectives.reducer import Reducer


class Cast:
    """Gradients as numbers of 16 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.traffic = Traffic()

    def start(self, number: int, flat: Tensor, layout: Sequence[Gradient], reducer: Reducer) -> Any:
        """Begin to sum a bucket."""
        small = flat.to(self._dtype)
        self.traffic.count(flat, small)
        return flat, small, reducer.start_all_reduce(small)

    def finish(self, work: Any, reducer: Reducer, operation: str) -> None:
        """Wait for the sum and cast it back."""
        flat, small, sum_ = work
        reducer.finish(sum_, operation)
        flat.copy_(small)

    def commit(self) -> None:
        """Nothing is kept."""

    def abandon(self) -> None:
        """Nothing was."""

    def state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load(self, state: Mapping[str, Tensor], num_ranks_before: int) -> None:
        """Nothing."""
