"""Packed parameters: several blocks of rows (q, k and v) in one tensor, each rank of `tp` holding a part of every block.

DTensor and FSDP shard rows in one piece. So the rows of a packed parameter lie
by rank while a model is cut: those of rank 0 from every block, then those of
rank 1. In checkpoints they lie as the user's module has them.

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

from shoal.parallel.protocol import Piece
from shoal.parallel.state import parameter_of


def by_rank(tensor: Tensor, num_blocks: int, degree: int) -> Tensor:
    return _swapped(tensor, num_blocks, degree)


def by_block(tensor: Tensor, num_blocks: int, degree: int) -> Tensor:
    return _swapped(tensor, degree, num_blocks)


def _swapped(tensor: Tensor, outer: int, inner: int) -> Tensor:
    rows = tensor.view(outer, inner, -1, *tensor.shape[1:])
    return rows.transpose(0, 1).reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class Packing:
    """The packed parameters of a model, and the reordering of its state."""

    degree: int = 1
    num_blocks: Mapping[str, int] = field(default_factory=dict)
    """Blocks of each parameter, by name."""

    num_rows: Mapping[str, int] = field(default_factory=dict)

    def to_user_layout(self, piece: str, tensor: Tensor) -> Tensor:
        """A whole tensor of the state in the order of the user's module."""
        name = self._packed(piece, tensor)
        return tensor if name is None else by_block(tensor, self.num_blocks[name], self.degree)

    def to_rank_layout(self, piece: str, tensor: Tensor) -> Tensor:
        """A whole tensor in the order in which it is sharded."""
        name = self._packed(piece, tensor)
        return tensor if name is None else by_rank(tensor, self.num_blocks[name], self.degree)

    def parts_in_user_layout(
        self, piece: str, local: Tensor, offset: Sequence[int], shape: tuple[int, ...]
    ) -> Iterator[Piece]:
        """Rows that lie by rank, `local` at `offset`, as pieces of a tensor in the order of the user's module."""
        if not local.numel() and 0 not in shape:
            return  # more ranks than rows
        name = parameter_of(piece)
        if name not in self.num_blocks or not shape or shape[0] != self.num_rows[name]:
            yield Piece(piece, local, shape, tuple(offset))
            return
        num_blocks = self.num_blocks[name]
        run = shape[0] // (self.degree * num_blocks)  # rows of one rank in one block
        begin, end = offset[0], offset[0] + len(local)
        while begin < end:
            rank, block = divmod(begin // run, num_blocks)
            stop = min((begin // run + 1) * run, end)
            at = (block * self.degree + rank) * run + begin % run
            yield Piece(piece, local[begin - offset[0] : stop - offset[0]], shape, (at, *offset[1:]))
            begin = stop

    def packs(self, piece: str) -> bool:
        return parameter_of(piece) in self.num_blocks

    def _packed(self, piece: str, tensor: Tensor) -> str | None:
        """The packed parameter that a tensor of the state belongs to, where it has the parameter's rows."""
        name = parameter_of(piece)
        has_rows = name in self.num_blocks and tensor.dim() > 0 and tensor.shape[0] == self.num_rows[name]
        return name if has_rows else None


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
