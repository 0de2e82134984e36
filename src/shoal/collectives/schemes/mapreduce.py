"""`mapreduce` exchange: each rank owns a part of the gradient, like the reducers of a map-reduce.

Combine (done by backward), shuffle (every rank sends each part to its owner), reduce (the owner
sums in rank order), all-gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.collectives.schemes import P2P, parts_of, ring
from shoal.collectives.schemes.broadcast import add_up


def all_reduce(p2p: P2P, flat: Tensor) -> None:
    parts = parts_of(flat, p2p.num_ranks)
    reduce_scatter(p2p, parts)
    ring.all_gather(p2p, parts, own=p2p.rank)


def reduce_scatter(p2p: P2P, parts: list[Tensor]) -> None:
    """Leave the whole sum in this rank's own part; the others are unchanged."""
    rank, num = p2p.rank, p2p.num_ranks
    mine = parts[rank]
    shuffled = [torch.empty_like(mine) if source != rank else mine.clone() for source in range(num)]
    others = [other for other in range(num) if other != rank]
    p2p.wait(
        *(p2p.receive(other, shuffled[other]) for other in others),
        *(p2p.send(other, parts[other]) for other in others),
    )
    add_up(shuffled, mine)
