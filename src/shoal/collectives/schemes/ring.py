"""`ring` exchange: reduce-scatter and all-gather around a ring; a rank talks to its two neighbours only.

The bytes that a rank sends do not grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.collectives.schemes import Swaps, parts_of


def all_reduce(p2p: Swaps, flat: Tensor) -> None:
    """Sum `flat` over the ranks, in place. Part p is added up from rank p on, around the ring."""
    _swap_all(p2p, sum_steps(p2p.rank, parts_of(flat, p2p.num_ranks)))


def all_gather(p2p: Swaps, parts: list[Tensor], *, own: int) -> None:
    """Pass the finished part (`own`) on, and receive the others."""
    _swap_all(p2p, gather_steps(parts, own=own))


def sum_steps(rank: int, parts: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors to send to the next rank and to receive from the previous one, step by step; advance when both are done."""
    num = len(parts)
    incoming = torch.empty_like(max(parts, key=len))
    for step in range(num - 1):
        mine, theirs = parts[(rank - step) % num], parts[(rank - step - 1) % num]
        got = incoming[: len(theirs)]
        yield mine, got
        torch.add(got, theirs, out=theirs)  # the received part first: the order of the ring
    yield from gather_steps(parts, own=(rank + 1) % num)


def gather_steps(parts: list[Tensor], *, own: int) -> Iterator[tuple[Tensor, Tensor]]:
    num = len(parts)
    for step in range(num - 1):
        yield parts[(own - step) % num], parts[(own - step - 1) % num]


def _swap_all(p2p: Swaps, steps: Iterator[tuple[Tensor, Tensor]]) -> None:
    num, rank = p2p.num_ranks, p2p.rank
    for outgoing, incoming in steps:
        p2p.swap((rank + 1) % num, outgoing, (rank - 1) % num, incoming)
