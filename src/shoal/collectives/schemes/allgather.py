"""`allgather` exchange: every rank gathers all parts around a ring, and adds them up for itself."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.collectives.schemes import Wires, ring
from shoal.collectives.schemes.broadcast import add_up


def all_reduce(wires: Wires, flat: Tensor) -> None:
    parts = gather(wires, flat)
    add_up(parts, flat)


def gather(wires: Wires, mine: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(mine) for _ in range(wires.num_ranks)]
    parts[wires.rank].copy_(mine)
    ring.all_gather(wires, parts, own=wires.rank)
    return parts
