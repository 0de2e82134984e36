"""`topk` compression: only the largest elements are sent; the rest is added to the next step's gradient (error feedback)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.compression import ErrorFeedback, Gradient
from shoal.collectives.reducer import Reducer


class TopKCompressor(ErrorFeedback):
    """The `ratio` largest elements of each bucket, as (place, value)."""

    def __init__(self, ratio: float = 0.01) -> None:
        super().__init__()
        self._ratio = ratio

    def start(self, number: int, flat: Tensor, layout: Sequence[Gradient], reducer: Reducer) -> Any:
        self._add_residual(number, flat)
        count = max(1, round(self._ratio * len(flat)))
        places = flat.abs().topk(count, sorted=False).indices
        values = flat[places]
        left = flat.clone()
        left[places] = 0.0
        self._pending[number] = left
        narrow = torch.int32 if len(flat) < 1 << 31 else torch.int64
        packed = torch.cat([places.to(narrow).view(torch.uint8), values.view(torch.uint8)])
        self.traffic.count(flat, packed)
        return flat, count, narrow, packed

    def finish(self, work: Any, reducer: Reducer, operation: str) -> None:
        flat, count, narrow, packed = work
        flat.zero_()
        cut = count * narrow.itemsize
        for part in reducer.all_gather(packed):
            # A copy: the values begin where a number of their size need not.
            places, values = part[:cut].clone().view(narrow), part[cut:].clone().view(flat.dtype)
            flat.index_add_(0, places.long(), values)
