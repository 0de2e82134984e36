"""Parameters sharded over ranks by FSDP2: which modules are a unit, and what each rank then holds.

A unit's parameters are gathered before its forward and freed after it, so
units should be the model's repeated blocks: small enough to save memory,
large enough to be worth a collective.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import ConfigError
from shoal.parallel.state import tied_parameters

UNIT_BYTES = 1 << 20  # a module with fewer bytes of parameters travels with the one around it

LAYER_BYTES = 64 << 20
"""A single layer with fewer travels with the block it is in: each unit costs a collective and a wait."""


def units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that are sharded on their own, inner ones first: members of lists and sequences, and layers in none of those.

    And layers of another dtype than most: torch gathers a unit in one piece.
    """
    found: list[tuple[str, nn.Module]] = []
    usual = _usual_dtype(model)

    def visit(name: str, module: nn.Module, *, in_unit: bool) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            # It reads the weight of a layer inside past that layer's forward, which would gather it.
            is_one = isinstance(child, nn.MultiheadAttention)
            is_layer = is_one or not list(child.children())
            own = sum(parameter.numel() * parameter.element_size() for parameter in child.parameters())
            if is_layer:
                is_unit = own >= (LAYER_BYTES if in_unit else UNIT_BYTES)
            else:
                is_member = isinstance(module, (nn.ModuleList, nn.Sequential))
                is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))  # which is never called itself
                is_unit = is_member and own >= UNIT_BYTES and not is_list
            if not is_one:
                visit(path, child, in_unit=in_unit or is_unit)
            is_leaf = is_one or not any(True for inner in child.children() for _ in inner.parameters())
            if is_unit or (is_leaf and {p.dtype for p in child.parameters()} not in (set(), {usual})):
                found.append((path, child))

    visit("", model, in_unit=False)
    return found


def shard(model: nn.Module, mesh: DeviceMesh, *, offload: bool = False) -> list[str]:
    """Shard `model` in place over `mesh` (one axis, or replicas and shards); returns the names of the units.

    Gradients are summed and not averaged: they were divided by the global batch before.
    """
    refuse(model)
    _quieten()
    # Pinned memory is of use to an accelerator alone; without one, shards are in the host's memory anyway.
    pinned = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    policy: OffloadPolicy = pinned if offload else OffloadPolicy()
    shared = tied_parameters(model)
    # A weight that two units share belongs to the one around both.
    alone = [
        (n, m) for n, m in units(model) if not any(id(parameter) in shared for parameter in m.parameters())
    ]
    _refuse_mixed([*alone, ("", model)])
    for _, module in alone:
        fully_shard(module, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor in it
        if isinstance(module, nn.RNNBase) and mesh.device_type == "cuda":
            without_cudnn(module)
    return [name for name, _ in alone]


def without_cudnn(module: nn.Module) -> None:
    """Have a recurrent layer computed by torch's own kernels.

    cuDNN's saw the weights of the step before, where fsdp had gathered new ones (seen with torch 2.11, at every step).
    """
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **settings: Any) -> Any:
        is_enabled = torch.backends.cudnn.enabled
        torch.backends.cudnn.enabled = False  # and no other of its flags, some of which may not be read
        try:
            return inner(*args, **settings)
        finally:
            torch.backends.cudnn.enabled = is_enabled

    module.forward = forward


def _quieten() -> None:
    """Torch's words about what is no concern of the user's, from every rank."""
    # A loss that writes into the model's output is refused before training: it does not recombine.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    # Shards of fsdp and tp are gathered one axis after the other, in checkpoints alone.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def refuse(model: nn.Module) -> None:
    """What cannot be sharded, by layer."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"the layer '{name}' has sparse=True, and fsdp shards dense gradients only. Nothing was trained; build it "
                "with sparse=False, or use --strategy ps, which keeps its rows on servers."
            )
        if isinstance(module, _BatchNorm):
            continue
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 0:
                raise ConfigError(
                    f"the parameter '{name}.{parameter_name}' is a single number, which fsdp cannot shard. Nothing was "
                    "trained; give it the shape (1,)."
                )


def _refuse_mixed(found: list[tuple[str, nn.Module]]) -> None:
    """Parameters of two dtypes in one unit, inner units first: torch would gather them as one."""
    taken: set[int] = set()
    for name, module in found:
        own = [(key, p) for key, p in module.named_parameters() if id(p) not in taken and p.requires_grad]
        taken |= {id(parameter) for _, parameter in own}
        by_dtype = {parameter.dtype: key for key, parameter in own}
        if len(by_dtype) > 1:
            said = " and ".join(
                f"'{f'{name}.' if name else ''}{key}' is {dtype}" for dtype, key in list(by_dtype.items())[:2]
            )
            raise ConfigError(
                f"parameters of different dtypes would be sharded as one: {said}, and fsdp gathers a layer and what it shares "
                "in one piece. Nothing was trained; give that parameter the dtype of the others, or a module of its own, or "
                "use --strategy ddp."
            )


def _usual_dtype(model: nn.Module) -> torch.dtype | None:
    """That of most numbers."""
    num_of = Counter[torch.dtype]()
    for parameter in model.parameters():
        num_of[parameter.dtype] += parameter.numel()
    return max(num_of, key=num_of.__getitem__, default=None)
