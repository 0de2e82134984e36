"""Whether layers that feed another can be cut by columns and that one by rows: what lies between has to work on a part of the features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from shoal.parallel.tensor_parallel.plan_rows import is_tied, why_not
from shoal.parallel.tensor_parallel.views import (
    blocks_of,
    feature_dims,
    is_dropout,
    is_shape,
    is_softmax,
    is_split,
    is_view,
    name_of,
    view_sizes,
)

_CUMULATIVE = {"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"}
"""What DTensor computes on each part by itself where the dim is negative (torch 2.13)."""


@dataclass(frozen=True, slots=True)
class Between:
    """What lies between a layer and those that feed it."""

    openers: list[fx.Node]
    """The linear layers whose outputs become its input."""

    path: list[fx.Node]
    given: list[fx.Node]
    """Inputs of the module that are used on the way, such as a mask, and that no opener is fed with."""

    @property
    def featured(self) -> list[fx.Node]:
        """What works on the openers' features."""
        path, found = {*self.path}, {*self.openers}
        for node in self.path[0].graph.nodes if path else ():  # in the order of the forward
            if node in path and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return [node for node in self.path if node in found]


class Pairing:
    """Whether some layers can be cut by columns and the one behind them by rows."""

    def __init__(
        self,
        between: Between,
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
            own = {key for key, _ in linears[node].named_parameters(recurse=False)}
            if num_blocks > 1 and (own - {"weight", "bias"} or not _computes_as_linear(linears[node])):
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
            # What is cut is the first dim of the features that has more than one: their heads, most often.
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


def _computes_as_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)
