"""Packed parameters: several blocks of rows (q, k and v) in one tensor, each rank of `tp` holding a part of every block.

DTensor shards rows in one piece, and so does FSDP with what is left. So the
rows of a packed parameter lie by rank while a model is cut: those of rank 0
from every block, then those of rank 1. In checkpoints they lie as the user's
module has them; reading and writing a state translates by name.

The output of a packed layer is a strided shard, which DTensor views without
communication but gathers for chunk and split; while a forward that does so
runs, they are views too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.overrides import TorchFunctionMode

from shoal.parallel.hashed_rows import MODEL
from shoal.parallel.optimizer_state import PREFIX as OPTIMIZER


def by_rank(tensor: Tensor, num_blocks: int, degree: int) -> Tensor:
    """Reorder rows from block order to rank order."""
    return _swapped(tensor, num_blocks, degree)


def by_block(tensor: Tensor, num_blocks: int, degree: int) -> Tensor:
    """Reorder rows from rank order to block order."""
    return _swapped(tensor, degree, num_blocks)


def _swapped(tensor: Tensor, outer: int, inner: int) -> Tensor:
    rows = tensor.view(outer, inner, -1, *tensor.shape[1:])
    return rows.transpose(0, 1).reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class Packing:
    """The packed parameters of a model, and the reordering of its state."""

    degree: int = 1
    num_blocks: Mapping[str, int] = field(default_factory=dict)
    """By name of the parameter."""

    num_rows: Mapping[str, int] = field(default_factory=dict)

    def to_user_layout(self, piece: str, tensor: Tensor) -> Tensor:
        """A whole tensor of the state in the order of the user's module."""
        name = self._packed(piece, tensor)
        return tensor if name is None else by_block(tensor, self.num_blocks[name], self.degree)

    def to_rank_layout(self, piece: str, tensor: Tensor) -> Tensor:
        """A whole tensor in the order in which it is sharded."""
        name = self._packed(piece, tensor)
        return tensor if name is None else by_rank(tensor, self.num_blocks[name], self.degree)

    def reading(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A checkpoint's tensors in the order in which they are sharded."""
        return _RankLayoutReader(tensors, self) if self.num_blocks else tensors

    def _packed(self, piece: str, tensor: Tensor) -> str | None:
        """The packed parameter that a tensor of the state belongs to, where it has the parameter's rows."""
        name = piece.removeprefix(MODEL)
        if piece.startswith(OPTIMIZER):
            name = piece.removeprefix(OPTIMIZER).rpartition("/")[0]
        has_rows = name in self.num_blocks and tensor.dim() > 0 and tensor.shape[0] == self.num_rows[name]
        return name if has_rows else None


class _RankLayoutReader(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor], packing: Packing) -> None:
        self._tensors, self._packing = tensors, packing

    def __getitem__(self, name: str) -> Tensor:
        return self._packing.to_rank_layout(name, self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


_CHUNK = (torch.chunk, Tensor.chunk)
_SPLIT = (torch.split, Tensor.split)


def as_strided_shard(tensor: DTensor, num_blocks: int) -> DTensor:
    """The output of a packed layer, whose features lie by rank, as a strided shard."""
    return DTensor.from_local(
        tensor.to_local(),
        tensor.device_mesh,
        [_StridedShard(tensor.dim() - 1, split_factor=num_blocks)],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def split_blocks_locally(module: nn.Module) -> None:
    """Patch a module's forward so that chunk and split of a strided shard are views."""
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _SplitBlocksMode():
            return forward(*args, **kwargs)

    module.forward = run


class _SplitBlocksMode(TorchFunctionMode):
    """chunk and split of a strided shard, where they give its blocks."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and (func in _CHUNK or func in _SPLIT):
            blocks = _blocks(func in _CHUNK, *args, **kwargs)
            if blocks is not None:
                return blocks
        return func(*args, **kwargs)


def _blocks(
    is_chunk: bool, tensor: Tensor, what: Any = None, dim: int = 0, **named: Any
) -> Sequence[Tensor] | None:
    what = next(iter(named.values()), what)
    placement = tensor.placements[0] if isinstance(tensor, DTensor) else None
    if not isinstance(placement, _StridedShard) or placement.dim != dim % tensor.dim():
        return None
    num_blocks = int(placement.split_factor)
    width = tensor.shape[dim] // num_blocks
    wanted = [num_blocks] if is_chunk else [width, [width] * num_blocks]
    if (list(what) if isinstance(what, (tuple, list)) else what) not in wanted:
        return None
    by_block = tensor.view(*tensor.shape[: placement.dim], num_blocks, width)
    return by_block.unbind(placement.dim)
