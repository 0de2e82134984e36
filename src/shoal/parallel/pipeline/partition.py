"""Partition of a model's forward: layers in a row, and the segments between chosen layers as functions of their own.

`Partition` is the traced forward as layers; modules are opened only as far as the split requires. A
`StageSegment` takes values from the previous one and gives values to the next. Segments in between
pass on values that a later one needs. Values that follow from the inputs alone are recomputed where
they are needed: every rank has the inputs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph_module import _forward_from_src
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.data.tree import Tree, leaves, map_tensors, tensors
from shoal.errors import ConfigError
from shoal.parallel.compute import ModelCall, evaluating, is_run_again
from shoal.parallel.pipeline import p2p
from shoal.parallel.pipeline.blocks import BlockForward, block_forwards, block_segments
from shoal.parallel.pipeline.trace import (
    MetaCopy,
    StageSegment,
    TracedForward,
    Untraceable,
    check,
    expect,
    forget,
    meta_copy_of,
    trace,
    unchanged,
)
from shoal.parallel.state import attribute

NUM_SAMPLES = 3  # samples in the batch used for tracing

_OPENS_AS_USERS = (nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)


@dataclass(frozen=True, slots=True)
class Layer:
    """Consecutive operations of a forward: a module, and what follows it before the next."""

    name: str
    """Path of the module, or of the parameter, in the user's model."""

    begin: int
    """Number of its first node in training's graph."""

    begin_in_evaluation: int | None
    """The same in evaluation's graph; None if evaluation differs here, so that no stage can begin."""

    holds: tuple[str, ...]
    """Parameters and buffers that it uses, by their first names in the model."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A model's forward as layers in a row, in training and in evaluation."""

    model: nn.Module
    train: TracedForward
    evaluation: TracedForward
    layers: tuple[Layer, ...]
    closed: dict[str, str] = field(default_factory=dict)
    """Modules that stay whole, and why."""

    draws: bool = False
    """Whether the forward draws random numbers in training."""

    draws_in_evaluation: bool = False
    is_batch_dependent: bool = False
    """Whether a sample's result in training depends on the others of its batch."""

    is_batch_dependent_in_evaluation: bool = False
    opened: frozenset[str] = frozenset()
    """Modules whose inside was traced."""

    meta_copy: MetaCopy | None = None
    """Copy for tracing batches of other shapes; None where the forward does not branch on them, or cannot be copied."""

    def forget(self) -> None:
        """Release the example values, and with them weights."""
        forget(self.train)
        forget(self.evaluation)


def sample(inputs: Tree, num: int) -> Tree:
    """First `num` samples of the inputs, repeated if there are fewer."""

    def some(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, torch.arange(num, device=tensor.device) % tensor.shape[0])

    return map_tensors(some, inputs)


def refuse_inputs(inputs: Tree) -> None:
    for leaf in leaves(inputs):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            what = "a single number" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise ConfigError(
                f"a pipeline runs batches in parts, and the inputs hold {what}, which cannot be cut by samples. Nothing was "
                "trained; let batches hold tensors with the samples as first dimension, or use ddp or fsdp."
            )


def find_partition(
    model: nn.Module,
    inputs: Tree,
    num_stages: int,
    user_cut: Sequence[str] = (),
    whole: Mapping[str, str] | None = None,
) -> Partition:
    """Trace the model and open its modules as far as this many stages need; refuses a forward that is no graph.

    `whole`: modules that must not be opened, with reasons.
    """
    refuse_inputs(inputs)
    if not model.training:
        model.train()
    closed = dict(whole or {})
    hooked = any(map(_has_hooks, model.modules()))  # their effects, and what they keep, are unknown
    meta_copy = functools.cache(lambda: None if hooked else meta_copy_of(model))
    size = max(sum(p.numel() for p in model.parameters()), 1)
    partition: Partition | None = None
    for share in (0.5 / num_stages, 0.0):  # the large ones; all of them
        opened: set[str] = set()

        def is_open(path: str, module: nn.Module, share: float = share, opened: set[str] = opened) -> bool:
            if path in closed or not _can_open(module):
                return False
            large = sum(p.numel() for p in module.parameters()) > share * size
            asked = any(name.startswith(f"{path}.") for name in user_cut)
            if large or asked or type(module).forward is nn.Sequential.forward:
                opened.add(path)
                return True
            return False

        partition = _traced_partition(model, inputs, is_open, opened, closed, meta_copy)
        if len(partition.layers) >= 2 * num_stages:
            break
    assert partition is not None
    decides = branches_on_shape(partition.train) or branches_on_shape(partition.evaluation)
    return replace(partition, meta_copy=meta_copy()) if decides else partition


