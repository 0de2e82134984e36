"""Pairs of linear layers, found by tracing a module's own forward one level deep.

Those that feed a block's inside are cut by columns, the one that closes it by
rows, and everything between them has to work on a part of the features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn

from shoal.strategies.tensor_rows import Plan, Row, is_tied, why_not


class _OneLevel(fx.Tracer):
    """Sees a module's own forward: its children are leaves, but for sequences, which are part of it."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not isinstance(module, nn.Sequential)


def pair(plan: Plan, name: str, module: nn.Module, tied: set[int]) -> None:
    """Decide about the linear layers that this module's own forward calls."""
    prefix = f"{name}." if name else ""
    try:
        graph = _OneLevel().trace(module)
        _mark_shapes(graph)
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
        openers, path = _openers(closing, linears, children)
        if not openers or closing in openers:
            continue
        names = [prefix + str(node.target) for node in (*openers, closing)]
        # In a chain of three, the second closes the first and cannot open for the third.
        is_settled = any(plan.is_settled(each) for each in names)
        wanted = ["colwise"] * len(openers) + ["rowwise"]
        if is_settled and [plan.rows[each].style if each in plan.rows else "" for each in names] != wanted:
            continue
        why = _why_not_pair(openers, closing, path, linears, tied, plan.degree)
        if why is None and any(called.count(str(node.target)) > 1 for node in (*openers, closing)):
            why = "it is called more than once"
        if why is not None:
            for each in names:
                plan.add(each, "replicated", why)
            continue
        plan.closed.update(names[:-1])
        if not is_settled:
            for each in names[:-1]:
                plan.rows[each] = Row(each, "colwise", f"closed by {names[-1]}")
            plan.rows[names[-1]] = Row(names[-1], "rowwise", f"closes {', '.join(names[:-1])}")
        for node in path:
            if node.op == "call_module":
                plan.inside.add(prefix + str(node.target))
            plan.parameters_inside += [
                prefix + str(each.target)
                for each in node.all_input_nodes
                if each.op == "get_attr" and isinstance(_attribute(module, str(each.target)), nn.Parameter)
            ]


def _openers(
    closing: fx.Node, linears: Mapping[fx.Node, nn.Module], children: Mapping[str, nn.Module]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The linear layers whose outputs, and nothing else, become this one's input; and what lies between."""
    openers: list[fx.Node] = []
    path: list[fx.Node] = []
    todo, seen = list(closing.all_input_nodes), set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in linears:
            openers.append(node)
        elif node.op == "placeholder" or (
            node.op == "call_module" and not isinstance(children[str(node.target)], _KEEPS_FEATURES)
        ):
            return [], []
        elif node.op != "get_attr" and not _is_shape(node):
            path.append(node)
            todo += node.all_input_nodes
    return sorted(openers, key=lambda node: str(node)), path


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
    nn.Dropout, nn.Identity, nn.Flatten,
)  # fmt: skip


def _why_not_pair(
    openers: list[fx.Node],
    closing: fx.Node,
    path: list[fx.Node],
    linears: Mapping[fx.Node, nn.Module],
    tied: set[int],
    degree: int,
) -> str | None:
    allowed = {*path, closing}
    for node in openers:
        strangers = _strangers(node, allowed, {*linears})
        if strangers:
            return f"its output is also used by {strangers}"
        why = why_not(linears[node], "colwise", degree)
        if why:
            return why
    why = why_not(linears[closing], "rowwise", degree)
    if why:
        return why
    if any(is_tied(linears[node], tied) for node in (*openers, closing)):
        return "its weight is shared with another layer"
    for node in path:
        if node.op == "call_method" and node.target in ("view", "reshape", "unflatten"):
            sizes = _numbers(node.args[2:] if node.target == "unflatten" else node.args[1:])
            odd = [size for size in sizes if size > 1 and size % degree]
            if odd:
                return f"its output is viewed in {odd[0]} parts or heads, which cannot be divided by {degree}"
        if node.op == "call_method" and node.target in ("chunk", "split"):
            return "its output is split into parts, which lie across the ranks"
        if node.op == "call_function" and node.target in (torch.chunk, torch.split):
            return "its output is split into parts, which lie across the ranks"
        if node.op == "call_function" and node.target in (torch.cat, torch.concat):
            return "its output is joined with others'"
    return None


def _strangers(node: fx.Node, allowed: set[fx.Node], linears: set[fx.Node]) -> str | None:
    """Who uses a layer's output besides the way to its partner."""
    todo, seen = list(node.users), set()
    while todo:
        user = todo.pop()
        if user in seen or _is_shape(user):
            continue
        seen.add(user)
        if user not in allowed:
            return "the module's result" if user.op == "output" else _name(user)
        if user not in linears:
            todo += list(user.users)
    return None


def _numbers(args: object) -> list[int]:
    if isinstance(args, (tuple, list)):
        return [number for each in args for number in _numbers(each)]
    return [args] if isinstance(args, int) else []


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:100]
