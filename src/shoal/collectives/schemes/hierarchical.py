"""`hierarchical` exchange: through shared memory inside each host, around rings between the hosts.

Between hosts one sum per host is sent, not one per worker. A large tensor is divided into pieces:
while one is on the network, the next is summed within the host and the previous one is distributed
there. If all hosts have as many ranks, each rank takes a lane of every piece around a ring of its
own, so that a host uses as many connections and cores as workers.

Ranks of a lost host may be restarted on different ones; their sum is then relayed, in the same
order. Neither pieces nor lanes change the order of a sum.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.exchanges import TorchP2P
from shoal.collectives.reducer import Native, Reducer, Scheme, Threaded
from shoal.collectives.schemes import P2P, chain, part_bounds, parts_of, ring
from shoal.collectives.shm import KINDS, Shm
from shoal.config.job import Job

SLICE_BYTES = 1 << 20
"""Bytes of a piece that each host adds up. The ranks of a host wait for each other twice per piece, so few pieces."""

SMALL_BYTES = 256 << 10
"""A tensor up to this size is not cut: one rank of a host takes it around the ring."""


class Hierarchical:
    """One rank's place: the sum over its host, and the ring if it represents that host."""

    def __init__(self, within: Scheme, between: P2P | None) -> None:
        """`between` connects the first rank of each host; None for all others."""
        self._within, self._between = within, between

    @classmethod
    def open(cls, job: Job, group: Native) -> Reducer:
        hosts = [job.host_of(rank) for rank in range(job.num_workers)]
        of_host = [[rank for rank, host in enumerate(hosts) if host == each] for each in sorted(set(hosts))]
        mine = next(ranks for ranks in of_host if group.rank in ranks)
        speakers = [ranks[0] for ranks in of_host]
        between = TorchP2P(group, speakers) if group.rank in speakers else None
        if not _are_at_home(job, group, hosts):
            relayed = cls(partial(chain.all_reduce, TorchP2P(group, mine)), between)
            return Threaded(group, relayed.all_reduce, dtypes=KINDS)
        shm = Shm.open(job, group, mine)
        simple = cls(partial(_sum_in_memory, shm), between)
        num_lanes = len(mine) if len({len(ranks) for ranks in of_host}) == 1 else 1
        at = mine.index(group.rank)
        lane = TorchP2P(group, [ranks[at] for ranks in of_host]) if at < num_lanes else None
        pieces = InPieces(shm, lane, num_hosts=len(of_host), num_lanes=num_lanes)

        def all_reduce(flat: Tensor) -> None:
            is_small = flat.nbytes <= SMALL_BYTES or len(of_host) == 1
            (simple.all_reduce if is_small else pieces.all_reduce)(flat)

        return Threaded(group, all_reduce, dtypes=KINDS)

    def all_reduce(self, flat: Tensor) -> None:
        """Sum `flat` over the ranks, in place: in rank order within a host, around the ring between hosts."""
        self._within(flat)
        if self._between is not None:
            ring.all_reduce(self._between, flat)
        else:
            flat.zero_()
        # The result plus zeros: how the others get it. As bytes: -0.0 plus zero is 0.0, on hosts of two
        # ranks alone.
        self._within(flat.view(torch.uint8))


class InPieces:
    """The same sums of a large tensor, piece by piece.

    A piece is a slice of each host's part of the whole tensor, so every element
    goes around the ring from where it would in one piece. Within a host each rank
    adds up its lane alone. All ranks of a host start the same sums in memory in
    the same order.
    """

    def __init__(self, shm: Shm, lane: P2P | None, *, num_hosts: int, num_lanes: int) -> None:
        """`lane` connects the ranks that have the same place on their hosts; None where this one has none."""
        self._shm, self._lane, self._num_hosts, self._num_lanes = shm, lane, num_hosts, num_lanes

    def all_reduce(self, flat: Tensor) -> None:
        under_way: deque[tuple[list[Tensor], Iterator[None]]] = deque()
        for slices in self._pieces(flat):
            works = [self._shm.start_reduce_scatter(each, *self._bounds(each)) for each in slices]
            for work in works:
                self._shm.finish(work, "the sum within a host")
            under_way.append((slices, self._around_the_ring(slices)))
            self._advance(under_way)
        while under_way:
            self._advance(under_way)

    def _pieces(self, flat: Tensor) -> Iterator[list[Tensor]]:
        parts = parts_of(flat, self._num_hosts)
        length = max(1, SLICE_BYTES // flat.element_size() // self._num_lanes) * self._num_lanes
        for begin in range(0, max(map(len, parts)), length):
            yield [part[begin : begin + length] for part in parts]

    def _advance(self, under_way: deque[tuple[list[Tensor], Iterator[None]]]) -> None:
        """One more step of every piece on the network; distribute the oldest once it is complete.

        The newest goes first, since it waits for nothing: it is sent while the others are awaited.
        """
        is_through = [next(steps, True) is True for _, steps in reversed(under_way)]
        if is_through[-1]:
            self._hand_out(under_way.popleft()[0])

    def _around_the_ring(self, slices: list[Tensor]) -> Iterator[None]:
        """Sum this rank's lane of a piece over the hosts; yields after each started step."""
        lane = self._lane
        parts = [each[slice(*self._bounds(each))] for each in slices]
        rank = lane.rank if lane is not None else 0
        next_rank, before = (rank + 1) % self._num_hosts, (rank - 1) % self._num_hosts
        num_steps = 2 * (self._num_hosts - 1)
        steps: Any = ring.sum_steps(rank, parts) if lane is not None else iter(())
        for _ in range(num_steps):
            if lane is None:
                yield
                continue
            outgoing, incoming = next(steps)
            works = lane.receive(before, incoming), lane.send(next_rank, outgoing)
            yield
            lane.wait(*works)

    def _bounds(self, whole: Tensor) -> tuple[int, int]:
        return part_bounds(len(whole), self._shm.rank, self._num_lanes) if self._lane is not None else (0, 0)

    def _hand_out(self, slices: list[Tensor]) -> None:
        """Give every rank of the host all lanes of a piece."""
        works = [self._start_handing_out(each) for each in slices]
        for work in works:
            self._shm.finish(work, "handing a sum out within a host")

    def _start_handing_out(self, part: Tensor) -> object:
        shm, (begin, end) = self._shm, self._bounds(part)
        if self._num_lanes == shm.num_workers and len(part) % self._num_lanes == 0:
            return shm.start_gather_in_place(part)
        part[:begin].zero_()
        part[end:].zero_()
        return shm.start_all_reduce(part.view(torch.uint8))  # as bytes, because of -0.0


def _are_at_home(job: Job, group: Native, hosts: Sequence[int]) -> bool:
    """Whether all ranks of each host are on one machine. Collective, and the same everywhere."""
    here = torch.tensor([zlib.crc32(job.host_address.encode())])
    machines = [int(each) for each in group.all_gather(here)]
    return len(set(zip(hosts, machines, strict=True))) == len(set(hosts))


def _sum_in_memory(shm: Shm, flat: Tensor) -> None:
    shm.finish(shm.start_all_reduce(flat), "the sum within a host")
