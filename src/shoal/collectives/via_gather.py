"""A Reducer where ranks can only gather: workers that meet at parameter servers, or a process that is alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor


class Gathered:
    """Everything by gathering every rank's tensor; sums are added in rank order."""

    def __init__(self, rank: int, num_workers: int, gather: Callable[[Tensor], list[Tensor]]) -> None:
        self.rank, self.num_workers, self._gather = rank, num_workers, gather

    def start_all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks, in place, at once."""
        parts = self._gather(tensor.detach().contiguous())
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        tensor.copy_(total.reshape(tensor.shape))

    def finish(self, work: None, operation: str) -> None:
        """It is done already."""

    def broadcast(self, tensor: Tensor) -> None:
        """Give everybody rank 0's values, in place."""
        tensor.copy_(self._gather(tensor.detach().contiguous())[0])

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor."""
        return self._gather(tensor.detach().contiguous())

    def close(self) -> None:
        """Nothing runs beside."""

    def during(self, operation: str) -> contextlib.AbstractContextManager[None]:
        """Whoever gathers says what broke."""
        return contextlib.nullcontext()
