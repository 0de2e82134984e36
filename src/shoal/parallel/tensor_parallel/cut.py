"""Application of a tensor-parallel plan: parameters and activations become DTensors.

Without sequence parallelism only activations inside a pair of layers are
DTensors; everything between pairs is a plain tensor, the same on every rank.
With it all tensors of the model are DTensors: activations between pairs are
sharded along the sequence, and layers that cannot work so get them whole.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from shoal.data.tree import Tree, map_tensors
from shoal.errors import ConfigError
from shoal.parallel.own_forward import once_differentiable
from shoal.parallel.tensor_parallel import attention as tensor_attention
from shoal.parallel.tensor_parallel import blocks
from shoal.parallel.tensor_parallel.attention import patch_sdpa
from shoal.parallel.tensor_parallel.blocks import BlockTrial
from shoal.parallel.tensor_parallel.dtensor_fixes import (
    InplaceWriteMode,
    patch_random_ops,
    patch_sharding_rules,
    plain,
    unsupported_operation,
)
from shoal.parallel.tensor_parallel.local import Entrance, placement_of, run_on_part
from shoal.parallel.tensor_parallel.packing import as_strided_shard, split_blocks_locally
from shoal.parallel.tensor_parallel.plan import NORMS, TensorPlan

SEQUENCE_DIM = 1
"""Sequence dimension of activations between pairs: (batch, sequence, features), or with the first two swapped, which serves as well."""


def apply(plan: TensorPlan, model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut `model` in place. Every rank holds the same weights, so each takes its shard without communication."""
    _ModelCutter(plan, model, mesh).run()
    patch_random_ops()
    patch_sdpa()
    patch_sharding_rules()


def try_blocks(model: nn.Module, mesh: DeviceMesh, inputs: Tree) -> BlockTrial:
    """Blocks of a model recognised by names, each kind of them partitioned on trial. Collective."""

    def cut(part: nn.Module, styles: Mapping[str, str]) -> None:
        plan = TensorPlan(mesh.size(), local=dict(styles))
        for name, style in styles.items():
            plan.add(name, style, "on trial")
        _ModelCutter(plan, part, mesh).run()

    return blocks.try_blocks(model, inputs, mesh.size(), cut)


@contextlib.contextmanager
def running(runs_model: bool = True) -> Iterator[None]:
    """Context in which a cut model runs; `runs_model=False` where only torch's own code works on its tensors (the update)."""
    # A mask or a table that the user's forward brings along is the same on every rank. The mode costs every call a little.
    with implicit_replication(), contextlib.ExitStack() as stack:
        if runs_model:
            stack.enter_context(InplaceWriteMode())
            stack.enter_context(once_differentiable("tp"))
        yield


