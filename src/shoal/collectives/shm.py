"""`shm`: sums through memory that all ranks of one host have mapped.

Each rank puts its part, chunk by chunk, into a ring of its own that the
others can read; whoever has seen a chunk of every rank adds them up in rank
order. Two or three ranks each add up everything for themselves; more share
the adding, and copy each other's results. There is no thread: copying is
work for the same cores that compute, so it is done where it is started and
where it is waited for.

The memory is of one view and never used again, so a process that wakes up
after its view is over writes into what nobody reads.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.collectives.native import Native, OverNative
from shoal.core.errors import PeerLost, WireError
from shoal.wire import memfd

CHUNK_BYTES = 1 << 20
"""Copied and added at once: it stays in a cache between the two, and is large against what Python costs per chunk."""

NUM_CHUNKS = 16
"""Of each ring: as far as one rank may be ahead of the others."""

SHARE_FROM = 4
"""From so many ranks on they share the adding: reading everybody's part costs more than one more copy."""

_LINE = 8  # int64 of a cache line: counters of two ranks never share one
_SPINS = 200  # looks before the first nap, where every rank has a core of its own
_LOOK_AROUND_S = 0.25  # between looks at the connections


class _Work:
    """A tensor on its way: so many of its chunks are put, added up, and taken."""

    __slots__ = ("first", "flat", "num_chunks", "per_chunk", "put", "summed", "taken", "target")

    def __init__(self, target: Tensor, flat: Tensor, first: int) -> None:
        self.target, self.flat, self.first = target, flat, first
        self.per_chunk = CHUNK_BYTES // flat.element_size()
        self.num_chunks = -(-flat.numel() // self.per_chunk)
        self.put = self.summed = self.taken = 0

    def chunk(self, number: int) -> Tensor:
        return self.flat[number * self.per_chunk : (number + 1) * self.per_chunk]


class Shm(OverNative):
    """All-reduce through shared memory; everything else, and tensors that are not plain CPU memory, by torch's own."""

    def __init__(
        self,
        native: Native,
        *,
        is_broken: Callable[[], bool] = lambda: False,
        timeout_s: float = 300.0,
        num_cores: int | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Collective over the whole group: the first of `ranks`, those of one host, makes the memory they map."""
        self._ranks = list(range(native.num_workers)) if ranks is None else list(ranks)
        self.rank, self.num_workers = self._ranks.index(native.rank), len(self._ranks)
        self._native, self._is_broken, self._timeout_s = native, is_broken, timeout_s
        self._must_share = self.num_workers >= SHARE_FROM
        # A rank that spins while another has no core keeps it from coming.
        cores = num_cores or len(os.sched_getaffinity(0))
        self._spins = _SPINS if cores >= self.num_workers else 0
        self._memory = self._map()
        num = self.num_workers
        counters = np.frombuffer(self._memory, np.int64, 3 * num * _LINE).reshape(3, num, _LINE)
        self._put, self._summed, self._taken = (counters[kind, :, 0] for kind in range(3))
        at = counters.nbytes
        rings = torch.frombuffer(self._memory, dtype=torch.uint8, offset=at)
        size = NUM_CHUNKS * CHUNK_BYTES
        self._rings = [rings[rank * size : (rank + 1) * size] for rank in range(num)]
        self._rings[self.rank].zero_()  # pages are made now, not under the first steps
        self._results = rings[num * size : (num + 1) * size] if self._must_share else None
        self._others = [rank for rank in range(num) if rank != self.rank]
        self._next = 0  # number of the next chunk, counted over all tensors
        self._pending: deque[_Work] = deque()

    # ---- what a Reducer offers ------------------------------------------------------------------

    def start_all_reduce(self, tensor: Tensor) -> object:
        """Begin to sum `tensor` over the ranks, in place."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return self._native.start_all_reduce(tensor)
        flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
        work = _Work(tensor, flat, self._next)
        self._next += work.num_chunks
        self._pending.append(work)
        self._progress()
        return work

    def finish(self, work: object, operation: str) -> None:
        """Wait until the sum is there."""
        if not isinstance(work, _Work):
            self._native.finish(work, operation)
            return
        if work.taken < work.num_chunks:
            self._wait(work, operation)
        if work.flat.data_ptr() != work.target.data_ptr():
            work.target.copy_(work.flat.view(work.target.shape))

    def close(self) -> None:
        """Nothing runs on; the memory goes with the last reference to it."""

    # ---- the rings ------------------------------------------------------------------------------

    def _wait(self, work: _Work, operation: str) -> None:
        looks, nap_s = 0, 10e-6
        deadline = look_at = 0.0
        while work.taken < work.num_chunks:
            if self._progress():
                looks, nap_s, deadline = 0, 10e-6, 0.0
                continue
            looks += 1
            if looks <= self._spins:
                continue
            now = time.monotonic()
            if not deadline:
                deadline, look_at = now + self._timeout_s, now + _LOOK_AROUND_S
            if now > look_at:
                look_at = now + _LOOK_AROUND_S
                if self._is_broken():
                    raise self._lost(operation, "a connection of the group was closed")
                if now > deadline:
                    raise self._lost(
                        operation, f"{self._whom_for(work)} did not come within {self._timeout_s:g} s"
                    )
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, 200e-6)

    def _progress(self) -> bool:
        """Do what can be done now; whether that was anything."""
        did = False
        for work in self._pending:
            did |= self._put_chunks(work)
            if work.put < work.num_chunks:
                break
        for work in self._pending:
            did |= self._share_chunks(work) if self._must_share else self._sum_chunks(work)
            if work.taken < work.num_chunks:
                break
        while self._pending and self._pending[0].taken == self._pending[0].num_chunks:
            self._pending.popleft()
        return did

    def _put_chunks(self, work: _Work) -> bool:
        if work.put == work.num_chunks:
            return False
        # A place is free once everybody has taken what lay there.
        # One at a time: what was just put is still in the cache when it is added up, unless the others are late.
        if work.first + work.put >= int(self._taken.min()) + NUM_CHUNKS:
            return False
        number, chunk = work.first + work.put, work.chunk(work.put)
        self._place(self._rings[self.rank], number, chunk).copy_(chunk)
        # x86 and torch's copies keep the order of stores: who reads the new count reads the chunk behind it.
        self._put[self.rank] = number + 1
        work.put += 1
        return True

    def _sum_chunks(self, work: _Work) -> bool:
        """Two or three ranks: add up everything here."""
        end = min(work.put, int(self._put.min()) - work.first)
        if end <= work.taken:
            return False
        for number in range(work.taken, end):
            chunk = work.chunk(number)
            self._sum(work.first + number, chunk, chunk)
            self._taken[self.rank] = work.first + number + 1
        work.taken = end
        return True

    def _share_chunks(self, work: _Work) -> bool:
        """Many ranks: each adds up its share of a chunk for all, and copies the others' shares."""
        assert self._results is not None
        did = False
        end = min(work.put, int(self._put.min()) - work.first)
        # The results have as many places as a ring: a new one may be written when all have taken the old.
        end = min(end, int(self._taken.min()) + NUM_CHUNKS - work.first)
        for number in range(work.summed, end):
            chunk = work.chunk(number)
            result = self._place(self._results, work.first + number, chunk)
            begin, stop = (len(chunk) * (self.rank + step) // self.num_workers for step in (0, 1))
            self._sum(work.first + number, chunk, result, begin, stop)
            self._summed[self.rank] = work.first + number + 1
            did = True
        work.summed = max(work.summed, end)
        ready = min(work.summed, int(self._summed.min()) - work.first)
        for number in range(work.taken, ready):
            chunk = work.chunk(number)
            chunk.copy_(self._place(self._results, work.first + number, chunk))
            self._taken[self.rank] = work.first + number + 1
            did = True
        work.taken = max(work.taken, ready)
        return did

    def _sum(self, number: int, chunk: Tensor, out: Tensor, begin: int = 0, stop: int | None = None) -> None:
        parts = [self._place(ring, number, chunk)[begin:stop] for ring in self._rings]
        if self.rank < 2:
            parts[self.rank] = chunk[begin:stop]  # the same numbers, one place less for the cache to hold
        out = out[begin:stop]
        if len(parts) == 1:
            out.copy_(parts[0])
            return
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)

    @staticmethod
    def _place(ring: Tensor, number: int, like: Tensor) -> Tensor:
        at = number % NUM_CHUNKS * CHUNK_BYTES
        return ring[at : at + like.numel() * like.element_size()].view(like.dtype)

    def _whom_for(self, work: _Work) -> str:
        late = [rank for rank in self._others if self._put[rank] <= work.first + work.taken]
        late = late or [rank for rank in self._others if self._taken[rank] < self._taken[self.rank]]
        return f"rank {', '.join(str(self._ranks[rank]) for rank in late or self._others)}"

    def _lost(self, operation: str, reason: str) -> PeerLost:
        self._pending.clear()
        return PeerLost(rank=self._native.rank, operation=operation, reason=reason)

    def _map(self) -> mmap.mmap:
        num_rings = self.num_workers + (1 if self._must_share else 0)
        num_bytes = 3 * self.num_workers * _LINE * 8 + num_rings * NUM_CHUNKS * CHUNK_BYTES
        fd = memfd.create(num_bytes, "shoal exchange") if self.rank == 0 else -1
        try:
            # By the way of /proc: the group's own connections carry no descriptors, and the kernel lets only processes
            # of the same user in.
            pid, theirs = self._native.all_gather(torch.tensor([os.getpid(), fd]))[self._ranks[0]].tolist()
            try:
                opened = os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    mapped = memfd.map_shared(opened, num_bytes)
                finally:
                    os.close(opened)
            except (OSError, WireError) as error:  # rank 0 is gone, or another has taken its place
                raise PeerLost(
                    rank=self._native.rank, operation="mapping shared memory", reason=str(error)
                ) from None
            self._native.all_gather(torch.zeros(1))  # rank 0 keeps it open until everybody has it
        finally:
            if fd >= 0:
                os.close(fd)
        return mapped
