"""What torch's short cut for evaluation does to padding, where a model that is cut cannot take the short cut.

An nn.TransformerEncoder that is given a padding mask drops the padding on the
way (nested tensors) and gives zeros for it, but only in evaluation, without
gradients and with whole weights. Losses and pooling that see those positions
would come out otherwise than in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_is_left = False


def leave_short_cut(model: nn.Module) -> None:
    """Evaluate `model` by the ordinary forward, with the result of the short cut."""
    global _is_left
    if not torch.backends.mha.get_fastpath_enabled() and not _is_left:
        return  # the user does not take it either
    # It reads the weights of a layer past the layer.
    torch.backends.mha.set_fastpath_enabled(False)
    _is_left = True
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and encoder.use_nested_tensor and len(encoder.layers):
            encoder.layers[-1].register_forward_hook(_without_padding(encoder), with_kwargs=True)


def _without_padding(encoder: nn.TransformerEncoder) -> Callable[..., Tensor]:
    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        padding = kwargs.get("src_key_padding_mask")
        if padding is None or kwargs.get("src_mask") is not None or output.dim() != 3:
            return output
        if layer.training or torch.is_grad_enabled() or torch.is_autocast_enabled():
            return output
        padding = padding != 0  # a mask that is added, by now
        is_left_aligned = not (padding[:, :-1] & ~padding[:, 1:]).any()
        if encoder.mask_check and not is_left_aligned:
            return output
        return output.masked_fill(padding[:, :, None], 0.0)

    return hook
