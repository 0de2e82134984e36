"""Optimizer steps on the local tensors of DTensors.

Each operation on a DTensor costs its dispatch, which on a CPU is more than the operation itself: an Adam step over 52 small
parameters took ten times as long as over plain tensors. An update that treats each element by itself needs no placement, so it
runs on this rank's part alone, by the same kernels and with the same bits; the state stays in DTensors between steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim import optimizer as torch_optimizer

from shoal.parallel.state import as_part_of

ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop)
"""By exact class: a subclass may look at a whole tensor (LAMB's norms)."""


@contextlib.contextmanager
def on_local_tensors(optimizer: Optimizer) -> Iterator[None]:
    """Context in which the optimizer holds this rank's parts in place of its DTensors; without effect where its update needs the whole."""
    if not _is_local(optimizer):
        yield
        return
    groups = [group["params"] for group in optimizer.param_groups]
    parts = {p: p._local_tensor for params in groups for p in params if isinstance(p, DTensor)}
    states = {p: optimizer.state.pop(p) for p in parts if p in optimizer.state}
    try:
        for p, part in parts.items():
            part.grad = _part_of(p.grad)
            if p in states:
                optimizer.state[part] = {key: _part_of(value) for key, value in states[p].items()}
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [parts.get(p, p) for p in params]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        for p, part in parts.items():
            part.grad = None
            torch.autograd.graph.increment_version(p)
            if (found := optimizer.state.pop(part, None)) is not None:
                optimizer.state[p] = _as_before(p, found, states.get(p, {}))


def _is_local(optimizer: Optimizer) -> bool:
    """Whether each element's update depends on no other element, and nothing reads the parameters meanwhile."""
    if type(optimizer) not in ELEMENTWISE:  # a wrapper may have no hooks at all
        return False
    if (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    ):
        return False
    found = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
    return bool(found) and all(
        (p.grad is None or _is_cut_alike(p.grad, p))
        and all(
            _is_cut_alike(value, p) for value in optimizer.state.get(p, {}).values() if _is_part(value, p)
        )
        for p in found
    )


def _is_part(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, DTensor) or (isinstance(value, Tensor) and value.shape == parameter.shape)


def _is_cut_alike(value: Tensor, parameter: DTensor) -> bool:
    return isinstance(value, DTensor) and value.placements == parameter.placements


def _part_of(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _as_before(parameter: DTensor, found: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """State of a parameter's part as the state of the parameter."""
    part, state = parameter._local_tensor, {}
    for key, value in found.items():
        old = before.get(key)
        if isinstance(old, DTensor) and old._local_tensor is value:
            state[key] = old
        elif isinstance(value, torch.Tensor) and value.dim() and value.shape == part.shape:
            state[key] = as_part_of(parameter, value)
        else:
            state[key] = value
    return state
