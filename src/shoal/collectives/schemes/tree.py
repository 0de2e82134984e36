"""`tree` exchange: sums go up a binary tree to rank 0 and the result comes down: few steps, for small tensors and many ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.collectives.schemes import Wires


def all_reduce(wires: Wires, flat: Tensor) -> None:
    """Sum `flat` over the ranks, in place: a rank adds those below it from the nearest to the farthest."""
    num, rank = wires.num_ranks, wires.rank
    incoming = torch.empty_like(flat)
    reach = 1
    while reach < num:
        if rank % (2 * reach) == reach:
            wires.wait(wires.send(rank - reach, flat))
            break
        if rank + reach < num:
            wires.wait(wires.receive(rank + reach, incoming))
            flat.add_(incoming)
        reach *= 2
    _down(wires, flat)


def _down(wires: Wires, flat: Tensor) -> None:
    """Broadcast the result down the same tree."""
    num, rank = wires.num_ranks, wires.rank
    reach = 1
    while reach < num:
        reach *= 2
    while reach > 1:
        reach //= 2
        if rank % (2 * reach) == 0 and rank + reach < num:
            wires.wait(wires.send(rank + reach, flat))
        elif rank % (2 * reach) == reach:
            wires.wait(wires.receive(rank - reach, flat))
