"""`chain` exchange: the sum is relayed from neighbour to neighbour to the last rank, and the result
comes back the same way.

In chunks, so that all links of the chain work at once (pipelining). Adds in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.schemes import P2P

CHUNK_BYTES = 256 << 10


def all_reduce(p2p: P2P, flat: Tensor) -> None:
    """Sum `flat` over the ranks, in place, in rank order."""
    chunks = list(_chunks(flat))
    last = p2p.num_ranks - 1
    sent = _up(p2p, chunks)
    p2p.wait(*sent)
    if p2p.rank < last:
        coming = [p2p.receive(p2p.rank + 1, chunk) for chunk in chunks]
    else:
        coming = [None] * len(chunks)
    passed: list[Any] = []
    for chunk, work in zip(chunks, coming, strict=True):
        p2p.wait(work)
        if p2p.rank > 0:
            passed.append(p2p.send(p2p.rank - 1, chunk))
    p2p.wait(*passed)


def _up(p2p: P2P, chunks: list[Tensor]) -> list[Any]:
    sent: list[Any] = []
    before = [torch.empty_like(chunk) for chunk in chunks] if p2p.rank else []
    coming = [p2p.receive(p2p.rank - 1, chunk) for chunk in before]
    for number, chunk in enumerate(chunks):
        if p2p.rank:
            p2p.wait(coming[number])
            torch.add(before[number], chunk, out=chunk)
        if p2p.rank < p2p.num_ranks - 1:
            sent.append(p2p.send(p2p.rank + 1, chunk))
    return sent


def _chunks(flat: Tensor) -> Iterator[Tensor]:
    length = max(1, CHUNK_BYTES // flat.element_size())
    for begin in range(0, len(flat), length):
        yield flat[begin : begin + length]
