"""`ring` exchange: reduce-scatter and all-gather around a ring; a rank talks to its two neighbours only.

The bytes that a rank sends do not grow with the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.collectives.schemes import Swaps, parts_of


def all_reduce(p2p: Swaps, flat: Tensor) -> None:
    """Sum `flat` over the ranks, in place. Part p is added up from rank p on, around the ring."""
    parts = parts_of(flat, p2p.num_ranks)
    reduce_scatter(p2p, parts)
    all_gather(p2p, parts, own=(p2p.rank + 1) % p2p.num_ranks)


def reduce_scatter(p2p: Swaps, parts: list[Tensor]) -> None:
    """Leave the whole sum in part rank + 1; the other parts are partial sums."""
    num, rank = p2p.num_ranks, p2p.rank
    incoming = torch.empty_like(max(parts, key=len))
    for step in range(num - 1):
        mine, theirs = parts[(rank - step) % num], parts[(rank - step - 1) % num]
        got = incoming[: len(theirs)]
        p2p.swap((rank + 1) % num, mine, (rank - 1) % num, got)
        torch.add(got, theirs, out=theirs)  # what came from behind first: the order of the ring


def all_gather(p2p: Swaps, parts: list[Tensor], *, own: int) -> None:
    """Pass the finished part (`own`) on, and receive the others."""
    num, rank = p2p.num_ranks, p2p.rank
    for step in range(num - 1):
        p2p.swap((rank + 1) % num, parts[(own - step) % num], (rank - 1) % num, parts[(own - step - 1) % num])
