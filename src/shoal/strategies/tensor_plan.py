"""Which layers are cut over the ranks of `tp`, and why not the others.

Linear layers are paired: those that feed a block's inside are cut by columns,
the one that closes it by rows, and everything between them works on a part of
the features: the two halves of an MLP, the projections of an attention. The
pairs are found by tracing each module's own forward, one level deep. Decides
only; `tensor_cut.py` does it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from shoal.core.errors import ConfigError

STYLES = ("colwise", "rowwise", "replicated")

ALONE_BYTES = 1 << 20
"""A linear layer or embedding without a partner is cut from this size on: its output has to be gathered then."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is done to one layer."""

    layer: str
    style: str
    """colwise, rowwise, colwise alone (its output is gathered), or replicated."""

    reason: str


@dataclass(slots=True)
class Plan:
    """What is done to every layer that has parameters."""

    degree: int
    rows: dict[str, Row] = field(default_factory=dict)

    def add(self, layer: str, style: str, reason: str) -> None:
        """Decide about a layer, once."""
        self.rows.setdefault(layer, Row(layer, style, reason))

    def is_settled(self, layer: str) -> bool:
        """Whether nobody may decide otherwise any more: it is cut, or the user has spoken."""
        row = self.rows.get(layer)
        return row is not None and (row.style != "replicated" or row.reason.startswith("tensor_plan"))

    @property
    def num_cut(self) -> int:
        """Layers of which each rank holds a part."""
        return sum(row.style != "replicated" for row in self.rows.values())

    def table(self) -> str:
        """For people: a line per layer."""
        width = max((len(name) for name in self.rows), default=0)
        lines = [f"  {row.layer:<{width}}  {row.style:<13} {row.reason}" for row in self.rows.values()]
        return "\n".join([f"tensor parallel over {self.degree}:", *lines])


def find_plan(model: nn.Module, degree: int, user_plan: Mapping[str, str] | None = None) -> Plan:
    """A plan for every layer; the user's patterns first. Refuses a model of which nothing can be cut."""
    plan = Plan(degree)
    _take_users(plan, model, user_plan or {})
    tied = _tied(model)
    for name, module in model.named_modules():
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            _pair_transformer(plan, name, module)
        elif any(isinstance(child, (nn.Linear, nn.Sequential)) for child in module.children()):
            _pair(plan, name, module, tied)
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            _leave(plan, name, module, tied)
    if not plan.num_cut:
        reasons = "; ".join(f"'{row.layer}': {row.reason}" for row in list(plan.rows.values())[:5])
        raise ConfigError(
            f"no layer of this model can be cut over {degree} ranks ({reasons or 'it has no parameters'}). Nothing was trained; "
            "use --strategy ddp or fsdp, another degree, or say how with tensor_plan={'blocks.*.fc1': 'colwise', ...}."
        )
    return plan


def _take_users(plan: Plan, model: nn.Module, patterns: Mapping[str, str]) -> None:
    layers = {name: module for name, module in model.named_modules() if name}
    for pattern, style in patterns.items():
        if style not in STYLES:
            raise ConfigError(f"tensor_plan says '{style}' for '{pattern}'; a layer is {', '.join(STYLES)}.")
        found = [name for name in layers if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            raise ConfigError(f"tensor_plan names '{pattern}', and no layer of the model is called so.")
        for name in found:
            module = layers[name]
            if style != "replicated":
                reason = _why_not(module, style, plan.degree)
                if reason:
                    raise ConfigError(f"tensor_plan cuts '{name}' {style}, which cannot be: {reason}.")
            plan.add(name, style, f"tensor_plan: '{pattern}'")


def _why_not(module: nn.Module, style: str, degree: int) -> str | None:
    """Why a layer cannot be cut; None where it can."""
    if isinstance(module, nn.Linear):
        size = module.out_features if style == "colwise" else module.in_features
        what = "outputs" if style == "colwise" else "inputs"
    elif isinstance(module, nn.Embedding) and style == "colwise":
        size, what = module.embedding_dim, "columns"
    else:
        return f"it is a {type(module).__name__}, and linear layers and embeddings can be cut"
    return None if size % degree == 0 else f"its {size} {what} cannot be divided by {degree}"


def _tied(model: nn.Module) -> set[int]:
    seen: set[int] = set()
    tied: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def _pair_transformer(plan: Plan, name: str, module: nn.Module) -> None:
    prefix = f"{name}." if name else ""
    first, second = module.get_submodule("linear1"), module.get_submodule("linear2")
    why = _why_not(first, "colwise", plan.degree) or _why_not(second, "rowwise", plan.degree)
    if why is None:
        plan.add(f"{prefix}linear1", "colwise", f"closed by {prefix}linear2")
        plan.add(f"{prefix}linear2", "rowwise", f"closes {prefix}linear1")
    for child_name, child in module.named_modules():
        if isinstance(child, nn.MultiheadAttention):
            plan.add(
                f"{prefix}{child_name}",
                "replicated",
                "nn.MultiheadAttention keeps its projections in one piece",
            )
            plan.add(f"{prefix}{child_name}.out_proj", "replicated", "belongs to an nn.MultiheadAttention")


class _OneLevel(fx.Tracer):
    """Sees a module's own forward: its children are leaves, but for sequences, which are part of it."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not isinstance(module, nn.Sequential)


def _pair(plan: Plan, name: str, module: nn.Module, tied: set[int]) -> None:
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
        if any(plan.is_settled(each) for each in names):
            continue
        why = _why_not_pair(openers, closing, path, linears, tied, plan.degree)
        if why is None and any(called.count(str(node.target)) > 1 for node in (*openers, closing)):
            why = "it is called more than once"
        if why is not None:
            for each in names:
                if each not in plan.rows:
                    plan.rows[each] = Row(each, "replicated", why)
            continue
        for each in names[:-1]:
            plan.rows[each] = Row(each, "colwise", f"closed by {names[-1]}")
        plan.rows[names[-1]] = Row(names[-1], "rowwise", f"closes {', '.join(names[:-1])}")


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


def _mark_shapes(graph: fx.Graph) -> None:
    """Note of every node whether it is a size, or arithmetic with sizes: those carry no features."""
    for node in graph.nodes:  # what a node is computed from comes before it, so one pass does
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
        why = _why_not(linears[node], "colwise", degree)
        if why:
            return why
    why = _why_not(linears[closing], "rowwise", degree)
    if why:
        return why
    if any(id(p) in tied for node in (*openers, closing) for p in linears[node].parameters(recurse=False)):
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


def _leave(plan: Plan, name: str, module: nn.Module, tied: set[int]) -> None:
    """A layer without a partner."""
    if plan.is_settled(name):
        return
    num_bytes = sum(
        parameter.numel() * parameter.element_size() for parameter in module.parameters(recurse=False)
    )
    if isinstance(module, (nn.Linear, nn.Embedding)):
        if any(id(parameter) in tied for parameter in module.parameters(recurse=False)):
            plan.rows[name] = Row(name, "replicated", "its weight is shared with another layer")
            return
        why = _why_not(module, "colwise", plan.degree)
        if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
            why = "its rows are updated one by one"
        if why is None and num_bytes >= ALONE_BYTES:
            plan.rows[name] = Row(name, "colwise alone", "no partner; its output is gathered")
            return
        plan.add(name, "replicated", why or "no partner, and too small to cut alone")
        return
    plan.add(name, "replicated", f"a {type(module).__name__} is not cut")


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:100]
