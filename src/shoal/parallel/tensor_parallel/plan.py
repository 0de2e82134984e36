"""Tensor-parallel plan: which layers are partitioned over the ranks of `tp`, and why not the others.

Linear layers are paired: those that open a block are partitioned by columns, the one that closes it
by rows, and everything between them works on a part of the features: the two halves of an MLP, the
projections of an attention. Pairs are found by tracing each module's own forward, one level deep.
The plan only decides; `cut.py` applies it.
"""

from __future__ import annotations

import fnmatch
import inspect
import operator
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import torch
from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

from shoal.errors import ConfigError
from shoal.parallel.state import attribute, first_line, tied_parameters
from shoal.parallel.tensor_parallel.attention import PACKED, why_not_by_heads
from shoal.parallel.tensor_parallel.blocks import Block
from shoal.parallel.tensor_parallel.channels import ChannelGroup, find_groups
from shoal.parallel.tensor_parallel.packing import Packing
from shoal.parallel.tensor_parallel.views import (
    blocks_of,
    feature_dims,
    is_dropout,
    is_part_of_shape,
    is_shape,
    is_softmax,
    is_split,
    is_view,
    mark_shapes,
    name_of,
    num_parts,
    view_sizes,
)

# Treat each position of a sequence alone, if they normalise over the last dim.
NORMS = (nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """The decision about one layer."""

    layer: str
    style: str
    """colwise, rowwise, heads (an attention), channels (each alone), colwise alone (its output is gathered), sequence (runs on a
    part of it), or replicated."""

    reason: str


@dataclass(slots=True)
class TensorPlan:
    """The decision about every layer that has parameters."""

    degree: int
    is_sequence: bool = False
    """Whether activations between pairs are sharded along the sequence."""

    rows: dict[str, PlanRow] = field(default_factory=dict)
    inside: set[str] = field(default_factory=set)
    """Layers without parameters within a pair: they work on sharded features."""

    parameters_inside: list[str] = field(default_factory=list)
    """Parameters that a forward uses within a pair."""

    packed: dict[str, int] = field(default_factory=dict)
    """Packed parameters and their number of blocks (q, k and v), each of which is sharded by itself."""

    splits_blocks: set[str] = field(default_factory=set)
    """Modules whose forward splits the output of a packed layer into its blocks."""

    inputs_inside: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules whose inputs of these names, such as a mask, are used within a pair; or whose result may be sharded."""

    closed: set[str] = field(default_factory=set)
    """Colwise layers whose sharded output only goes to a rowwise one."""

    local: dict[str, str] = field(default_factory=dict)
    """Layers that run on plain tensors, and the style of each; among them replicated ones "inside" a block."""

    roots: set[str] = field(default_factory=set)
    """Modules whose forward runs on plain parts, however it is written."""

    fixed: set[str] = field(default_factory=set)
    """Layers whose weights are read past their own forward: cut by heads with their attention, or not at all."""

    def add(self, layer: str, style: str, reason: str) -> None:
        """Decide about a layer; the first decision stands."""
        self.rows.setdefault(layer, PlanRow(layer, style, reason))

    def replace(self, layer: str, style: str, reason: str) -> None:
        """Decide about a layer, whatever was decided before."""
        self.rows[layer] = PlanRow(layer, style, reason)

    def is_decided(self, layer: str) -> bool:
        """Whether the decision is final: the layer is cut, or the user's plan names it."""
        row = self.rows.get(layer)
        if row is None:
            return False
        is_fixed = layer in self.fixed or layer in self.local
        return row.style != "replicated" or row.reason.startswith("tensor_plan") or is_fixed

    @property
    def num_cut(self) -> int:
        return sum(row.style not in ("replicated", "sequence") for row in self.rows.values())

    def packing_of(self, model: nn.Module) -> Packing:
        parameters = dict(model.named_parameters())
        return Packing(
            self.degree, dict(self.packed), {name: parameters[name].shape[0] for name in self.packed}
        )

    def table(self) -> str:
        """The plan as printed: a line per layer."""
        width = max((len(name) for name in self.rows), default=0)
        lines = [f"  {row.layer:<{width}}  {row.style:<13} {row.reason}" for row in self.rows.values()]
        between = ", between its pairs a part of the sequence on each" if self.is_sequence else ""
        return "\n".join([f"tensor parallel over {self.degree}{between}:", *lines])


def why_not(module: nn.Module, style: str, degree: int) -> str | None:
    if style == "sequence":
        return why_not_sequence(module)
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
        return "its rows are updated one by one"
    if isinstance(module, (nn.Linear, nn.Embedding)) and "weight" not in module._parameters:
        return "its weight is computed from other parameters"
    if isinstance(module, nn.Linear):
        size = module.out_features if style == "colwise" else module.in_features
        what = "outputs" if style == "colwise" else "inputs"
    elif isinstance(module, nn.Embedding):
        size = module.embedding_dim if style == "colwise" else module.num_embeddings
        what = "columns" if style == "colwise" else "rows"
    else:
        return f"it is a {type(module).__name__}, and linear layers and embeddings can be cut"
    return None if size % degree == 0 else f"its {size} {what} cannot be divided by {degree}"


def why_not_sequence(module: nn.Module) -> str | None:
    if isinstance(module, _DropoutNd):
        return None
    if not isinstance(module, NORMS):
        return f"it is a {type(module).__name__}, and dropout, LayerNorm and RMSNorm can run on a part of the sequence"
    dims = len(module.normalized_shape)
    return None if dims == 1 else f"it normalises over {dims} dims, of which the sequence may be one"


def is_tied(module: nn.Module, tied: set[int]) -> bool:
    return any(id(parameter) in tied for parameter in module.parameters(recurse=False))


_CUMULATIVE = {"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"}
"""Operations that DTensor computes on each shard by itself where the dim is negative (torch 2.13)."""


@dataclass(frozen=True, slots=True)
class PairPath:
    """The operations between a layer and the linear layers that feed it."""

    openers: list[fx.Node]
    """The linear layers whose outputs become its input."""

    path: list[fx.Node]
    given: list[fx.Node]
    """Inputs of the module used on the path, such as a mask, that feed no opener."""

    @property
    def featured(self) -> list[fx.Node]:
        """Nodes of the path that work on the openers' features."""
        path, found = {*self.path}, {*self.openers}
        for node in self.path[0].graph.nodes if path else ():  # in the order of the forward
            if node in path and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return [node for node in self.path if node in found]


class Pairing:
    """Decides whether some layers can be cut by columns and the one they feed by rows."""

    def __init__(
        self,
        between: PairPath,
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
        return [each or 1 for each in self._found]

    def why_not(self, tied: set[int]) -> str | None:
        linears, openers = self._linears, self._between.openers
        for node, num_blocks in zip(openers, self._found, strict=True):
            strangers = self._other_users(node)
            if strangers:
                return f"its output is also used by {strangers}"
            if num_blocks is None:
                return "its output is split into parts, which lie across the ranks"
            width = _linear(linears[node]).out_features // num_blocks
            own = {key for key, _ in linears[node].named_parameters(recurse=False)}
            is_plain = type(linears[node]).forward is nn.Linear.forward and "forward" not in vars(
                linears[node]
            )
            if num_blocks > 1 and (own - {"weight", "bias"} or not is_plain):
                return "its output lies in blocks, and it is more than a weight and a bias"
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
            widths = [self._width, *(num // blocks[each] for each, num in outputs.items())]
            dims = feature_dims(node, [outputs[source]] if source in blocks else widths)
            in_blocks = dims is not None and len(dims) in (2, 3) and num_blocks == dims[0] > 1
            sizes = view_sizes(node) if dims is None else dims[1:] if in_blocks else dims
            several = [size for size in sizes if size is not None and size > 1]
            # Sharded is the first dim of the features with more than one: most often their heads.
            odd = [size for size in (several if dims is None else several[:1]) if size % self._degree]
            if odd:
                return f"its output is viewed in {odd[0]} parts or heads, which cannot be divided by {self._degree}"
        if is_split(node) and num_blocks == 1 and not self._is_within_heads(node):
            return "its output is split into parts, which lie across the ranks"
        if node.op == "call_function" and node.target in (torch.cat, torch.concat):
            return "its output is joined with others'"
        if getattr(node.target, "__name__", node.target) in _CUMULATIVE:
            return "its output is added up from one number to the next"
        is_softmaxed = node.op == "call_module" and is_softmax(node, self._children)
        if is_softmaxed and not any(is_view(each) for each in self._path):
            return "its output is made weights that add up to one, over all of it"
        return None

    def _is_within_heads(self, split: fx.Node) -> bool:
        """Whether the split stays within each head."""
        source = split.all_input_nodes[0]
        outputs = [_linear(self._linears[each]).out_features for each in self._between.openers]
        dims = feature_dims(source, outputs) if is_view(source) else None
        by_last = (split.args[2] if len(split.args) > 2 else split.kwargs.get("dim")) in (-1,)
        return dims is not None and len(dims) == 2 and by_last

    def _other_users(self, node: fx.Node) -> str | None:
        """A user of a layer's output besides the path to its partner. An attention's weights may be part of the result."""
        allowed = {*self._path, self._closing}
        todo, seen = [(user, node) for user in node.users], set[fx.Node]()
        while todo:
            user, given = todo.pop()
            if user.op == "output" and self._is_weights(given):
                self.returns_weights = True
                continue
            if user in seen or is_shape(user):
                continue
            seen.add(user)
            if user not in allowed:
                return "the module's result" if user.op == "output" else name_of(user)
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


class _ShapeProxy(fx.Proxy):
    """Proxy for a tensor or a shape while a forward is traced."""

    def __len__(self) -> int:
        """The length of `x.shape[:-1]`, as in `view(*x.shape[:-1], -1, 64)`: batch and sequence.

        A guess that does not matter: sizes of features are read from the end.
        """
        return 2 if is_part_of_shape(self.node) else super().__len__()


class _OneLevel(fx.Tracer):
    """Traces a module's own forward: its children are leaves, except nn.Sequential, which is opened."""

    proxy_buffer_attributes = True  # a mask of which a part is taken, as long as the sequence

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _ShapeProxy(node, self)

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not isinstance(module, nn.Sequential)

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        """Iterate where the number of items is known: `for each in self.qkv(x).chunk(3, -1)`."""
        num = len(obj) if is_part_of_shape(obj.node) else num_parts(obj.node)
        return (
            super().iter(obj)
            if num is None
            else iter([operator.getitem(obj, number) for number in range(num)])
        )


def pair(plan: TensorPlan, name: str, module: nn.Module, tied: set[int]) -> None:
    """Decide about the linear layers that this module's own forward calls."""
    prefix = f"{name}." if name else ""
    try:
        graph = _traced(module)
    except Exception as error:  # a user's forward may do anything to a tracer
        for child_name, child in module.named_children():
            if isinstance(child, nn.Linear):
                plan.add(
                    prefix + child_name,
                    "replicated",
                    f"its module's forward cannot be traced ({first_line(error)})",
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
        if any(each in plan.local for each in names):
            continue
        # In a chain of three, the second closes the first and cannot open for the third.
        is_decided = any(plan.is_decided(each) for each in names)
        wanted = ["colwise"] * len(openers) + ["rowwise"]
        if is_decided and [plan.rows[each].style if each in plan.rows else "" for each in names] != wanted:
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
        if not is_decided:
            for each, num_blocks in zip(names, pairing.blocks, strict=False):
                in_blocks = f", in {num_blocks} blocks" if num_blocks > 1 else ""
                plan.replace(each, "colwise", f"closed by {names[-1]}{in_blocks}")
            plan.rows[names[-1]] = PlanRow(names[-1], "rowwise", f"closes {', '.join(names[:-1])}")
        for opener, each, num_blocks in zip(openers, names, pairing.blocks, strict=False):
            if num_blocks > 1:
                plan.splits_blocks.add(name)
                plan.packed |= {
                    f"{each}.{key}": num_blocks for key, _ in linears[opener].named_parameters(recurse=False)
                }
        # With a switch set otherwise than during the trace, a forward may return more.
        if between.given or pairing.returns_weights or _defaults(module):
            known = plan.inputs_inside.get(name, ())
            plan.inputs_inside[name] = (*known, *(str(node.target) for node in between.given))
        for node in between.path:
            if node.op == "call_module":
                plan.inside.add(prefix + str(node.target))
            plan.parameters_inside += [
                prefix + str(each.target)
                for each in node.all_input_nodes
                if each.op == "get_attr" and isinstance(attribute(module, str(each.target)), nn.Parameter)
            ]


def _traced(module: nn.Module) -> fx.Graph:
    """The graph of a forward with its switches at their defaults; where that fails, with all defaults."""
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
) -> PairPath:
    """Path from the linear layers that feed this one; empty if anything other than module inputs feeds it too."""
    openers: list[fx.Node] = []
    path: list[fx.Node] = []
    given: list[fx.Node] = []
    for node in _ancestors(closing.all_input_nodes, stop=linears):
        if node in linears:
            openers.append(node)
        elif node.op == "placeholder":
            given.append(node)
        elif node.op == "call_module" and not isinstance(children[str(node.target)], _KEEPS_FEATURES):
            return PairPath([], [], [])
        elif node.op != "get_attr":
            path.append(node)
    fed = _ancestors([each for opener in openers for each in opener.all_input_nodes])
    if any(node in fed for node in given):
        return PairPath([], [], [])
    return PairPath(sorted(openers, key=str), path, sorted(given, key=str))


def _ancestors(nodes: Iterable[fx.Node], stop: Container[fx.Node] = ()) -> dict[fx.Node, None]:
    """All nodes that these are computed from, except sizes; the search ends at `stop`."""
    todo, seen = list(nodes), dict[fx.Node, None]()
    while todo:
        node = todo.pop()
        if node in seen or is_shape(node):
            continue
        seen[node] = None
        if node not in stop:
            todo += node.all_input_nodes
    return seen


_KEEPS_FEATURES = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardswish, nn.Mish, nn.ReLU6,
    nn.Dropout, nn.Identity, nn.Flatten, nn.Softmax,
)  # fmt: skip


STYLES = ("colwise", "rowwise", "heads", "replicated", "sequence")

ALONE_BYTES = 1 << 20
"""A linear layer or embedding without a partner is cut from this size on: its output has to be gathered then."""


def find_plan(
    model: nn.Module,
    degree: int,
    user_plan: Mapping[str, str] | None = None,
    *,
    sequence: bool = False,
    blocks: Sequence[Block] = (),
) -> TensorPlan:
    """Plan every layer; the user's patterns first, then blocks that were tried. Refuses a model of which nothing can be cut."""
    plan = TensorPlan(degree, is_sequence=sequence or "sequence" in (user_plan or {}).values())
    tied = tied_parameters(model)
    attentions = {n: each for n, each in model.named_modules() if isinstance(each, nn.MultiheadAttention)}
    for name in attentions:
        plan.fixed |= {name, _out_of(name)}
    _apply_user_plan(plan, model, user_plan or {}, tied)
    for block in blocks:
        _add_block(plan, block)
    for name, module in attentions.items():
        _cut_by_heads(plan, name, module, tied)
    for name, module in model.named_modules():
        if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            _pair_transformer(plan, name, module)
        elif any(isinstance(child, (nn.Linear, nn.Sequential)) for child in module.children()):
            pair(plan, name, module, tied)
    if not plan.is_sequence:
        for group in find_groups(model, degree, plan.is_decided):
            _add_channels(plan, group, model, tied)
    _cut_tied(plan, model, tied)
    for row in list(plan.rows.values()):
        if row.style == "colwise" and row.layer not in plan.closed:
            reason = f"{row.reason}; no rowwise layer closes it, so its output is gathered"
            plan.replace(row.layer, "colwise alone", reason)
    for name, module in model.named_modules():
        if sequence and isinstance(module, (*NORMS, _DropoutNd)) and name not in plan.inside:
            why = why_not_sequence(module)
            plan.add(name, "replicated" if why else "sequence", why or "runs on a part of the sequence")
        if any(True for _ in module.parameters(recurse=False)):
            _plan_unpaired(plan, name, module, tied)
    if not plan.num_cut:
        reasons = "; ".join(f"'{row.layer}': {row.reason}" for row in list(plan.rows.values())[:5])
        raise ConfigError(
            f"no layer of this model can be cut over {degree} ranks ({reasons or 'it has no parameters'}). Nothing was trained; "
            "use --strategy ddp or fsdp, another degree, or say how with tensor_plan={'blocks.*.fc1': 'colwise', ...}."
        )
    return plan


def _apply_user_plan(plan: TensorPlan, model: nn.Module, patterns: Mapping[str, str], tied: set[int]) -> None:
    layers = {name: module for name, module in model.named_modules() if name}
    for pattern, style in patterns.items():
        if style not in STYLES:
            raise ConfigError(
                f"tensor_plan says '{style}' for '{pattern}', which is no way to cut a layer. Nothing was trained; a layer is "
                f"{', '.join(STYLES)}."
            )
        found = [name for name in layers if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            close = get_close_matches(pattern, layers, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            some = ", ".join(f"'{name}'" for name in list(layers)[:5]) + (", ..." if len(layers) > 5 else "")
            raise ConfigError(
                f"tensor_plan names '{pattern}', and no layer of the model is called so.{hint} Nothing was trained; its layers are "
                f"{some or 'none: the model is one layer itself'}, and a pattern may hold * and ?."
            )
        for name in found:
            module = layers[name]
            if style != "replicated":
                reason = _why_not_user_style(plan, name, module, style)
                if reason is None and style != "sequence" and is_tied(module, tied):
                    reason = "its weight is shared with another layer, and is cut with it or not at all"
                if reason:
                    raise ConfigError(
                        f"tensor_plan cuts '{name}' {style} over {plan.degree} ranks, which cannot be: {reason}. Nothing was trained; "
                        f"leave '{pattern}' out of it, or say 'replicated'."
                    )
            plan.add(name, style, f"tensor_plan: '{pattern}'")


def _why_not_user_style(plan: TensorPlan, name: str, module: nn.Module, style: str) -> str | None:
    if style == "heads":
        if isinstance(module, nn.MultiheadAttention):
            return why_not_by_heads(module, plan.degree)
        return f"it is a {type(module).__name__}, and an nn.MultiheadAttention can be cut by heads"
    if name in plan.fixed:
        return "an nn.MultiheadAttention is cut by heads with all its projections, or not at all"
    return why_not(module, style, plan.degree)


def _add_block(plan: TensorPlan, block: Block) -> None:
    """Cut a block as its names say, unless the user's plan says something of a layer in it."""
    names = block.names()
    if any(plan.is_decided(name) for name in names):
        return
    closing = ", ".join(name for name, style in names.items() if style == "rowwise")
    openers = ", ".join(name for name, style in names.items() if style == "colwise")
    reasons = {
        "colwise": f"closed by {closing}",
        "rowwise": f"closes {openers}",
        "inside": "works on parts: its gradient is summed",
    }
    for name, style in names.items():
        row_style = "replicated" if style == "inside" else style
        plan.replace(name, row_style, f"{reasons[style]} ({block.source})")
        plan.local[name] = style
        plan.closed.add(name)
    plan.roots.add(block.root)


def _add_channels(plan: TensorPlan, group: ChannelGroup, model: nn.Module, tied: set[int]) -> None:
    """Cut convolutions around a group of values, or note why not."""
    styles = dict.fromkeys(group.makers, "colwise") | dict.fromkeys(group.inside, "channels")
    styles |= dict.fromkeys(group.takers, "rowwise")
    shared = next((name for name in styles if is_tied(model.get_submodule(name), tied)), None)
    why = group.why_whole or (f"the weight of '{shared}' is shared with another layer" if shared else None)
    if why is not None:
        for name in group.makers:
            plan.add(name, "replicated", why)
        return
    makers, takers = ", ".join(group.makers), ", ".join(group.takers)
    for name, style in styles.items():
        reasons = {"colwise": f"closed by {takers}", "rowwise": f"closes {makers}"}
        plan.replace(name, style, reasons.get(style, f"each channel alone, between {makers} and {takers}"))
        plan.local[name] = style
        plan.closed.add(name)


def _out_of(attention: str) -> str:
    return f"{attention}.out_proj" if attention else "out_proj"


def _cut_by_heads(plan: TensorPlan, name: str, module: nn.MultiheadAttention, tied: set[int]) -> None:
    """Cut a whole attention or nothing of it: its forward reads the projections' weights past the layers that hold them."""
    out, prefix = _out_of(name), f"{name}." if name else ""
    why = why_not_by_heads(module, plan.degree)
    if any(is_tied(each, tied) for each in module.modules()):
        why = "its weight is shared with another layer"
    users = next((plan.rows[each] for each in (name, out) if each in plan.rows), None)
    if users is not None and users.style != "heads":
        why = users.reason
    if why is None:
        share = f"{module.num_heads // plan.degree} of its {module.num_heads} heads on each rank"
        plan.add(name, "heads", share)
        plan.replace(out, "heads", f"closes {name or 'the attention'}")
        parameters = dict(module.named_parameters(recurse=False))
        plan.packed |= {prefix + key: 3 for key in PACKED if key in parameters}
        return
    plan.add(name, "replicated", why)
    plan.add(out, "replicated", f"belongs to {name or 'an attention'}, which is not cut")


def _cut_tied(plan: TensorPlan, model: nn.Module, tied: set[int]) -> None:
    """Cut a large embedding table tied to an output layer: both by the table's rows."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in tied:
                holders.setdefault(id(parameter), []).append(name)
    for names in holders.values():
        modules = {name: model.get_submodule(name) for name in names}
        tables = [name for name, module in modules.items() if isinstance(module, nn.Embedding)]
        scoring = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        if (
            not tables
            or len(tables) + len(scoring) != len(names)
            or any(plan.is_decided(name) for name in names)
        ):
            continue
        num_bytes = sum(each.numel() * each.element_size() for each in modules[tables[0]].parameters())
        if num_bytes < ALONE_BYTES or any(why_not(modules[name], "rowwise", plan.degree) for name in tables):
            continue
        for name in tables:
            plan.replace(
                name, "rowwise", f"its weight is also that of {', '.join(sorted({*names} - {name}))}"
            )
        for name in scoring:
            plan.replace(
                name, "colwise alone", f"its weight is also that of {tables[0]}; its output is gathered"
            )


def _pair_transformer(plan: TensorPlan, name: str, module: nn.Module) -> None:
    prefix = f"{name}." if name else ""
    first, second = module.get_submodule("linear1"), module.get_submodule("linear2")
    why = why_not(first, "colwise", plan.degree) or why_not(second, "rowwise", plan.degree)
    if why is None:
        plan.add(f"{prefix}linear1", "colwise", f"closed by {prefix}linear2")
        plan.add(f"{prefix}linear2", "rowwise", f"closes {prefix}linear1")
        plan.closed.add(f"{prefix}linear1")
    for child_name, child in module.named_children():
        if isinstance(child, nn.Dropout) and child_name == "dropout":
            plan.inside.add(prefix + child_name)  # between the two


def _plan_unpaired(plan: TensorPlan, name: str, module: nn.Module, tied: set[int]) -> None:
    """Decide about a layer without a partner."""
    if plan.is_decided(name):
        return
    num_bytes = sum(
        parameter.numel() * parameter.element_size() for parameter in module.parameters(recurse=False)
    )
    if isinstance(module, (nn.Linear, nn.Embedding)):
        if is_tied(module, tied):
            plan.replace(name, "replicated", "its weight is shared with another layer")
            return
        why = why_not(module, "colwise", plan.degree)
        if why is None and num_bytes >= ALONE_BYTES:
            plan.replace(name, "colwise alone", "no partner; its output is gathered")
            return
        plan.add(name, "replicated", why or "no partner, and too small to cut alone")
        return
    own = [f"'{key}'" for key, _ in module.named_parameters(recurse=False)] if not name else []
    what = f"{', '.join(own[:3])} of the model itself" if own else f"a {type(module).__name__}"
    plan.add(name, "replicated", f"{what} is not cut")
