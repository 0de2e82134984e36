"""The state of metrics as parts that can be gathered, saved and merged.

A part is what one rank counted since the last reset. Parts are merged in rank
order, each state by its own reduction, into a fresh metric that then computes:
the same numbers on every rank, and those of one process over all the data. A
part that counted nothing contributes nothing.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

from shoal.errors import ConfigError
from shoal.train.checkpoint import safetensors_file
from shoal.train.metrics.inputs import Task


@dataclass(slots=True, kw_only=True)
class Part:
    """What one rank counted."""

    names: list[str]
    """The metrics, in order; parts of other metrics are not merged."""

    num_updates: int = 0
    num_samples: int = 0
    task: Task | None = None
    """As inferred from the first batch; None on a rank that saw none."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By metric, module within it, and state."""


def pack(parts: list[Part]) -> Tensor:
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


def unpack(packed: Tensor) -> list[Part]:
    """What `pack` was given."""
    raw = packed.cpu().numpy().tobytes()
    source = io.BytesIO(raw)
    parts = []
    for fields in json.loads(safetensors_file.read_metadata(source)["parts"]):
        task = fields.pop("task")
        parts.append(Part(**fields, task=Task(**task) if task else None))
    for key, entry in safetensors_file.read_header(source, len(raw)).items():
        number, _, rest = key.partition(":")
        parts[int(number)].tensors[rest] = safetensors_file.read_tensor(source, entry)
    return parts


def read(name: str, metric: Metric) -> dict[str, Tensor]:
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


def write(name: str, metric: Metric, part: Part, device: torch.device) -> None:
    """Make `metric` go on from where the part's was."""
    for key, module, state in _states(name, metric):
        if isinstance(module._defaults[state], Tensor):
            setattr(module, state, part.tensors[key].to(device))
        else:
            setattr(module, state, [item.to(device) for item in _items(part, key)])
    _counted(metric, part.num_updates)


def merged(name: str, fresh: Metric, parts: list[Part]) -> Metric:
    """A copy of `fresh` that has counted what all parts did. There is at least one part, and none is empty."""
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


def _items(part: Part, key: str) -> list[Tensor]:
    """The list state `key`: one tensor when it was concatenated, else one by one."""
    if key in part.tensors:
        return [part.tensors[key]]
    items: list[Tensor] = []
    while f"{key}:{len(items)}" in part.tensors:
        items.append(part.tensors[f"{key}:{len(items)}"])
    return items


def _reduced(reduction: Any, values: list[Tensor], num_samples: list[int]) -> Tensor:
    if reduction is None and len(values) == 1:
        return values[
            0
        ]  # a metric that merges by itself takes a stack for several ranks, and its own shape for one
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
