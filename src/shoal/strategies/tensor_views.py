"""What a forward does to the features of a linear layer, read off its graph: in how many heads it views them, in which blocks it takes them apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import fx, nn

_SHAPE = "shoal: is a shape"
_VIEWS = ("view", "reshape", "unflatten")
_SPLITS = ("chunk", "split")
_SPLIT_FUNCTIONS = (torch.chunk, torch.split)
_SOFTMAX = (torch.softmax, nn.functional.softmax)
_DROPOUT = (torch.dropout, nn.functional.dropout)


def mark_shapes(graph: fx.Graph) -> None:
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


def is_shape(node: fx.Node) -> bool:
    """Whether it was marked as a size."""
    return bool(node.meta[_SHAPE])


def is_view(node: fx.Node) -> bool:
    """Whether it gives a tensor another shape."""
    return node.op == "call_method" and node.target in _VIEWS


def is_split(node: fx.Node) -> bool:
    """Whether it takes a tensor apart."""
    return (node.op == "call_method" and node.target in _SPLITS) or (
        node.op == "call_function" and node.target in _SPLIT_FUNCTIONS
    )


def is_softmax(node: fx.Node, children: Mapping[str, nn.Module]) -> bool:
    """Whether it makes weights that add up to one."""
    return _is(node, children, nn.Softmax, _SOFTMAX, "softmax")


def is_dropout(node: fx.Node, children: Mapping[str, nn.Module]) -> bool:
    """Whether it draws."""
    return _is(node, children, nn.Dropout, _DROPOUT, "dropout")


def _is(
    node: fx.Node, children: Mapping[str, nn.Module], kind: type[nn.Module], functions: object, method: str
) -> bool:
    if node.op == "call_module":
        return isinstance(children[str(node.target)], kind)
    assert isinstance(functions, tuple)
    return (node.op == "call_function" and node.target in functions) or (
        node.op == "call_method" and node.target == method
    )


def blocks_of(node: fx.Node, num_features: int, width: int) -> int | None:
    """In how many blocks the output of a layer is, by what is done to it; None where they differ in size. `width`: of one, perhaps.

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
    if dims is None or len(dims) != 3 or likely == 1 or dims[1] == likely != dims[0]:
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
    """Into how many parts a tensor is taken apart, where the call says so."""
    what = node.args[1] if is_split(node) and len(node.args) > 1 else node.kwargs.get("chunks")
    if isinstance(what, (tuple, list)):
        return len(what)
    return what if isinstance(what, int) and name_of(node) == "chunk" else None


def name_of(node: fx.Node) -> str:
    """What is called."""
    return str(getattr(node.target, "__name__", node.target))


def feature_dims(node: fx.Node, widths: Iterable[int]) -> list[int] | None:
    """The dims into which a view puts features of one of these widths; None where the graph does not say.

    The last ones, whose product is the width. A size that is not known (-1, or worked out from a shape) may be one of them.
    """
    args = node.args[2:] if node.target == "unflatten" else node.args[1:]
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        args = tuple(args[0])
    sizes = [each if isinstance(each, int) and each >= 0 else None for each in args]
    for width in widths:
        for begin in range(len(sizes)):
            dims = sizes[begin:]
            if None not in dims and math.prod(dims) == width:  # type: ignore[arg-type]
                return [each for each in dims if each is not None]
        # Sizes, then what is left for the features of a head: after the sizes of batch and sequence, which are not known.
        known = [each for each in sizes[_after_unknown(sizes[:-1]) : -1] if each is not None]
        if sizes and sizes[-1] is None and known and width % math.prod(known) == 0:
            return [*known, width // math.prod(known)]
    return None


def _after_unknown(sizes: list[int | None]) -> int:
    """Where the last run of known sizes begins."""
    return max((number + 1 for number, each in enumerate(sizes) if each is None), default=0)


def numbers(args: object) -> list[int]:
    """All sizes that a call names."""
    if isinstance(args, (tuple, list)):
        return [number for each in args for number in numbers(each)]
    return [args] if isinstance(args, int) else []
