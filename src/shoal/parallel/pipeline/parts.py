"""A traced forward in parts, each a function of its own: what it takes from the part before, and what it gives to the next.

Values that a later part needs are handed on by those between. What follows
from the inputs alone is computed again where it is needed: every rank has
the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph_module import _forward_from_src
from torch.fx.node import map_arg

from shoal.parallel.pipeline import p2p as wire
from shoal.parallel.pipeline.partition import free_nodes
from shoal.parallel.pipeline.trace import Traced, attribute, expect


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a forward's operations."""

    takes: tuple[str, ...]
    """Names of the values that it is given by the part before it."""

    gives: tuple[str, ...]
    """Names of those that it gives to the next; empty where it is the last, which gives the model's output."""

    inputs: tuple[int, ...]
    """Numbers of the model's inputs that it reads itself."""

    targets: tuple[str, ...]
    """Paths of the modules, parameters and buffers that it uses."""

    run: Callable[..., Any]
    """Called with whoever has the targets as attributes, the inputs and what it takes."""

    needs_grad: tuple[bool, ...]
    """Which of the tensors that it gives need a gradient, in the order in which they are packed."""

    draws: bool
    """Whether it draws random numbers."""

    trains_beside: bool
    """Whether something in it is trained on which nothing that it takes has an influence."""


def live_at(traced: Traced, begin: int, free: set[fx.Node] | None = None) -> list[fx.Node]:
    """Values that go from before a node to it and those behind it."""
    free = free_nodes(traced) if free is None else free
    nodes = list(traced.graph.nodes)
    number = {node: at for at, node in enumerate(nodes)}
    return [
        node
        for node in nodes[:begin]
        if node not in free and any(number[user] >= begin for user in node.users)
    ]


def parts_of(traced: Traced, begins: Sequence[int], *, training: bool) -> list[Part]:
    """The forward cut before these nodes."""
    nodes, free = list(traced.graph.nodes), free_nodes(traced)
    bounds = [0, *begins[1:], len(nodes)]
    lives = [[], *(live_at(traced, begin, free) for begin in begins[1:]), []]
    return [
        _part(nodes, free, own, lives[at], lives[at + 1], is_last=at == len(begins) - 1, training=training)
        for at in range(len(begins))
        for own in [nodes[bounds[at] : bounds[at + 1]]]
    ]


def decisions_of(traced: Traced) -> Callable[[Sequence[Any]], None] | None:
    """Checks all that forward decides by shapes, given its inputs; None where it takes layers to know them."""
    free = free_nodes(traced)
    decisions = [node for node in traced.graph.nodes if node.target is expect]
    if any(given not in free for node in decisions for given in node.all_input_nodes):
        return None
    part = _part(list(traced.graph.nodes), free, decisions, (), (), is_last=False, training=False)
    if part.targets:
        return None
    return lambda inputs: part.run(None, *(inputs[number] for number in part.inputs))


def _part(
    nodes: Sequence[fx.Node],
    free: set[fx.Node],
    own: Sequence[fx.Node],
    takes: Sequence[fx.Node],
    gives: Sequence[fx.Node],
    *,
    is_last: bool,
    training: bool,
) -> Part:
    needed = _with_free([*(node for node in own if node not in free), *(n for n in gives if n in free)], free)
    chosen = [node for node in nodes if node in needed or (node in set(own) and node not in free)]
    inputs = [node for node in chosen if node.op == "placeholder"]
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in [*inputs, *takes]}
    changed = {node for each in chosen for node in each.meta["changes"]}
    for node in takes:
        if node in changed and isinstance(node.meta["example"], Tensor):
            made[node] = graph.call_method(
                "clone", (made[node],)
            )  # what came from outside is not written into
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
    return Part(
        tuple(node.name for node in takes),
        tuple(node.name for node in gives),
        tuple(int(str(node.target).removeprefix("input_")) for node in inputs),
        tuple(dict.fromkeys(str(node.target) for node in held)),
        _forward_from_src(code.src, code.globals),
        _needs_grad(tuple(node.meta["example"] for node in gives)),
        any(node.meta["draws"] for node in chosen),
        _trains_beside(chosen, takes),
    )


def _needs_grad(given: tuple[Any, ...]) -> tuple[bool, ...]:
    if wire.why_not(given) is not None:  # a part that is only measured
        return ()
    return tuple(tensor.requires_grad for tensor in wire.pack(given)[0])


def _with_free(roots: Iterable[fx.Node], free: set[fx.Node]) -> set[fx.Node]:
    """The nodes that every stage computes for itself and these need."""
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
    parts = example if isinstance(example, (tuple, list)) else [example]
    return any(isinstance(part, Tensor) and part.requires_grad for part in parts)


class Holder(nn.Module):
    """Parts of the user's model under their own names: the very modules and tensors, nothing copied."""

    def __init__(self, model: nn.Module, targets: Iterable[str], constants: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._held: set[str] = set()
        self.hold(model, targets, constants)

    def hold(self, model: nn.Module, targets: Iterable[str], constants: Mapping[str, Tensor]) -> None:
        """These too, where they are not here yet."""
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
