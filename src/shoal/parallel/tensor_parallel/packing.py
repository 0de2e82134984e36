"""Parameters that hold several blocks of rows, such as q, k and v of an attention, of which each rank of `tp` has a part of every block.

DTensor cuts rows in one piece, and so does FSDP what is left. So the rows of
such a parameter lie by rank while a model is cut: those of rank 0 from every
block, then those of rank 1. Outside, in checkpoints, they lie as the user's
module has them; whoever writes or reads a state translates by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from shoal.parallel.hashed_rows import MODEL
from shoal.parallel.optimizer_state import PREFIX as OPTIMIZER


def by_rank(tensor: Tensor, num_blocks: int, degree: int) -> Tensor:
    """Rows in the order of ranks, from rows in the order of blocks."""
    return _swapped(tensor, num_blocks, degree)


def by_block(tensor: Tensor, num_blocks: int, degree: int) -> Tensor:
    """And back."""
    return _swapped(tensor, degree, num_blocks)


def _swapped(tensor: Tensor, outer: int, inner: int) -> Tensor:
    rows = tensor.view(outer, inner, -1, *tensor.shape[1:])
    return rows.transpose(0, 1).reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class Packing:
    """Which parameters of a model lie by rank, and what follows for the tensors of its state."""

    degree: int = 1
    num_blocks: Mapping[str, int] = field(default_factory=dict)
    """By name of the parameter."""

    num_rows: Mapping[str, int] = field(default_factory=dict)

    def as_users(self, piece: str, tensor: Tensor) -> Tensor:
        """A whole tensor of the state as one process has it."""
        name = self._packed(piece, tensor)
        return tensor if name is None else by_block(tensor, self.num_blocks[name], self.degree)

    def as_cut(self, piece: str, tensor: Tensor) -> Tensor:
        """A whole tensor as one process has it, in the order in which it is cut."""
        name = self._packed(piece, tensor)
        return tensor if name is None else by_rank(tensor, self.num_blocks[name], self.degree)

    def reading(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A state that one process can read, for ranks that are about to cut it."""
        return _Reader(tensors, self) if self.num_blocks else tensors

    def _packed(self, piece: str, tensor: Tensor) -> str | None:
        """The parameter a tensor of the state belongs to, where it has the parameter's rows."""
        name = piece.removeprefix(MODEL)
        if piece.startswith(OPTIMIZER):
            name = piece.removeprefix(OPTIMIZER).rpartition("/")[0]
        has_rows = name in self.num_blocks and tensor.dim() > 0 and tensor.shape[0] == self.num_rows[name]
        return name if has_rows else None


class _Reader(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor], packing: Packing) -> None:
        self._tensors, self._packing = tensors, packing

    def __getitem__(self, name: str) -> Tensor:
        return self._packing.as_cut(name, self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
