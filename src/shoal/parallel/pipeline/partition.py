"""Which layers of a model run one after the other, in training and in evaluation, and what goes from one to the next.

Opens modules as far as it takes to cut the model, and no further; says of each
that stays whole why. A position is a layer at which a stage may begin.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.data.tree import Tree, leaves, map_tensors, tensors
from shoal.errors import ConfigError
from shoal.parallel.activations import is_run_again
from shoal.parallel.compute import evaluating
from shoal.parallel.model_call import ModelCall
from shoal.parallel.pipeline.meta_copy import Blank, blank_of
from shoal.parallel.pipeline.trace import Traced, Untraceable, attribute, expect, forget, trace, unchanged

NUM_SAMPLES = 3
"""Of the batch with which a forward is traced."""

_OPENS_AS_USERS = (nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)


@dataclass(frozen=True, slots=True)
class Layer:
    """Some of a forward's operations that follow one another: a module, and what happens to its result before the next."""

    name: str
    """Path of the module, or of the parameter, in the user's model."""

    begin: int
    """Number of its first node in training's graph."""

    begin_in_evaluation: int | None
    """The same in evaluation's; None where that does something else here, so that no stage can begin."""

    holds: tuple[str, ...]
    """Parameters and buffers that it uses, by their first names in the model."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A model's forward as layers in a row."""

    model: nn.Module
    train: Traced
    evaluation: Traced
    layers: tuple[Layer, ...]
    closed: dict[str, str] = field(default_factory=dict)
    """Modules that stay whole although more cuts would have been of use, and why."""

    draws: bool = False
    """Whether it draws random numbers in training; `draws_in_evaluation`: also then."""

    draws_in_evaluation: bool = False
    mixes: bool = False
    """Whether a sample's result in training depends on the others of its batch; `mixes_in_evaluation`: also then."""

    mixes_in_evaluation: bool = False
    opened: frozenset[str] = frozenset()
    """Modules of which the inside was followed."""

    blank: Blank | None = None
    """To follow forward for batches of other shapes; None where it decides nothing by them, or cannot be copied."""

    def forget(self) -> None:
        """Let go of what every layer gave."""
        forget(self.train)
        forget(self.evaluation)


def sample(inputs: Tree, num: int) -> Tree:
    """So many samples of the inputs, repeated where there are fewer."""

    def some(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, torch.arange(num, device=tensor.device) % tensor.shape[0])

    return map_tensors(some, inputs)


def refuse_inputs(inputs: Tree) -> None:
    """Batches that cannot be cut into micro-batches."""
    for leaf in leaves(inputs):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            what = "a single number" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise ConfigError(
                f"a pipeline runs batches in parts, and the inputs hold {what}, which cannot be cut by samples. Nothing was "
                "trained; let batches hold tensors with the samples as first dimension, or use ddp or fsdp."
            )


def find_flow(
    model: nn.Module,
    inputs: Tree,
    num_stages: int,
    user_cut: Sequence[str] = (),
    whole: Mapping[str, str] | None = None,
) -> Flow:
    """The model's layers, as many as so many stages need; refuses a forward that is no graph.

    `whole`: modules that are not to be opened, and why.
    """
    refuse_inputs(inputs)
    if not model.training:
        model.train()
    closed = dict(whole or {})
    hooked = any(map(_has_hooks, model.modules()))  # who knows what they do, or keep
    blank = functools.cache(lambda: None if hooked else blank_of(model))
    size = max(sum(p.numel() for p in model.parameters()), 1)
    flow: Flow | None = None
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

        flow = _traced_flow(model, inputs, is_open, opened, closed, blank)
        if len(flow.layers) >= 2 * num_stages:
            break
    assert flow is not None
    decides = decides_by_shape(flow.train) or decides_by_shape(flow.evaluation)
    return replace(flow, blank=blank()) if decides else flow


def decides_by_shape(traced: Traced) -> bool:
    """Whether a forward may do something else for a batch of another shape."""
    return any(node.target is expect for node in traced.graph.nodes)


def _can_open(module: nn.Module) -> bool:
    if is_run_again(module):
        return False  # as a whole
    if _has_hooks(module):
        return False  # a hook of the user's wants the module itself
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


def _traced_flow(
    model: nn.Module,
    inputs: Tree,
    is_open: Callable[[str, nn.Module], bool],
    opened: set[str],
    closed: dict[str, str],
    blank: Callable[[], Blank | None],
) -> Flow:
    with evaluating(module for module in model.modules() if isinstance(module, _BatchNorm)):
        _run(model, sample(inputs, 2))  # what is wrong with the model itself is said by its own traceback
    while True:
        try:
            if not _can_open(model):
                raise Untraceable("", _why_closed(model))
            # BatchNorm takes no batch of one, and a synchronised one would wait for other ranks.
            with evaluating(module for module in model.modules() if isinstance(module, _BatchNorm)):
                train = _twice(model, inputs, is_open, blank)
            with evaluating(model.modules()):
                evaluation = _twice(model, inputs, is_open, blank)
            break
        except Untraceable as error:
            path = error.path
            while path and path not in opened:
                path = path.rpartition(".")[0]
            if not path:
                raise _refusal(model, error.reason) from None
            closed[path] = error.reason
            opened.clear()
    draws = any(node.meta["draws"] for node in train.graph.nodes)
    draws_later = any(node.meta["draws"] for node in evaluation.graph.nodes)
    with evaluating(model.modules()):
        mixes_later = not draws_later and _mixes(model, inputs)
    known = any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
    return Flow(
        model,
        train,
        evaluation,
        tuple(_layers(model, train, evaluation)),
        dict(closed),
        draws,
        draws_later,
        known or mixes_later or (not draws and _mixes(model, inputs)),
        mixes_later,
        frozenset(opened),
    )


