"""`hierarchical` exchange: through shared memory inside each host, around a ring between the hosts.

Between hosts one sum per host is sent, not one per worker.
"""

from __future__ import annotations

from torch import Tensor

from shoal.collectives.adapters import Threaded
from shoal.collectives.native import Native
from shoal.collectives.p2p import TorchWires, Wires
from shoal.collectives.reducer import Reducer
from shoal.collectives.schemes import ring
from shoal.collectives.shm import Shm
from shoal.config.job import Job


class Hierarchical:
    """One rank's place: the shared memory of its host, and the ring if it speaks for that host."""

    def __init__(self, within: Shm, between: Wires | None) -> None:
        """`between` connects the first rank of each host; None for all others."""
        self._within, self._between = within, between

    @classmethod
    def open(cls, job: Job, native: Native) -> Reducer:
        """Build the exchange for a view. Collective."""
        hosts = [rank * job.num_hosts // job.num_workers for rank in range(job.num_workers)]
        mine = [rank for rank, host in enumerate(hosts) if host == job.host]
        speakers = [hosts.index(host) for host in range(job.num_hosts)]
        within = Shm.open(job, native, mine)
        between = TorchWires(native, speakers) if native.rank in speakers else None
        return Threaded(native, cls(within, between).all_reduce)

    def all_reduce(self, flat: Tensor) -> None:
        """Sum `flat` over the ranks, in place: in rank order within a host, around the ring between hosts."""
        self._sum_within(flat)
        if self._between is not None:
            ring.all_reduce(self._between, flat)
        else:
            flat.zero_()
        self._sum_within(flat)  # the result plus zeros: how the others get it

    def _sum_within(self, flat: Tensor) -> None:
        self._within.finish(self._within.start_all_reduce(flat), "the sum within a host")
