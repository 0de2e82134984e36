"""Metrics, exact over all workers.

`MetricSet` counts what this rank sees and computes over what all ranks saw. It does not use a
process group: the caller passes `gather`. Parts (the counts of one rank) are merged in rank order,
each state by its own reduction, into a fresh metric that then computes: the same numbers on every
rank, and those of one process over all the data. The mean loss is not counted here.

Metrics by name are shoal's own torchmetrics, made for one task and fed aligned outputs.
torchmetrics turns scores into probabilities whenever a batch has values outside [0, 1], so that one
epoch can mix both; here the loss decides once: the outputs it takes (logits, probabilities) are the
model's.
"""

from __future__ import annotations

import difflib
import io
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

from shoal.data.tree import Tree, tensors
from shoal.errors import ConfigError
from shoal.parallel.loss import OutputKind, logits_of
from shoal.train.checkpoint import safetensors_file

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
        """Reset the counts. The task stays known."""
        self._live = {name: metric.clone() for name, metric in self._fresh.items() if metric is not None}
        self._device = torch.device("cpu")
        self._num_updates = self._num_samples = 0
        self._inherited: list[MetricPart] = []

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
        """Metrics over the counts of all ranks; collective, equal everywhere. nan if nothing was counted."""
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
            results.update(_flat(name, _value(merge_parts(name, fresh, parts))))
        return results

    def state(self, gather: Gather) -> dict[str, Tensor]:
        """Counts of all ranks, for a checkpoint in the middle of an epoch; collective."""
        if not self._fresh:
            return {}
        return {f"part_{number}": pack_parts([part]) for number, part in enumerate(self._gathered(gather))}

    def load_state(self, tensors: Mapping[str, Tensor], rank: int, num_workers: int | None = None) -> bool:
        """Restore `state`. False, with nothing counted, if other metrics were saved.

        With the same number of workers each continues with its own part, to the bit; otherwise rank
        0 takes all.
        """
        self.reset()
        parts = [part for number in range(len(tensors)) for part in unpack_parts(tensors[f"part_{number}"])]
        if any(part.names != list(self._fresh) for part in parts):
            return False
        own = [parts[rank]] if num_workers == len(parts) else parts if rank == 0 else []
        counted = [part for part in own if part.num_updates]
        if counted:
            first, *self._inherited = counted
            if first.task is not None and self._task is None:
                self._know(first.task)
            for name, metric in self._live.items():
                write_states(name, metric, first, self._device)
            self._num_updates, self._num_samples = first.num_updates, first.num_samples
        return True

    def _gathered(self, gather: Gather) -> list[MetricPart]:
        own = MetricPart(
            names=list(self._fresh),
            num_updates=self._num_updates,
            num_samples=self._num_samples,
            task=self._task,
        )
        if self._num_updates:
            for name, metric in self._live.items():
                own.tensors.update(read_states(name, metric))
        packed = pack_parts([own, *self._inherited])
        return [part for each in gather(packed) for part in unpack_parts(each)]

    def _know(self, task: Task) -> None:
        """Create the metrics that were only names so far."""
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
        """Outputs and targets for a torchmetrics object. One for classification says its task in its own name."""
        found = _TASKS.match(type(metric).__name__) if _classifies(metric) else None
        if found is None or not output.is_floating_point():
            same_numbers = output.shape != target.shape and output.numel() == target.numel()
            return output.reshape(target.shape) if same_numbers else output, target
        class_dim = find_classes(output, target) if found[1] == "Multiclass" else 1
        if class_dim is None:
            return output, target  # torchmetrics' own error is the best description
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
            if spec != "loss":  # always present, counted by the loop
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
    """Value of a metric; nan if torchmetrics warns that it is meaningless."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = metric.compute()
    meaningless = any("should be meaningless" in str(warning.message) for warning in caught)
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


@dataclass(slots=True, kw_only=True)
class MetricPart:
    """Counts of one rank."""

    names: list[str]
    """The metrics, in order; parts of other metrics are not merged."""

    num_updates: int = 0
    num_samples: int = 0
    task: Task | None = None
    """Task as inferred from the first batch; None on a rank that saw none."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors by metric, module within it, and state."""


