"""`mapreduce` exchange: each rank owns a part of the gradient, like the reducers of a map-reduce.

Combine (what backward did), shuffle (every rank sends each part to its
owner), reduce (the owner adds up in rank order), all-gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.collectives.schemes import Wires, parts_of, ring
from shoal.collectives.schemes.broadcast import add_up


def all_reduce(wires: Wires, flat: Tensor) -> None:
    parts = parts_of(flat, wires.num_ranks)
    reduce_scatter(wires, parts)
    ring.all_gather(wires, parts, own=wires.rank)


def reduce_scatter(wires: Wires, parts: list[Tensor]) -> None:
    """Leave the whole sum in this rank's own part; the others are unchanged."""
    rank, num = wires.rank, wires.num_ranks
    mine = parts[rank]
    shuffled = [torch.empty_like(mine) if source != rank else mine.clone() for source in range(num)]
    others = [other for other in range(num) if other != rank]
    wires.wait(
        *(wires.receive(other, shuffled[other]) for other in others),
        *(wires.send(other, parts[other]) for other in others),
    )
    add_up(shuffled, mine)
