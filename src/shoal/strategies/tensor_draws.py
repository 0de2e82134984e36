"""Dropout of tensors in parts: every rank draws all of the mask, as one process does, and keeps its part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.strategies.sharded_tensors import local_part


def draw_as_one_process() -> None:
    """From now on, for all tensors in parts of this process."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten.bernoulli_.float] = _bernoulli
    handlers[torch.ops.aten.native_dropout.default] = _dropout


def _bernoulli(operation: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What dropout draws on a CPU."""
    tensor, chance = args[0], args[1] if len(args) > 1 else 0.5
    here = tensor._local_tensor
    here.copy_(local_part(_whole(tensor).bernoulli_(chance, **kwargs), tensor))
    drawn: Tensor = tensor
    return drawn


def _dropout(operation: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What dropout is on a GPU: one kernel that draws and multiplies; what it draws hangs on the whole shape."""
    tensor, chance, is_training = args
    if not is_training:
        return tensor, torch.ones_like(tensor, dtype=torch.bool)
    _, mask = torch.native_dropout(_whole(tensor), chance, True)
    own = local_part(mask, tensor)
    kept = tensor._local_tensor * own * (0.0 if chance == 1 else 1 / (1 - chance))
    return _like(tensor, kept), _like(tensor, own)


def _whole(tensor: DTensor) -> Tensor:
    here = tensor._local_tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=here.dtype, device=here.device)


def _like(tensor: DTensor, own: Tensor) -> DTensor:
    return DTensor.from_local(
        own,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
