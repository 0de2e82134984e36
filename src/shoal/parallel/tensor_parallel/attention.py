"""Attention under tensor parallelism: each rank computes some of the heads.

nn.MultiheadAttention is partitioned by heads as a whole: inside, tensors are plain and local;
queries, keys, values and masks enter whole, and the output is summed over the ranks.

F.scaled_dot_product_attention on DTensors runs on local heads and samples, which are independent of
each other. It is hooked in two places, because neither sees all calls: a function in place of
torch's own, and sharding rules for its CPU kernel, for callers that hold torch's own. Neither is a
torch mode: modes are off when a checkpointed layer runs again in backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias

from shoal.parallel.tensor_parallel.dtensor_fixes import replicated

PACKED = ("in_proj_weight", "in_proj_bias")  # packed parameters: q, k and v one below the other

BY_ROWS = (*PACKED, "q_proj_weight", "k_proj_weight", "v_proj_weight")


def why_not_by_heads(module: nn.MultiheadAttention, degree: int) -> str | None:
    """The reason why an attention cannot be cut by heads; None where it can."""
    if type(module) is not nn.MultiheadAttention or "forward" in vars(module):
        return f"a {type(module).__name__} is not torch's own, and may read the projections in one piece"
    if module.bias_k is not None or module.add_zero_attn:
        setting = "add_bias_kv" if module.bias_k is not None else "add_zero_attn"
        return f"{setting}=True adds a key that belongs to no part of the sequence"
    if module.num_heads % degree:
        return f"its {module.num_heads} heads cannot be divided by {degree}"
    return None


@dataclass(frozen=True, slots=True)
class HeadRanks:
    """The ranks that share an attention's heads."""

    mesh: DeviceMesh
    between: Callable[[Tensor], Tensor]
    """Converts the partial output where it leaves the layer."""

    is_sequence: bool
    """Whether tensors outside are DTensors."""

    def shared(self, tensor: Tensor) -> Tensor:
        """The whole tensor; its gradient is a partial sum on each rank."""
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)
        return tensor.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        length = tensor.shape[dim] // self.mesh.size()
        return tensor.narrow(dim, self.mesh.get_local_rank() * length, length)

    def joined(self, tensor: Tensor, placement: Placement) -> Tensor:
        whole = self.spread(tensor, placement).redistribute(placements=[Replicate()])
        return whole if self.is_sequence else whole.to_local()

    def spread(self, tensor: Tensor, placement: Placement) -> DTensor:
        return DTensor.from_local(tensor, self.mesh, [placement], run_check=False)


