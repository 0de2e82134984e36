"""`bf16` and `fp16` compression: half the bytes; the sum is added in that precision, and nothing is kept for later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.compression import Gradient, Stateless
from shoal.collectives.reducer import Reducer


class CastCompressor(Stateless):
    """Gradients as numbers of 16 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def start(self, number: int, flat: Tensor, layout: Sequence[Gradient], reducer: Reducer) -> Any:
        small = flat.to(self._dtype)
        self.traffic.count(flat, small)
        return flat, small, reducer.start_all_reduce(small)

    def finish(self, work: Any, reducer: Reducer, operation: str) -> None:
        flat, small, sum_ = work
        reducer.finish(sum_, operation)
        flat.copy_(small)


def bf16() -> CastCompressor:
    return CastCompressor(torch.bfloat16)


def fp16() -> CastCompressor:
    return CastCompressor(torch.float16)
