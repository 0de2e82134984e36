"""Layers that run on plain tensors, each rank with its part of the features or channels.

A colwise layer takes whole inputs and gives this rank's part, layers between
work on parts, a rowwise one gives the sum over the ranks. Parameters are
DTensors, so state, norms and FSDP see them as those of other layers; a layer's
own forward sees its part of them, plain, in their place.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from shoal.parallel.tensor_parallel.attention import HeadRanks

CHANNELS = "_shoal_channels"
"""Attribute of a BatchNorm whose channels are cut: the slice whose running statistics this rank keeps."""


def is_transposed(module: nn.Module) -> bool:
    """Whether a layer is transformers' Conv1D: a linear layer whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def num_features(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a layer that can be cut."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, _ConvNd):
        return module.in_channels, module.out_channels
    num_in, num_out = module.get_parameter("weight").shape
    return num_in, num_out


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of the script. shoal's own read nothing that is sharded, and may be on one rank alone."""
    registered = (
        module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    )  # fmt: skip
    return any(
        not str(getattr(hook, "__module__", "")).startswith("shoal.")
        for hooks in registered
        for hook in hooks.values()
    )


def placement_of(module: nn.Module, key: str, style: str) -> Placement | None:
    """Where a parameter lies; None where it stays a plain tensor, the same on every rank."""
    if style == "inside":
        return Replicate()
    if style == "rowwise":
        return Shard(0 if is_transposed(module) else 1) if key == "weight" else None
    return Shard(1 if is_transposed(module) and key == "weight" else 0)


def run_on_part(module: nn.Module, style: str, ranks: HeadRanks, enter: Callable[[Tensor], Tensor]) -> None:
    """Patch a layer's forward; its parameters are cut already.

    `style`: colwise, rowwise, channels (works on each channel alone), or inside (a whole layer that works on parts: its gradient
    is a partial sum).
    """
    forward, degree = module.forward, ranks.mesh.size()
    settings: dict[str, Any] = {}
    if style == "channels" and isinstance(module, _ConvNd):
        settings["groups"] = module.groups // degree
    elif style == "channels" and isinstance(module, nn.GroupNorm):
        settings["num_groups"] = module.num_groups // degree
    elif style == "colwise" and is_transposed(module):
        settings["nf"] = num_features(module)[1] // degree
    if style == "channels" and isinstance(module, _NormBase):
        width = module.num_features // degree
        begin = ranks.mesh.get_local_rank() * width
        vars(module)[CHANNELS] = slice(begin, begin + width)

    @functools.wraps(forward)
    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if style == "colwise":
            tensor = enter(tensor)
        with _shadowed(module, {**settings, **_own_tensors(module, style)}):
            out: Tensor = forward(tensor, *args, **kwargs)
        if style != "rowwise":
            return out
        out = ranks.between(ranks.spread(out, Partial()))
        bias = module._parameters.get("bias")
        if bias is None:
            return out
        shape = (-1, *(1,) * (out.dim() - 2)) if isinstance(module, _ConvNd) else (-1,)
        return out + bias.view(shape).to(out.dtype)

    module.forward = run


def own_channels(module: nn.Module) -> slice | None:
    """The channels whose statistics this rank keeps, where a layer is cut by channels."""
    found: slice | None = vars(module).get(CHANNELS)
    return found


class Entrance:
    """The whole input of colwise layers. Those with the same input (q, k and v) share the sum of its gradient."""

    def __init__(self, ranks: HeadRanks) -> None:
        self._ranks = ranks
        self._last: tuple[Any, ...] = ()

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.is_inference():  # has no version, and no gradient to share
            return self._ranks.shared(tensor)
        # Weak: a tensor kept here would keep the graph of a whole step.
        key = tensor._version, torch.is_grad_enabled()
        if self._last and self._last[0]() is tensor and self._last[2:] == key:
            shared: Tensor | None = self._last[1]()
            if shared is not None:
                return shared
        shared = self._ranks.shared(tensor)
        self._last = weakref.ref(tensor), weakref.ref(shared), *key
        return shared


def _own_tensors(module: nn.Module, style: str) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    parameters: dict[str, Any] = dict(module._parameters)
    for key, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            grads = [Partial()] if style == "inside" else None
            found[key] = parameter.to_local(grad_placements=grads)
    bias = module._parameters.get("bias")
    if style == "rowwise" and bias is not None:
        # Added after the sum. transformers' Conv1D cannot do without.
        found["bias"] = torch.zeros_like(bias) if is_transposed(module) else None
    channels = own_channels(module)
    if channels is not None:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.dim() == 1:
                found[key] = buffer[channels]
    return found


@contextlib.contextmanager
def _shadowed(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    """Attributes of a module that stand before its parameters, buffers and settings while its forward runs."""
    held = vars(module)
    before = {key: held[key] for key in values if key in held}
    held.update(values)
    try:
        yield
    finally:
        for key in values:
            del held[key]
        held.update(before)
