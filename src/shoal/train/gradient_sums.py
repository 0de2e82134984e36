"""Gradients of a loop of the user's own that are looked at before the step: summed over the workers first.

`torch.nn.utils.clip_grad_norm_` and its siblings, called between backward and
step on the parameters of a model that `shoal.setup` was given, act on the sum.
A script may have imported them by name before, so they are extended in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

Sum = Callable[[list[Tensor]], None]
"""Sums the gradients of the models that any of these parameters belongs to."""

_is_extended = False


def extend_torch(sum_of: Sum, owners_of: Callable[[], dict[int, Tensor]]) -> None:
    """Let torch's functions see sums; `owners_of` gives parameters by the identity of their gradients."""
    global _is_extended
    if _is_extended:
        return
    _is_extended = True

    def of_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            sum_of(given)
            return function(given, *args, **kwargs)

        return clip

    def of_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
        def total(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            by_gradient = owners_of()
            owners = [by_gradient.get(id(tensor)) for tensor in given]
            sum_of([owner for owner in owners if owner is not None])
            now = [
                tensor if owner is None or owner.grad is None else owner.grad
                for tensor, owner in zip(given, owners, strict=True)
            ]
            return function(now, *args, **kwargs)

        return total

    for name in ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_"):
        _extend(name, of_parameters)
    _extend("_get_total_norm", of_gradients)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients, summed over all workers, to a norm of at most `max_norm`; gives the norm they had.

    As `torch.nn.utils.clip_grad_norm_`, which under `shoal.setup` does the same. Call it after the last backward of a step.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def _extend(name: str, extended: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    function: Callable[..., Any] | None = getattr(clip_grad, name, None)
    if function is None:  # of another version of torch
        return
    inner = _cell_of(function)
    if inner is not None:
        inner.cell_contents = extended(inner.cell_contents)
        return
    replacement = extended(function)
    for module in (clip_grad, torch.nn.utils):
        for alias in (name, name.removeprefix("_")):
            if getattr(module, alias, None) is function:
                setattr(module, alias, replacement)


def _cell_of(function: Any) -> CellType | None:
    """Where torch's no-grad wrapper holds the function it calls: to exchange it there reaches every import of it."""
    closure = getattr(function, "__closure__", None) or ()
    held = [cell for cell in closure if isinstance(cell.cell_contents, FunctionType)]
    return held[0] if len(held) == 1 else None