def branches_on_shape(traced: TracedForward) -> bool:
    """Whether a forward may differ for a batch of another shape."""
    return any(node.target is expect for node in traced.graph.nodes)


def _can_open(module: nn.Module) -> bool:
    if is_run_again(module):
        return False  # as a whole
    if _has_hooks(module):
        return False  # a user's hook needs the module itself
    if type(module).forward is nn.Sequential.forward or isinstance(module, _OPENS_AS_USERS):
        return True
    return not type(module).__module__.startswith(("torch.nn", "torch.ao"))


def _has_hooks(module: nn.Module) -> bool:
    hooks = (
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *module._backward_hooks.values(),
    )
    return any(not getattr(hook, "__module__", "").startswith("shoal.") for hook in hooks)


def _why_closed(model: nn.Module) -> str:
    if _has_hooks(model):
        return "it has hooks of its own, which no stage would run"
    if is_run_again(model):
        return "checkpoint_activations runs all of it again as one block"
    return "it is one layer of torch's own, which has no parts"


def _traced_partition(
    model: nn.Module,
    inputs: Tree,
    is_open: Callable[[str, nn.Module], bool],
    opened: set[str],
    closed: dict[str, str],
    meta_copy: Callable[[], MetaCopy | None],
) -> Partition:
    with evaluating(module for module in model.modules() if isinstance(module, _BatchNorm)):
        _run(model, sample(inputs, 2))  # an error of the model itself keeps its own traceback
    while True:
        try:
            if not _can_open(model):
                raise Untraceable("", _why_closed(model))
            # BatchNorm accepts no batch of one, and a synchronised one would wait for other ranks.
            with evaluating(module for module in model.modules() if isinstance(module, _BatchNorm)):
                train = _twice(model, inputs, is_open, meta_copy)
            with evaluating(model.modules()):
                evaluation = _twice(model, inputs, is_open, meta_copy)
            break
        except Untraceable as error:
            path = error.path
            while path and path not in opened:
                path = path.rpartition(".")[0]
            if not path:
                raise ConfigError(
                    f"a {type(model).__name__} cannot be cut into stages: its own forward cannot be followed, because {error.reason}. "
                    "Nothing was trained; take that out of the model's forward into one of its modules, which then stays whole, or "
                    "use fsdp or tp."
                ) from None
            closed[path] = error.reason
            opened.clear()
    layers = tuple(_layers(model, train, evaluation))
    return _partition(model, inputs, train, evaluation, layers, closed, opened)


def partition_by_blocks(model: nn.Module, inputs: Tree) -> Partition | None:
    """Split at repeated blocks, each stage running the user's own forward; None for a model without a row of them."""
    if not _can_open(model):
        return None
    few = sample(inputs, NUM_SAMPLES)
    try:
        found = block_forwards(model, few)
    except Exception:  # of the user's or torch's, on values without data: such a forward has no row of blocks
        return None
    if found is None:
        return None
    train, evaluation = found
    rows = zip(train.units, train.begins, evaluation.begins, strict=True)
    layers = tuple(Layer(unit.name, begin, later, unit.holds) for unit, begin, later in rows)
    return _partition(model, inputs, train, evaluation, layers, {}, ())


def _partition(
    model: nn.Module,
    inputs: Tree,
    train: TracedForward,
    evaluation: TracedForward,
    layers: tuple[Layer, ...],
    closed: Mapping[str, str],
    opened: Collection[str],
) -> Partition:
    draws = any(node.meta["draws"] for node in train.graph.nodes)
    draws_later = any(node.meta["draws"] for node in evaluation.graph.nodes)
    with evaluating(model.modules()):
        is_dependent_in_evaluation = not draws_later and _is_batch_dependent(model, inputs)
    known = any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
    known = known or _changes_buffers(model, inputs)
    return Partition(
        model,
        train,
        evaluation,
        layers,
        dict(closed),
        draws,
        draws_later,
        known or is_dependent_in_evaluation or (not draws and _is_batch_dependent(model, inputs)),
        is_dependent_in_evaluation,
        frozenset(opened),
    )


