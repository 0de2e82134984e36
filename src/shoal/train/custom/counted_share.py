"""How much of a slice a loss counts: read off the loss's graph, before backward runs it.

Labels that are ignored, classes with weights and means over a mask make a slice count less than its samples say. Known
are torch's own losses, `elements[mask].mean()`, `(elements * mask).sum() / number`, and sums and multiples of such with one
common share. Other losses count by samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.errors import ConfigError

CURE = "use shoal.mean(sum, count), whose weight is known before backward"

_EXACT = "shoal: exact as it is"
_MEAN, _SUM = 1, 2  # at::Reduction
_MULTIPLE = ("MulBackward", "DivBackward")
_LINEAR = (
    *_MULTIPLE,
    "AddBackward",
    "SubBackward",
    "NegBackward",
    "ToCopyBackward",
    "StackBackward",
    "CatBackward",
    "SumBackward",
)
_SHAPES = ("ViewBackward", "ReshapeAliasBackward", "UnsafeViewBackward", "SqueezeBackward", "UnsqueezeBackward", "CloneBackward",
           "TransposeBackward", "PermuteBackward", "ToCopyBackward", "LogSoftmaxBackward")  # fmt: skip


def mark_exact(loss: Tensor) -> None:
    """This loss was divided by the count of all workers."""
    if loss.grad_fn is not None:
        loss.grad_fn.metadata[_EXACT] = True  # type: ignore[index]  # a property in C


def counted_share(losses: Iterable[Tensor], num_samples: int) -> float:
    """Share of a slice's targets that these losses, together, are a mean over; 1 where that is unknown."""
    shares = [share for loss in losses for share in _shares(loss.grad_fn, num_samples)]
    known = [share for share in shares if share is not None]
    if known and len(known) == len(shares) and all(math.isclose(share, known[0]) for share in known):
        return known[0]
    if all(share == 1.0 for share in known):
        return 1.0
    raise ConfigError(
        "the loss is a sum of parts that count differently (labels were ignored, a mask was averaged over, or classes have weights), so no "
        f"weight of this worker's slice is right for all of them. Nothing of this step was applied; {CURE}."
    )


def _shares(node: Any, num_samples: int) -> Iterator[float | None]:
    """The share of each term of a loss."""
    if node is None or node.metadata.get(_EXACT):
        yield 1.0
        return
    share = _share_of(node, num_samples)
    if share is not None:
        yield share
        return
    inner = _children(node)
    if not _is_number(node) and not _is_named(node, ("StackBackward", "CatBackward")):
        yield None
        return
    found = [share for each in inner for share in _shares(each, num_samples)]
    is_linear = _is_named(node, _LINEAR) and (len(inner) == 1 or not _is_named(node, _MULTIPLE))
    yield from found if found and is_linear else [None, *found]


def _share_of(node: Any, num_samples: int) -> float | None:
    """Of a mean that is known; None otherwise."""
    inner = _children(node)
    if getattr(node, "_saved_reduction", None) == _MEAN and hasattr(node, "_saved_target"):
        num_targets = node._saved_target.numel()
        if not hasattr(node, "_saved_total_weight"):
            return _selected(inner[0], num_samples) if inner else None
        selected = _selected(inner[0], num_samples)
        if selected is None and num_targets > num_samples and num_targets % num_samples:
            raise ConfigError(
                f"the loss is a mean over {num_targets} targets, and this worker's slice has {num_samples} samples, so how much each sample "
                f"counts is unknown. Nothing of this step was applied; {CURE}."
            )
        source = num_targets / (selected or 1.0)
        return _value(node._saved_total_weight) / float(max(source, num_samples)) if num_targets else 0.0
    if _is_named(node, ("MeanBackward",)) and inner:
        return _selected(inner[0], num_samples)
    if not _is_named(node, ("DivBackward",)) or len(inner) != 1:
        return None
    summed = inner[0]  # and divided by the script
    while (
        _is_number(summed)
        and _is_named(summed, ("MulBackward", "NegBackward"))
        and len(_children(summed)) == 1
    ):
        [summed] = _children(summed)
    if getattr(summed, "_saved_reduction", None) == _SUM and hasattr(summed, "_saved_total_weight"):
        return _value(node._saved_other) / float(summed._saved_target.numel())
    if not _is_named(summed, ("SumBackward",)):
        return None
    while _is_named(summed, ("SumBackward",)):
        [summed] = _children(summed)
    selected = _selected(summed, num_samples)
    if selected is None and not _is_masked(summed):
        return None
    return _value(node._saved_other) * (selected or 1.0) / _size_of(summed)


def _selected(node: Any, num_samples: int) -> float | None:
    """Share of the rows or elements that were taken from what they were selected from; None where nothing was selected."""
    while node is not None and _is_named(node, _SHAPES):
        node = next(iter(_children(node)), None)
    if node is None:
        return None
    if _is_named(node, ("MaskedSelectBackward",)):
        return _size_of(node) / float(node._saved_self.numel())
    if _is_named(node, ("IndexSelectBackward",)):
        return _size_of(node) / float(math.prod(node._saved_self_sym_sizes))
    if _is_named(node, ("IndexBackward",)):
        indices = [index for index in node._saved_indices if index is not None]
        if any(index.dtype is torch.bool for index in indices):
            return _size_of(node) / float(math.prod(node._saved_self_sym_sizes))
        # One element of each row, as in `log_probabilities[range(n), labels]`, is the whole.
        return float(max(index.numel() for index in indices)) / num_samples
    return None


def _is_masked(node: Any) -> bool:
    """Whether elements were multiplied by a tensor without gradients, or some were replaced."""
    if _is_named(node, ("MaskedFillBackward", "WhereBackward")):
        return True
    if not _is_named(node, ("MulBackward",)) or len(_children(node)) != 1:
        return False
    return any(
        isinstance(each, Tensor) and each.dim()
        for each in (_saved(node, "_saved_other"), _saved(node, "_saved_self"))
    )


def _saved(node: Any, name: str) -> Any:
    return getattr(node, name, None)


def _children(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def _is_named(node: Any, names: Iterable[str]) -> bool:
    return str(node.name()).startswith(tuple(names))


def _is_number(node: Any) -> bool:
    return _size_of(node) == 1 and not len(node._input_metadata[0].shape)


def _size_of(node: Any) -> int:
    """Number of elements that an operation gave."""
    return math.prod(node._input_metadata[0].shape)


def _value(tensor: Tensor) -> float:
    return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
