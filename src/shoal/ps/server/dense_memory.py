"""Memory for dense parameters that clients on the same host can map and read.

Whole memfds, filled from the front; what is given back is kept for the next
of the same size. Who may read when is decided by the protocol, not here.
"""

from __future__ import annotations

import mmap
import os
import weakref

import torch

from shoal.runtime.transport import memfd

MEMORY_BYTES = 64 << 20
"""Of one memfd, unless a chunk is larger."""

ALIGNMENT = 64


class DenseMemory:
    """All of one server."""

    def __init__(self) -> None:
        self._memories: list[tuple[int, int, mmap.mmap]] = []  # read-only descriptor, bytes, mapping
        self._used = 0  # of the last one
        self._free: dict[int, list[tuple[int, int]]] = {}

    @property
    def sizes(self) -> list[int]:
        """Bytes of each memory."""
        return [size for _, size, _ in self._memories]

    @property
    def descriptors(self) -> list[int]:
        """To read each of them; they stay open."""
        return [fd for fd, _, _ in self._memories]

    def alloc(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, tuple[int, int]]:
        """Zeros, and where they are: (memory, offset)."""
        nbytes = _rounded(max(numel, 1) * dtype.itemsize)
        found = self._free.get(nbytes)
        place = found.pop() if found else self._place(nbytes)
        memory, offset = place
        mapping = self._memories[memory][2]
        flat = torch.frombuffer(mapping, dtype=dtype, count=max(numel, 1), offset=offset)[:numel]
        flat.zero_()
        return flat, place

    def free(self, place: tuple[int, int], numel: int, dtype: torch.dtype) -> None:
        """Nobody uses it any more, readers neither."""
        self._free.setdefault(_rounded(max(numel, 1) * dtype.itemsize), []).append(place)

    def _place(self, nbytes: int) -> tuple[int, int]:
        if not self._memories or self._used + nbytes > self._memories[-1][1]:
            size = max(MEMORY_BYTES, nbytes)
            fd = memfd.create(size, "shoal-dense")
            try:
                mapping = memfd.map_shared(fd, size)
                # What is handed out cannot be written through.
                readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            finally:
                os.close(fd)
            weakref.finalize(self, os.close, readable)
            self._memories.append((readable, size, mapping))
            self._used = 0
        place = (len(self._memories) - 1, self._used)
        self._used += nbytes
        return place


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
