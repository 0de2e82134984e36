"""Pairs of linear layers, found by tracing a module's own forward one level deep.

Those that feed a block's inside are cut by columns, the one that closes it by
rows, and everything between them has to work on a part of the features.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from shoal.strategies.tensor_rows import Plan, Row, is_tied, why_not
from shoal.strategies.tensor_views import (
    blocks_of,
    feature_dims,
    is_dropout,
    is_softmax,
    is_split,
    is_view,
    numbers,
)


class _OneLevel(fx.Tracer):
    """Sees a module's own forward: its children are leaves, but for sequences, which are part of it."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not isinstance(module, nn.Sequential)


@dataclass(frozen=True, slots=True)
class _Between:
    """What lies between a layer and those that feed it."""

    openers: list[fx.Node]
    """The linear layers whose outputs become its input."""

    path: list[fx.Node]
    given: list[fx.Node]
    """Inputs of the module that are used on the way, such as a mask, and that no opener is fed with."""

    @property
    def featured(self) -> list[fx.Node]:
        """What works on the openers' features."""
        found = {*self.openers}
        for node in self.path[0].graph.nodes if self.path else ():  # in the order of the forward
            if node in self.path and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return [node for node in self.path if node in found]


def pair(plan: Plan, name: str, module: nn.Module, tied: set[int]) -> None:
    """Decide about the linear layers that this module's own forward calls."""
    prefix = f"{name}." if name else ""
    try:
        graph = _traced(module)
    except Exception as error:  # whatever a user's forward does to a tracer
        for child_name, child in module.named_children():
            if isinstance(child, nn.Linear):
                plan.add(
                    prefix + child_name,
                    "replicated",
                    f"its module's forward cannot be traced ({_short(error)})",
                )
        return
    children = dict(module.named_modules())
    linears = {
        node: children[str(node.target)]
        for node in graph.nodes
        if node.op == "call_module" and isinstance(children[str(node.target)], nn.Linear)
    }
    called = [str(node.target) for node in linears]
    for closing in linears:
        between = _between(closing, linears, children)
        openers = between.openers
        if not openers or closing in openers:
            continue
        names = [prefix + str(node.target) for node in (*openers, closing)]
        # In a chain of three, the second closes the first and cannot open for the third.
        is_settled = any(plan.is_settled(each) for each in names)
        wanted = ["colwise"] * len(openers) + ["rowwise"]
        if is_settled and [plan.rows[each].style if each in plan.rows else "" for each in names] != wanted:
            continue
        pairing = _Pairing(between, closing, linears, children, plan.degree)
        why = pairing.why_not(tied)
        if why is None and any(called.count(str(node.target)) > 1 for node in (*openers, closing)):
            why = "it is called more than once"
        if why is not None:
            for each in names:
                plan.add(each, "replicated", why)
            continue
        plan.closed.update(names[:-1])
        if not is_settled:
            for each, num_blocks in zip(names, pairing.blocks, strict=False):
                in_blocks = f", in {num_blocks} blocks" if num_blocks > 1 else ""
                plan.rows[each] = Row(each, "colwise", f"closed by {names[-1]}{in_blocks}")
            plan.rows[names[-1]] = Row(names[-1], "rowwise", f"closes {', '.join(names[:-1])}")
        for opener, each, num_blocks in zip(openers, names, pairing.blocks, strict=False):
            if num_blocks > 1:
                plan.taken_apart.add(name)
                plan.packed |= {
                    f"{each}.{key}": num_blocks for key, _ in linears[opener].named_parameters(recurse=False)
                }
        if between.given or pairing.returns_weights:
            known = plan.given_inside.get(name, ())
            plan.given_inside[name] = (*known, *(str(node.target) for node in between.given))
        for node in between.path:
            if node.op == "call_module":
                plan.inside.add(prefix + str(node.target))
            plan.parameters_inside += [
                prefix + str(each.target)
                for each in node.all_input_nodes
                if each.op == "get_attr" and isinstance(_attribute(module, str(each.target)), nn.Parameter)
            ]


def _traced(module: nn.Module) -> fx.Graph:
    """The graph of a forward; switches are as they are by default, and where that does not do, so is all that has a default."""
    # As the class has it: the module's own may have been replaced by one that runs it again.
    defaults = {
        key: each.default
        for key, each in inspect.signature(module.forward).parameters.items()
        if each.default is not inspect.Parameter.empty
    }
    switches = {key: each for key, each in defaults.items() if isinstance(each, (bool, int, float, str))}
    try:
        graph = _OneLevel().trace(module, switches)
    except Exception:
        if switches == defaults:
            raise
        graph = _OneLevel().trace(module, defaults)
    _mark_shapes(graph)
    return graph


def _between(
    closing: fx.Node, linears: Mapping[fx.Node, nn.Module], children: Mapping[str, nn.Module]
) -> _Between:
    """The linear layers whose outputs become this one's input, and nothing else but what a module is given beside theirs."""
    openers: list[fx.Node] = []
    path: list[fx.Node] = []
    given: list[fx.Node] = []
    for node in _ancestors(closing.all_input_nodes, stop=linears):
        if node in linears:
            openers.append(node)
        elif node.op == "placeholder":
            given.append(node)
        elif node.op == "call_module" and not isinstance(children[str(node.target)], _KEEPS_FEATURES):
            return _Between([], [], [])
        elif node.op != "get_attr":
            path.append(node)
    fed = _ancestors([each for opener in openers for each in opener.all_input_nodes])
    if any(node in fed for node in given):
        return _Between([], [], [])
    return _Between(sorted(openers, key=str), path, sorted(given, key=str))


