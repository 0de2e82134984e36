"""`allgather` exchange: every rank gathers all parts around a ring, and adds them up for itself."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.collectives.schemes import P2P, ring
from shoal.collectives.schemes.broadcast import add_up


def all_reduce(p2p: P2P, flat: Tensor) -> None:
    parts = gather(p2p, flat)
    add_up(parts, flat)


def gather(p2p: P2P, mine: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(mine) for _ in range(p2p.num_ranks)]
    parts[p2p.rank].copy_(mine)
    ring.all_gather(p2p, parts, own=p2p.rank)
    return parts
