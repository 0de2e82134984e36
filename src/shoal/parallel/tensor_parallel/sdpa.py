"""torch's scaled_dot_product_attention of tensors in parts: each rank attends with its own heads, by whichever kernel is fastest.

Heads and samples do not look at each other: where those are what is cut,
every rank just attends on what it has. Two ways lead here, because neither
sees all calls: a function in place of torch's own, on every device and for
every kernel; and for those who hold torch's own, rules for its kernel for
CPUs, of which torch knows nothing for tensors in parts. Neither is a mode of
torch's: those are off when a checkpointed layer runs again in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias

_NAME = "scaled_dot_product_attention"
_attention: Any = getattr(F, _NAME)

_PLAIN = (Tensor, nn.Parameter)

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_KERNEL_BACK = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@functools.cache
def attend_in_parts() -> None:
    """From now on, for all models of this process."""
    vars(F)[_NAME] = _attend
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[_KERNEL] = _attend_on_cpu
    handlers[_KERNEL_BACK] = _attend_on_cpu_back
    # A mask of torch's own knows what it is asked for by the name that we took; for whoever holds torch's function, too.
    asked: Any = vars(CausalBias)["__torch_function__"].__func__

    def answer(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _attention:
            return cls._dispatch(*args, **(kwargs or {}))
        return asked(cls, func, types, args, kwargs)

    CausalBias.__torch_function__ = classmethod(answer)  # type: ignore[assignment]


@functools.wraps(_attention)
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    given, said = (query, key, value), (attn_mask, dropout_p, is_causal)
    out: Tensor
    if not _are_cut_alike(given) or not _is_cut_with(attn_mask, query):
        out = _attention(*given, *said, **options)
        return out
    if dropout_p:
        # Its weights are a tensor in parts, and draw as one process does.
        with sdpa_kernel(SDPBackend.MATH):
            out = _attention(*given, *said, **options)
        return out
    cut: Any = query
    mask = None if attn_mask is None else _own_part(attn_mask, cut)
    own = [each.to_local() for each in given if isinstance(each, DTensor)]
    out = _attention(*own, mask, 0.0, is_causal, **options)
    return _as(out, cut)


def _attend_on_cpu(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The kernel itself, below autograd."""
    mesh = next(each.device_mesh for each in args if isinstance(each, DTensor))
    given = [_in_parts(each, mesh) for each in args[:3]]
    mask = kwargs.get("attn_mask")
    if not _are_cut_alike(given) or not _is_cut_with(mask, given[0]):
        given = [_whole(each) for each in given]
    if mask is not None:
        kwargs = {**kwargs, "attn_mask": _own_part(mask, given[0])}
    found = operation(*(each._local_tensor for each in given), *args[3:], **kwargs)
    return tuple(_as(each, given[0]) for each in found)


def _attend_on_cpu_back(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    out = args[4]  # in parts as they were when it was computed
    given = [
        _in_parts(each, out.device_mesh).redistribute(placements=out.placements)._local_tensor
        for each in args[:6]
    ]
    if kwargs.get("attn_mask") is not None:
        kwargs = {**kwargs, "attn_mask": _own_part(kwargs["attn_mask"], out)}
    return tuple(_as(each, out) for each in operation(*given, *args[6:], **kwargs))


def _in_parts(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _whole(tensor: DTensor) -> DTensor:
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def _as(own: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(own, like.device_mesh, like.placements, run_check=False)


def _are_cut_alike(given: Sequence[Tensor]) -> bool:
    """Whether all three are in parts of the same heads or samples."""
    first = given[0]
    if not isinstance(first, DTensor):
        return False
    return all(
        isinstance(each, DTensor)
        and each.dim() == first.dim()
        and each.device_mesh == first.device_mesh
        and each.placements == first.placements
        and all(
            _is_between_heads(placement, each, each.device_mesh.size(axis))
            for axis, placement in enumerate(each.placements)
        )
        for each in given
    )


def _is_between_heads(placement: Placement, tensor: Tensor, num_parts: int) -> bool:
    if isinstance(placement, Shard):
        return placement.dim < tensor.dim() - 2 and tensor.shape[placement.dim] % num_parts == 0
    return isinstance(placement, Replicate)


def _is_cut_with(mask: Tensor | None, query: Tensor) -> bool:
    """Whether a mask is a tensor that says something of each head and sample, or the same of all of them."""
    if mask is None:
        return True
    if not isinstance(mask, DTensor) and type(mask) not in _PLAIN:
        return False
    missing = query.dim() - mask.dim()
    return missing >= 0 and all(
        size in (1, query.shape[dim + missing]) for dim, size in enumerate(mask.shape[:-2])
    )


def _own_part(mask: Tensor, like: DTensor) -> Tensor:
    """What a mask, or a bias that is trained, says of this rank's heads and samples."""
    mask = _in_parts(mask, like.device_mesh)
    wanted: list[Placement] = []
    of_gradient: list[Placement] = []
    for placement in like.placements:
        dim = placement.dim - (like.dim() - mask.dim()) if isinstance(placement, Shard) else -1
        is_cut = dim >= 0 and mask.shape[dim] > 1
        wanted.append(Shard(dim) if is_cut else Replicate())
        # Of one that all heads share, each rank has its heads' part of the gradient.
        of_gradient.append(Partial() if isinstance(placement, Shard) and not is_cut else wanted[-1])
    return mask.redistribute(placements=wanted).to_local(grad_placements=of_gradient)
