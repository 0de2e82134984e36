"""Pairs of linear layers, found by tracing a module's own forward one level deep.

Those that feed a block's inside are cut by columns, the one that closes it by
rows, and everything between them has to work on a part of the features.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Container, Iterable, Iterator, Mapping

from torch import fx, nn

from shoal.parallel.tensor_parallel.pairing import Between, Pairing
from shoal.parallel.tensor_parallel.plan_rows import Plan, Row
from shoal.parallel.tensor_parallel.views import is_part_of_shape, is_shape, mark_shapes, num_parts


class _Traced(fx.Proxy):
    """Stands for a tensor, or a shape, while a forward is traced."""

    def __len__(self) -> int:
        """Of a shape without its last sizes, as in `view(*x.shape[:-1], -1, 64)`: batch and sequence.

        Which is a guess that does not matter: what becomes of features is read from the end.
        """
        return 2 if is_part_of_shape(self.node) else super().__len__()


class _OneLevel(fx.Tracer):
    """Sees a module's own forward: its children are leaves, but for sequences, which are part of it."""

    proxy_buffer_attributes = True  # a mask of which a part is taken, as long as the sequence

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Traced(node, self)

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not isinstance(module, nn.Sequential)

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        """One by one, where it is known how many there are: `for each in self.qkv(x).chunk(3, -1)`."""
        num = len(obj) if is_part_of_shape(obj.node) else num_parts(obj.node)
        return (
            super().iter(obj)
            if num is None
            else iter([operator.getitem(obj, number) for number in range(num)])
        )


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
    widths = {node: layer.out_features for node, layer in linears.items()}
    widths |= {node.all_input_nodes[0]: layer.in_features for node, layer in linears.items()}
    mark_shapes(graph, widths)
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
        pairing = Pairing(between, closing, linears, children, plan.degree)
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
        # With a switch set otherwise than when it was traced, a forward may give back more.
        if between.given or pairing.returns_weights or _defaults(module):
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
    defaults = _defaults(module)
    switches = {key: each for key, each in defaults.items() if isinstance(each, (bool, int, float, str))}
    try:
        graph = _OneLevel().trace(module, switches)
    except Exception:
        if switches == defaults:
            raise
        graph = _OneLevel().trace(module, defaults)
    return graph


def _defaults(module: nn.Module) -> dict[str, object]:
    parameters = inspect.signature(module.forward).parameters.items()
    return {key: each.default for key, each in parameters if each.default is not inspect.Parameter.empty}


def _between(
    closing: fx.Node, linears: Mapping[fx.Node, nn.Module], children: Mapping[str, nn.Module]
) -> Between:
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
            return Between([], [], [])
        elif node.op != "get_attr":
            path.append(node)
    fed = _ancestors([each for opener in openers for each in opener.all_input_nodes])
    if any(node in fed for node in given):
        return Between([], [], [])
    return Between(sorted(openers, key=str), path, sorted(given, key=str))


def _ancestors(nodes: Iterable[fx.Node], stop: Container[fx.Node] = ()) -> dict[fx.Node, None]:
    """All that these are computed from, but for sizes; without what lies behind `stop`."""
    todo, seen = list(nodes), dict[fx.Node, None]()
    while todo:
        node = todo.pop()
        if node in seen or is_shape(node):
            continue
        seen[node] = None
        if node not in stop:
            todo += node.all_input_nodes
    return seen


def _attribute(module: nn.Module, path: str) -> object:
    owner, _, key = path.rpartition(".")
    return getattr(module.get_submodule(owner), key, None)


_KEEPS_FEATURES = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardswish, nn.Mish, nn.ReLU6,
    nn.Dropout, nn.Identity, nn.Flatten, nn.Softmax,
)  # fmt: skip


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:100]
