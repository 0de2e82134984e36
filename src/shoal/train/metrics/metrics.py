"""Metrics, exact over all workers.

`MetricSet` counts what this rank sees and computes over what all ranks saw. It
never talks to a process group itself: `gather` is handed in by whoever has one.
The mean loss is not counted here; the loop has its sums from the verdicts.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from shoal.data.tree import Tree
from shoal.errors import ConfigError
from shoal.parallel.loss import OutputKind
from shoal.train.metrics import state as metric_state
from shoal.train.metrics.inputs import (
    Kind,
    Task,
    aligned,
    find_classes,
    first_tensor,
    infer_task,
    probabilities,
)
from shoal.train.metrics.named import check_name, named_metric
from shoal.train.metrics.state import Part

Gather = Callable[[Tensor | None], list[Tensor]]
"""Every rank's tensor, in rank order; collective. It is always given bytes on the CPU."""

Specs = Sequence[str | Metric | MetricCollection] | Mapping[str, Metric]

_KINDS: dict[str, Kind] = {"Binary": "binary", "Multiclass": "multiclass", "Multilabel": "multilabel"}
_TASKS = re.compile(rf"^({'|'.join(_KINDS)})(?=[A-Z])")


class MetricSet:
    """The metrics of one pass over data.

    Names ("accuracy", "top5", "auroc") become metrics once the first batch
    shows the task. torchmetrics objects are copied, so that passes share no
    state; those of torchmetrics.classification get probabilities, all others
    the model's output as it is. Of a model that returns several tensors, and of
    a target of several, the first counts.
    """

    def __init__(self, specs: Specs, *, loss_kind: OutputKind, ignore_index: int | None = None) -> None:
        self._outputs_are = loss_kind
        self._ignore_index = ignore_index
        self._fresh: dict[str, Metric | None] = {}
        for name, metric in _entries(specs):
            if name in self._fresh:
                raise ConfigError(
                    f"two metrics are called '{name}'. Nothing was started; give them as a dict of name to metric."
                )
            self._fresh[name] = _alone(metric) if metric is not None else None
        self._task: Task | None = None
        self._by_name = [name for name, metric in self._fresh.items() if metric is None]
        self.reset()

    def __len__(self) -> int:
        return len(self._fresh)

    def reset(self) -> None:
        """Forget what was counted. The task stays known."""
        self._live = {name: metric.clone() for name, metric in self._fresh.items() if metric is not None}
        self._device = torch.device("cpu")
        self._num_updates = self._num_samples = 0
        self._inherited: list[Part] = []

    @torch.no_grad()
    def update(self, outputs: Tree, target: Tree | None, num_local: int) -> None:
        """Count one slice; a borrowed one (`num_local` 0) counts nothing."""
        if num_local == 0 or not self._fresh:
            return
        output, wanted = first_tensor(outputs), first_tensor(target)
        if output is None:
            raise ConfigError("the model returned no tensor, so there is nothing to compute metrics from.")
        if self._by_name and wanted is None:
            raise ConfigError(
                f"the metric '{self._by_name[0]}' compares with a target, and these batches have none: a batch is "
                "(inputs, target). Leave metrics out (the mean loss is always there), or give a torchmetrics object that "
                "needs the output alone."
            )
        if wanted is not None and wanted.device != output.device:
            wanted = wanted.to(output.device)
        pair = None
        if self._by_name and wanted is not None:
            if self._task is None:
                self._know(infer_task(output, wanted))
            assert self._task is not None
            pair = aligned(self._task, output, wanted)
        self._move(output.device)
        for name, metric in self._live.items():
            if wanted is None:
                metric.update(output)
            elif pair is not None and name in self._by_name:
                metric.update(*pair)
            else:
                metric.update(*self._for_object(metric, output, wanted))
        self._num_updates += 1
        self._num_samples += num_local

    def compute(self, gather: Gather) -> dict[str, float]:
        """The metrics over what all ranks counted; collective, the same everywhere. nan where nothing was."""
        if not self._fresh:
            return {}
        parts = [part for part in self._gathered(gather) if part.num_updates]
        if not parts:
            return dict.fromkeys(self._fresh, math.nan)
        task = next((part.task for part in parts if part.task is not None), None)
        if task is not None and self._task is None:
            self._know(task)
        results: dict[str, float] = {}
        for name, fresh in self._fresh.items():
            assert fresh is not None
            results.update(_flat(name, _value(metric_state.merged(name, fresh, parts))))
        return results

    def state(self, gather: Gather) -> dict[str, Tensor]:
        """What all ranks counted, for a checkpoint in the middle of an epoch; collective."""
        if not self._fresh:
            return {}
        return {
            f"part_{number}": metric_state.pack([part]) for number, part in enumerate(self._gathered(gather))
        }

    def load_state(self, tensors: Mapping[str, Tensor], rank: int, num_workers: int | None = None) -> bool:
        """Go on from `state`. False, and nothing counted, where other metrics were saved.

        Among as many workers as there were, each goes on with its own part, to
        the bit; else rank 0 takes all.
        """
        self.reset()
        parts = [
            part for number in range(len(tensors)) for part in metric_state.unpack(tensors[f"part_{number}"])
        ]
        if any(part.names != list(self._fresh) for part in parts):
            return False
        own = [parts[rank]] if num_workers == len(parts) else parts if rank == 0 else []
        counted = [part for part in own if part.num_updates]
        if counted:
            first, *self._inherited = counted
            if first.task is not None and self._task is None:
                self._know(first.task)
            for name, metric in self._live.items():
                metric_state.write(name, metric, first, self._device)
            self._num_updates, self._num_samples = first.num_updates, first.num_samples
        return True

    def _gathered(self, gather: Gather) -> list[Part]:
        own = Part(
            names=list(self._fresh),
            num_updates=self._num_updates,
            num_samples=self._num_samples,
            task=self._task,
        )
        if self._num_updates:
            for name, metric in self._live.items():
                own.tensors.update(metric_state.read(name, metric))
        packed = metric_state.pack([own, *self._inherited])
        return [part for each in gather(packed) for part in metric_state.unpack(each)]

    def _know(self, task: Task) -> None:
        """Make the metrics that were only names so far."""
        for name in self._by_name:
            metric = named_metric(name, task, self._outputs_are, self._ignore_index)
            self._fresh[name] = metric
            self._live[name] = metric.clone().to(self._device)
        self._task = task

    def _move(self, device: torch.device) -> None:
        if device != self._device:
            self._device = device
            for metric in self._live.values():
                metric.to(device)

    def _for_object(self, metric: Metric, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """What a torchmetrics object is given. One for classification says its task in its own name."""
        found = _TASKS.match(type(metric).__name__) if _classifies(metric) else None
        if found is None or not output.is_floating_point():
            same_numbers = output.shape != target.shape and output.numel() == target.numel()
            return output.reshape(target.shape) if same_numbers else output, target
        class_dim = find_classes(output, target) if found[1] == "Multiclass" else 1
        if class_dim is None:
            return output, target  # torchmetrics says best what is wrong with them
        task = Task(_KINDS[found[1]], 0, class_dim)
        output, target = aligned(task, output, target)
        return probabilities(task, output, self._outputs_are), target


def _entries(specs: Specs) -> Iterator[tuple[str, Metric | None]]:
    """(name, metric) of everything asked for; None for one that is made by its name."""
    if isinstance(specs, (str, Metric, MetricCollection)):
        raise ConfigError(
            f"metrics must be a list or a dict, got {specs!r} alone. Write metrics=[...] around it."
        )
    if isinstance(specs, Mapping):
        for name, metric in specs.items():
            if not isinstance(metric, Metric):
                raise ConfigError(
                    f"metrics['{name}'] must be a torchmetrics object, got {type(metric).__name__}."
                )
            yield name, metric
        return
    for spec in specs:
        if isinstance(spec, str):
            if spec != "loss":  # always there, counted by the loop
                check_name(spec)
                yield spec, None
        elif isinstance(spec, MetricCollection):
            yield from spec.items()
        elif isinstance(spec, Metric):
            yield _snake_case(type(spec).__name__), spec
        else:
            raise ConfigError(f"a metric must be a name or a torchmetrics object, got {type(spec).__name__}.")


def _alone(metric: Metric) -> Metric:
    """A fresh copy that counts for this process alone: torchmetrics would gather by itself wherever a group exists."""
    copy = metric.clone()
    copy.reset()
    for module in copy.modules():
        if isinstance(module, Metric):
            module.sync_on_compute = module._to_sync = False
    return copy


def _classifies(metric: Metric) -> bool:
    return type(metric).__module__.startswith("torchmetrics.classification.")


def _value(metric: Metric) -> Any:
    """What a metric comes to. Where torchmetrics warns that a value means nothing, it is nan."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        value = metric.compute()
    meaningless = any("should be meaningless" in str(warning.message) for warning in heard)
    return (
        torch.tensor(math.nan) if meaningless and isinstance(value, Tensor) and value.numel() == 1 else value
    )


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Numbers by name: several are numbered, or called by their key."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}_{key}", item)
    elif isinstance(value, (tuple, list)) or (isinstance(value, Tensor) and value.numel() != 1):
        for number, item in enumerate(value):
            yield from _flat(f"{name}_{number}", item)
    else:
        yield name, float(value)


def _snake_case(name: str) -> str:
    """F1Score, and the BinaryF1Score that it makes, as f1_score."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", _TASKS.sub("", name)).lower()
