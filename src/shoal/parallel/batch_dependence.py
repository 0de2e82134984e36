"""Batch dependence: layers that mix the samples of a batch, or draw random numbers.

For these, "the same as one process" means one process that runs the workers'
slices in turn with the workers' seeds; so they are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from shoal.collectives.sync_batchnorm import SyncedBatchNorm

MIXES = "mixes the batch"
DRAWS = "draws random numbers"


@dataclass(frozen=True, slots=True)
class MixingLayer:
    """A layer whose result depends on how the batch is cut."""

    layer: str
    kind: str
    why: str


def mixing_layers(model: nn.Module) -> list[MixingLayer]:
    """The layers that say so by their type: BatchNorm, dropout in any form, recurrent and attention dropout."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, SyncedBatchNorm):
            continue  # sees the whole batch
        if isinstance(module, _BatchNorm) and module.training:
            found.append(MixingLayer(name or "the model", type(module).__name__, MIXES))
        elif _draws(module):
            found.append(MixingLayer(name or "the model", type(module).__name__, DRAWS))
    return found


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


def watch_randomness(model: nn.Module) -> Callable[[], list[MixingLayer]]:
    """Watch the next forward for modules that really draw; call the result to stop watching and get them.

    Sees what types cannot tell: F.dropout in a forward, sampling in a VAE.
    Only the innermost module that drew is named.
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
        return [MixingLayer(name or "the model", kind, DRAWS) for name, kind in drew.items()]

    return stop


def _draws(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return float(module.dropout) > 0
    return isinstance(module, nn.RReLU)