def _ancestors(nodes: Iterable[fx.Node], stop: Container[fx.Node] = ()) -> dict[fx.Node, None]:
    """All that these are computed from, but for sizes; without what lies behind `stop`."""
    todo, seen = list(nodes), dict[fx.Node, None]()
    while todo:
        node = todo.pop()
        if node in seen or _is_shape(node):
            continue
        seen[node] = None
        if node not in stop:
            todo += node.all_input_nodes
    return seen


def _attribute(module: nn.Module, path: str) -> object:
    owner, _, key = path.rpartition(".")
    return getattr(module.get_submodule(owner), key, None)


def _mark_shapes(graph: fx.Graph) -> None:
    """Note of every node whether it is a size, or arithmetic with sizes: those carry no features."""
    for (
        node
    ) in graph.nodes:  # what a node is computed from comes before it: one pass, however many ways lead back
        inputs = node.all_input_nodes
        node.meta[_SHAPE] = (
            (node.op == "call_method" and node.target in ("size", "dim", "numel"))
            or (node.target is getattr and node.args[1] in ("shape", "device", "dtype"))
            or (node.op == "call_function" and bool(inputs) and all(each.meta[_SHAPE] for each in inputs))
        )


def _is_shape(node: fx.Node) -> bool:
    return bool(node.meta[_SHAPE])


_SHAPE = "shoal: is a shape"
_KEEPS_FEATURES = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardswish, nn.Mish, nn.ReLU6,
    nn.Dropout, nn.Identity, nn.Flatten, nn.Softmax,
)  # fmt: skip


class _Pairing:
    """Whether some layers can be cut by columns and the one behind them by rows."""

    def __init__(
        self,
        between: _Between,
        closing: fx.Node,
        linears: Mapping[fx.Node, nn.Module],
        children: Mapping[str, nn.Module],
        degree: int,
    ) -> None:
        self._between, self._closing, self._linears = between, closing, linears
        self._children, self._degree = children, degree
        self._path = between.featured
        self._width = _linear(linears[closing]).in_features
        self._found = [
            blocks_of(node, _linear(linears[node]).out_features, self._width) for node in between.openers
        ]
        self.returns_weights = False

    @property
    def blocks(self) -> list[int]:
        """Of each opener, in how many blocks its output is."""
        return [each or 1 for each in self._found]

    def why_not(self, tied: set[int]) -> str | None:
        """The reason, or None."""
        linears, openers = self._linears, self._between.openers
        for node, num_blocks in zip(openers, self._found, strict=True):
            strangers = self._strangers(node)
            if strangers:
                return f"its output is also used by {strangers}"
            if num_blocks is None:
                return "its output is split into parts, which lie across the ranks"
            width = _linear(linears[node]).out_features // num_blocks
            if num_blocks > 1 and width % self._degree:
                return f"its {num_blocks} blocks of {width} outputs cannot be divided by {self._degree}"
            why = why_not(linears[node], "colwise", self._degree)
            if why:
                return why
        why = why_not(linears[self._closing], "rowwise", self._degree)
        if why:
            return why
        if any(is_tied(linears[node], tied) for node in (*openers, self._closing)):
            return "its weight is shared with another layer"
        return next((why for node in self._path if (why := self._why_not_through(node))), None)

    def _why_not_through(self, node: fx.Node) -> str | None:
        blocks = dict(zip(self._between.openers, self.blocks, strict=True))
        source = node.all_input_nodes[0]
        num_blocks = blocks.get(source, 1)
        if is_view(node):
            outputs = {each: _linear(self._linears[each]).out_features for each in blocks}
            widths = [outputs[source]] if source in blocks else []
            widths += [self._width, *(num // blocks[each] for each, num in outputs.items())]
            dims = feature_dims(node, widths)
            in_blocks = dims is not None and len(dims) == 3 and num_blocks == dims[0] > 1
            sizes = numbers(node.args[1:]) if dims is None else dims[1:2] if in_blocks else dims[:1]
            odd = [size for size in sizes if size > 1 and size % self._degree]
            if odd:
                return f"its output is viewed in {odd[0]} parts or heads, which cannot be divided by {self._degree}"
        if is_split(node) and num_blocks == 1 and not self._is_within_heads(node):
            return "its output is split into parts, which lie across the ranks"
        if node.op == "call_function" and node.target in (torch.cat, torch.concat):
            return "its output is joined with others'"
        if is_softmax(node, self._children) and not any(is_view(each) for each in self._path):
            return "its output is made weights that add up to one, over all of it"
        return None

    def _is_within_heads(self, split: fx.Node) -> bool:
        """Whether each head is split for itself."""
        source = split.all_input_nodes[0]
        outputs = [_linear(self._linears[each]).out_features for each in self._between.openers]
        dims = feature_dims(source, outputs) if is_view(source) else None
        by_last = (split.args[2] if len(split.args) > 2 else split.kwargs.get("dim")) in (-1,)
        return dims is not None and len(dims) == 2 and by_last

    def _strangers(self, node: fx.Node) -> str | None:
        """Who uses a layer's output besides the way to its partner. Weights of an attention may be part of the result."""
        allowed = {*self._path, self._closing}
        todo, seen = [(user, node) for user in node.users], set[fx.Node]()
        while todo:
            user, given = todo.pop()
            if user.op == "output" and self._is_weights(given):
                self.returns_weights = True
                continue
            if user in seen or _is_shape(user):
                continue
            seen.add(user)
            if user not in allowed:
                return "the module's result" if user.op == "output" else _name(user)
            if user not in self._linears:
                todo += [(each, user) for each in user.users]
        return None

    def _is_weights(self, node: fx.Node) -> bool:
        while is_dropout(node, self._children):
            node = node.all_input_nodes[0]
        return is_softmax(node, self._children)


def _linear(module: nn.Module) -> nn.Linear:
    assert isinstance(module, nn.Linear)
    return module


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:100]
