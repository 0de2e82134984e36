"""`broadcast` exchange: every rank sends everything to every other, and each adds up for itself. One step; for two or three ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.collectives.schemes import P2P


def all_reduce(p2p: P2P, flat: Tensor) -> None:
    others = [rank for rank in range(p2p.num_ranks) if rank != p2p.rank]
    parts = {rank: torch.empty_like(flat) for rank in others}
    parts[p2p.rank] = flat.clone()
    p2p.wait(
        *(p2p.receive(rank, parts[rank]) for rank in others),
        *(p2p.send(rank, parts[p2p.rank]) for rank in others),
    )
    add_up([parts[rank] for rank in range(p2p.num_ranks)], flat)


def add_up(parts: list[Tensor], out: Tensor) -> None:
    """The sum of the parts from the first on; `out` is none of them."""
    out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)
