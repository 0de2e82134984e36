"""Random numbers of DTensors: every rank draws the whole tensor, as one process does, and keeps its shard.

Generators are seeded alike on every rank. DTensor would draw each shard by
itself: the same numbers for all shards, silently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from shoal.parallel.sharded_tensors import local_part

aten = torch.ops.aten

_IN_PLACE = (
    aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default, aten.exponential_.default, aten.random_.default,
    getattr(aten.random_, "from"), aten.random_.to, aten.cauchy_.default, aten.log_normal_.default, aten.geometric_.default,
)  # fmt: skip
_LIKE = (
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype, aten.bernoulli.p,
)  # fmt: skip


def patch_random_ops() -> None:
    """Replace the random operations of all DTensors of this process; refuse those without a replacement."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for operation in _everything_that_draws():
        handlers.setdefault(operation, _refuse)
    handlers.update(dict.fromkeys(_IN_PLACE, _draw_in_place))
    handlers.update(dict.fromkeys(_LIKE, _draw_like))
    handlers[aten.bernoulli.default] = _draw_by_chances
    handlers[aten.native_dropout.default] = _dropout


def _everything_that_draws() -> list[Any]:
    packets = (getattr(aten, name, None) for name in dir(aten) if not name.startswith("__"))
    operations = (
        getattr(packet, overload)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for overload in packet.overloads()  # type: ignore[no-untyped-call]  # torch says nothing of its type
    )
    # Attention kernels may draw, and seldom do: DTensor has rules for them (see also attention.py).
    return [
        each
        for each in operations
        if torch.Tag.nondeterministic_seeded in each.tags and "attention" not in each.name()
    ]


def _draw_in_place(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """In-place draws, among them dropout on a CPU."""
    tensor = args[0]
    tensor._local_tensor.copy_(_part(operation(_whole(tensor), *args[1:], **kwargs), tensor))
    drawn: Tensor = tensor
    return drawn


def _draw_like(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = args[0]
    return _with_placements_of(tensor, _part(operation(_whole(tensor), *args[1:], **kwargs), tensor))


def _draw_by_chances(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = args[0]
    chances = tensor.full_tensor()
    return _with_placements_of(tensor, _part(operation(chances, *args[1:], **kwargs), tensor))


def _dropout(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Dropout on a GPU: one kernel that draws and multiplies; its draws depend on the whole shape."""
    given = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
    tensor, chance, is_training = given["input"], given["p"], given["train"]
    _, mask = operation(_whole(tensor), chance, is_training)
    mask = local_part(mask, tensor)
    scale = 1.0 if is_training is False else (0.0 if chance == 1 else 1 / (1 - chance))
    # A partial sum times the mask is a partial sum; the mask itself is not partial.
    placements = [Replicate() if isinstance(each, Partial) else each for each in tensor.placements]
    kept = tensor._local_tensor * mask * scale
    return _with_placements_of(tensor, kept), _with_placements_of(tensor, mask, placements)


def _refuse(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise RuntimeError(
        f"Operator {operation} does not have a sharding strategy registered: it draws random numbers"
    )


def _whole(tensor: DTensor) -> Tensor:
    here = tensor._local_tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=here.dtype, device=here.device)


def _part(drawn: Tensor, tensor: DTensor) -> Tensor:
    """This rank's shard of the draw; of a partial sum, one rank has all of it."""
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial) and tensor.device_mesh.get_local_rank(axis):
            drawn = torch.zeros_like(drawn)
    return local_part(drawn, tensor)


def _with_placements_of(tensor: DTensor, own: Tensor, placements: Any = None) -> DTensor:
    return DTensor.from_local(
        own,
        tensor.device_mesh,
        placements or tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
