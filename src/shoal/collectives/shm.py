"""`shm` exchange: sums through memory that all ranks of one host have mapped.

Each rank writes its part, chunk by chunk, into a ring buffer of its own that the others can read; a
rank that has a chunk of every rank sums them in rank order (shm_kernels.py, or shm_torch.py before
that is compiled). With few ranks each sums everything for itself; for large tensors many ranks
share the summing, and copy each other's results. An all-gather is the same without the summing.
There is no thread: copying needs the same cores that compute, so it is done in `start_all_reduce`
and `finish`.

The memory belongs to one view and is never reused, so a process that wakes up after its view is
over writes into memory that nobody reads (fencing).
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal import system
from shoal.collectives import shm_layout as layout
from shoal.collectives.reducer import Native, OverNative, SharedParts
from shoal.collectives.shm_layout import KERNELS
from shoal.collectives.shm_torch import TorchLoops
from shoal.config.exchange_rule import ORDERED
from shoal.config.job import Job
from shoal.errors import ConfigError, PeerLost, WireError
from shoal.runtime import kernel_cache
from shoal.runtime.failpoints import failpoint
from shoal.runtime.transport import memfd

CHUNK_BYTES = 256 << 10
"""Bytes written and summed at once: a chunk stays in a cache between the two, and peers need not wait long for it."""

NUM_CHUNKS = 64
"""Chunks of each ring: how far a rank may be ahead, so that a straggler without a core blocks nobody."""

LARGE_BYTES = 4 << 20
"""Larger tensors do not stay in a cache between two ranks: they are written with streaming stores, and
many ranks share the summing.
"""

SHARE_FROM = 4  # ranks from which large tensors are shared: reading all parts costs more than one more copy

KINDS = {
    torch.float32: layout.FLOAT32,
    torch.complex64: layout.FLOAT32,
    torch.float64: layout.FLOAT64,
    torch.complex128: layout.FLOAT64,
    torch.bfloat16: layout.BFLOAT16,
    torch.int8: layout.INT8,
    torch.uint8: layout.INT8,
    torch.int16: layout.INT16,
    torch.uint16: layout.INT16,
    torch.int32: layout.INT32,
    torch.uint32: layout.INT32,
    torch.int64: layout.INT64,
    torch.uint64: layout.INT64,
    torch.bool: layout.BOOL,
    torch.float16: layout.FLOAT16,
}
"""The sum of a dtype."""

_AT = {name: at for at, name in enumerate(layout.WORK_FIELDS)}
_SPIN_S = 0.1e-3  # polling before the first sleep; longer would take a core from the others on a busy machine
_LOOKS = 1000  # of those at once, where every rank has a core of its own: about 10 us
_LOOK_AROUND_S = 0.25  # between looks at the connections
_SHORTEST_NAP_S, _LONGEST_NAP_S = 10e-6, 200e-6


class _ShmWork:
    """A tensor being summed, or gathered. `flat` is its memory, or a copy where that is not contiguous."""

    __slots__ = ("_bytes", "flat", "gathered", "is_done", "state", "target")

    def __init__(
        self, target: Tensor, flat: Tensor, state: np.ndarray[Any, Any], gathered: Tensor | None
    ) -> None:
        self.target, self.flat, self.state, self.is_done = target, flat, state, False
        self.gathered = gathered
        self._bytes: Tensor | None = None

    @property
    def bytes(self) -> Tensor:
        if self._bytes is None:
            flat = self.flat.detach()
            flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
            # A single element is contiguous with any stride, which a view as bytes does not accept.
            self._bytes = flat.as_strided(flat.shape, (1,)).view(torch.uint8)
        return self._bytes

    def __getitem__(self, name: str) -> int:
        return int(self.state[_AT[name]])


class _CompiledLoops:
    """The loops of shm_kernels.py, by addresses."""

    def __init__(self, ring: np.ndarray[Any, Any]) -> None:
        from shoal.collectives import shm_kernels

        self._ring, self._kernels = ring, shm_kernels

    def advance(self, work: _ShmWork, max_looks: int) -> int:
        return self._kernels.advance(self._ring, work.state, max_looks)

    def put_ahead(self, work: _ShmWork) -> bool:
        return self._kernels.put_ahead(self._ring, work.state)


def _is_known(tensor: Tensor) -> bool:
    return tensor.dtype in KINDS and tensor.layout is torch.strided and tensor.is_cpu


def use_compiled() -> bool:
    """True if the compiled loops are loaded, or on the disk; processors other than x86 need their ordered accesses.

    Ranks may decide differently: both kinds of loops use the same memory layout.
    """
    if platform.machine() not in ORDERED:
        return True
    if KERNELS not in sys.modules and not kernel_cache.is_compiled(KERNELS):
        return False
    return bool(importlib.import_module(KERNELS).HAS_HALF)


class Shm(OverNative):
    """All-reduce and the gathers of a step through shared memory; the rest, and what is not plain CPU memory, by torch's own."""

    def __init__(
        self,
        group: Native,
        *,
        is_broken: Callable[[], bool] = lambda: False,
        timeout_s: float = 300.0,
        num_cores: int | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Collective over the whole group: the first of `ranks`, those of one host, makes the memory they map."""
        self._ranks = list(range(group.num_workers)) if ranks is None else list(ranks)
        self.rank, self.num_workers = self._ranks.index(group.rank), len(self._ranks)
        self._group, self._is_broken, self._timeout_s = group, is_broken, timeout_s
        # A rank that spins while another has no core delays it.
        cores = num_cores or len(system.cores())
        self._looks = _LOOKS if cores >= self.num_workers else 0
        num, self._chunk_bytes = self.num_workers, CHUNK_BYTES
        mapped = self._map(num * (3 * layout.LINE + NUM_CHUNKS * CHUNK_BYTES))
        # The sums of a few ranks are made by each, and ranks of other hosts share none of it.
        is_shared = SHARE_FROM <= num == group.num_workers
        self.shared_parts = SharedParts(num, self._map_more) if is_shared else None
        counters = np.frombuffer(mapped, np.int64, 3 * num * layout.LINE // 8)
        self._put, _, self._taken = counters.reshape(3, num, -1)[:, :, 0]
        address = counters.ctypes.data
        place = (self.rank, num, address, address + counters.nbytes, CHUNK_BYTES, NUM_CHUNKS)
        self._loops: _CompiledLoops | TorchLoops = (
            _CompiledLoops(np.array(place, np.int64))
            if use_compiled()
            else TorchLoops(mapped, self.rank, num, CHUNK_BYTES, NUM_CHUNKS)
        )
        self._next = 0  # number of the next chunk, counted over all tensors
        self._pending: deque[_ShmWork] = deque()

    @classmethod
    def open(cls, job: Job, group: Native, ranks: Sequence[int] | None = None) -> Shm:
        return cls(group, is_broken=group.is_broken, timeout_s=job.liveness.step_timeout_s, ranks=ranks)

    # ---- Reducer --------------------------------------------------------------------------------

    def start_all_reduce(self, tensor: Tensor) -> object:
        if not _is_known(tensor):
            return self._group.start_all_reduce(tensor)
        return self._start(tensor)

    def gather_rows(self, tensor: Tensor) -> list[Tensor]:
        """An all-gather that is part of a step. A script's own calls go through torch: a rank that
        makes another call there is detected at the deadline, and not answered with the bytes of a
        step.
        """
        if not _is_known(tensor) or self.num_workers < self._group.num_workers:
            return self._group.all_gather(tensor)
        if self.num_workers == 1 or not tensor.numel():
            return [tensor.detach().clone() for _ in range(self.num_workers)]
        gathered = torch.empty((self.num_workers, tensor.nbytes), dtype=torch.uint8)
        self.finish(self._start(tensor.detach(), gathered), "an all-gather")
        return [part.view(tensor.dtype).reshape(tensor.shape) for part in gathered]

    def start_gather_in_place(self, whole: Tensor) -> object:
        """Start an all-gather of even parts of a flat tensor, where each rank has its own."""
        num = self.num_workers
        mine = whole.view(num, len(whole) // num)[self.rank]
        return self._start(mine, whole.view(torch.uint8).view(num, whole.nbytes // num))

    def start_reduce_scatter(self, whole: Tensor, begin: int, end: int) -> object:
        """Start a sum of which this rank gets the elements from `begin` to `end`, and no other rank; the rest keeps its values."""
        return self._start(whole, part=(begin * whole.element_size(), end * whole.element_size()))

    def _start(
        self, tensor: Tensor, gathered: Tensor | None = None, part: tuple[int, int] | None = None
    ) -> _ShmWork:
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        flat = (
            tensor if is_plain else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
        )
        num_bytes = flat.nbytes if self.num_workers > 1 else 0  # alone there is nothing to add
        num_chunks = -(-num_bytes // self._chunk_bytes)
        is_large = num_bytes > LARGE_BYTES
        is_shared = is_large and self.num_workers >= SHARE_FROM and gathered is None and part is None
        to = gathered.data_ptr() if gathered is not None else 0
        kind = KINDS[tensor.dtype]
        place = (flat.data_ptr(), num_bytes, kind, is_shared, is_large, self._next, num_chunks, 0, 0, 0, to)
        state = (*place, part is not None, *(part or (0, 0)))
        work = _ShmWork(tensor, flat, np.array(state, np.int64), gathered)
        self._next += num_chunks
        self._pending.append(work)
        self._progress(0)
        return work

    def finish(self, work: object, operation: str) -> None:
        if not isinstance(work, _ShmWork):
            self._group.finish(work, operation)
            return
        if not work.is_done:
            self._wait(work, operation)
        if work.flat is not work.target and work.gathered is None:
            work.target.copy_(work.flat)

    def close(self) -> None:
        pass  # no thread runs; the memory goes with the last reference to it

    # ---- the rings ------------------------------------------------------------------------------

    def _wait(self, work: _ShmWork, operation: str) -> None:
        since, look_at, nap_s = 0.0, 0.0, _SHORTEST_NAP_S
        while not work.is_done:
            if self._progress(self._looks):
                since, nap_s = 0.0, _SHORTEST_NAP_S
                continue
            now = time.monotonic()
            if not since:
                since, look_at = now, now + _LOOK_AROUND_S
            if now - since < _SPIN_S:
                os.sched_yield()  # may run the awaited rank; free if no process wants the core
                continue
            if now > look_at:
                look_at = now + _LOOK_AROUND_S
                if self._is_broken():
                    raise self._lost(operation, "a connection of the group was closed")
                if now - since > self._timeout_s:
                    raise self._lost(
                        operation, f"{self._whom_for(work)} did not come within {self._timeout_s:g} s"
                    )
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def _progress(self, max_looks: int) -> bool:
        """Advance the pending works as far as possible now; whether any made progress."""
        did, pending = False, self._pending
        while pending:
            outcome = self._loops.advance(pending[0], max_looks)
            did |= outcome != layout.NONE
            if outcome != layout.DONE:
                break
            pending.popleft().is_done = True
        for before, work in pairwise(pending):
            if before["put"] < before["num_chunks"]:
                break
            did |= self._loops.put_ahead(work)
        return did

    def _whom_for(self, work: _ShmWork) -> str:
        others = [rank for rank in range(self.num_workers) if rank != self.rank]
        late = [rank for rank in others if self._put[rank] <= work["first"] + work["taken"]]
        late = late or [rank for rank in others if self._taken[rank] < self._taken[self.rank]]
        return f"rank {', '.join(str(self._ranks[rank]) for rank in late or others)}"

    def _lost(self, operation: str, reason: str) -> PeerLost:
        self._pending.clear()
        return PeerLost(rank=self._group.rank, operation=operation, reason=reason)

    def _map(self, num_bytes: int) -> mmap.mmap:
        fd = memfd.create(num_bytes, "shoal exchange") if self.rank == 0 else -1
        try:
            try:
                mapped = self._map_of_first(fd, num_bytes)
            except (OSError, WireError) as error:  # rank 0 is gone, or was replaced
                raise PeerLost(
                    rank=self._group.rank, operation="mapping shared memory", reason=str(error)
                ) from None
            self._group.all_gather(torch.zeros(1))  # barrier: rank 0 keeps it open until every rank has it
        finally:
            if fd >= 0:
                os.close(fd)
        return mapped

    def _map_more(self, num_bytes: int) -> mmap.mmap | None:
        """Memory besides the rings; None on all ranks where one of them cannot make or map it."""
        fd, mapped = -1, None
        if self.rank == 0:
            with contextlib.suppress(ConfigError):  # a limit on file sizes
                fd = memfd.create(num_bytes, "shoal rows")
        try:
            with contextlib.suppress(OSError, WireError):  # a limit on this rank's memory
                mapped = self._map_of_first(fd, num_bytes)
            failpoint("worker: larger memory mapped")
            num_mapped = torch.tensor([mapped is not None], dtype=torch.int64)
            self.finish(self.start_all_reduce(num_mapped), "an agreement on shared memory")
        finally:
            if fd >= 0:  # every rank has it by now
                os.close(fd)
        return mapped if int(num_mapped) == self.num_workers else None

    def _map_of_first(self, fd: int, num_bytes: int) -> mmap.mmap:
        """Map what rank 0 has at its descriptor `fd`. Collective; the error is this rank's alone."""
        # Through /proc: the group's own connections carry no descriptors, and the kernel admits only
        # processes of the same user.
        pid, theirs = self._group.all_gather(torch.tensor([os.getpid(), fd]))[self._ranks[0]].tolist()
        opened = os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return memfd.map_shared(opened, num_bytes)
        finally:
            os.close(opened)