class AttentionByHeads(nn.MultiheadAttention):
    """An nn.MultiheadAttention whose parameters are cut by heads. `convert_to_heads` makes one in place."""

    ranks: HeadRanks

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's own, without the inference fast path, which needs whole weights."""
        is_batched: bool = F._mha_shape_check(  # type: ignore[attr-defined]  # private, and says what torch says
            query, key, value, key_padding_mask, attn_mask, self.num_heads
        )
        # Once for each tensor, not for each use: it is gathered before and its gradient summed after.
        given = {id(each): self._batch_first(each, is_batched) for each in (query, key, value)}
        q, k, v = self._heads(given[id(query)], given[id(key)], given[id(value)])
        mask = self._mask(q, k, attn_mask, key_padding_mask, query.dtype)
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "Need attn_mask if specifying the is_causal hint. You may use the Transformer module method "
                "`generate_square_subsequent_mask` to create this mask."
            )
        keep = self._dropout_mask(q, k)
        weights = None
        if need_weights or keep is not None:
            # A position with everything masked: torch gives NaN if weights are requested, else zeros.
            softmax = torch.softmax if need_weights else torch.ops.aten._safe_softmax
            weights = self._weights(q, k, mask, softmax)
            weights = weights if keep is None else weights * keep
            mixed = weights @ v
        else:
            # A hint, which holds for the mask without padding.
            takes_hint = is_causal and key_padding_mask is None
            mixed = F.scaled_dot_product_attention(
                q, k, v, None if takes_hint else mask, is_causal=takes_hint
            )
        out = self._joined(mixed.transpose(1, 2).flatten(-2), is_batched)
        if weights is None or not need_weights:
            return out, None
        if average_attn_weights:
            weights = self.ranks.joined(weights.sum(1) / self.num_heads, Partial())
        else:
            weights = self.ranks.joined(weights, Shard(1))
        return out, weights if is_batched else weights.squeeze(0)

    def _batch_first(self, tensor: Tensor, is_batched: bool) -> Tensor:
        tensor = self.ranks.shared(tensor)
        if not is_batched:
            return tensor.unsqueeze(0)
        return tensor if self.batch_first else tensor.transpose(0, 1)

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project to this rank's heads: (batch, heads, length, features of a head)."""
        bias = None if self.in_proj_bias is None else _local(self.in_proj_bias)
        if self._qkv_same_embed_dim and query is key and key is value:
            parts = F.linear(query, _local(self.in_proj_weight), bias).chunk(3, -1)
        else:
            weights = (
                _local(self.in_proj_weight).chunk(3)
                if self._qkv_same_embed_dim
                else [_local(each) for each in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)]
            )
            biases = [None] * 3 if bias is None else bias.chunk(3)
            parts = tuple(map(F.linear, (query, key, value), weights, biases))
        q, k, v = (part.view(*part.shape[:-1], -1, self.head_dim).transpose(1, 2) for part in parts)
        return q, k, v

    def _mask(
        self, q: Tensor, k: Tensor, attn_mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        size, shape = q.shape[0], (q.shape[2], k.shape[2])
        added = F._canonical_mask(attn_mask, "attn_mask", None, "", dtype, check_other=False)
        if added is not None:
            wanted = shape if added.dim() == 2 else (size * self.num_heads, *shape)
            if tuple(added.shape) != wanted:
                raise RuntimeError(
                    f"The shape of the {added.dim()}D attn_mask is {tuple(added.shape)}, but should be {wanted}."
                )
            added = self.ranks.shared(added)
            added = (
                self.ranks.own(added.view(size, self.num_heads, *shape), 1)
                if added.dim() == 3
                else added[None, None]
            )
        other = F._none_or_dtype(attn_mask)
        hidden = F._canonical_mask(padding, "key_padding_mask", other, "attn_mask", dtype)
        if hidden is not None:
            hidden = self.ranks.shared(hidden).view(size, 1, 1, shape[1])
            return hidden if added is None else added + hidden
        return added

    def _dropout_mask(self, q: Tensor, k: Tensor) -> Tensor | None:
        """The dropout mask, drawn whole on every rank as one process does; each takes its heads."""
        if not self.training or self.dropout == 0:
            return None
        shape = q.shape[0], self.num_heads, q.shape[2], k.shape[2]
        whole = torch.empty(shape, dtype=q.dtype, device=q.device)
        if self.dropout == 1:  # torch draws nothing then
            return self.ranks.own(whole.zero_(), 1)
        return self.ranks.own(whole.bernoulli_(1 - self.dropout), 1).div(1 - self.dropout)

    def _weights(
        self, q: Tensor, k: Tensor, mask: Tensor | None, softmax: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        scores = (q * math.sqrt(1 / self.head_dim)) @ k.transpose(-2, -1)
        return softmax(scores if mask is None else scores + mask, -1)

    def _joined(self, mixed: Tensor, is_batched: bool) -> Tensor:
        """The output projection, summed over the ranks."""
        # Sequence first in memory, as torch leaves it: a dropout that follows draws in the order of memory.
        part = F.linear(mixed.transpose(0, 1).contiguous(), _local(self.out_proj.weight))
        if not is_batched:
            part = part.squeeze(1)
        swaps = self.batch_first and is_batched
        if self.ranks.is_sequence:
            out = self.ranks.between(self.ranks.spread(part.transpose(0, 1) if swaps else part, Partial()))
        else:
            out = self.ranks.between(self.ranks.spread(part, Partial()))
            out = out.transpose(0, 1) if swaps else out
        bias: Tensor | None = self.out_proj.bias
        if bias is None:
            return out
        return out + (bias if isinstance(out, DTensor) else _local(bias)).to(out.dtype)


def convert_to_heads(module: nn.MultiheadAttention, ranks: HeadRanks) -> None:
    module.__class__ = AttentionByHeads
    module.__dict__["ranks"] = ranks


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


_NAME = "scaled_dot_product_attention"
_attention: Any = getattr(F, _NAME)

_PLAIN = (Tensor, nn.Parameter)

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_KERNEL_BACK = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@functools.cache
def patch_sdpa() -> None:
    """Route F.scaled_dot_product_attention of this process through local heads for DTensors."""
    vars(F)[_NAME] = _sdpa
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[_KERNEL] = _sdpa_cpu_forward
    handlers[_KERNEL_BACK] = _sdpa_cpu_backward
    # CausalBias recognises torch's function by identity, which the patch has replaced; callers may hold either.
    asked: Any = vars(CausalBias)["__torch_function__"].__func__

    def answer(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _attention:
            return cls._dispatch(*args, **(kwargs or {}))
        return asked(cls, func, types, args, kwargs)

    CausalBias.__torch_function__ = classmethod(answer)  # type: ignore[assignment]


@functools.wraps(_attention)
def _sdpa(
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
    if not _are_sharded_alike(given) or not _is_mask_sharded_with(attn_mask, query):
        out = _attention(*given, *said, **options)
        return out
    if dropout_p:
        # The weights are a DTensor then, and draw as one process does.
        with sdpa_kernel(SDPBackend.MATH):
            out = _attention(*given, *said, **options)
        return out
    cut: Any = query
    mask = None if attn_mask is None else _local_mask(attn_mask, cut)
    own = [each.to_local() for each in given if isinstance(each, DTensor)]
    out = _attention(*own, mask, 0.0, is_causal, **options)
    return _as(out, cut)


def _sdpa_cpu_forward(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    mesh = next(each.device_mesh for each in args if isinstance(each, DTensor))
    given = [_to_dtensor(each, mesh) for each in args[:3]]
    mask = kwargs.get("attn_mask")
    if not _are_sharded_alike(given) or not _is_mask_sharded_with(mask, given[0]):
        given = [replicated(each) for each in given]
    if mask is not None:
        kwargs = {**kwargs, "attn_mask": _local_mask(mask, given[0])}
    found = operation(*(each._local_tensor for each in given), *args[3:], **kwargs)
    return tuple(_as(each, given[0]) for each in found)


def _sdpa_cpu_backward(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    out = args[4]  # with the placements of the forward
    given = [
        _to_dtensor(each, out.device_mesh).redistribute(placements=out.placements)._local_tensor
        for each in args[:6]
    ]
    if kwargs.get("attn_mask") is not None:
        kwargs = {**kwargs, "attn_mask": _local_mask(kwargs["attn_mask"], out)}
    return tuple(_as(each, out) for each in operation(*given, *args[6:], **kwargs))


def _to_dtensor(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _as(own: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(own, like.device_mesh, like.placements, run_check=False)


def _are_sharded_alike(given: Sequence[Tensor]) -> bool:
    """Whether all three are sharded by the same heads or samples."""
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


def _is_mask_sharded_with(mask: Tensor | None, query: Tensor) -> bool:
    """Whether a mask has a value for each head and sample, or one for all of them."""
    if mask is None:
        return True
    if not isinstance(mask, DTensor) and type(mask) not in _PLAIN:
        return False
    missing = query.dim() - mask.dim()
    return missing >= 0 and all(
        size in (1, query.shape[dim + missing]) for dim, size in enumerate(mask.shape[:-2])
    )


def _local_mask(mask: Tensor, like: DTensor) -> Tensor:
    """The part of a mask, or of a trained bias, for this rank's heads and samples."""
    mask = _to_dtensor(mask, like.device_mesh)
    wanted: list[Placement] = []
    of_gradient: list[Placement] = []
    for placement in like.placements:
        dim = placement.dim - (like.dim() - mask.dim()) if isinstance(placement, Shard) else -1
        is_cut = dim >= 0 and mask.shape[dim] > 1
        wanted.append(Shard(dim) if is_cut else Replicate())
        # The gradient of a mask that all heads share is a partial sum on each rank.
        of_gradient.append(Partial() if isinstance(placement, Shard) and not is_cut else wanted[-1])
    return mask.redistribute(placements=wanted).to_local(grad_placements=of_gradient)


_is_disabled = False


def disable_encoder_fast_path(model: nn.Module) -> None:
    """Evaluate `model` by the ordinary forward, with the fast path's zeros for padding.

    An nn.TransformerEncoder with a padding mask drops the padding internally (nested tensors) and
    returns zeros for it, but only in evaluation, without gradients and with whole weights. Losses
    and pooling that see those positions would otherwise differ from one process.
    """
    global _is_disabled
    if not torch.backends.mha.get_fastpath_enabled() and not _is_disabled:
        return  # the user disabled it
    # It reads the weights of a layer without its forward.
    torch.backends.mha.set_fastpath_enabled(False)
    _is_disabled = True
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and encoder.use_nested_tensor and len(encoder.layers):
            encoder.layers[-1].register_forward_hook(_zero_padding(encoder), with_kwargs=True)


def _zero_padding(encoder: nn.TransformerEncoder) -> Callable[..., Tensor]:
    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        padding = kwargs.get("src_key_padding_mask")
        if padding is None or kwargs.get("src_mask") is not None or output.dim() != 3:
            return output
        if layer.training or torch.is_grad_enabled() or torch.is_autocast_enabled():
            return output
        padding = padding != 0  # an additive mask by now
        is_left_aligned = not (padding[:, :-1] & ~padding[:, 1:]).any()
        if encoder.mask_check and not is_left_aligned:
            return output
        return output.masked_fill(padding[:, :, None], 0.0)

    return hook