def _refusal(model: nn.Module, reason: str) -> ConfigError:
    return ConfigError(
        f"a {type(model).__name__} cannot be cut into stages: its own forward cannot be followed, because {reason}. Nothing was "
        "trained; take that out of the model's forward into one of its modules, which then stays whole, or use fsdp or tp."
    )


def _twice(
    model: nn.Module,
    inputs: Tree,
    is_open: Callable[[str, nn.Module], bool],
    blank: Callable[[], Blank | None],
) -> Traced:
    """Traced with batches of two sizes, which have to give one graph, or the same layers in one that can be found anew."""
    one, other = (trace(model, sample(inputs, num), is_open) for num in (2, NUM_SAMPLES))
    path, reason = "", "what it does depends on the number of samples in a batch"
    for (at, mine), (_, its) in zip(one.signature(), other.signature(), strict=False):
        if mine != its:
            path, reason = at, f"{reason} ('{mine}' and '{its}')"[:300]
            break
    else:
        if len(one.graph.nodes) == len(other.graph.nodes):
            return other
    if [mark[1:] for mark in marks_of(one)] == [mark[1:] for mark in marks_of(other)]:
        copied = blank()
        if copied is not None:
            found = copied.trace(sample(inputs, 2), is_open, training=model.training)
            if found is not None and found.told() == one.told():
                return other
    raise Untraceable(path, reason)


def _run(model: nn.Module, inputs: Tree) -> Any:
    with unchanged(model), torch.no_grad():
        return ModelCall(model)(inputs)


def _mixes(model: nn.Module, inputs: Tree) -> bool:
    """Whether three samples give together something else than alone, in the mode that the model is in."""
    three = sample(inputs, 3)
    with contextlib.suppress(Exception):  # a layer that takes no batch of one mixes, and is known for it
        together = tensors(_run(model, three))
        apart = [tensors(_run(model, map_tensors(lambda t, n=n: t[n : n + 1], three))) for n in range(3)]  # type: ignore[misc]
        for number, tensor in enumerate(together):
            if tensor.dim() and tensor.shape[0] % 3 == 0:
                joined = torch.cat([part[number] for part in apart])
                if tensor.is_floating_point() and not torch.allclose(
                    tensor, joined, 1e-3, 1e-5, equal_nan=True
                ):
                    return True
    return False


# ---- layers ---------------------------------------------------------------------------------------


def free_nodes(traced: Traced) -> set[fx.Node]:
    """Nodes that every stage can have for itself: inputs, weights, and what follows from inputs and shapes alone."""
    changed = {node for each in traced.graph.nodes for node in each.meta["changes"]}
    free: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            free.add(node)
        elif node.op in ("call_function", "call_method") and node.target is not expect:
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
    """The name of the layer that begins with a node; None where it goes on with the one before."""
    if node.op == "call_module":
        return str(node.target)
    if node in free or node.op == "output":
        return None
    return next((str(given.target) for given in node.all_input_nodes if _is_weight(given)), None)


def marks_of(traced: Traced) -> list[tuple[int, str, int]]:
    """Where layers begin: number of the node, name, and the how manieth of that name."""
    free, seen = free_nodes(traced), dict[str, int]()
    marks = []
    for number, node in enumerate(traced.graph.nodes):
        name = begins_layer(node, free)
        if name is not None:
            seen[name] = seen.get(name, 0) + 1
            marks.append((number, name, seen[name]))
    return marks


def _layers(model: nn.Module, train: Traced, evaluation: Traced) -> list[Layer]:
    names = {id(tensor): name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    marks, later = marks_of(train), marks_of(evaluation)
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
    """Parameters and buffers of the model that a node needs, those of the nodes it is given included where they are weights."""
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


def spare_of(flow: Flow, used: Sequence[Collection[str]]) -> list[list[str]]:
    """By stage, what the first batch did not need and batches of other shapes may: with the layer that is defined before it.

    `used`: by stage, paths of what it uses.
    """
    spare: list[list[str]] = [[] for _ in used]
    if flow.blank is None:
        return spare
    held = {id(tensor) for paths in used for path in paths for tensor in _tensors_at(flow.model, path)}
    at = 0

    def visit(prefix: str, module: nn.Module) -> None:
        nonlocal at
        members = [*module.named_parameters(recurse=False), *module.named_children()]
        for name, member in members:
            path = prefix + name
            homes = [number for number, paths in enumerate(used) if path in paths]
            if homes:
                at = homes[-1]
            elif path in flow.opened or isinstance(member, (nn.ModuleList, nn.ModuleDict)):
                assert isinstance(member, nn.Module)
                visit(f"{path}.", member)
            elif (own := _tensors_at(flow.model, path)) and not any(id(tensor) in held for tensor in own):
                spare[at].append(path)

    visit("", flow.model)
    return spare


def _tensors_at(model: nn.Module, path: str) -> list[Tensor]:
    if path.startswith("_constant_"):
        return []
    found = attribute(model, path)
    if isinstance(found, nn.Module):
        return [*found.parameters(), *found.buffers()]
    return [found] if isinstance(found, Tensor) else []
