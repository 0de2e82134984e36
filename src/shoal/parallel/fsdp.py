"""Parameters sharded over ranks by FSDP2: which modules are a unit, and what each rank then holds.

A unit's parameters are gathered before its forward and freed after it, so units should be the
model's repeated blocks: small enough to save memory, large enough to be worth a collective.
"""

from __future__ import annotations

import functools
import logging
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import ConfigError, TrainingError
from shoal.parallel.state import tied_parameters

UNIT_BYTES = 1 << 20  # a module with fewer bytes of parameters belongs to the unit around it

LAYER_BYTES = 64 << 20
"""A single layer with fewer belongs to its block's unit: each unit costs a collective and a wait."""


def units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules sharded on their own, inner ones first: members of lists and sequences, and layers outside of those.

    Also layers of another dtype than most: torch gathers a unit in one piece.
    """
    found: list[tuple[str, nn.Module]] = []
    usual = _usual_dtype(model)

    def visit(name: str, module: nn.Module, *, in_unit: bool) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            # It reads the weight of a layer inside without that layer's forward, which would gather it.
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


def layers_by_sample(model: nn.Module, calls: Sequence[Callable[[], object]]) -> list[nn.Module]:
    """Outermost modules that run in some of these forwards and not in others, such as experts.

    The first of `calls` runs the model on all samples, each of the others on one of them. All members of a list are meant if
    one of them is, or if only some ran. A layer that a sample runs alone and the batch does not is a branch by the batch: refused.
    """
    runs: list[set[nn.Module]] = []
    for call in calls:
        ran: set[nn.Module] = set()
        handles = [
            module.register_forward_pre_hook(lambda module, _, ran=ran: ran.add(module))
            for module in model.modules()
        ]
        try:
            call()
        finally:
            for handle in handles:
                handle.remove()
        runs.append(ran)
    whole, *single = runs
    names = {module: name for name, module in model.named_modules()}
    if left_out := {module for each in single for module in each} - whole:
        raise TrainingError(
            f"forward runs the layer '{min(names[each] for each in left_out)}' for a sample alone, and not for the batch that holds it: it "
            "decides by the whole batch which layers run, and under fsdp a worker has its own slice alone. Nothing was trained; let each "
            "sample decide for itself, or run in one process."
        )
    ran = {module for each in runs for module in each}
    varying = {module for module in ran if not all(module in each for each in runs)}
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            members = set(module.children())
            if members & varying or (members & ran and members - ran):
                varying |= members
    inner = {each for module in varying for each in module.modules() if each is not module}
    return [
        each for each in model.modules() if each in varying - inner and any(True for _ in each.parameters())
    ]


def shard(
    model: nn.Module, mesh: DeviceMesh, *, offload: bool = False, by_sample: Sequence[nn.Module] = ()
) -> list[str]:
    """Shard `model` in place over `mesh` (one axis, or replicas and shards); returns the names of the units.

    Gradients are summed and not averaged: they were divided by the global batch before. Modules
    `by_sample`, which do not run on every rank, are no units of their own: gathering is collective.
    """
    refuse(model)
    _quieten()
    # Pinned memory only helps an accelerator; without one, shards are in host memory anyway.
    pinned = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    policy: OffloadPolicy = pinned if offload else OffloadPolicy()
    shared = tied_parameters(model)
    for parameter in model.parameters():
        # As channels_last convolutions are: fsdp shards rows, which are then apart in memory. Tensors that tp has cut are contiguous.
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    nothing = {
        parameter for parameter in model.parameters() if not parameter.numel()
    }  # torch cannot sum its gradient
    # A weight shared by two units belongs to the unit around both.
    within = {each for module in by_sample for each in module.modules()}
    alone = [
        (n, m)
        for n, m in units(model)
        if m not in within and not any(id(parameter) in shared for parameter in m.parameters())
    ]
    _refuse_mixed([*alone, ("", model)])
    for _, module in alone:
        fully_shard(module, mesh=mesh, offload_policy=policy, ignored_params=nothing)
    fully_shard(model, mesh=mesh, offload_policy=policy, ignored_params=nothing)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
            if by_sample:
                module.set_reduce_scatter_unused_params(True, recurse=False)
        if isinstance(module, nn.RNNBase) and mesh.device_type == "cuda":
            without_cudnn(module)
    return [name for name, _ in alone]


class LayersBySample:
    """Layers that only some samples run through: their gradients are left out if no rank ran them, as in one process."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(layers)
        self._ran = [0.0] * len(self._layers)
        for number, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(functools.partial(self._note, number))

    def _note(self, number: int, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._ran[number] = 1.0

    def leave_out_unused(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        """Drop the zeros that fsdp sums in the place of gradients. Collective."""
        # A layer whose weights are read without its forward has gradients, too.
        used = [
            has_run
            or float(any(bool(_local(p.grad).any()) for p in layer.parameters() if p.grad is not None))
            for has_run, layer in zip(self._ran, self._layers, strict=True)
        ]
        ran, self._ran = torch.tensor(used, device=device), [0.0] * len(self._layers)
        for group in groups:
            dist.all_reduce(ran, dist.ReduceOp.MAX, group)
        for layer, has_run in zip(self._layers, ran.tolist(), strict=True):
            if not has_run:
                for parameter in layer.parameters():
                    parameter.grad = None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class UnitCalls:
    """The units that forwards ran, in their order, since the last look.

    Each call gathers over the ranks. Where a forward decides by its slice (experts by what samples hold), units of the same
    size are gathered for one another: every rank then computes with a mixture of both.
    """

    def __init__(self, model: nn.Module) -> None:
        self._digest = 0
        for number, module in enumerate(each for each in model.modules() if isinstance(each, FSDPModule)):
            module.register_forward_pre_hook(functools.partial(self._note, number))

    def _note(self, number: int, module: nn.Module, args: Any) -> None:
        self._digest = zlib.crc32(number.to_bytes(4, "little"), self._digest)

    def refuse_different(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        """Compare with the other ranks of the batch. Collective."""
        found, self._digest = self._digest, 0
        bounds = torch.tensor([found, -found], dtype=torch.int64, device=device)
        for group in groups:
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
        largest, smallest = bounds.tolist()
        if largest != -smallest:
            raise TrainingError(
                "the workers ran different layers in this step, each by what its slice of the batch holds (experts, a branch, layers that "
                "are dropped at random), and under fsdp a layer's parameters are gathered from all workers when it runs: some computed "
                "with those of another layer. Nothing of this step was updated; have every worker run the same layers for every batch, "
                "or use --strategy ddp."
            )


def without_cudnn(module: nn.Module) -> None:
    """Compute a recurrent layer by torch's own kernels.

    cuDNN's used the weights of the previous step after fsdp had gathered new ones (seen with torch
    2.11, at every step).
    """
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **settings: Any) -> Any:
        is_enabled = torch.backends.cudnn.enabled
        torch.backends.cudnn.enabled = False  # leave its other flags alone: some may not be read
        try:
            return inner(*args, **settings)
        finally:
            torch.backends.cudnn.enabled = is_enabled

    module.forward = forward


def _quieten() -> None:
    """Silence torch's warnings that do not concern the user, which every rank would print."""
    # A loss that writes into the model's output is refused before training: it does not recombine.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    # Shards of fsdp and tp are gathered one axis after the other, in checkpoints only.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def refuse(model: nn.Module) -> None:
    """Refuse, by layer, a model that cannot be sharded."""
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
    """Refuse parameters of two dtypes in one unit, inner units first: torch would gather them as one."""
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
    """dtype of most elements."""
    num_of = Counter[torch.dtype]()
    for parameter in model.parameters():
        num_of[parameter.dtype] += parameter.numel()
    return max(num_of, key=num_of.__getitem__, default=None)