def _twice(
    model: nn.Module,
    inputs: Tree,
    is_open: Callable[[str, nn.Module], bool],
    meta_copy: Callable[[], MetaCopy | None],
) -> TracedForward:
    """Trace with batches of two sizes: they must give one graph, or the same layers and a graph that
    the meta copy reproduces.
    """
    one, other = (trace(model, sample(inputs, num), is_open) for num in (2, NUM_SAMPLES))
    path, reason = "", "what it does depends on the number of samples in a batch"
    for (at, mine), (_, its) in zip(one.signature(), other.signature(), strict=False):
        if mine != its:
            path, reason = at, f"{reason} ('{mine}' and '{its}')"[:300]
            break
    else:
        if len(one.graph.nodes) == len(other.graph.nodes):
            return other
    if [mark[1:] for mark in layer_starts(one)] == [mark[1:] for mark in layer_starts(other)]:
        copied = meta_copy()
        if copied is not None:
            found = copied.trace(sample(inputs, 2), is_open, training=model.training)
            if found is not None and found.node_texts() == one.node_texts():
                return other
    raise Untraceable(path, reason)


def _run(model: nn.Module, inputs: Tree) -> Any:
    with unchanged(model), torch.no_grad():
        return ModelCall(model)(inputs)


def _changes_buffers(model: nn.Module, inputs: Tree) -> bool:
    """Whether a forward leaves other buffers than it found (the power iteration of spectral_norm, say): then it runs once a step."""
    with unchanged(model), torch.no_grad(), contextlib.suppress(Exception):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        ModelCall(model)(sample(inputs, 2))
        return any(
            not torch.equal(before[name], now) for name, now in model.named_buffers() if name in before
        )
    return False


def _is_batch_dependent(model: nn.Module, inputs: Tree) -> bool:
    """Whether three samples together give another result than one by one, in the model's current mode."""
    three = sample(inputs, 3)
    with contextlib.suppress(Exception):  # a layer that accepts no batch of one (BatchNorm) is known already
        together = tensors(_run(model, three))
        apart = [tensors(_run(model, map_tensors(lambda t, n=n: t[n : n + 1], three))) for n in range(3)]  # type: ignore[misc]
        for number, tensor in enumerate(together):
            if tensor.dim() and tensor.shape[0] % 3 == 0:
                joined = torch.cat([alone[number] for alone in apart])
                if tensor.is_floating_point() and not torch.allclose(
                    tensor, joined, 1e-3, 1e-5, equal_nan=True
                ):
                    return True
    return False


# ---- layers ---------------------------------------------------------------------------------------


def free_nodes(traced: TracedForward) -> set[fx.Node]:
    """Nodes that every stage can compute for itself: inputs, weights, and functions of inputs and shapes alone."""
    changed = {node for each in traced.graph.nodes for node in each.meta["changes"]}
    free: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            free.add(node)
        elif node.op in ("call_function", "call_method") and node.target not in (check, expect):
            plain = not node.meta["draws"] and not node.meta["changes"] and node not in changed
            given = node.all_input_nodes
            if plain and all(n in free and not _is_weight(n) for n in given):
                free.add(node)
    return free


def _is_weight(node: fx.Node) -> bool:
    return (
        node.op == "get_attr"
        and isinstance(node.meta["example"], Tensor)
        and node.meta["example"].requires_grad
    )


def begins_layer(node: fx.Node, free: set[fx.Node]) -> str | None:
    """The name of the layer that begins with a node; None where the node belongs to the layer before."""
    if node.op == "call_module":
        return str(node.target)
    if node in free or node.op == "output":
        return None
    return next((str(given.target) for given in node.all_input_nodes if _is_weight(given)), None)


def layer_starts(traced: TracedForward) -> list[tuple[int, str, int]]:
    """Layer beginnings: node number, name, and occurrence of that name."""
    free, seen = free_nodes(traced), dict[str, int]()
    marks = []
    for number, node in enumerate(traced.graph.nodes):
        name = begins_layer(node, free)
        if name is not None:
            seen[name] = seen.get(name, 0) + 1
            marks.append((number, name, seen[name]))
    return marks


