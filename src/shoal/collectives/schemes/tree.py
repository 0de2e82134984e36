"""`tree` exchange: sums go up a binary tree to rank 0 and the result comes down: few steps, for small tensors and many ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.collectives.schemes import P2P


def all_reduce(p2p: P2P, flat: Tensor) -> None:
    """Sum `flat` over the ranks, in place: a rank adds those below it from the nearest to the farthest."""
    num, rank = p2p.num_ranks, p2p.rank
    incoming = torch.empty_like(flat)
    reach = 1
    while reach < num:
        if rank % (2 * reach) == reach:
            p2p.wait(p2p.send(rank - reach, flat))
            break
        if rank + reach < num:
            p2p.wait(p2p.receive(rank + reach, incoming))
            flat.add_(incoming)
        reach *= 2
    _down(p2p, flat)


def _down(p2p: P2P, flat: Tensor) -> None:
    """Broadcast the result down the same tree."""
    num, rank = p2p.num_ranks, p2p.rank
    reach = 1
    while reach < num:
        reach *= 2
    while reach > 1:
        reach //= 2
        if rank % (2 * reach) == 0 and rank + reach < num:
            p2p.wait(p2p.send(rank + reach, flat))
        elif rank % (2 * reach) == reach:
            p2p.wait(p2p.receive(rank - reach, flat))
