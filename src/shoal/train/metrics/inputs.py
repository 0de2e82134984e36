"""What a model's output and a target mean to a metric: which task, which dim holds the classes, which probabilities.

torchmetrics turns scores into probabilities whenever a batch has values outside
[0, 1], so that one epoch can mix both. Here the loss decides once: what it takes
(logits, probabilities, log-probabilities) is what the model gives. Pure shapes
and numbers; counts nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.data.tree import Tree, tensors
from shoal.errors import ConfigError
from shoal.parallel.loss import OutputKind

Kind = Literal["binary", "multiclass", "multilabel"]

_HALF: dict[OutputKind, float] = {"logits": 0.0, "probabilities": 0.5, "log_probabilities": math.log(0.5)}


@dataclass(frozen=True, slots=True)
class Task:
    """What is predicted; the same on every rank and for every batch of a run."""

    kind: Kind
    num_classes: int
    """Classes, or labels; 2 when binary."""

    class_dim: int = 1
    """Where the classes lie in the output: 1, as torch's losses have it, or -1."""


def first_tensor(tree: Tree | None) -> Tensor | None:
    """The prediction of a model that returns several things is the first tensor; so is the target."""
    found = tensors(tree)
    return found[0].detach() if found else None


def infer_task(output: Tensor, target: Tensor) -> Task:
    """The task, from the shapes of one batch.

    [N] or [N, 1] on both sides is binary; [N, L] on both is multilabel; any
    other equal shapes are binary at each position; classes along one more dim
    than the target's are multiclass.
    """
    squeezed_output, squeezed_target = _squeezed(output), _squeezed(target)
    if squeezed_output.shape == squeezed_target.shape:
        _check_labels(target, output)
        if squeezed_output.dim() == 2:
            return Task("multilabel", squeezed_output.shape[1])
        return Task("binary", 2)
    class_dim = find_classes(output, target)
    if class_dim is None or target.is_floating_point():
        raise ConfigError(
            f"a metric was asked for by name, but shoal cannot tell what is right or wrong from outputs of shape "
            f"{tuple(output.shape)} and targets of shape {tuple(target.shape)} ({_word(target)}). Give a torchmetrics "
            "object instead of the name, or targets that are class numbers [N] or 0/1 labels of the output's shape."
        )
    return Task("multiclass", output.shape[class_dim], class_dim)


def find_classes(output: Tensor, target: Tensor) -> int | None:
    """The dim of `output` that `target` has not: its classes. torch's own place, dim 1, is tried first."""
    target = _squeezed(target)
    if output.dim() == target.dim() + 1:
        if output.shape[0] == target.shape[0] and output.shape[2:] == target.shape[1:]:
            return 1
        if output.shape[:-1] == target.shape:
            return -1
    if output.dim() == 2 and output.shape[0] == target.numel():  # the model flattened its positions
        return 1
    return None


def aligned(task: Task, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the shapes that metrics take: classes in dim 1, whole numbers as target."""
    if task.kind == "multiclass":
        output = output.movedim(task.class_dim, 1)
        return output, target.reshape(output.shape[:1] + output.shape[2:])
    if target.is_floating_point():
        target = target > 0.5
    return output.reshape(_squeezed(target).shape), _squeezed(target).long()


def probabilities(task: Task, output: Tensor, outputs_are: OutputKind) -> Tensor:
    """Aligned outputs as probabilities, in at least 32 bits."""
    output = output if output.dtype in (torch.float32, torch.float64) else output.float()
    if outputs_are == "probabilities":
        return output
    if outputs_are == "log_probabilities":
        return output.exp()
    return output.softmax(1) if task.kind == "multiclass" else output.sigmoid()


def yes(output: Tensor, outputs_are: OutputKind) -> Tensor:
    """Which aligned outputs, binary or by label, say yes."""
    return output > _HALF[outputs_are]


def _squeezed(tensor: Tensor) -> Tensor:
    return tensor.squeeze(1) if tensor.dim() > 1 and tensor.shape[1] == 1 else tensor


def _check_labels(target: Tensor, output: Tensor) -> None:
    if target.numel() and (target.min() < 0 or target.max() > 1):
        raise ConfigError(
            f"a metric was asked for by name, but targets of shape {tuple(target.shape)} like the outputs' must be "
            f"labels between 0 and 1, and these go from {float(target.min()):.4g} to {float(target.max()):.4g}. For a "
            "regression give a torchmetrics object such as MeanSquaredError(), or leave metrics out: the mean loss is "
            "always there."
        )


def _word(target: Tensor) -> str:
    return str(target.dtype).removeprefix("torch.")
