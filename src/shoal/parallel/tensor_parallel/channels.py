"""Plan of convolutions under tensor parallelism: which are partitioned by channels.

Values connected by operations on single channels (BatchNorm, ReLU, pooling, a depthwise
convolution, an addition) have their channels partitioned alike: a group. A group can be partitioned
if dense convolutions produce all of it and dense ones, or linear layers behind a flatten, consume
all of it: the producers are partitioned by output channels, the consumers by input channels. Any
other use keeps a group whole.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _MaxPoolNd

from shoal.parallel.tensor_parallel.local import has_hooks

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

_EACH_ALONE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardswish, nn.Hardsigmoid,
    nn.Hardtanh, nn.Mish, nn.Identity, nn.Upsample, nn.ZeroPad2d, _AvgPoolNd, _MaxPoolNd, _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd,
)  # fmt: skip
"""Layers without parameters that treat each channel alone."""

_FUNCTIONS = {
    operator.add, operator.iadd, operator.sub, operator.isub, operator.mul, operator.imul, operator.truediv, operator.neg,
    torch.add, torch.mul, torch.sub, torch.relu, torch.relu_, torch.sigmoid, torch.tanh, F.relu, F.relu6, F.gelu, F.silu, F.mish,
    F.sigmoid, F.tanh, F.elu, F.leaky_relu, F.softplus, F.hardswish, F.hardsigmoid, F.hardtanh, F.max_pool2d, F.avg_pool2d,
    F.max_pool1d, F.avg_pool1d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.interpolate,
    torch.max_pool2d, torch.avg_pool1d, torch.max_pool1d, torch.adaptive_avg_pool1d,
}  # fmt: skip

_METHODS = {
    "add",
    "add_",
    "mul",
    "mul_",
    "sub",
    "relu",
    "relu_",
    "sigmoid",
    "sigmoid_",
    "tanh",
    "contiguous",
    "clone",
}


@dataclass(slots=True)
class ChannelGroup:
    """Values whose channels are cut alike."""

    makers: list[str] = field(default_factory=list)
    takers: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    """Layers with parameters that treat each channel, or group of channels, alone."""

    why_whole: str | None = None
    order: int = 0

    @property
    def layers(self) -> list[str]:
        return [*self.makers, *self.inside, *self.takers]


class _ChannelTracer(fx.Tracer):
    """Opens everything but torch's own layers and those that are cut as one."""

    def __init__(self, is_deep: bool) -> None:
        super().__init__()
        self._is_deep = is_deep
        self.closed: list[str] = []
        """Modules with hooks, which would see values between their layers and others."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if has_hooks(m):
            self.closed.append(module_qualified_name)
            return True
        if isinstance(m, nn.Sequential):
            return False
        is_layer = isinstance(m, (_ConvNd, _BatchNorm)) or type(m).__module__.startswith("torch.nn")
        return is_layer or not self._is_deep


def find_groups(model: nn.Module, degree: int, taken: Callable[[str], bool]) -> list[ChannelGroup]:
    """The groups of every part of the model whose forward can be traced. `taken`: layers that are planned already.

    A layer is cut by its outputs or by its inputs, so neighbouring groups exclude each other: the forward's order, or small
    groups first (the two convolutions of a residual block), whichever cuts more.
    """
    found: list[ChannelGroup] = []
    _search(model, "", degree, found)
    free = [group for group in found if group.why_whole is None and not any(map(taken, group.layers))]
    chosen: dict[int, list[ChannelGroup]] = {}
    for groups in (free, sorted(free, key=lambda group: len(group.makers) + len(group.takers))):
        names: set[str] = set()
        kept: list[ChannelGroup] = []
        for group in groups:
            if names.isdisjoint(group.layers):
                names.update(group.layers)
                kept.append(group)
        num_cut = sum(each.numel() for name in names for each in model.get_submodule(name).parameters())
        chosen.setdefault(num_cut, kept)
    best = chosen[max(chosen)]
    for group in found:
        if group.why_whole is None and not any(group is each for each in best):
            group.why_whole = "the layers before or behind it are cut with others"
    return found


def _search(module: nn.Module, name: str, degree: int, found: list[ChannelGroup]) -> None:
    convolutions = [each for each in module.modules() if isinstance(each, _CONVOLUTIONS)]
    if not convolutions or isinstance(module, _ConvNd):
        return
    for is_deep in (True, False):
        try:
            tracer = _ChannelTracer(is_deep)
            graph = tracer.trace(module)
        except Exception:  # a user's forward may do anything to a tracer
            continue
        found += _Groups(graph, dict(module.named_modules()), f"{name}." if name else "", degree).found()
        if is_deep:
            for path in dict.fromkeys(tracer.closed):
                _search(module.get_submodule(path), f"{name}.{path}" if name else path, degree, found)
            return
        break
    for child_name, child in module.named_children():
        if not isinstance(child, nn.Sequential) or not _is_opened(found, child_name, name):
            _search(child, f"{name}.{child_name}" if name else child_name, degree, found)


def _is_opened(found: list[ChannelGroup], child: str, name: str) -> bool:
    prefix = f"{name}.{child}." if name else f"{child}."
    return any(each.startswith(prefix) for group in found for each in (*group.makers, *group.takers))


class _Groups:
    """Groups of values of one traced forward, by union of what an operation connects."""

    def __init__(self, graph: fx.Graph, layers: Mapping[str, nn.Module], prefix: str, degree: int) -> None:
        self._graph, self._layers, self._prefix, self._degree = graph, layers, prefix, degree
        self._parent: dict[object, object] = {}
        self._whole: dict[object, str] = {}
        called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        self._repeated = {each for each in called if called.count(each) > 1}
        self._ends: list[tuple[str, str, object]] = []
        self._num_dims: dict[fx.Node, int] = {}  # of the images, by the convolution they come from
        self._flat: set[fx.Node] = set()  # (batch, features), of which a linear layer takes the channels

    def found(self) -> list[ChannelGroup]:
        for node in self._graph.nodes:
            self._visit(node)
        groups: dict[object, ChannelGroup] = {}
        for value, why in self._whole.items():
            group = groups.setdefault(self._root(value), ChannelGroup())
            group.why_whole = group.why_whole or why
        for order, (kind, layer, value) in enumerate(self._ends):
            group = groups.setdefault(self._root(value), ChannelGroup())
            group.order = group.order or order + 1
            getattr(group, kind).append(self._prefix + layer)
        for group in groups.values():
            if group.why_whole is None and not (group.makers and group.takers):
                group.why_whole = "no other convolution takes its output"
        return sorted((each for each in groups.values() if each.order), key=lambda each: each.order)

    def _visit(self, node: fx.Node) -> None:
        given = node.all_input_nodes
        layer = self._layers.get(str(node.target)) if node.op == "call_module" else None
        dims = [self._num_dims[each] for each in given if each in self._num_dims]
        if isinstance(layer, _CONVOLUTIONS):
            self._num_dims[node] = len(layer.kernel_size)
        elif dims:
            self._num_dims[node] = dims[0]
        why = None
        if layer is not None and has_hooks(layer):
            why = f"'{node.target}' has a hook of the script's own, which would see a part of it"
        elif dims and _dims_said(layer, node) not in (None, dims[0]):
            what = _name(node) if layer is None else type(layer).__name__
            why = f"{what} is not for images of {dims[0]} dims, and takes channels for one"
        if why is not None:
            for each in (node, *given):
                self._pin(each, why)
        if isinstance(layer, (*_CONVOLUTIONS, nn.Linear)):
            self._visit_dense(node, layer)
        elif why is None and (
            (layer is not None and self._keeps_channels(node, layer))
            or (node.op == "call_function" and self._is_function(node))
            or (node.op == "call_method" and self._is_method(node))
        ):
            self._union(node, *given)
            if isinstance(layer, nn.Flatten) or _flattens(node) or not self._flat.isdisjoint(given):
                self._flat.add(node)
        elif _is_batch_size(node):
            self._pin(node, "a number")
        elif not (node.target is getattr and node.args[1] == "shape" and _only_batch_is_read(node)):
            what = "the result of its module" if node.op == "output" else _name(node)
            for each in (node, *given):
                self._pin(
                    each,
                    f"its channels are all used by {what}" if each is not node else "it is no convolution's",
                )

    def _visit_dense(self, node: fx.Node, layer: nn.Module) -> None:
        name, source = str(node.target), node.all_input_nodes[0]
        if isinstance(layer, nn.Linear):
            # Of a linear layer only the inputs: it has partners of its own behind it.
            self._end("takers", name, source)
            self._pin(node, "a linear layer makes it")
            if source not in self._flat:
                self._pin(source, "a linear layer takes its last dim")
            self._check(layer, name, layer.in_features, source)
            return
        assert isinstance(layer, _ConvNd)
        if layer.groups > 1:
            if layer.groups % self._degree == 0 and self._is_plain(layer, name):
                self._union(node, source)
                self._end("inside", name, node)
                return
            why = f"its {layer.groups} groups cannot be divided by {self._degree}"
            self._pin(source, why)
            self._pin(node, why)
            return
        self._end("takers", name, source)
        self._end("makers", name, node)
        self._check(layer, name, layer.in_channels, source)
        self._check(layer, name, layer.out_channels, node)

    def _check(self, layer: nn.Module, name: str, num: int, value: object) -> None:
        if num % self._degree:
            self._pin(value, f"{num} channels cannot be divided by {self._degree}")
        elif not self._is_plain(layer, name):
            what = (
                "it is called more than once"
                if name in self._repeated
                else "its weight is computed in its forward"
            )
            self._pin(value, what)

    def _is_plain(self, layer: nn.Module, name: str) -> bool:
        is_own = any(type(layer).forward is each.forward for each in (*_CONVOLUTIONS, nn.Linear))
        is_whole = "forward" not in vars(layer) and "weight" in layer._parameters
        return is_own and is_whole and name not in self._repeated

    def _keeps_channels(self, node: fx.Node, layer: nn.Module) -> bool:
        name = str(node.target)
        if isinstance(layer, _BatchNorm):
            # timm's has activations within it.
            is_known = all(isinstance(each, _EACH_ALONE) for each in layer.children())
            if is_known and name not in self._repeated and layer.num_features % self._degree == 0:
                self._end("inside", name, node)
                return True
            return False
        if isinstance(layer, nn.GroupNorm):
            if (
                type(layer) is nn.GroupNorm
                and layer.num_groups % self._degree == 0
                and name not in self._repeated
            ):
                self._end("inside", name, node)
                return True
            return False
        if isinstance(layer, nn.Flatten):
            return layer.start_dim == 1 and layer.end_dim == -1
        is_idle = isinstance(layer, (nn.Dropout, nn.Dropout2d)) and layer.p == 0
        return is_idle or isinstance(layer, _EACH_ALONE)

    def _is_function(self, node: fx.Node) -> bool:
        if node.target is torch.flatten:
            return _argument(node, 1, "start_dim") == 1 and _argument(node, 2, "end_dim") in (None, -1)
        if node.target in (torch.mean, torch.sum):
            return _leaves_channels(node) and self._num_dims.get(node.all_input_nodes[0]) == 2
        return node.target in _FUNCTIONS

    def _is_method(self, node: fx.Node) -> bool:
        if node.target == "flatten":
            return _argument(node, 1, "start_dim") == 1 and _argument(node, 2, "end_dim") in (None, -1)
        if node.target in ("view", "reshape"):
            first, rest = _argument(node, 1, "size"), _argument(node, 2, "rest")
            return len(node.args) == 3 and rest == -1 and isinstance(first, fx.Node) and _is_batch_size(first)
        if node.target in ("mean", "sum"):
            return _leaves_channels(node) and self._num_dims.get(node.all_input_nodes[0]) == 2
        return node.target in _METHODS

    # ---- union of values ------------------------------------------------------------------------

    def _root(self, value: object) -> object:
        while value in self._parent:
            value = self._parent[value]
        return value

    def _union(self, *values: object) -> None:
        first, *others = [
            self._root(each) for each in values if not (isinstance(each, fx.Node) and _is_batch_size(each))
        ]
        for each in others:
            if each is not first:
                self._parent[each] = first

    def _pin(self, value: object, why: str) -> None:
        self._whole.setdefault(value, why)

    def _end(self, kind: str, layer: str, value: object) -> None:
        self._ends.append((kind, layer, value))


def _argument(node: fx.Node, number: int, name: str) -> object:
    return node.args[number] if len(node.args) > number else node.kwargs.get(name)


def _leaves_channels(node: fx.Node) -> bool:
    """Whether a reduction is over rows and columns of an image alone, counted from the front or the end of four dims."""
    dims = _argument(node, 1, "dim")
    return isinstance(dims, (tuple, list)) and set(dims) in ({2, 3}, {-1, -2})


def _dims_said(layer: nn.Module | None, node: fx.Node) -> int | None:
    """Dims of the images that a pooling or a padding is for; None where it is for any."""
    kinds = [kind.__name__ for kind in type(layer).__mro__] if layer is not None else [_name(node)]
    said = [found for kind in kinds if (found := re.search(r"(?:pool|pad)(\d)d$", kind, re.IGNORECASE))]
    return int(said[0].group(1)) if said else None


def _flattens(node: fx.Node) -> bool:
    if _name(node) in ("mean", "sum"):
        return not _argument(node, 2, "keepdim")
    return _name(node) in ("flatten", "view", "reshape")


def _is_batch_size(node: fx.Node) -> bool:
    if node.op == "call_method" and node.target == "size":
        return _argument(node, 1, "dim") == 0
    return node.target is operator.getitem and _argument(node, 1, "") == 0 and _is_shape(node.args[0])


def _is_shape(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is getattr and node.args[1] == "shape"


def _only_batch_is_read(shape: fx.Node) -> bool:
    return all(_is_batch_size(user) for user in shape.users)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
