"""`halving` exchange: recursive halving and doubling: as few bytes as the ring in as few steps as the tree.

In each round a rank swaps half of its remaining part with a partner at half the previous distance,
and afterwards the rounds run backwards. Ranks beyond the largest power of two give their part to a
partner first, and get the result from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.collectives.schemes import P2P


def all_reduce(p2p: P2P, flat: Tensor) -> None:
    """Sum `flat` over the ranks, in place: pairs of ranks first, then pairs of pairs, lower ranks first."""
    num, rank = p2p.num_ranks, p2p.rank
    power = 1 << (num.bit_length() - 1)
    extra = num - power
    if rank >= power:
        p2p.wait(p2p.send(rank - power, flat))
        p2p.wait(p2p.receive(rank - power, flat))
        return
    incoming = torch.empty_like(flat)
    if rank < extra:
        p2p.wait(p2p.receive(rank + power, incoming))
        flat.add_(incoming)
    _halve_and_double(p2p, flat, incoming, power)
    if rank < extra:
        p2p.wait(p2p.send(rank + power, flat))


def _halve_and_double(p2p: P2P, flat: Tensor, incoming: Tensor, power: int) -> None:
    rank = p2p.rank
    begin, end = 0, len(flat)
    done: list[tuple[int, int, int]] = []  # partner, and what we held before we parted
    distance = power // 2
    while distance:
        partner = rank ^ distance
        middle = (begin + end) // 2
        done.append((partner, begin, end))
        keep, give = ((begin, middle), (middle, end)) if rank < partner else ((middle, end), (begin, middle))
        mine, got = flat[slice(*keep)], incoming[: keep[1] - keep[0]]
        p2p.swap(partner, flat[slice(*give)], partner, got)
        first, second = (mine, got) if rank < partner else (got, mine)
        torch.add(first, second, out=mine)
        begin, end = keep
        distance //= 2
    for partner, whole_begin, whole_end in reversed(done):
        middle = (whole_begin + whole_end) // 2
        low, high = flat[whole_begin:middle], flat[middle:whole_end]
        mine, theirs = (low, high) if rank < partner else (high, low)
        p2p.swap(partner, mine, partner, theirs)
