"""Losses that read parameters of a partitioned model, such as a penalty on weights.

`fsdp` and `tp`: inside the loss the model's parameters are whole, gathered when they are read, and
their gradients go back to the shards. `pp` is refused, and so are tensors that a script took from
the model before it was partitioned, and forwards that use parameters of layers which are not
running.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from shoal.data.tree import Tree, tensors
from shoal.errors import LossReadsParameters, TrainingError
from shoal.parallel.loss import LossRule, leaves_of, nodes_of
from shoal.parallel.tensor_parallel.packing import Packing

Read = Callable[[str, nn.Parameter], Tensor]


class Uncut:
    """Parameters of a model before it is partitioned, recognised wherever a script kept them."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(each): (name, weakref.ref(each)) for name, each in model.named_parameters()}

    def name_of(self, tensor: Tensor) -> str | None:
        """Name of a tensor that is one of them; else None."""
        name, there = self._names.get(id(tensor), ("", None))
        return name if there is not None and there() is tensor else None


class WholeParameters:
    """Loss rule that passes whole parameters to its loss.

    Gathering is collective: every rank that shares a parameter must call it for each of its slices,
    borrowed ones too.
    """

    def __init__(
        self,
        loss: LossRule,
        model: nn.Module,
        before: Uncut,
        packing: Packing,
        *,
        strategy: str,
        in_stages: bool,
    ) -> None:
        """`model` after partitioning, `before` its parameters before; `in_stages`: this process only
        has the layers of some stages.
        """
        self.name, self.outputs_are, self.is_in_forward = loss.name, loss.outputs_are, loss.is_in_forward
        self.is_checked = loss.is_checked
        self._loss, self._before, self._packing = loss, before, packing
        self._strategy, self._in_stages = strategy, in_stages
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._now = {id(parameter): (name, parameter) for name, parameter in model.named_parameters()}
        self._places = [
            (module, _Parameters(module._parameters, names, self._read))
            for module in model.modules()
            if any(parameter is not None for parameter in module._parameters.values())
        ]
        self._whole: dict[int, Tensor] = {}
        self._copies: dict[int, Tensor] | None = None
        self._reads_graph_of_model = False

    @property
    def named(self) -> Mapping[str, tuple[float, float]]:
        return self._loss.named

    @property
    def must_check(self) -> bool:
        return self._loss.must_check

    def __call__(
        self, output: Tree, target: Tree, num_local: int, num_global: int, weight: Tensor | None = None
    ) -> tuple[Tensor, float]:
        outputs = [tensor.grad_fn for tensor in tensors(output)]  # before the loss may write into them
        self._whole = {}
        with self._shown():
            total, count = self._loss(output, target, num_local, num_global, weight)
        for whole in self._whole.values():
            if whole.requires_grad:  # backward is collective, so every rank has to pass through it
                total = total + whole.sum() * 0.0
        if torch.is_grad_enabled():
            self._refuse(leaves_of(nodes_of(total, outputs)))
        return total, count

    def run(self, call: Callable[[], Tree], inputs: Tree, num_local: int, num_global: int) -> Tree:
        return self._loss.run(call, inputs, num_local, num_global)

    def predictions(self, output: Tree) -> Tree:
        return self._loss.predictions(output)

    def check_forward(
        self, call: Callable[[Tree], Tree], parts: Sequence[tuple[Tree, int]], num_global: int, like: Tree
    ) -> None:
        self._loss.check_forward(call, parts, num_global, like)

    def gap_of_gradients(
        self,
        call: Callable[[Tree], Tree],
        parts: Sequence[tuple[Tree, int]],
        num_global: int,
        trained: Sequence[Tensor],
    ) -> float:
        return self._loss.gap_of_gradients(call, parts, num_global, trained)

    def check(self, output: Tree, target: Tree, num_local: int, weight: Tensor | None = None) -> None:
        """Uses the parameters gathered by the last call: ranks with a single sample check nothing."""
        self._copies = {key: whole.detach().requires_grad_() for key, whole in self._whole.items()}
        # Backward of a forward's graph gathers and reduces, which a check must not run.
        values_only = torch.no_grad() if self._reads_graph_of_model else contextlib.nullcontext()
        try:
            with self._shown(), values_only:
                self._loss.check(output, target, num_local, weight)
        finally:
            self._copies = None

    def _refuse(self, leaves: Sequence[Tensor]) -> None:
        read = [self._now[id(leaf)][0] for leaf in leaves if id(leaf) in self._now]
        others = [self._before.name_of(leaf) for leaf in leaves if id(leaf) not in self._now]
        refused = [name for name in others if name is not None] + (read if self._in_stages else [])
        if refused:
            raise LossReadsParameters(
                names=sorted(refused), strategy=self._strategy, in_stages=self._in_stages
            )
        self._reads_graph_of_model = len(read) < len(leaves)

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        before = [module.__dict__["_parameters"] for module, _ in self._places]
        for module, shown in self._places:
            module.__dict__["_parameters"] = shown
        try:
            yield
        finally:
            for (module, _), parameters in zip(self._places, before, strict=True):
                module.__dict__["_parameters"] = parameters

    def _read(self, name: str, parameter: nn.Parameter) -> Tensor:
        if parameter.is_meta:
            raise LossReadsParameters(names=[name], strategy=self._strategy, in_stages=True)
        if not isinstance(parameter, DTensor) or self._in_stages:
            return parameter
        if self._copies is not None:
            return self._copies[id(parameter)]
        if id(parameter) not in self._whole:
            whole = parameter.full_tensor(grad_placements=_of_gradient(parameter))
            self._whole[id(parameter)] = self._packing.to_user_layout(name, whole)
        return self._whole[id(parameter)]


def refusal(error: RuntimeError, strategy: str, *, in_stages: bool) -> TrainingError | None:
    """Explanation of torch's error for a forward that computes with parameters outside of their layers."""
    if in_stages and "backward through the graph a second time" in str(error):
        why = "micro-batches go back through it one after the other, and something that is computed once serves all of them"
        cure = ""
    elif "got mixed torch.Tensor and DTensor" in str(error):
        why = "each rank has a part of them while their own layers do not run"
        cure = "compute it in the loss, from model.parameters(); or "
    else:
        return None
    return TrainingError(
        f"the model's forward uses parameters outside of the layers they belong to (a penalty on weights that it returns, "
        f"say), and under '{strategy}' {why}: {str(error).partition(' (or directly')[0]}. Nothing of this step was updated; "
        f"{cure}give the optimizer weight_decay= in place of a penalty, or use --strategy ddp."
    )


def _of_gradient(parameter: DTensor) -> list[Placement]:
    """Ranks of tp compute the same loss; ranks of the other axes compute it for their part of the batch."""
    names = parameter.device_mesh.mesh_dim_names or ()
    return [Replicate() if name == "tp" else Partial() for name in names]


class _Parameters(dict[str, Any]):
    """Parameters of a module, each read through a function."""

    def __init__(self, parameters: dict[str, Any], names: dict[int, str], read: Read) -> None:
        super().__init__(parameters)
        self._names, self._read = names, read

    def __getitem__(self, key: str) -> Any:
        parameter = super().__getitem__(key)
        return parameter if parameter is None else self._read(self._names[id(parameter)], parameter)

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def items(self) -> Any:
        return ((key, self[key]) for key in self)

    def values(self) -> Any:
        return (self[key] for key in self)
