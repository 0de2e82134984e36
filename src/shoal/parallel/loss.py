"""Loss rules: a user's loss as a local sum and a count.

Sums of slices can be added and divided once by the global count; means
cannot, as soon as a mask or a weight makes slices count differently. So
torch's losses run with reduction="sum" beside their own denominator, and any
other callable is taken as a mean over samples and checked once.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn import functional as F

from shoal.data.tree import Tree, map_tensors, tensors
from shoal.errors import ConfigError, LossDoesNotRecombine, TrainingError
from shoal.parallel.weighted_loss import (
    EachAlone,
    elements_of_row,
    elementwise,
    labels_of_row,
    samples_of_row,
    without_reduction,
)

OutputKind = Literal["logits", "probabilities", "log_probabilities"]


class LossRule(Protocol):
    """One loss, ready to be cut over workers."""

    name: str
    outputs_are: OutputKind

    def __call__(
        self, output: Tree, target: Tree, num_local: int, num_global: int, weight: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """The sum over this slice, with its graph, and what it is to be divided by once all slices are added.

        With a `weight` for each sample, both count each sample by its weight.
        """

    def check(self, output: Tree, target: Tree, num_local: int, weight: Tensor | None = None) -> None:
        """Refuse a loss that would mean something else when its batch is cut."""


def loss_rule(loss: Any) -> LossRule:
    """The rule for whatever was given as `loss=`."""
    if not callable(loss):
        raise ConfigError(
            f"loss must be callable as loss(output, target), got {type(loss).__name__}. Use a torch loss such as "
            "nn.CrossEntropyLoss(), or a function."
        )
    plain = _FUNCTIONAL.get(loss) if isinstance(loss, type(F.cross_entropy)) else None
    module = plain() if plain is not None else loss
    denominator = _DENOMINATORS.get(type(module))
    if denominator is None:
        return MeanOverSamples(loss)
    if module.reduction == "sum":
        return SumOverBatch(module)
    if module.reduction not in ("mean", "batchmean"):
        raise ConfigError(
            f"{type(module).__name__} was given reduction='{module.reduction}', so a batch has no single loss. Use the "
            "default reduction='mean', or 'sum'."
        )
    return SumAndCount(module, denominator)


class SumAndCount:
    """A torch loss, run as a sum beside its own denominator."""

    def __init__(self, module: Any, denominator: Callable[[Any, Tensor, Tensor], float]) -> None:
        self.name = type(module).__name__
        self.outputs_are: OutputKind = _OUTPUTS_ARE.get(type(module), "logits")
        self._denominator = denominator
        self._mean = module
        self._sum: Any = copy.copy(module)  # shares weights, so that a later .to() reaches both
        self._sum.reduction = "sum"
        self._each = without_reduction(module)
        per_sample = denominator is _samples or module.reduction == "batchmean"
        self._counts = (
            labels_of_row if denominator is _labels else samples_of_row if per_sample else elements_of_row
        )

    def __call__(
        self, output: Tree, target: Tree, num_local: int, num_global: int, weight: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """See LossRule."""
        self._follow(output)
        if weight is not None:
            return elementwise(self._each, self._counts, output, target, weight)
        return self._sum(output, target), self._denominator(self._mean, output, target)

    def check(self, output: Tree, target: Tree, num_local: int, weight: Tensor | None = None) -> None:
        """torch's own losses recombine by construction."""

    def _follow(self, output: Tensor) -> None:
        # Class weights live in the loss; the model may have moved to another device or precision since.
        for name in ("weight", "pos_weight"):
            weight = getattr(self._mean, name, None)
            if weight is not None and (weight.device != output.device or weight.dtype != output.dtype):
                moved = weight.to(device=output.device, dtype=output.dtype)
                setattr(self._mean, name, moved)
                setattr(self._sum, name, moved)
                setattr(self._each, name, moved)


