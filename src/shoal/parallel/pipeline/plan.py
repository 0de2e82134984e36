"""Pipeline plan: where a model is cut into stages of equal cost.

Decides from the layers and their costs alone, so every rank comes to the same
cut from the same costs. Says of each layer at which no stage can begin, why.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from shoal.data.tree import Tree, leaves
from shoal.errors import ConfigError, ShapeDecides
from shoal.parallel.pipeline import p2p
from shoal.parallel.pipeline.partition import (
    NUM_SAMPLES,
    Layer,
    Partition,
    SegmentModule,
    live_at,
    sample,
    segments_of,
)
from shoal.parallel.pipeline.trace import is_of_data, unchanged
from shoal.parallel.tensor_parallel.plan import TensorPlan
from shoal.runtime import scratch

_REPEATS = 3
_PER_LAYER = 1.0  # cost of a layer without parameters, in elements: it is not free


@dataclass(frozen=True, slots=True)
class PipelineCut:
    """The stages of a model."""

    layers: tuple[Layer, ...]
    begins: tuple[int, ...]
    """Number of the layer at which each stage begins; the first is 0."""

    costs: tuple[float, ...]
    """Cost of each layer, in whatever unit it was measured."""

    sizes: tuple[int, ...]
    """Size of each layer, in elements of its parameters."""

    @property
    def num_stages(self) -> int:
        return len(self.begins)

    def table(self) -> str:
        """One line for each stage: its layers, its parameters and its part of the cost."""
        whole = sum(self.costs) or 1.0
        ends = [*self.begins[1:], len(self.layers)]
        lines = ["stage  layers                          parameters   cost"]
        for number, (begin, end) in enumerate(zip(self.begins, ends, strict=True)):
            names = self.layers[begin].name
            if end - begin > 1:
                names += f" ... {self.layers[end - 1].name}"
            cost = sum(self.costs[begin:end]) / whole
            lines.append(f"{number:5d}  {names:30s}  {sum(self.sizes[begin:end]):10,d}  {cost:4.0%}")
        return "\n".join(lines)


def kept_whole_by_tp(model: nn.Module, plan: TensorPlan) -> dict[str, str]:
    """Modules that tp hooks into, which therefore stay whole; and why."""
    roots = (*plan.splits_blocks, *plan.roots)
    found = dict.fromkeys(roots, "tp has each rank take its part out of what it computes in one")
    for name, module in model.named_modules():
        has_state = any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        if plan.is_sequence and has_state and not list(module.children()):
            found[name] = "--sequence-parallel gives it whole sequences"
    return {name: why for name, why in found.items() if name}


def find_cut(
    partition: Partition,
    num_stages: int,
    costs: Sequence[float],
    user_cut: Sequence[str] | None = None,
    styles: Mapping[str, str] | None = None,
) -> PipelineCut:
    """Stages of as equal cost as possible; or the user's, checked.

    `styles`: tp style of layers, by their names.
    """
    layers = partition.layers
    blocked = _blocked(partition, styles or {})
    sizes = tuple(_sizes(partition))
    if user_cut is not None:
        begins = _begins_of(layers, num_stages, user_cut, partition.closed)
        for begin in begins[1:]:
            if begin in blocked:
                raise ConfigError(
                    f"a stage cannot begin at '{layers[begin].name}', as pipeline_cut says: {blocked[begin]}. Nothing was "
                    "trained; cut elsewhere."
                )
        return PipelineCut(layers, tuple(begins), tuple(costs), sizes)
    allowed = [0, *(number for number in range(1, len(layers)) if number not in blocked)]
    if len(allowed) < num_stages:
        reasons = [*dict.fromkeys(blocked.values())]
        reasons += [f"'{path}' stays whole, because {why}" for path, why in partition.closed.items()]
        because = f" ({'; '.join(reasons[:3])})" if reasons else ""
        raise ConfigError(
            f"the model cannot be cut into {num_stages} stages: of its {len(layers)} layers in a row, a stage can begin at "
            f"{len(allowed)}{because}. Nothing was trained; use fewer stages, or fsdp or tp."
        )
    ends = [*allowed[1:], len(layers)]
    blocks = [sum(costs[begin:end]) for begin, end in zip(allowed, ends, strict=True)]
    return PipelineCut(
        layers, tuple(allowed[block] for block in balance(blocks, num_stages)), tuple(costs), sizes
    )


def balance(costs: Sequence[float], num_stages: int) -> list[int]:
    """Beginnings of `num_stages` non-empty stages that minimise the largest cost."""
    num = len(costs)
    upto = [0.0]
    for cost in costs:
        upto.append(upto[-1] + cost)
    # best[k][i]: the dearest of k stages over the first i costs, and where the last of them begins.
    best = [[(float("inf"), 0)] * (num + 1) for _ in range(num_stages + 1)]
    best[0][0] = (0.0, 0)
    for k in range(1, num_stages + 1):
        for i in range(k, num + 1):
            best[k][i] = min((max(best[k - 1][j][0], upto[i] - upto[j]), j) for j in range(k - 1, i))
    begins, end = [], num
    for k in range(num_stages, 0, -1):
        end = best[k][end][1]
        begins.append(end)
    return begins[::-1]


def _blocked(partition: Partition, styles: Mapping[str, str]) -> dict[int, str]:
    """Layers at which no stage can begin, and why."""
    reasons: dict[int, str] = {}
    layers = partition.layers
    sharded = _sharded_values(partition, styles)
    for begin, end, why in _written_in_two(partition):
        for number in range(begin + 1, end + 1):
            reasons.setdefault(number, why)
    for number, layer in enumerate(layers[1:], start=1):
        if number in reasons:
            continue
        if layer.begin_in_evaluation is None:
            reasons[number] = f"evaluation does something else than training before '{layer.name}'"
            continue
        live = live_at(partition.train, layer.begin)
        cut = next((sharded[node] for node in live if node in sharded), None)
        if cut is not None:
            reasons[number] = (
                f"tp leaves the result of '{cut}' in parts until the layer that closes it, in one stage"
            )
            continue
        values = [node.meta["example"] for node in live]
        later = [node.meta["example"] for node in live_at(partition.evaluation, layer.begin_in_evaluation)]
        odd = p2p.why_not(values) or p2p.why_not(later)
        numbers = [n for n in live if not isinstance(n.meta["example"], (Tensor, NoneType))]
        if odd is None and any(map(is_of_data, numbers)):
            odd = "a number read out of the data"
        if odd is not None:
            reasons[number] = f"{odd} goes from before '{layer.name}' to it, which cannot be sent"
        elif not any(tensor.requires_grad for tensor in p2p.pack(values)[0]):
            reasons[number] = (
                f"nothing before '{layer.name}' that it depends on is trained, so nothing goes back"
            )
    return reasons


def _written_in_two(partition: Partition) -> list[tuple[int, int, str]]:
    """Layers that write into the same buffer: each stage would keep its own."""
    graphs = (partition.train.graph, partition.evaluation.graph)
    changed = {node for graph in graphs for each in graph.nodes for node in each.meta["changes"]}
    constant = {
        str(n.target) for graph in graphs for n in graph.nodes if n.op == "get_attr" and n not in changed
    }
    written = {name for name, _ in partition.model.named_buffers()} - constant
    found: dict[str, list[int]] = {}
    for number, layer in enumerate(partition.layers):
        for name in layer.holds:
            if name in written:
                found.setdefault(name, []).append(number)
    return [
        (
            at[0],
            at[-1],
            f"'{partition.layers[at[0]].name}' and '{partition.layers[at[-1]].name}' share the buffer '{name}'",
        )
        for name, at in found.items()
        if len(at) > 1
    ]


def _sharded_values(partition: Partition, styles: Mapping[str, str]) -> dict[fx.Node, str]:
    """Values sharded by tp, and the layer that they come from."""
    found: dict[fx.Node, str] = {}
    for node in partition.train.graph.nodes:
        style = styles.get(str(node.target)) if node.op == "call_module" else None
        if style == "colwise":
            found[node] = str(node.target)
        elif style in (None, "replicated", "channels"):
            source = next((found[given] for given in node.all_input_nodes if given in found), None)
            if source is not None:
                found[node] = source
    return found


def _begins_of(
    layers: Sequence[Layer], num_stages: int, user_cut: Sequence[str], closed: Mapping[str, str]
) -> list[int]:
    begins = [0]
    for name in user_cut:
        at = next(
            (n for n, layer in enumerate(layers) if layer.name == name or layer.name.startswith(f"{name}.")),
            None,
        )
        if at is None:
            whole = [
                f" ('{path}' stays whole, because {why})"
                for path, why in closed.items()
                if name.startswith(path)
            ]
            raise ConfigError(
                f"pipeline_cut names '{name}', and no layer in a row is called so{''.join(whole[:1])}. Nothing was trained; "
                f"the layers are {', '.join(dict.fromkeys(layer.name for layer in layers))}."
            )
        if at <= begins[-1]:
            raise ConfigError(
                f"pipeline_cut says that a stage begins at '{name}', which does not come after the beginning of the stage "
                "before it. Nothing was trained; name the first layer of each stage but the first, in their order."
            )
        begins.append(at)
    if len(begins) != num_stages:
        raise ConfigError(
            f"pipeline_cut names {len(user_cut)} layers, which makes {len(begins)} stages, and there are {num_stages}. Nothing "
            f"was trained; name {num_stages - 1}."
        )
    return begins


def _sizes(partition: Partition) -> list[int]:
    numel = {name: parameter.numel() for name, parameter in partition.model.named_parameters()}
    return [sum(numel.get(name, 0) for name in layer.holds) for layer in partition.layers]


def costs_by_size(partition: Partition) -> list[float]:
    return [_PER_LAYER + size for size in _sizes(partition)]


def costs_of_job(partition: Partition, inputs: Tree, number: int) -> list[float]:
    """Measured costs, kept in the job's scratch directory, so that a restarted job has the same stages.

    By size if layers share a weight: whether one stage has both decides the order in which their
    gradients are added.
    """
    held = [name for layer in partition.layers for name in layer.holds]
    if len(held) != len(set(held)):
        return costs_by_size(partition)
    path = scratch.directory() / f"pipeline-costs-{number}.json"
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(path.read_text())
        if len(kept) == len(partition.layers):
            return [float(cost) for cost in kept]
    try:
        costs = measure(partition, inputs)
    except ShapeDecides:  # it branches on the number of samples
        costs = measure(partition, sample(inputs, NUM_SAMPLES))
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(costs))
    temporary.replace(path)
    return costs


def measure(partition: Partition, inputs: Tree) -> list[float]:
    """Seconds of each layer forward and backward on these inputs; without side effects on the model."""
    segments = segments_of(partition.train, [layer.begin for layer in partition.layers], training=True)
    given = list(leaves(inputs))
    holder = SegmentModule(
        partition.model,
        [path for segment in segments for path in segment.targets],
        dict(partition.train.constants),
    )
    costs = []
    values: tuple[Any, ...] = ()
    with unchanged(partition.model):
        for segment in segments:
            least = float("inf")
            for _ in range(_REPEATS):
                taken = [_leaf(value) for value in values]
                began_at = time.perf_counter()
                result = segment.run(holder, *(given[number] for number in segment.inputs), *taken)
                trained = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
                if trained:
                    torch.autograd.backward(trained, [torch.ones_like(t) for t in trained])
                least = min(least, time.perf_counter() - began_at)
            values = result
            costs.append(least)
            for parameter in holder.parameters():  # of this layer only: all of them would be a second model
                parameter.grad = None
    return costs


def _leaf(value: object) -> object:
    """Detached values that collect gradients of their own."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), value)
