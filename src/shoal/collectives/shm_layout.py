"""Memory of the `shm` exchange: counters, rings of chunks, and the state of a tensor that is being summed.

Shared by the compiled loops (shm_kernels.py) and those of torch operations
(shm_torch.py). numba keeps compiled code by the file of a kernel: a change
here has to be one in shm_kernels.py too.
"""

from __future__ import annotations

import numpy as np

KERNELS = "shoal.collectives.shm_kernels"
"""The module of the compiled loops."""

LINE = 64  # bytes of a cache line: counters of two ranks never share one, and vectors are as long

RING_FIELDS = ("rank", "num_ranks", "counters", "rings", "chunk_bytes", "num_chunks")
RING = np.dtype([(name, np.int64) for name in RING_FIELDS])
"""The memory, as one rank sees it: `counters` and `rings` are addresses, the rest is the same everywhere or its own."""

WORK_FIELDS = (
    "address",
    "num_bytes",
    "kind",
    "is_shared",
    "is_streamed",
    "first",
    "num_chunks",
    "put",
    "summed",
    "taken",
    "gathered",
    "is_scattered",
    "begin",
    "end",
)
WORK = np.dtype([(name, np.int64) for name in WORK_FIELDS])
"""A tensor being summed: so many of its chunks are put, summed and taken; `first` is the number of its first chunk.

Where it `is_shared`, each rank adds up its share of a chunk and takes the others' from them; else each adds up all.
Where it `is_streamed`, what is put goes past the caches. Where `gathered` is an address, nothing is added: every rank's
bytes are copied there, one rank after the other. Where it `is_scattered`, this rank adds up the bytes from `begin` to
`end`, and no other rank does.
"""

FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT8, INT16, INT32, INT64, BOOL = range(9)
"""Kinds of numbers to add; complex ones are pairs, and integers the same with and without a sign."""

NONE, SOME, DONE = range(3)  # outcome of a call of `advance`