class SumOverBatch:
    """A torch loss that the user asked to be a sum: the batch's loss is the sum, divided by nothing.

    Where bad samples were skipped it is that of the whole batch still: the sum over the others, in proportion.
    """

    def __init__(self, module: nn.Module) -> None:
        self.name = type(module).__name__
        self.outputs_are: OutputKind = _OUTPUTS_ARE.get(type(module), "logits")
        self._module, self._each = module, without_reduction(module)

    def __call__(
        self, output: Tree, target: Tree, num_local: int, num_global: int, weight: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """See LossRule. The shares of all slices add up to a count of one."""
        if weight is not None:
            total, _ = elementwise(self._each, elements_of_row, output, target, weight)
            return total, num_local / num_global
        return self._module(output, target), num_local / num_global

    def check(self, output: Tree, target: Tree, num_local: int, weight: Tensor | None = None) -> None:
        """A sum always recombines."""


class MeanOverSamples:
    """Any callable: a mean over samples, or a pair (sum, count)."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self.name = getattr(loss, "__name__", type(loss).__name__)
        self.outputs_are: OutputKind = "logits"
        self._loss = loss
        self._takes_weights = _takes_weights(loss)
        self._each_alone = EachAlone(self._value, self.name)

    def __call__(
        self, output: Tree, target: Tree, num_local: int, num_global: int, weight: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """See LossRule. A loss that takes `sample_weight` is given it; of any other each sample's own is weighted."""
        if weight is not None and not self._takes_weights:
            return self._each_alone(output, target, weight)
        value = self._value(output, target, weight)
        if isinstance(value, tuple):
            total, count = value
            return total, float(count)
        counted = float(num_local) if weight is None else float(weight.sum())
        if not counted:  # a mean over nothing is no number, and must not become one of the batch's
            return sum((tensor.sum() for tensor in tensors(output)), start=value.new_zeros(())) * 0.0, 0.0
        return value * counted, counted

    def check(self, output: Tree, target: Tree, num_local: int, weight: Tensor | None = None) -> None:
        """The loss of two halves must recombine to the loss of the whole, and so must its gradient by what it reads besides.

        A penalty on parameters may be too small to show in the value; in the gradient by these parameters nothing else is.
        Under `torch.no_grad` only values are compared.
        """
        is_each_alone = weight is not None and not self._takes_weights
        if num_local < 2 or is_each_alone:
            return
        output = map_tensors(lambda tensor: tensor.detach(), output)
        whole = self._value(output, target, weight)
        for tensor in [*tensors(output), *tensors(target)]:
            if tensor.dim() == 0 or tensor.shape[0] % num_local:
                if isinstance(whole, tuple):
                    return  # its author counted; where the halves of this one are, only they know
                raise TrainingError(
                    f"the loss '{self.name}' cannot be cut over workers: it is computed from a tensor of shape "
                    f"{tuple(tensor.shape)} that does not hold the {num_local} samples of the slice in its first "
                    "dimension, so shoal cannot tell what it averages over. Nothing was trained. Let the loss "
                    "return a pair (sum, count): the sum over what it counts, and how much that was."
                )
        half = num_local // 2
        halves = [
            self._value(*_part(output, target, begin, end, num_local), _rows(weight, begin, end))
            for begin, end in ((0, half), (half, num_local))
        ]
        counted = [float(half), float(num_local - half)]
        if weight is not None:
            counted = [float(_rows(weight, 0, half).sum()), float(_rows(weight, half, num_local).sum())]
        _refuse_cut(self.name, whole, halves, counted, _tolerance(output))

    def _value(self, output: Tree, target: Tree, weight: Tensor | None = None) -> Any:
        weights = {} if weight is None else {"sample_weight": weight}
        value = self._loss(output, **weights) if target is None else self._loss(output, target, **weights)
        if isinstance(value, tuple) and len(value) == 2:
            return value
        if not isinstance(value, Tensor) or value.dim() != 0:
            what = (
                f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else f"a {type(value).__name__}"
            )
            raise TrainingError(
                f"the loss '{self.name}' returned {what}. It must return one number as a tensor (the mean over the "
                "samples), or a pair (sum, count)."
            )
        return value


def _takes_weights(loss: Callable[..., Any]) -> bool:
    """Whether a loss has a parameter for the weights of samples."""
    try:
        return "sample_weight" in inspect.signature(getattr(loss, "forward", loss)).parameters
    except (TypeError, ValueError):  # written in C
        return False


def _refuse_cut(name: str, whole: Any, halves: list[Any], counted: Sequence[float], tolerance: float) -> None:
    """Refuse a loss whose halves do not make its whole: sums add up, means by what each half counted."""
    is_pair = isinstance(whole, tuple)
    shares = [1.0, 1.0] if is_pair else [part / (sum(counted) or 1.0) for part in counted]
    totals = [each[0] if is_pair else each for each in (whole, *halves)]
    values = [float(total.detach()) for total in totals]
    recombined = values[1] * shares[0] + values[2] * shares[1]
    if math.isfinite(values[0]) and not math.isclose(
        values[0], recombined, rel_tol=tolerance, abs_tol=tolerance * 1e-2
    ):
        raise LossDoesNotRecombine(whole=values[0], recombined=recombined, name=name, is_pair=is_pair)
    if is_pair:
        count, counts = float(whole[1]), float(halves[0][1]) + float(halves[1][1])
        if not math.isclose(count, counts, rel_tol=tolerance):
            raise LossDoesNotRecombine(whole=count, recombined=counts, name=name, is_pair=True, what="count")
    nodes = nodes_of(totals[0])
    if any(isinstance(node, BackwardCFunction) for node in nodes):
        return  # whose backward may do more than compute: exchange, push rows, run a layer again
    read = [leaf for leaf in leaves_of(nodes) if leaf.numel()]
    of_whole, of_first, of_second = (_gradients(total, read) for total in totals)
    for by, first, second in zip(of_whole, of_first, of_second, strict=True):
        summed = first * shares[0] + second * shares[1]
        size = torch.stack([by.abs().max(), first.abs().max(), second.abs().max()]).max()
        if bool((summed - by).abs().max() > tolerance * size):
            raise LossDoesNotRecombine(
                whole=float(by.norm()),
                recombined=float(summed.norm()),
                name=name,
                is_pair=is_pair,
                what="gradient by a parameter that it reads",
            )


def nodes_of(total: Tensor, beyond: Iterable[Any] = ()) -> list[Any]:
    """The graph that a tensor was computed by, without the nodes `beyond` and what lies behind them."""
    seen: set[Any] = {None, *beyond}
    waiting: list[Any] = [total.grad_fn]
    found = []
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            found.append(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def leaves_of(nodes: Iterable[Any]) -> list[Tensor]:
    """The tensors at which these nodes would accumulate gradients."""
    return [node.variable for node in nodes if node.name() == "torch::autograd::AccumulateGrad"]


def _gradients(total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    if not leaves or not total.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    # Retained: what a forward left behind for the loss, backward has still to pass through.
    found = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    return [
        torch.zeros_like(leaf) if by is None else by.to_dense()
        for leaf, by in zip(leaves, found, strict=True)
    ]


def _rows(weight: Tensor | None, begin: int, end: int) -> Any:
    return None if weight is None else weight[begin:end]


def _part(output: Tree, target: Tree, begin: int, end: int, num_samples: int) -> tuple[Tree, Tree]:
    def narrow(tensor: Tensor) -> Tensor:
        rows = tensor.shape[0] // num_samples
        return tensor[begin * rows : end * rows]

    return map_tensors(narrow, output), map_tensors(narrow, target)


def _tolerance(output: Tree) -> float:
    """What rounding may do to a mean, in the coarsest precision among the outputs: 1e-3 in float32, 6e-2 in bf16."""
    coarsest = max((torch.finfo(t.dtype).eps for t in tensors(output) if t.is_floating_point()), default=1e-7)
    return 1e-6 if coarsest < 1e-12 else max(1e-3, 8 * coarsest)


def _elements(loss: Any, output: Tensor, target: Tensor) -> float:
    if output.shape == target.shape:  # broadcast_shapes costs 0.1 ms
        return float(output.numel())
    return float(math.prod(torch.broadcast_shapes(output.shape, target.shape)))  # type: ignore[no-untyped-call]


def _samples(loss: Any, output: Tensor, target: Tensor) -> float:
    return float(output.shape[0]) if output.dim() > 1 else 1.0


def _divergence(loss: Any, output: Tensor, target: Tensor) -> float:
    return float(output.shape[0]) if loss.reduction == "batchmean" else _elements(loss, output, target)


def _labels(loss: Any, output: Tensor, target: Tensor) -> float:
    """What cross entropy divides by: labels that are not ignored, each by the weight of its class."""
    if target.is_floating_point():  # class probabilities
        return output.numel() / output.shape[1 if output.dim() > 1 else 0]
    counted = target != loss.ignore_index
    if loss.weight is None:
        return float(counted.sum())
    return float(loss.weight[target[counted]].sum())


_DENOMINATORS: dict[type, Callable[[Any, Tensor, Tensor], float]] = {
    nn.CrossEntropyLoss: _labels,
    nn.NLLLoss: _labels,
    nn.BCELoss: _elements,
    nn.BCEWithLogitsLoss: _elements,
    nn.MSELoss: _elements,
    nn.L1Loss: _elements,
    nn.SmoothL1Loss: _elements,
    nn.HuberLoss: _elements,
    nn.PoissonNLLLoss: _elements,
    nn.SoftMarginLoss: _elements,
    nn.HingeEmbeddingLoss: _elements,
    nn.KLDivLoss: _divergence,
    nn.MultiMarginLoss: _samples,
    nn.MultiLabelMarginLoss: _samples,
    nn.MultiLabelSoftMarginLoss: _samples,
}

_OUTPUTS_ARE: dict[type, OutputKind] = {nn.BCELoss: "probabilities", nn.NLLLoss: "log_probabilities"}

_FUNCTIONAL: dict[Any, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
}
