"""Placement of embeddings: rows of a table on the servers, or dense, with the reason.

An embedding is taken over only where that changes nothing: where the
optimizer leaves a row alone whose gradient is zero, and where nothing but the
module's own forward uses the weight. The first is read off the optimizer, the
second is watched in one forward of the user's model on a real batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.data.tree import Tree, leaves
from shoal.embedding import HashEmbedding
from shoal.embedding.rules import rule_of_optimizer
from shoal.parallel.hashed_rows import cannot_follow

_LOOKUPS = {
    torch.ops.aten.embedding,
    torch.ops.aten._embedding_bag,
    torch.ops.aten._embedding_bag_forward_only,
}
_KINDS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True, slots=True)
class RowRule:
    """An update rule of the servers and its settings."""

    name: str
    settings: dict[str, float]


@dataclass(slots=True)
class PlacedEmbedding:
    """A module whose weight becomes rows."""

    name: str
    """Of the weight, as the model names it."""

    module: nn.Module
    group: int
    """Parameter group of the optimizer; -1 for rows that are no parameter."""

    rule: RowRule
    leaf: int | None = None
    """Number of the batch's tensor that holds its ids; None: computed in forward."""


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Placement of a model's embeddings."""

    taken: list[PlacedEmbedding]
    """Those that become rows."""

    dense: dict[str, str]
    """Name of the weight: why it stays dense."""


def plan(model: nn.Module, optimizer: torch.optim.Optimizer) -> PlacementPlan:
    """The plan as far as it needs no forward."""
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    taken, dense = [], {}
    for path, module in model.named_modules():
        if isinstance(module, HashEmbedding):
            rule, name = row_rule(optimizer, 0), f"{path}.rows" if path else "rows"
            if isinstance(rule, str):
                raise cannot_follow(name, rule)
            taken.append(PlacedEmbedding(name, module, -1, rule))
            continue
        if not isinstance(module, _KINDS):
            continue
        name = f"{path}.weight" if path else "weight"
        why = _why_dense(module, uses)
        group = groups.get(id(module.weight))
        rule = row_rule(optimizer, group) if group is not None else "the optimizer does not train it"
        if why is None and isinstance(rule, str):
            why = rule
        if why is not None:
            dense[name] = why
        elif group is not None and isinstance(rule, RowRule):
            taken.append(PlacedEmbedding(name, module, group, rule))
    return PlacementPlan(taken, dense)


def row_rule(optimizer: torch.optim.Optimizer, group: int) -> RowRule | str:
    """The servers' rule that does to rows what this optimizer does; or why there is none."""
    found = rule_of_optimizer(type(optimizer).__name__, optimizer.param_groups[group])
    return found if isinstance(found, str) else RowRule(*found)


def _why_dense(module: nn.Embedding | nn.EmbeddingBag, uses: Counter[int]) -> str | None:
    if type(module) not in _KINDS:
        return f"{type(module).__name__} is a class of its own"
    weight = module.weight
    if not weight.requires_grad:
        return "it is frozen"
    if uses[id(weight)] > 1:
        return "its weight is tied to another layer's"
    if module.max_norm is not None:
        return "max_norm changes rows in forward"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq looks at the whole batch"
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return "mode='max' has no sum of gradients"
    if weight.dtype not in (torch.float32, torch.float64):
        return f"rows are float32 or float64, not {str(weight.dtype).removeprefix('torch.')}"
    return None


def watch(found: PlacementPlan, batch: Tree, run: Callable[[], Any]) -> PlacementPlan:
    """Run the model once, and leave dense whose weight was used outside of its lookup; find ids among the batch.

    `run` must be a forward without gradients that leaves no trace.
    """
    columns = {
        (leaf.data_ptr(), leaf.shape): number
        for number, leaf in enumerate(leaves(batch))
        if isinstance(leaf, Tensor)
    }
    seen: dict[int, list[int | None]] = {id(each.module): [] for each in found.taken}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input")
        at = columns.get((ids.data_ptr(), ids.shape)) if isinstance(ids, Tensor) else None
        seen[id(module)].append(at)
        watching.inside = names[id(module)]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        watching.inside = ""

    names = {id(each.module): each.name for each in found.taken}
    hooks = [each.module.register_forward_pre_hook(before, with_kwargs=True) for each in found.taken]
    hooks += [each.module.register_forward_hook(after) for each in found.taken]
    weights = {
        each.module.weight.untyped_storage()._cdata: each.name
        for each in found.taken
        if isinstance(each.module, _KINDS)
    }
    watching = _Uses(weights)
    try:
        with watching:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    taken, dense = [], dict(found.dense)
    for each in found.taken:
        if each.name in watching.outside:
            dense[each.name] = "its weight is used outside of its own lookup"
            continue
        places = seen[id(each.module)]
        each.leaf = places[0] if len(places) == 1 else None
        taken.append(each)
    return PlacementPlan(taken, dense)


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Weights that any operation has read but the lookup of their own module, the one that runs being `inside`."""

    def __init__(self, weights: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights
        self.outside: set[str] = set()
        self.inside = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = self.inside if func.overloadpacket in _LOOKUPS else ""
        if func is not torch.ops.aten.detach.default:
            for arg in (*args, *(kwargs or {}).values()):
                for each in arg if isinstance(arg, (list, tuple)) else (arg,):
                    if isinstance(each, Tensor):
                        name = self._weights.get(each.untyped_storage()._cdata)
                        if name is not None and name != own:
                            self.outside.add(name)
        return func(*args, **(kwargs or {}))


def describe(found: PlacementPlan) -> list[str]:
    """One line per embedding, for the start of a run."""
    lines = [
        f"{each.name}: rows on the servers ({each.rule.name}"
        + (", pulled ahead of the step)" if each.leaf is not None else ")")
        for each in found.taken
    ]
    return lines + [f"{name}: dense, because {why}" for name, why in found.dense.items()]