def _layers(model: nn.Module, train: TracedForward, evaluation: TracedForward) -> list[Layer]:
    names = {id(tensor): name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    marks, later = layer_starts(train), layer_starts(evaluation)
    at_later = {(name, nth): number for number, name, nth in later}
    both = {(name, nth) for _, name, nth in marks} & at_later.keys()
    nodes = list(train.graph.nodes)
    found = []
    for at, (number, name, nth) in enumerate(marks):
        end = marks[at + 1][0] if at + 1 < len(marks) else len(nodes)
        begin_later = at_later.get((name, nth))
        if begin_later is not None:
            before = {(n, k) for _, n, k in marks[:at]} & both
            before_later = {(n, k) for m, n, k in later if m < begin_later} & both
            if before != before_later:
                begin_later = None
        begin = 0 if at == 0 else number
        holds = dict.fromkeys(
            names[id(tensor)]
            for node in nodes[begin:end]
            for tensor in held_tensors(model, node)
            if id(tensor) in names
        )
        found.append(Layer(name, begin, 0 if at == 0 else begin_later, tuple(holds)))
    return found


def held_tensors(model: nn.Module, node: fx.Node) -> list[Tensor]:
    """Parameters and buffers of the model that a node uses, as a module or as direct inputs."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        own = [*module.parameters(), *module.buffers()]
    else:
        own = []
    for given in node.all_input_nodes:
        if given.op == "get_attr" and not str(given.target).startswith("_constant_"):
            value = attribute(model, str(given.target))
            own += [value] if isinstance(value, Tensor) else []
    return own


def spare_of(partition: Partition, used: Sequence[Collection[str]]) -> list[list[str]]:
    """Modules and parameters unused by the first batch that other shapes may need, by stage: assigned
    with the layer defined before them.

    `used`: by stage, paths of what it uses.
    """
    spare: list[list[str]] = [[] for _ in used]
    if partition.meta_copy is None:
        return spare
    held = {id(tensor) for paths in used for path in paths for tensor in _tensors_at(partition.model, path)}
    at = 0

    def visit(prefix: str, module: nn.Module) -> None:
        nonlocal at
        members = [*module.named_parameters(recurse=False), *module.named_children()]
        for name, member in members:
            path = prefix + name
            homes = [number for number, paths in enumerate(used) if path in paths]
            if homes:
                at = homes[-1]
            elif path in partition.opened or isinstance(member, (nn.ModuleList, nn.ModuleDict)):
                assert isinstance(member, nn.Module)
                visit(f"{path}.", member)
            elif (own := _tensors_at(partition.model, path)) and not any(
                id(tensor) in held for tensor in own
            ):
                spare[at].append(path)

    visit("", partition.model)
    return spare


def _tensors_at(model: nn.Module, path: str) -> list[Tensor]:
    if path.startswith("_constant_"):
        return []
    found = attribute(model, path)
    if isinstance(found, nn.Module):
        return [*found.parameters(), *found.buffers()]
    return [found] if isinstance(found, Tensor) else []


def live_at(traced: TracedForward, begin: int, free: set[fx.Node] | None = None) -> list[fx.Node]:
    """Values computed before a node and used at or after it."""
    free = free_nodes(traced) if free is None else free
    nodes = list(traced.graph.nodes)
    number = {node: at for at, node in enumerate(nodes)}
    return [
        node
        for node in nodes[:begin]
        if node not in free and any(number[user] >= begin for user in node.users)
    ]


def segments_of(traced: TracedForward, begins: Sequence[int], *, training: bool) -> list[StageSegment]:
    """Cut the forward before these nodes."""
    if isinstance(traced, BlockForward):
        return block_segments(traced, begins)
    nodes, free = list(traced.graph.nodes), free_nodes(traced)
    bounds = [0, *begins[1:], len(nodes)]
    lives = [[], *(live_at(traced, begin, free) for begin in begins[1:]), []]
    return [
        _segment(nodes, free, own, lives[at], lives[at + 1], is_last=at == len(begins) - 1, training=training)
        for at in range(len(begins))
        for own in [nodes[bounds[at] : bounds[at + 1]]]
    ]


def decisions_of(traced: TracedForward) -> Callable[[Sequence[Any]], None] | None:
    """A check of every branch on shapes, given the inputs; None where layers must run to know the shapes."""
    free = free_nodes(traced)
    decisions = [node for node in traced.graph.nodes if node.target is expect]
    if any(given not in free for node in decisions for given in node.all_input_nodes):
        return None
    segment = _segment(list(traced.graph.nodes), free, decisions, (), (), is_last=False, training=False)
    if segment.targets:
        return None
    return lambda inputs: segment.run(None, *(inputs[number] for number in segment.inputs))


def _segment(
    nodes: Sequence[fx.Node],
    free: set[fx.Node],
    own: Sequence[fx.Node],
    takes: Sequence[fx.Node],
    gives: Sequence[fx.Node],
    *,
    is_last: bool,
    training: bool,
) -> StageSegment:
    needed = _with_free([*(node for node in own if node not in free), *(n for n in gives if n in free)], free)
    chosen = [node for node in nodes if node in needed or (node in set(own) and node not in free)]
    inputs = [node for node in chosen if node.op == "placeholder"]
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in [*inputs, *takes]}
    changed = {node for each in chosen for node in each.meta["changes"]}
    for node in takes:
        if node in changed and isinstance(node.meta["example"], Tensor):
            # Values from outside are not written into.
            made[node] = graph.call_method("clone", (made[node],))
    grad_is_off = False
    for node in chosen:
        if node.op in ("placeholder", "output"):
            continue
        if training and node.meta["no_grad"] != grad_is_off:
            grad_is_off = not grad_is_off
            graph.call_function(torch._C._set_grad_enabled, (not grad_is_off,))
        made[node] = graph.node_copy(node, made.__getitem__)
    if grad_is_off:
        graph.call_function(torch._C._set_grad_enabled, (True,))
    if is_last:
        graph.output(map_arg(nodes[-1].args[0], made.__getitem__))
    else:
        graph.output(tuple(made[node] for node in gives))
    code = graph.python_code("self")
    held = [node for node in chosen if node.op in ("call_module", "get_attr")]
    given = tuple(node.meta["example"] for node in gives)
    is_sent = p2p.why_not(given) is None  # else a segment that is only measured
    return StageSegment(
        tuple(node.name for node in takes),
        tuple(node.name for node in gives),
        tuple(int(str(node.target).removeprefix("input_")) for node in inputs),
        tuple(dict.fromkeys(str(node.target) for node in held)),
        _forward_from_src(code.src, code.globals),
        tuple(tensor.requires_grad for tensor in p2p.pack(given)[0]) if is_sent else (),
        any(node.meta["draws"] for node in chosen),
        _trains_beside(chosen, takes),
    )


def _with_free(roots: Iterable[fx.Node], free: set[fx.Node]) -> set[fx.Node]:
    """The free nodes that these need."""
    todo, needed = [given for node in roots for given in node.all_input_nodes], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in free and node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    return needed


def _trains_beside(chosen: Sequence[fx.Node], takes: Sequence[fx.Node]) -> bool:
    reached = set(takes)
    for node in chosen:
        if any(given in reached for given in node.all_input_nodes):
            reached.add(node)
        elif node.op not in ("placeholder", "get_attr", "output") and _requires_grad(node):
            return True
    return False


def _requires_grad(node: fx.Node) -> bool:
    example = node.meta["example"]
    values = example if isinstance(example, (tuple, list)) else [example]
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


class SegmentModule(nn.Module):
    """Some modules and tensors of the user's model under their own names; nothing is copied."""

    def __init__(self, model: nn.Module, targets: Iterable[str], constants: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._held: set[str] = set()
        self.hold(model, targets, constants)

    def hold(self, model: nn.Module, targets: Iterable[str], constants: Mapping[str, Tensor]) -> None:
        for path in dict.fromkeys(targets):
            if path in self._held:
                continue
            self._held.add(path)
            owner, _, name = path.rpartition(".")
            place: nn.Module = self
            for step in owner.split(".") if owner else ():
                if step not in place._modules:
                    place.add_module(step, nn.Module())
                place = place.get_submodule(step)
            value = constants[path] if path in constants else attribute(model, path)
            if isinstance(value, nn.Parameter):
                place.register_parameter(name, value)
            elif isinstance(value, nn.Module):
                place.add_module(name, value)
            elif isinstance(value, Tensor):
                place.register_buffer(name, value, persistent=False)
            else:
                setattr(place, name, value)
