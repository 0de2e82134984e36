"""`broadcast` exchange: every rank sends everything to every other, and each adds up for itself. One step; for two or three ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.collectives.schemes import Wires


def all_reduce(wires: Wires, flat: Tensor) -> None:
    others = [rank for rank in range(wires.num_ranks) if rank != wires.rank]
    parts = {rank: torch.empty_like(flat) for rank in others}
    parts[wires.rank] = flat.clone()
    wires.wait(
        *(wires.receive(rank, parts[rank]) for rank in others),
        *(wires.send(rank, parts[wires.rank]) for rank in others),
    )
    add_up([parts[rank] for rank in range(wires.num_ranks)], flat)


def add_up(parts: list[Tensor], out: Tensor) -> None:
    """The sum of the parts from the first on; `out` is none of them."""
    out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)