def pack_parts(parts: list[MetricPart]) -> Tensor:
    """Parts as bytes: one collective for everything, whatever the states are."""
    about = []
    tensors = {}
    for number, part in enumerate(parts):
        described = {key: getattr(part, key) for key in ("names", "num_updates", "num_samples")}
        about.append({**described, "task": asdict(part.task) if part.task else None})
        tensors.update({f"{number}:{key}": tensor for key, tensor in part.tensors.items()})
    buffer = io.BytesIO()
    safetensors_file.write(buffer, tensors, {"parts": json.dumps(about)})
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpack_parts(packed: Tensor) -> list[MetricPart]:
    raw = packed.cpu().numpy().tobytes()
    source = io.BytesIO(raw)
    parts = []
    for fields in json.loads(safetensors_file.read_metadata(source)["parts"]):
        task = fields.pop("task")
        parts.append(MetricPart(**fields, task=Task(**task) if task else None))
    for key, entry in safetensors_file.read_header(source, len(raw)).items():
        number, _, rest = key.partition(":")
        parts[int(number)].tensors[rest] = safetensors_file.read_tensor(source, entry)
    return parts


def read_states(name: str, metric: Metric) -> dict[str, Tensor]:
    """Every state of a metric, by name. Lists that are to be concatenated are, so that a part stays small."""
    held: dict[str, Tensor] = {}
    for key, module, state in _states(name, metric):
        value = getattr(module, state)
        if isinstance(value, Tensor):
            held[key] = value
        elif module._reductions[state] is dim_zero_cat:
            if value:
                held[key] = dim_zero_cat(value)
        else:
            for number, item in enumerate(value):
                if not isinstance(item, Tensor):
                    raise ConfigError(
                        f"the metric {name} keeps a list of {type(item).__name__} in '{state}', which cannot be gathered "
                        "over workers. Keep tensors in its states, or compute it after the run from trainer.predict()."
                    )
                held[f"{key}:{number}"] = item
    return held


def write_states(name: str, metric: Metric, part: MetricPart, device: torch.device) -> None:
    """Make `metric` continue from the part's state."""
    for key, module, state in _states(name, metric):
        if isinstance(module._defaults[state], Tensor):
            setattr(module, state, part.tensors[key].to(device))
        else:
            setattr(module, state, [item.to(device) for item in _items(part, key)])
    _counted(metric, part.num_updates)


def merge_parts(name: str, fresh: Metric, parts: list[MetricPart]) -> Metric:
    """Copy of `fresh` with the counts of all parts. There is at least one part, and none is empty."""
    metric = fresh.clone()
    for key, module, state in _states(name, metric):
        reduction: Any = module._reductions[state]
        value: Any
        if isinstance(module._defaults[state], Tensor):
            value = _reduced(
                reduction, [part.tensors[key] for part in parts], [part.num_samples for part in parts]
            )
        else:
            items = [item for part in parts for item in _items(part, key)]
            value = items if reduction is None or reduction is dim_zero_cat else reduction(items)
        setattr(module, state, value)
    _counted(metric, sum(part.num_updates for part in parts))
    return metric


def _states(name: str, metric: Metric) -> Iterator[tuple[str, Metric, str]]:
    """(key, module, state) of a metric and of the metrics within it, in a fixed order."""
    for path, module in metric.named_modules():
        if isinstance(module, Metric):
            for state in module._defaults:
                yield f"{name}:{path}:{state}", module, state


def _items(part: MetricPart, key: str) -> list[Tensor]:
    """The list state `key`: one tensor when it was concatenated, else one by one."""
    if key in part.tensors:
        return [part.tensors[key]]
    items: list[Tensor] = []
    while f"{key}:{len(items)}" in part.tensors:
        items.append(part.tensors[f"{key}:{len(items)}"])
    return items


def _reduced(reduction: Any, values: list[Tensor], num_samples: list[int]) -> Tensor:
    if reduction is None and len(values) == 1:
        # A metric that merges by itself takes a stack for several ranks, and its own shape for one.
        return values[0]
    stacked = torch.stack(values)
    if reduction is dim_zero_mean:
        weights = torch.tensor(num_samples, dtype=torch.float64)
        share = (weights / weights.sum()).to(stacked.dtype).reshape(-1, *[1] * (stacked.dim() - 1))
        return (stacked * share).sum(0)
    if reduction is None:
        return stacked
    result: Tensor = reduction(stacked)
    return result


def _counted(metric: Metric, num_updates: int) -> None:
    for module in metric.modules():
        if isinstance(module, Metric):
            module._update_count = num_updates
            module._computed = None


# ---- metrics by name --------------------------------------------------------------------------------


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
    """Prediction of a model with several outputs: the one named logits, else the first tensor; likewise the target."""
    found = tensors(logits_of(tree))
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
    """Aligned outputs, binary or by label, that predict the positive class."""
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
    """Refuse an unknown name, before anything starts."""
    if name not in ("accuracy", "auroc", "loss") and not _TOP_K.fullmatch(name):
        guess = difflib.get_close_matches(name, ["accuracy", "auroc", "loss", "top5"], n=1, cutoff=0.5)
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
