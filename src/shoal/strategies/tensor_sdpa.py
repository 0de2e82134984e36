"""torch's scaled_dot_product_attention of tensors in parts: each rank attends with its own heads, by whichever kernel is fastest.

torch itself runs the fast kernels (flash, cuDNN) on tensors in parts only for
some devices and dtypes. Heads and samples do not look at each other, so where
those are what is cut, every rank just attends on what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_attention: Any = F.scaled_dot_product_attention


class AttendingInParts(TorchFunctionMode):
    """While it is active, attention of tensors that are cut by heads or samples is computed part by part."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Leaves everything else alone."""
        if func is not _attention:
            return func(*args, **(kwargs or {}))
        return _attend(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    given = (query, key, value)
    if not any(isinstance(each, DTensor) for each in given):
        plain: Tensor = _attention(*given, attn_mask, dropout_p, is_causal, **options)
        return plain
    if dropout_p or not _are_cut_alike(given):
        # The only one of torch's ways that knows tensors in parts; and it draws as one process does.
        with sdpa_kernel(SDPBackend.MATH):
            drawn: Tensor = _attention(*given, attn_mask, dropout_p, is_causal, **options)
            return drawn
    cut: Any = query
    mask = None if attn_mask is None else _own_part(attn_mask, cut)
    own = [each.to_local() for each in given if isinstance(each, DTensor)]
    out = _attention(*own, mask, 0.0, is_causal, **options)
    whole: Tensor = DTensor.from_local(out, cut.device_mesh, cut.placements, run_check=False)
    return whole


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


def _own_part(mask: Tensor, like: DTensor) -> Tensor:
    """What a mask, or a bias that is trained, says of this rank's heads and samples."""
    mesh = like.device_mesh
    if not isinstance(mask, DTensor):
        mask = DTensor.from_local(mask, mesh, [Replicate()] * mesh.ndim, run_check=False)
    wanted: list[Placement] = []
    of_gradient: list[Placement] = []
    for placement in like.placements:
        dim = placement.dim - (like.dim() - mask.dim()) if isinstance(placement, Shard) else -1
        is_cut = dim >= 0 and mask.shape[dim] > 1
        wanted.append(Shard(dim) if is_cut else Replicate())
        # Of one that all heads share, each rank has its heads' part of the gradient.
        of_gradient.append(Partial() if isinstance(placement, Shard) and not is_cut else wanted[-1])
    return mask.redistribute(placements=wanted).to_local(grad_placements=of_gradient)
