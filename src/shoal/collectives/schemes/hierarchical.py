"""`hierarchical` exchange: through shared memory inside each host, around a ring between the hosts.

Between hosts one sum per host is sent, not one per worker. Ranks of a lost host
may be restarted on different ones; their sum is then relayed, in the same order.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from shoal.collectives.exchanges import TorchP2P
from shoal.collectives.reducer import Native, Reducer, Scheme, Threaded
from shoal.collectives.schemes import P2P, chain, ring
from shoal.collectives.shm import KINDS, Shm
from shoal.config.job import Job


class Hierarchical:
    """One rank's place: the sum over its host, and the ring if it speaks for that host."""

    def __init__(self, within: Scheme, between: P2P | None) -> None:
        """`between` connects the first rank of each host; None for all others."""
        self._within, self._between = within, between

    @classmethod
    def open(cls, job: Job, group: Native) -> Reducer:
        hosts = [job.host_of(rank) for rank in range(job.num_workers)]
        mine = [rank for rank, host in enumerate(hosts) if host == job.host]
        speakers = [hosts.index(host) for host in sorted(set(hosts))]
        within: Scheme
        if _are_at_home(job, group, hosts):
            shm = Shm.open(job, group, mine)
            within = partial(_sum_in_memory, shm)
        else:
            within = partial(chain.all_reduce, TorchP2P(group, mine))
        between = TorchP2P(group, speakers) if group.rank in speakers else None
        return Threaded(group, cls(within, between).all_reduce, dtypes=KINDS)

    def all_reduce(self, flat: Tensor) -> None:
        """Sum `flat` over the ranks, in place: in rank order within a host, around the ring between hosts."""
        self._within(flat)
        if self._between is not None:
            ring.all_reduce(self._between, flat)
        else:
            flat.zero_()
        # The result plus zeros: how the others get it. As bytes: -0.0 plus zero is 0.0, on hosts of two ranks alone.
        self._within(flat.view(torch.uint8))


def _are_at_home(job: Job, group: Native, hosts: Sequence[int]) -> bool:
    """Whether all ranks of each host are on one machine. Collective, and the same everywhere."""
    here = torch.tensor([zlib.crc32(job.host_address.encode())])
    machines = [int(each) for each in group.all_gather(here)]
    return len(set(zip(hosts, machines, strict=True))) == len(set(hosts))


def _sum_in_memory(shm: Shm, flat: Tensor) -> None:
    shm.finish(shm.start_all_reduce(flat), "the sum within a host")
