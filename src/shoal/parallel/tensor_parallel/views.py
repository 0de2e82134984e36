"""Graph queries about a traced forward: into how many heads it views features, into which blocks it splits them."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx, nn

_SHAPE = "shoal: is a shape"
_SIZE = "shoal: is so much"
_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv)


def mark_shapes(graph: fx.Graph, widths: Mapping[fx.Node, int]) -> None:
    """Mark nodes that are sizes or arithmetic with sizes: those carry no features.

    Their values are noted too, where they follow from `widths`, the number of features of some nodes.
    """
    # A node's inputs come before it: one pass suffices, whatever the number of paths.
    for node in graph.nodes:
        inputs = node.all_input_nodes
        node.meta[_SHAPE] = (
            (node.op == "call_method" and node.target in ("size", "dim", "numel"))
            or (node.target is getattr and node.args[1] in ("shape", "device", "dtype"))
            or (node.op == "call_function" and bool(inputs) and all(each.meta[_SHAPE] for each in inputs))
        )
        node.meta[_SIZE] = _size(node, widths)


def _size(node: fx.Node, widths: Mapping[fx.Node, int]) -> int | None:
    for operation in _ARITHMETIC:
        if node.target is operation and len(node.args) == 2:
            first, second = (_known(each) for each in node.args)
            if first is None or second is None or (operation is operator.floordiv and second == 0):
                return None
            return int(operation(first, second))
    of: object = None
    dim: object = None
    if node.op == "call_method" and node.target == "size":
        of, dim = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    elif node.target is operator.getitem and _is_whole_shape(node.args[0]):
        shape = node.args[0]
        of, dim = shape.args[0] if isinstance(shape, fx.Node) else None, node.args[1]
    if isinstance(of, fx.Node) and dim in (-1, 2):  # of (batch, sequence, features)
        return widths.get(of)
    return None


def _known(what: object) -> int | None:
    if isinstance(what, fx.Node):
        size: int | None = what.meta.get(_SIZE)
        return size
    return what if isinstance(what, int) else None


def is_shape(node: fx.Node) -> bool:
    return bool(node.meta[_SHAPE])


def is_view(node: fx.Node) -> bool:
    return _calls(node, ("view", "reshape", "unflatten"), (torch.reshape, torch.unflatten))


def is_split(node: fx.Node) -> bool:
    return _calls(node, ("chunk", "split"), (torch.chunk, torch.split))


def is_softmax(node: fx.Node, children: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(children[str(node.target)], nn.Softmax)
    return _calls(node, ("softmax",), (torch.softmax, nn.functional.softmax))


def is_dropout(node: fx.Node, children: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(children[str(node.target)], nn.Dropout)
    return _calls(node, ("dropout",), (torch.dropout, nn.functional.dropout))


def _calls(node: fx.Node, methods: Collection[str], functions: Collection[object]) -> bool:
    is_method = node.op == "call_method" and node.target in methods
    return is_method or (node.op == "call_function" and node.target in functions)


def blocks_of(node: fx.Node, num_features: int, width: int) -> int | None:
    """The number of blocks in a layer's output, by its uses; None where they differ in size. `width`: a likely block size.

    Three for `chunk(3, -1)`, `split(width, -1)` and `view(..., 3, heads, -1)` of one layer for q, k and v.
    """
    likely = num_features // width if num_features % width == 0 else 1
    users = [user for user in node.users if is_split(user) or is_view(user)]
    found = {
        _blocks_viewed(user, num_features, likely)
        if is_view(user)
        else _blocks_split(user, num_features, likely)
        for user in users
    }
    return found.pop() if len(found) == 1 else (None if found else 1)


def _blocks_viewed(view: fx.Node, num_features: int, likely: int) -> int:
    """(3, heads, features of a head) are three; (heads, features) and (heads, 3, features) are by heads already."""
    dims = feature_dims(view, (num_features,))
    if dims is not None and len(dims) == 2 and dims[0] == likely:
        return likely if any(name_of(user) == "unbind" for user in view.users) else 1
    if dims is None or len(dims) != 3 or likely == 1 or (likely in dims[1:] and dims[0] != likely):
        return 1
    return dims[0] if dims[0] in (likely, 2, 3) else 1


def _blocks_split(split: fx.Node, num_features: int, likely: int) -> int | None:
    named = {**split.kwargs}
    dim = split.args[2] if len(split.args) > 2 else named.pop("dim", 0)
    what = split.args[1] if len(split.args) > 1 else next(iter(named.values()), None)
    if dim not in (-1, 2):  # of (batch, sequence, features)
        return None
    if isinstance(what, fx.Node):  # a size that is worked out from a shape
        return likely
    if isinstance(what, (tuple, list)):
        is_even = all(isinstance(each, int) and each * len(what) == num_features for each in what)
        return len(what) if is_even else None
    if not isinstance(what, int) or num_features % what:
        return None
    return num_features // what if name_of(split) == "split" else what


def num_parts(node: fx.Node) -> int | None:
    """The number of pieces of a chunk or split, where the call says so."""
    what = node.args[1] if is_split(node) and len(node.args) > 1 else node.kwargs.get("chunks")
    if isinstance(what, (tuple, list)):
        return len(what)
    return what if isinstance(what, int) and name_of(node) == "chunk" else None


def name_of(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def feature_dims(node: fx.Node, widths: Iterable[int]) -> list[int] | None:
    """Dims into which a view puts features of one of these widths; None if the graph does not determine them.

    The last ones, whose product is the width. An unknown size (-1, or computed from a shape) may be
    one of them.
    """
    sizes = view_sizes(node)
    for width in widths:
        for begin in range(len(sizes)):
            dims = sizes[begin:]
            if None not in dims and math.prod(dims) == width:  # type: ignore[arg-type]
                return [each for each in dims if each is not None]
        if None not in sizes:
            continue
        # The last unknown size is what the sizes around it leave: those of batch and sequence, also
        # unknown, come before.
        open_dim = len(sizes) - 1 - sizes[::-1].index(None)
        begin = max((at + 1 for at, each in enumerate(sizes[:open_dim]) if each is None), default=0)
        before = [each for each in sizes[begin:open_dim] if each is not None]
        after = [each for each in sizes[open_dim + 1 :] if each is not None]
        known = math.prod((*before, *after))
        if (before or after) and known and width % known == 0:
            return [*before, width // known, *after]
    return None


def view_sizes(node: fx.Node) -> list[int | None]:
    """The sizes that a view names; None for one that is not known, and for a run of them that is part of a shape."""
    named = next((node.kwargs[key] for key in ("shape", "size", "sizes") if key in node.kwargs), None)
    args = node.args[2:] if name_of(node) == "unflatten" else node.args[1:]
    return _sizes(args if named is None else named)


def _sizes(what: object) -> list[int | None]:
    if isinstance(what, (tuple, list)):
        return [size for each in what for size in _sizes(each)]
    if isinstance(what, fx.Node) and what.target is operator.add and _is_run(what):
        return _sizes(what.args[0]) + _sizes(what.args[1])
    size = _known(what)
    return [None if size is None or size < 0 else size]


def _is_run(node: object) -> bool:
    """Whether a node stands for several sizes: `x.shape[:-1]`, or that and more."""
    if not isinstance(node, fx.Node):
        return isinstance(node, (tuple, list))
    if node.target is operator.add:
        return any(_is_run(each) for each in node.args)
    return is_part_of_shape(node)


def is_part_of_shape(node: fx.Node) -> bool:
    """Whether a node is a slice of a shape, such as all sizes but that of the features."""
    return (
        node.target is operator.getitem and isinstance(node.args[1], slice) and _is_whole_shape(node.args[0])
    )


def _is_whole_shape(node: object) -> bool:
    if not isinstance(node, fx.Node):
        return False
    is_size = node.op == "call_method" and node.target == "size" and len(node.args) == 1 and not node.kwargs
    return is_size or (node.target is getattr and node.args[1] == "shape")
