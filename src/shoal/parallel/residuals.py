"""Residuals of compressors in checkpoints: one part per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shoal.collectives.compression.compressor import Compressor
from shoal.parallel.protocol import Piece, PieceReader

PREFIX = "residual/"
_SAME = "same/"  # what all ranks have alike


def pieces(compressor: Compressor, gather: Callable[[Tensor], list[Tensor]]) -> Iterator[Piece]:
    """A row for each rank. Collective."""
    for name, mine in compressor.state().items():
        tensor = mine if name.startswith(_SAME) else torch.stack(gather(mine))
        yield Piece(PREFIX + name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def load(compressor: Compressor, saved: PieceReader, rank: int, num_workers: int) -> None:
    """This rank's row; at another number of ranks an even share of them all, so that nothing is lost."""
    state: dict[str, Tensor] = {}
    num_before = num_workers
    for piece in saved.tensors:
        if not piece.startswith(PREFIX):
            continue
        name, value = piece.removeprefix(PREFIX), saved.tensors[piece]
        if name.startswith(_SAME):
            state[name] = value
        elif len(value) == num_workers:
            state[name] = value[rank]
        else:
            num_before = len(value)
            state[name] = value.sum(0) / num_workers
    compressor.load(state, num_before)
