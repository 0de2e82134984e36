"""Batch dependence: layers that mix the samples of a batch, or draw random numbers.

For these, "the same as one process" means one process that runs the workers'
slices in turn with the workers' seeds; so they are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from shoal.collectives.sync_batchnorm import SyncedBatchNorm
from shoal.errors import ConfigError

MIXES = "mixes the batch"
DRAWS = "draws random numbers"

THE_MODEL = "the model"
"""Name used for a layer that is the model itself."""


@dataclass(frozen=True, slots=True)
class MixingLayer:
    """A layer whose result depends on how the batch is divided."""

    layer: str
    kind: str
    why: str


_noted: list[MixingLayer] = []


def note_mixing(layer: str, kind: str) -> None:
    """Under `shoal verify`: record a layer that a trial found to mix the batch, beyond the known types."""
    found = MixingLayer(layer or THE_MODEL, kind, MIXES)
    if found not in _noted:
        _noted.append(found)


def noted_mixing() -> list[MixingLayer]:
    return _noted


def mixing_layers(model: nn.Module) -> list[MixingLayer]:
    """Layers known by their type to mix or draw: BatchNorm, dropout in any form, recurrent and attention dropout."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, SyncedBatchNorm):
            continue  # sees the whole batch
        if isinstance(module, _BatchNorm) and module.training:
            found.append(MixingLayer(name or THE_MODEL, type(module).__name__, MIXES))
        elif _draws(module):
            found.append(MixingLayer(name or THE_MODEL, type(module).__name__, DRAWS))
    return found


def draws_numbers(model: nn.Module) -> bool:
    """Whether a layer draws random numbers in training."""
    return any(map(_draws, model.modules()))


def describe_mixing(layers: list[MixingLayer], *, sync_every: int | None = None) -> Iterator[str]:
    """A line for each kind of mixing, naming the first layers."""
    when = "at every step" if sync_every is None else "with the models"
    for why, means in (
        (MIXES, f"each worker normalises its own slice; running statistics are averaged {when}"),
        (DRAWS, "each worker draws its own numbers, a function of seed, rank and step"),
    ):
        named = [f"{layer.layer} ({layer.kind})" for layer in layers if layer.why == why]
        if named:
            more = f" and {len(named) - 2} more" if len(named) > 2 else ""
            yield f"{', '.join(named[:2])}{more}: {means}"


def refuse_gradient_hooks(model: nn.Module, strategy: str, *, is_cut: bool) -> None:
    """Refuse gradient hooks of parameters that would see partial gradients: a sum of clamped parts is no clamped sum.

    An additive hook (a mask, a factor) is kept, and so is one after backward that only reads; both
    are tried on numbers of all sizes. `is_cut`: parameters are replaced by shards, and their hooks
    are lost. shoal's own hooks, of an earlier Trainer on the same model, are inactive meanwhile.
    """
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        hooks = _of_script(parameter._backward_hooks)
        after = _of_script(getattr(parameter, "_post_accumulate_grad_hooks", None))
        if is_cut and (hooks or after):
            why = "ranks hold parts of parameters, which have no hooks"
        elif after and not _only_look(after, parameter, draw):
            why = "a hook after backward sees this worker's part of the gradient, before it is summed over the workers"
        elif hooks and not _are_additive(hooks, parameter, draw):
            why = "what it makes of the workers' parts of a gradient does not add up to what it makes of their sum"
        else:
            continue
        raise ConfigError(
            f"the parameter '{name}' has a hook of the script's own on its gradient, and under '{strategy}' {why}: the result would "
            "not be that of one process. Nothing was trained; for clipping give clip_norm= (in a loop of your own "
            "shoal.clip_grad_norm_), else run in one process."
        )


def _of_script(hooks: Mapping[Any, Any] | None) -> list[Any]:
    return [
        hook
        for hook in (hooks or {}).values()
        if not str(getattr(hook, "__module__", "")).startswith("shoal.")
    ]


def _only_look(hooks: list[Any], parameter: nn.Parameter, draw: torch.Generator) -> bool:
    """Whether hooks after backward leave gradient and parameter unchanged."""
    gradient, weight = parameter.grad, parameter.detach().clone()
    given = numbers_of_all_sizes(parameter, draw)
    try:
        with torch.no_grad():
            parameter.grad = given.clone()
            for hook in hooks:
                hook(parameter)
            left = parameter.grad
            return left is not None and torch.equal(left, given) and torch.equal(parameter, weight)
    finally:
        parameter.grad = gradient


def _are_additive(hooks: list[Any], parameter: nn.Parameter, draw: torch.Generator) -> bool:
    def result(gradient: torch.Tensor) -> torch.Tensor:
        for hook in hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    with torch.no_grad():
        one, other = numbers_of_all_sizes(parameter, draw), numbers_of_all_sizes(parameter, draw)
        first, second, together = result(one.clone()), result(other.clone()), result(one + other)
        # Relative to the summands, which may cancel out.
        slack = 16 * torch.finfo(parameter.dtype).eps * (first.abs() + second.abs() + together.abs())
        return bool(((first + second - together).abs() <= slack).all())


def numbers_of_all_sizes(parameter: Tensor, draw: torch.Generator) -> Tensor:
    sizes = 10 ** (8 * torch.rand(parameter.shape, generator=draw, dtype=torch.float64) - 4)
    return (torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * sizes).to(parameter)


def watch_randomness(model: nn.Module) -> Callable[[], list[MixingLayer]]:
    """Watch the next forward for modules that really draw; call the result to stop watching and get them.

    Detects what types do not show: F.dropout in a forward, sampling in a VAE. Only the innermost
    module that drew is named.
    """
    drew: dict[str, str] = {}
    before: dict[str, Any] = {}
    handles = []

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            before[name] = torch.default_generator.get_state()

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            same = torch.equal(before.pop(name), torch.default_generator.get_state())
            inside = any(inner.startswith(f"{name}." if name else "") for inner in drew)
            if not same and not inside:
                drew[name] = type(module).__name__

        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave(name)))

    def stop() -> list[MixingLayer]:
        for handle in handles:
            handle.remove()
        return [MixingLayer(name or THE_MODEL, kind, DRAWS) for name, kind in drew.items()]

    return stop


def _draws(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return float(module.dropout) > 0
    return isinstance(module, nn.RReLU)
