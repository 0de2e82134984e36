"""What every way of summing over the ranks offers to those who need sums."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from torch import Tensor


class Reducer(Protocol):
    """The collectives of one view's group.

    Everything is started in the same order on every rank. The order in which
    a sum is added is a function of rank and place alone, never of who came
    first. Whatever breaks is a PeerLost.
    """

    rank: int
    num_workers: int

    def start_all_reduce(self, tensor: Tensor) -> Any:
        """Begin to sum `tensor` over the ranks, in place; `finish` waits for it, and it must not be touched before."""

    def finish(self, work: Any, operation: str) -> None:
        """Wait for what `start_all_reduce` began; `operation` names it where it breaks."""

    def broadcast(self, tensor: Tensor) -> None:
        """Give everybody rank 0's values, in place."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor; all of one shape and dtype."""

    def close(self) -> None:
        """Its view is over: end what runs on beside."""

    def during(self, operation: str) -> contextlib.AbstractContextManager[None]:
        """Name the operation in whatever breaks inside."""
