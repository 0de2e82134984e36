"""The metrics that are asked for by name: accuracy, top-k, AUROC.

Small torchmetrics of our own, made for one task and fed aligned outputs. The
accuracy is the share of predictions that are right, over samples and positions
alike; AUROC is exact, over all scores, and averaged over the classes (or
labels) that have both sides in the data.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.utilities import dim_zero_cat

from shoal.errors import ConfigError
from shoal.parallel.loss import OutputKind
from shoal.train.metrics.inputs import Task, probabilities, yes

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
        return TopK(k, ignore_index)
    if name == "accuracy":
        return TopK(1, ignore_index) if task.kind == "multiclass" else Agreement(outputs_are)
    return Auroc(task, outputs_are, ignore_index)


class Share(Metric):
    """How many of how many were right."""

    higher_is_better = True
    full_state_update = False
    right: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        for state in ("right", "seen"):
            self.add_state(state, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """The share; nan of nothing."""
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


class TopK(Share):
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
