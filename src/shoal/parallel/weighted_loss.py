"""Losses of which every sample counts by a weight: the sum of w · loss, and the sum of w · what it counts.

Divided once all slices are added, that is the weighted mean, cut however it
may be. torch's losses are run element by element; of any other callable the
loss of each sample alone is taken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.tree import Tree, map_tensors, tensors
from shoal.errors import TrainingError

Value = Callable[[Tree, Tree], Any]


def elementwise(
    module: Any,
    counts: Callable[[Any, Tensor, Tensor], Tensor],
    output: Tensor,
    target: Tensor,
    weight: Tensor,
) -> tuple[Tensor, float]:
    """A torch loss with reduction="none": its weighted sum and weighted count. `counts` says what each row counts."""
    losses: Tensor = module(output, target)
    losses = losses.reshape(max(losses.shape[0], 1) if losses.dim() else 1, -1)
    per_row = spread(weight, len(losses), type(module).__name__).to(losses.dtype)
    counted = counts(module, losses, target).to(losses.dtype)
    return (losses.sum(1) * per_row).sum(), float((counted * per_row).sum())


def elements_of_row(module: Any, losses: Tensor, target: Tensor) -> Tensor:
    """Every element counts one."""
    return torch.full((len(losses),), float(losses.shape[1]), device=losses.device, dtype=losses.dtype)


def samples_of_row(module: Any, losses: Tensor, target: Tensor) -> Tensor:
    """A row is a sample."""
    return torch.ones(len(losses), device=losses.device, dtype=losses.dtype)


def labels_of_row(module: Any, losses: Tensor, target: Tensor) -> Tensor:
    """Labels that are not ignored, each by the weight of its class."""
    if target.is_floating_point():  # class probabilities
        return elements_of_row(module, losses, target)
    counted: Tensor = target != module.ignore_index
    if module.weight is not None:
        # An ignored label is no class: any that is there stands in for it, and counts nothing.
        counted = module.weight[torch.where(counted, target, torch.zeros_like(target))] * counted
    return counted.reshape(len(losses), -1).sum(1)


def spread(weight: Tensor, num_rows: int, name: str) -> Tensor:
    """A weight for each row of the loss: the samples, or so many rows for each of them."""
    if weight.dim() != 1 or len(weight) == 0 or num_rows % len(weight):
        raise TrainingError(
            f"the loss '{name}' gives {num_rows} rows for weights of shape {tuple(weight.shape)}, so shoal cannot tell which "
            "weight belongs to which. Nothing was trained. Let output and target have one row per sample, or a loss of your "
            "own take the weights: loss(output, target, sample_weight)."
        )
    return weight if len(weight) == num_rows else weight.repeat_interleave(num_rows // len(weight))


class EachAlone:
    """Any callable, asked for the loss of each sample alone: all at once by vmap where it can be, else one by one."""

    def __init__(self, value: Value, name: str) -> None:
        """`value(output, target)` is the loss of a batch: one number, or a pair (sum, count)."""
        self._value, self._name = value, name
        self._vectorised = True

    def __call__(self, output: Tree, target: Tree, weight: Tensor) -> tuple[Tensor, float]:
        """The weighted sum and the weighted count."""
        num_samples = len(weight)
        for tensor in [*tensors(output), *tensors(target)]:
            if tensor.dim() == 0 or tensor.shape[0] % num_samples:
                raise TrainingError(
                    f"the loss '{self._name}' cannot be weighted: it is computed from a tensor of shape {tuple(tensor.shape)} "
                    f"that does not hold the {num_samples} samples in its first dimension. Nothing was trained. Let the loss "
                    "take the weights itself, loss(output, target, sample_weight), and return a pair (sum, count)."
                )
        if self._vectorised:
            try:
                losses = self._at_once(output, target, num_samples)
                return (losses * weight.to(losses.dtype)).sum(), float(weight.sum())
            except Exception:  # vmap takes no branch on a value, no .item(), and no pair with a plain number
                self._vectorised = False
        totals, count = [], 0.0
        for sample in range(num_samples):
            value = self._value(*_one(output, target, sample, num_samples))
            total, counted = value if isinstance(value, tuple) else (value, 1.0)
            totals.append(total * weight[sample].to(total.dtype))
            count += float(counted) * float(weight[sample])
        return torch.stack(totals).sum(), count

    def _at_once(self, output: Tree, target: Tree, num_samples: int) -> Tensor:
        flat = [
            tensor.reshape(num_samples, tensor.shape[0] // num_samples, *tensor.shape[1:])
            for tensor in [*tensors(output), *tensors(target)]
        ]

        def one(*parts: Tensor) -> Tensor:
            left = iter(parts)
            value = self._value(_filled(output, left), _filled(target, left))
            if not isinstance(value, Tensor):
                raise TypeError("a pair of sum and count")
            return value

        losses: Tensor = torch.func.vmap(one)(*flat)
        return losses


def _filled(tree: Tree, parts: Iterator[Tensor]) -> Tree:
    return map_tensors(lambda _: next(parts), tree)


def _one(output: Tree, target: Tree, sample: int, num_samples: int) -> tuple[Tree, Tree]:
    def narrow(tensor: Tensor) -> Tensor:
        rows = tensor.shape[0] // num_samples
        return tensor[sample * rows : (sample + 1) * rows]

    return map_tensors(narrow, output), map_tensors(narrow, target)


def without_reduction(module: nn.Module) -> Any:
    """The same loss, element by element; shares the weights of its classes."""
    each: Any = copy.copy(module)
    each.reduction = "none"
    return each
