"""Loops of `shm` in torch operations: the sums of shm_kernels.py, to the bit, without a compiler.

Used until the compiled loops are on this machine's disk, and if nothing can be cached there. A
chunk of 256 KiB takes about as long; a tensor of a few numbers some 30 us more. Counters are plain
loads and stores, which x86 keeps in order.
"""

from __future__ import annotations

import mmap
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.collectives import shm_layout as layout
from shoal.collectives.shm_layout import LINE

_DTYPES = {
    layout.FLOAT32: torch.float32,
    layout.FLOAT64: torch.float64,
    layout.BFLOAT16: torch.bfloat16,
    layout.FLOAT16: torch.float16,
    layout.INT8: torch.int8,
    layout.INT16: torch.int16,
    layout.INT32: torch.int32,
    layout.INT64: torch.int64,
    layout.BOOL: torch.uint8,
}
_AT = {name: at for at, name in enumerate(layout.WORK_FIELDS)}
_PUT, _SUMMED, _TAKEN = _AT["put"], _AT["summed"], _AT["taken"]
_PUTS, _SUMS, _TAKES = range(3)  # counters of each rank


class Work(Protocol):
    """A tensor being summed: its state by layout.WORK, and its memory as bytes."""

    state: NDArray[np.int64]

    @property
    def bytes(self) -> Tensor: ...

    @property
    def gathered(self) -> Tensor | None: ...


class TorchLoops:
    """The loops of one rank over the mapped memory."""

    def __init__(
        self, mapped: mmap.mmap, rank: int, num_ranks: int, chunk_bytes: int, num_chunks: int
    ) -> None:
        self._rank, self._num_ranks, self._chunk_bytes, self._num_chunks = (
            rank,
            num_ranks,
            chunk_bytes,
            num_chunks,
        )
        num_counter_bytes = 3 * num_ranks * LINE
        counters = np.frombuffer(mapped, np.int64, num_counter_bytes // 8)
        self._counters = counters.reshape(3, num_ranks, -1)[:, :, 0]
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        self._rings = whole[num_counter_bytes:].view(num_ranks, num_chunks, chunk_bytes)

    def advance(self, work: Work, max_looks: int) -> int:
        """Advance as far as possible, until the work is DONE or `max_looks` polls in a row found
        nothing: SOME or NONE of it.
        """
        state, flat = work.state, work.bytes
        num_looks, outcome, num_chunks = 0, layout.NONE, state[_AT["num_chunks"]]
        while state[_TAKEN] < num_chunks and num_looks <= max_looks:
            if self._take(state, flat) or self._sum(work) or self._put(state, flat):
                num_looks, outcome = 0, layout.SOME
            else:
                num_looks += 1
        return layout.DONE if state[_TAKEN] == num_chunks else outcome

    def put_ahead(self, work: Work) -> bool:
        """Write as much as there is room for, while earlier works are not yet summed; whether anything was written."""
        state, flat = work.state, work.bytes
        before = state[_PUT]
        while self._put(state, flat):
            pass
        return bool(state[_PUT] > before)

    def _put(self, state: NDArray[np.int64], flat: Tensor) -> bool:
        """Write the next chunk into this rank's ring, once all ranks have read the previous content."""
        chunk = int(state[_PUT])
        number = int(state[_AT["first"]]) + chunk
        if chunk == state[_AT["num_chunks"]] or number >= self._counters[_TAKES].min() + self._num_chunks:
            return False
        own = self._own(state, flat, chunk)
        self._slot(self._rank, number)[: len(own)].copy_(own)
        state[_PUT] = chunk + 1
        self._counters[_PUTS, self._rank] = number + 1
        return True

    def _sum(self, work: Work) -> bool:
        """Sum the next chunk that all ranks have written, or this rank's share of it, in rank order."""
        state, flat = work.state, work.bytes
        chunk, rank = int(state[_SUMMED]), self._rank
        number = int(state[_AT["first"]]) + chunk
        if chunk == state[_PUT] or self._counters[_PUTS].min() <= number:
            return False
        own = self._own(state, flat, chunk)
        begin, end, kind, is_shared = 0, len(own), int(state[_AT["kind"]]), bool(state[_AT["is_shared"]])
        if work.gathered is not None:
            at = chunk * self._chunk_bytes
            for other in range(self._num_ranks):
                work.gathered[other, at : at + end].copy_(self._slot(other, number)[:end])
            end = 0
        if state[_AT["is_scattered"]]:
            before = chunk * self._chunk_bytes
            begin, end = (min(max(int(state[_AT[name]]) - before, 0), end) for name in ("begin", "end"))
        if is_shared:
            begin, end = self._share(rank, end), self._share(rank + 1, end)
        if begin < end:
            dtype = _DTYPES[kind]
            add = torch.bitwise_or if kind == layout.BOOL else torch.add
            parts = [self._slot(other, number)[begin:end].view(dtype) for other in range(self._num_ranks)]
            out = own[begin:end].view(dtype)
            add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                add(out, part, out=out)
            if is_shared:
                parts[rank].copy_(out)  # no other rank reads this rank's own part
        state[_SUMMED] = chunk + 1
        if is_shared:
            self._counters[_SUMS, rank] = number + 1
        else:
            state[_TAKEN] = chunk + 1
            self._counters[_TAKES, rank] = number + 1
        return True

    def _take(self, state: NDArray[np.int64], flat: Tensor) -> bool:
        """Copy the others' shares of the next chunk that all ranks have summed."""
        chunk = int(state[_TAKEN])
        number = int(state[_AT["first"]]) + chunk
        if chunk == state[_SUMMED] or self._counters[_SUMS].min() <= number:
            return False
        own = self._own(state, flat, chunk)
        for other in range(self._num_ranks):
            if other != self._rank:
                begin, end = self._share(other, len(own)), self._share(other + 1, len(own))
                own[begin:end].copy_(self._slot(other, number)[begin:end])
        state[_TAKEN] = chunk + 1
        self._counters[_TAKES, self._rank] = number + 1
        return True

    def _own(self, state: NDArray[np.int64], flat: Tensor, chunk: int) -> Tensor:
        begin = chunk * self._chunk_bytes
        return flat[begin : min(begin + self._chunk_bytes, int(state[_AT["num_bytes"]]))]

    def _slot(self, rank: int, number: int) -> Tensor:
        return self._rings[rank, number % self._num_chunks]

    def _share(self, rank: int, num_bytes: int) -> int:
        """The beginning of a rank's share: whole lines, but for the end of the last."""
        return num_bytes if rank == self._num_ranks else num_bytes // LINE * rank // self._num_ranks * LINE
