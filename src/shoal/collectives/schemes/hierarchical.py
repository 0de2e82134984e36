"""`hierarchical`: through shared memory inside each host, around a ring between the hosts.

Between hosts travels one sum per host, not one per worker.
"""

from __future__ import annotations

from torch import Tensor

from shoal.collectives.p2p import Wires
from shoal.collectives.schemes import ring
from shoal.collectives.shm import Shm


class Hierarchical:
    """One rank's place: the memory of its host, and the ring if it speaks for that host."""

    def __init__(self, within: Shm, between: Wires | None) -> None:
        """`between` connects the first rank of each host; None for all others."""
        self._within, self._between = within, between

    def all_reduce(self, flat: Tensor) -> None:
        """Sum `flat` over the ranks, in place: in rank order within a host, around the ring between hosts."""
        self._sum_within(flat)
        if self._between is not None:
            ring.all_reduce(self._between, flat)
        else:
            flat.zero_()
        self._sum_within(flat)  # the result and nothing: how the others get it

    def _sum_within(self, flat: Tensor) -> None:
        self._within.finish(self._within.start_all_reduce(flat), "the sum within a host")