def match_placements(parameters: Iterable[nn.Parameter]) -> None:
    """Redistribute gradients to their parameters' placements: a layer that ran on part of the sequence leaves partial sums."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            if gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        elif isinstance(gradient, DTensor):
            parameter.grad = gradient.full_tensor()


def explain_unsupported(error: RuntimeError, model: nn.Module) -> ConfigError | None:
    """The ConfigError for an operation that DTensor does not support: it names the operation and the layer."""
    operation = unsupported_operation(error)
    if operation is None and "is a view and is being modified inplace" in str(error):
        operation = "an operation in place"
    if operation is None:
        return None
    in_update = explain_optimizer(error)
    if in_update is not None:
        return in_update
    names = {id(module): name for name, module in model.named_modules()}
    layer = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        layer = names.get(id(frame.f_locals.get("self")), layer)
    return ConfigError(
        f"the layer '{layer or type(model).__name__}' uses {operation}, which torch cannot run on a tensor of which each "
        "rank holds a part. Nothing was trained; leave the layers around it whole with tensor_plan={'"
        f"{layer}*': 'replicated'}}, leave --sequence-parallel out if it was asked for, or use --strategy fsdp."
    )


def explain_optimizer(error: RuntimeError) -> ConfigError | None:
    """The ConfigError for an update that DTensor does not support: Adafactor's and Rprop's, with torch 2.13."""
    operation = unsupported_operation(error)
    selves = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    optimizer = next((each for each in selves if isinstance(each, torch.optim.Optimizer)), None)
    if operation is None or optimizer is None:
        return None
    return ConfigError(
        f"the update of {type(optimizer).__name__} uses {operation}, which torch cannot run on a parameter of which each rank holds a "
        "part. The step is not finished and nothing was saved of it; use another optimizer (AdamW, SGD), or a strategy that keeps "
        "parameters whole: --strategy ddp or ps."
    )


class _ModelCutter:
    """Cuts one model."""

    def __init__(self, plan: TensorPlan, model: nn.Module, mesh: DeviceMesh) -> None:
        self._plan, self._model, self._mesh = plan, model, mesh
        self._cut: dict[int, nn.Parameter] = {}  # tied weights stay tied
        self._kept: list[nn.Parameter] = []  # alive, or their ids would be used again
        self._has_noted_length = False
        self._ranks = tensor_attention.HeadRanks(mesh, self._between, plan.is_sequence)
        self._enter = Entrance(self._ranks)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._packing = plan.packing_of(model)
        # DTensor returns a view here, which must not be written into.
        self._writes = any(getattr(module, "inplace", False) is True for module in model.modules())

    def run(self) -> None:
        for row in self._plan.rows.values():
            module = self._model.get_submodule(row.layer)
            if row.layer in self._plan.local:
                self._local(module, self._plan.local[row.layer])
            elif row.style == "colwise":
                self._colwise(module)
                num_blocks = self._plan.packed.get(f"{row.layer}.weight")
                if num_blocks:
                    self._after(module, functools.partial(as_strided_shard, num_blocks=num_blocks))
            elif row.style == "rowwise":
                self._rowwise(module)
            elif row.style == "colwise alone":
                self._colwise(module)
                self._after(module, self._between)
            elif isinstance(module, nn.MultiheadAttention) and row.style == "heads":
                self._by_heads(module)
        for name in self._plan.parameters_inside:
            owner, _, key = name.rpartition(".")
            self._place(self._model.get_submodule(owner), key, Replicate())
        for name in self._plan.splits_blocks:
            split_blocks_locally(self._model.get_submodule(name))
        for name, inputs in self._plan.inputs_inside.items():
            self._convert_inputs_inside(self._model.get_submodule(name), inputs)
        if self._plan.is_sequence:
            self._cut_sequences()
        self._tie_again()
        self._after(self._model, plain)

    def _tie_again(self) -> None:
        """Assign a sharded parameter to every module that holds it: a bias of BERT's head is also its parent's."""
        for module in self._model.modules():
            for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(parameter) in self._cut:
                    module.register_parameter(key, self._cut[id(parameter)])

    def _colwise(self, module: nn.Module) -> None:
        dim = 1 if isinstance(module, nn.Embedding) else 0
        for key in dict(module.named_parameters(recurse=False)):
            self._place(module, key, Shard(dim))
        self._before(module, lambda tensor: self._as(tensor, Replicate()))

    def _local(self, module: nn.Module, style: str) -> None:
        for key in dict(module.named_parameters(recurse=False)):
            placement = placement_of(module, key, style)
            if placement is not None:
                self._place(module, key, placement)
        run_on_part(module, style, self._ranks, self._enter)

    def _by_heads(self, module: nn.MultiheadAttention) -> None:
        for key in tensor_attention.BY_ROWS:
            self._place(module, key, Shard(0))
        self._place(module.out_proj, "weight", Shard(1))
        self._place(module.out_proj, "bias", Replicate())
        tensor_attention.convert_to_heads(module, self._ranks)

    def _rowwise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            self._place(module, "weight", Shard(0))
            self._before(module, lambda tensor: self._as(tensor, Replicate()))
            # Rows of other ranks are masked, and no gradient can have that placement: made whole before it
            # is sharded again.
            self._after(module, plain)
            if self._plan.is_sequence:
                self._after(module, lambda tensor: self._as(tensor, self._part_of(tensor)))
            return
        if isinstance(module, nn.Linear):
            self._place(module, "weight", Shard(1))
            if module.bias is not None:
                self._place(module, "bias", Replicate())
            self._before(module, lambda tensor: self._as(tensor, Shard(tensor.dim() - 1)))
        self._after(module, self._between)

    def _convert_inputs_inside(self, module: nn.Module, inputs: Sequence[str]) -> None:
        """Make inputs used within a pair DTensors: each rank computes a partial sum of their gradient."""
        signature = inspect.signature(module.forward)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = signature.bind(*args, **kwargs)
            for name in inputs:
                value = given.arguments.get(name)
                if isinstance(value, Tensor) and value.requires_grad:
                    given.arguments[name] = self._as(value, Replicate())
            return given.args, given.kwargs

        if inputs:
            module.register_forward_pre_hook(hook, with_kwargs=True)
        if not self._plan.is_sequence:
            self._after(module, plain)  # for example weights of an attention

    def _cut_sequences(self) -> None:
        """Make the rest of the model work on DTensors sharded along the sequence."""
        whole: set[nn.Module] = set()
        for name, module in self._model.named_modules():
            row = self._plan.rows.get(name)
            if module in whole or (row is not None and row.style not in ("replicated", "sequence")):
                continue
            parameters = dict(module.named_parameters(recurse=False))
            has_state = bool(parameters) or any(True for _ in module.buffers(recurse=False))
            is_alone = isinstance(module, nn.MultiheadAttention) or (
                has_state and not list(module.children())
            )
            if row is not None and row.style == "sequence":
                self._before(module, self._along_sequence)
            elif is_alone and not isinstance(module, (nn.Linear, nn.Embedding, *NORMS)):
                # Its use of its inputs is unknown: it gets them whole and plain.
                whole.update(module.modules())
                self._before(module, plain)
                self._after(module, lambda tensor: self._as(tensor, Replicate()))
                continue
            elif isinstance(module, nn.Embedding):
                self._after(module, self._between)
            for key in parameters:
                self._place(module, key, Replicate())

    # ---- conversions of tensors -----------------------------------------------------------------

    def _as(self, tensor: Tensor, placement: Placement) -> Tensor:
        """The tensor with this placement; a plain one counts as replicated."""
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)
        if tensor.placements != (placement,):
            return tensor.redistribute(placements=[placement])
        return tensor

    def _between(self, tensor: Tensor) -> Tensor:
        """The output of a pair: sharded along the sequence, or whole as a plain tensor."""
        assert isinstance(tensor, DTensor)
        if self._plan.is_sequence:
            return self._as(tensor, self._part_of(tensor))
        whole: Tensor = plain(tensor)
        return whole.clone() if self._writes else whole

    def _along_sequence(self, tensor: Tensor) -> Tensor:
        """The input of a layer that treats each position alone; a sharded one stays as it is."""
        if isinstance(tensor, DTensor) and tensor.placements != (Replicate(),):
            return tensor
        return self._as(tensor, self._part_of(tensor))

    def _part_of(self, tensor: Tensor) -> Placement:
        if tensor.dim() != 3:
            return Replicate()
        length, degree = tensor.shape[SEQUENCE_DIM], self._plan.degree
        if length % degree == 0:
            return Shard(SEQUENCE_DIM)
        if not self._has_noted_length and dist.get_rank() == 0:
            note = f"note: a sequence of {length} cannot be divided by {degree}: where it is so long it stays whole"
            print(note, file=sys.stderr, flush=True)
        self._has_noted_length = True
        return Replicate()

    # ---- hooks ----------------------------------------------------------------------------------

    def _place(self, module: nn.Module, key: str, placement: Placement) -> None:
        parameter = getattr(module, key)
        if parameter is None or isinstance(parameter, DTensor):
            return
        if id(parameter) not in self._cut:
            self._kept.append(parameter)
            whole = self._packing.to_rank_layout(self._names[id(parameter)], parameter.detach())
            cut = distribute_tensor(whole, self._mesh, [placement], src_data_rank=None)
            self._cut[id(parameter)] = nn.Parameter(cut, requires_grad=parameter.requires_grad)
        module.register_parameter(key, self._cut[id(parameter)])

    def _before(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return _changed(args, change), _changed(kwargs, change)

        module.register_forward_pre_hook(hook, with_kwargs=True)

    def _after(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        def hook(_: nn.Module, args: Any, output: Tree) -> Tree:
            return _changed(output, change)

        module.register_forward_hook(hook)


def _changed(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    return map_tensors(change, tree)
