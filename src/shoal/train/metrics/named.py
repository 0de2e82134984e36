"""Metrics by name: accuracy, top-k, AUROC, and the task that outputs and targets imply.

Small torchmetrics of our own, made for one task and fed aligned outputs.
Accuracy is the share of right predictions, over samples and positions alike;
AUROC is exact, over all scores, and averaged over the classes (or labels) that
have both sides in the data. torchmetrics turns scores into probabilities
whenever a batch has values outside [0, 1], so that one epoch can mix both; here
the loss decides once: the outputs it takes (logits, probabilities,
log-probabilities) are what the model gives.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.utilities import dim_zero_cat

from shoal.data.tree import Tree, tensors
from shoal.errors import ConfigError
from shoal.parallel.loss import OutputKind

Kind = Literal["binary", "multiclass", "multilabel"]

_HALF: dict[OutputKind, float] = {"logits": 0.0, "probabilities": 0.5, "log_probabilities": math.log(0.5)}


@dataclass(frozen=True, slots=True)
class Task:
    """The kind of prediction; the same on every rank and for every batch of a run."""

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
    """Aligned outputs, binary or by label, that predict yes."""
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


_TOP_K = re.compile(r"top[-_]?([1-9]\d*)")


def check_name(name: str) -> None:
    """Refuse a name that is none, before anything starts."""
    if name not in ("accuracy", "auroc", "loss") and not _TOP_K.fullmatch(name):
        guess = difflib.get_close_matches(name, ["accuracy", "auroc", "loss", "top5"], n=1)
        hint = f" Did you mean '{guess[0]}'?" if guess else ""
        raise ConfigError(
            f"there is no metric '{name}'.{hint} By name there are accuracy, auroc, loss and top1, top5, ...; for any "
            "other give a torchmetrics object. Nothing was started."
        )


def named_metric(name: str, task: Task, outputs_are: OutputKind, ignore_index: int | None) -> Metric:
    """The metric of that name for a task that is now known."""
    top_k = _TOP_K.fullmatch(name)
    if top_k is not None:
        k = int(top_k.group(1))
        if task.kind != "multiclass" or k > task.num_classes:
            raise ConfigError(
                f"the metric '{name}' needs at least {k} classes to choose from, and this model's outputs are {task.kind} "
                f"with {task.num_classes}. Use accuracy, or a smaller k."
            )
        return TopKAccuracy(k, ignore_index)
    if name == "accuracy":
        return TopKAccuracy(1, ignore_index) if task.kind == "multiclass" else Agreement(outputs_are)
    return Auroc(task, outputs_are, ignore_index)


class Share(Metric):
    """The share of predictions that were right."""

    higher_is_better = True
    full_state_update = False
    right: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        for state in ("right", "seen"):
            self.add_state(state, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        return self.right.double() / self.seen if self.seen else torch.tensor(math.nan)


class Agreement(Share):
    """Yes or no, as the target says."""

    def __init__(self, outputs_are: OutputKind) -> None:
        super().__init__()
        self._outputs_are = outputs_are

    def update(self, output: Tensor, target: Tensor) -> None:
        """Count aligned outputs, binary or by label."""
        self.right += (yes(output, self._outputs_are) == target.bool()).sum()
        self.seen += target.numel()


class TopKAccuracy(Share):
    """The target's class is among the k highest."""

    def __init__(self, k: int, ignore_index: int | None) -> None:
        super().__init__()
        self._k, self._ignore_index = k, ignore_index

    def update(self, output: Tensor, target: Tensor) -> None:
        """Count aligned outputs, [N, C, ...] and [N, ...]."""
        if self._k == 1:
            right = output.argmax(1) == target
        else:
            right = (output.topk(self._k, dim=1).indices == target.unsqueeze(1)).any(1)
        if self._ignore_index is None:
            self.right += right.sum()
            self.seen += target.numel()
        else:
            counted = target != self._ignore_index
            self.right += (right & counted).sum()
            self.seen += counted.sum()


class Auroc(Metric):
    """The chance that a positive scores above a negative, exactly: every score is kept."""

    higher_is_better = True
    full_state_update = False
    scores: Any
    targets: Any

    def __init__(self, task: Task, outputs_are: OutputKind, ignore_index: int | None) -> None:
        super().__init__(sync_on_compute=False)
        self._task, self._outputs_are, self._ignore_index = task, outputs_are, ignore_index
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("targets", [], dist_reduce_fx="cat")

    def update(self, output: Tensor, target: Tensor) -> None:
        """Keep the scores [M] or [M, C] and the targets of one slice."""
        scores = probabilities(self._task, output, self._outputs_are)
        if self._task.kind == "multiclass":
            scores, target = scores.movedim(1, -1).reshape(-1, scores.shape[1]), target.reshape(-1)
            if self._ignore_index is not None:
                counted = target != self._ignore_index
                scores, target = scores[counted], target[counted]
        elif self._task.kind == "binary":
            scores, target = scores.reshape(-1), target.reshape(-1)
        self.scores.append(scores)
        self.targets.append(target)

    def compute(self) -> Tensor:
        """The area, averaged over classes or labels; nan where no class has both positives and negatives."""
        scores, targets = dim_zero_cat(self.scores), dim_zero_cat(self.targets)
        if self._task.kind == "binary":
            columns = [(scores, targets.bool())]
        elif self._task.kind == "multiclass":
            columns = [(scores[:, number], targets == number) for number in range(scores.shape[1])]
        else:
            columns = [(scores[:, number], targets[:, number].bool()) for number in range(scores.shape[1])]
        areas = [
            binary_auroc(column, positive.long(), validate_args=False)
            for column, positive in columns
            if positive.any() and not positive.all()
        ]
        return torch.stack(areas).mean() if areas else torch.tensor(math.nan)
