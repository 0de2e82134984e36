"""Weights and optimizer state of a rank that holds all of both, as pieces and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shoal.parallel.hashed_rows import MODEL, hash_embeddings, load_local, local_pieces, plain_tensors
from shoal.parallel.optimizer_state import load_optimizer, optimizer_pieces
from shoal.parallel.protocol import Piece, PieceReader

__all__ = ["MODEL", "load_state", "state_pieces"]


def state_pieces(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[Piece]:
    """Every tensor a fresh process needs to go on, but for rows that are on servers."""
    for name, tensor in plain_tensors(model).items():
        yield Piece(MODEL + name, tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())
    yield from local_pieces(model)
    if optimizer is not None:
        yield from optimizer_pieces(model, optimizer)


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer | None, pieces: PieceReader) -> None:
    """Write the pieces into model and optimizer, in place."""
    with torch.no_grad():
        for name, tensor in plain_tensors(model).items():
            tensor.copy_(pieces.tensors[MODEL + name])
    load_local(model, pieces)
    if optimizer is not None and pieces.optimizer_settings is not None:
        load_optimizer(
            model,
            optimizer,
            pieces.tensors,
            pieces.optimizer_settings,
            path=pieces.path,
            elsewhere=hash_embeddings(model).keys(),
        )
