"""The output of a layer that computes several things at once (q, k and v; a gate and what it lets through), of each of which a rank has a part.

DTensor can say so (a strided shard) and views it without a word to the others;
only chunk and split it would gather first. While a forward that does so runs,
they are views too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.overrides import TorchFunctionMode

_CHUNK = (torch.chunk, Tensor.chunk)
_SPLIT = (torch.split, Tensor.split)


def in_blocks(tensor: DTensor, num_blocks: int) -> DTensor:
    """A layer's output whose features lie by rank, told as what it is."""
    return DTensor.from_local(
        tensor.to_local(),
        tensor.device_mesh,
        [_StridedShard(tensor.dim() - 1, split_factor=num_blocks)],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def take_apart(module: nn.Module) -> None:
    """From now on, a block that this module's forward takes out of such an output is a part on each rank."""
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _ByBlock():
            return forward(*args, **kwargs)

    module.forward = run


class _ByBlock(TorchFunctionMode):
    """chunk and split of a tensor in blocks, where they give its blocks."""

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
