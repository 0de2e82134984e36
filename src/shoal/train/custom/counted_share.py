"""How a loop's loss counts the samples of its slice: read off the loss's graph, before backward runs it.

A mean over labels that are not ignored, over weighted classes or over a mask counts a share of the
slice. A sum over samples counts them all, at any number of workers. A root, a product or a ratio of
such numbers is neither, and is refused. Known are torch's own losses, `elements[mask].mean()`,
`elements.sum() / number`, and sums and multiples of such. Other losses count by samples.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

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
    "RsubBackward",
    "NegBackward",
    "ToCopyBackward",
    "StackBackward",
    "CatBackward",
    "SumBackward",
    "ViewBackward",
    "ReshapeAliasBackward",
    "UnsafeViewBackward",
    "SqueezeBackward",
    "UnsqueezeBackward",
    "CloneBackward",
    "AliasBackward",
    "_OutputBackward",  # the end of a model in parts
)
_SIDE_BY_SIDE = ("StackBackward", "CatBackward")
_SHAPES = ("ViewBackward", "ReshapeAliasBackward", "UnsafeViewBackward", "SqueezeBackward", "UnsqueezeBackward", "CloneBackward",
           "TransposeBackward", "PermuteBackward", "ToCopyBackward", "LogSoftmaxBackward")  # fmt: skip
_REDUCTIONS = ("MeanBackward", "SumBackward", "DotBackward")
_OF_ALL = ("LinalgVectorNormBackward", "NormBackward", "VarBackward", "StdBackward", "LogsumexpBackward", "MaxBackward1", "MinBackward1",
           "MedianBackward", "ProdBackward")  # fmt: skip
"""Reductions to a number that are no sum over rows."""

_CURVED = ("SqrtBackward", "RsqrtBackward", "LogBackward", "Log1PBackward", "Log2Backward", "Log10Backward", "ExpBackward", "Expm1Backward",
           "PowBackward", "ReciprocalBackward", "SigmoidBackward", "TanhBackward", "SoftplusBackward")  # fmt: skip
_PRODUCTS = ("MmBackward", "BmmBackward", "MvBackward", "DotBackward")
_OF_PARAMETERS = (*_LINEAR, *_SHAPES, *_REDUCTIONS, *_OF_ALL, *_CURVED, *_PRODUCTS, "AbsBackward", "TBackward", "ClampBackward",
                  "ClampMinBackward", "ClampMaxBackward", "ReluBackward", "ExpandBackward", "SelectBackward", "SliceBackward",
                  "LinalgMatrixNormBackward", "LinalgSvdBackward", "SoftmaxBackward", "MaximumBackward", "MinimumBackward",
                  "DiagonalBackward", "TraceBackward", "AliasBackward")  # fmt: skip
"""Operations of which a penalty on parameters is made; those of a model's layers are others."""


def mark_exact(loss: Tensor) -> None:
    """This loss was divided by the count of all workers."""
    if loss.grad_fn is not None:
        loss.grad_fn.metadata[_EXACT] = True  # type: ignore[index]  # a property in C


class LossWeight(NamedTuple):
    """How losses count their slice."""

    share: float
    """Share of the slice's targets that they are a mean over; 1 where that is unknown."""

    sums: list[Any]
    """Nodes of sums over samples."""

    is_sum: bool = False
    """Nothing in them is a mean."""

    is_exact: bool = False
    """They were divided by the counts of all workers."""

    unknown: str | None = None
    """An operation that nothing is known of."""

    @contextlib.contextmanager
    def whole_sums(self, factor: float) -> Iterator[None]:
        """Context in which backward takes each sum `factor` times: as if the slice were the batch."""
        handles = [
            node.register_prehook(lambda gradients: (gradients[0] * factor, *gradients[1:]))
            for node in self.sums
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class LossTerm(NamedTuple):
    """A summand of a loss."""

    share: float | None
    is_sum: bool = False
    is_exact: bool = False
    factor: float | None = None
    """Of a mean over something else than the slice's samples, such as one of them."""


class LossCounts:
    """Reads the losses of a script; remembers which factors do not change with the slice."""

    def __init__(self) -> None:
        self._fixed: set[float] = set()
        self._num_whole = 0  # samples of the largest batch
        self._num_samples = self._num_global = 1
        self._slices: tuple[tuple[int, int], ...] = ()
        self._sums: list[Any] = []
        self._unknown: str | None = None

    def read(self, losses: Iterable[Tensor], *slices: tuple[int, int]) -> LossWeight:
        """What these losses, together, count of slices; of each the samples, and those of its batch."""
        self._slices, (self._num_samples, self._num_global) = slices, slices[0]
        self._num_whole = max(self._num_whole, self._num_global)
        self._sums, self._unknown = [], None
        terms = self._with_samples([term for loss in losses for term in self._terms(loss.grad_fn)])
        known = [term.share for term in terms if term.share is not None]
        if known and len(known) == len(terms) and all(math.isclose(share, known[0]) for share in known):
            share = known[0]
        elif all(share == 1.0 for share in known):
            share = 1.0
        else:
            raise _refusal(
                "the loss is a sum of parts that count differently (labels were ignored, a mask was averaged over, or classes have weights), so "
                "no weight of this worker's slice is right for all of them"
            )
        is_sum = bool(self._sums) and all(term.is_sum for term in terms)
        is_exact = all(term.is_exact for term in terms)
        return LossWeight(share, self._sums, is_sum, is_exact, self._unknown)

    def _with_samples(self, terms: list[LossTerm]) -> list[LossTerm]:
        """Terms of single samples are, together, a mean over samples where they are divided by their number."""
        single = [term.factor for term in terms if term.factor is not None]
        if not single or (single == [1.0] and terms[0].share is not None):
            return terms
        num_samples = self._num_samples
        is_of_each = len(single) % num_samples == 0
        if not is_of_each or not all(math.isclose(each * num_samples, 1.0, rel_tol=1e-6) for each in single):
            what = "a mean" if len(single) == 1 else f"a sum of {len(single)} means"
            raise _refusal(
                f"the loss is {what} over something else than the {num_samples} samples of this worker's slice of the newest batch (some of them, pairs of them)"
            )
        return [term if term.factor is None else LossTerm(1.0) for term in terms]

    def _terms(self, node: Any, factor: float = 1.0) -> Iterator[LossTerm]:
        """Summands of a loss; `factor` is the number by which the script multiplies this one."""
        if node is None or node.metadata.get(_EXACT):
            yield LossTerm(1.0, is_exact=True)
            return
        if _is_of_parameters(node):
            return  # the same on every worker: any weights that add up to one are right
        term = self._term(node, factor)
        if term is not None:
            yield term
            return
        inner = [each for each in _children(node) if not _is_of_parameters(each)]
        is_of_numbers = _is_of_numbers(node)
        if not (_size_of(node) == 1 or _is_named(node, _SIDE_BY_SIDE)) or not inner:
            yield LossTerm(None)
            return
        self._refuse_curved(node, inner)
        if _is_named(node, ("MeanBackward",)) and is_of_numbers:
            factor /= len(_children(inner[0]))
        elif _is_named(node, _MULTIPLE):
            factor *= _multiple_of(node)
        if (_is_named(node, _LINEAR) and (len(inner) == 1 or not _is_named(node, _MULTIPLE))) or (
            is_of_numbers and _is_named(node, ("MeanBackward",))
        ):
            for each in inner:
                yield from self._terms(each, factor)
            return
        if not node.name()[-1].isdigit():
            self._unknown = str(node.name())
        yield LossTerm(None)
        for each in inner:
            if _is_number(each):
                yield from self._terms(each, factor)

    def _term(self, node: Any, factor: float) -> LossTerm | None:
        """A mean or a sum that is known; None otherwise."""
        inner = _children(node)
        self._look_at_rows(node)
        num_samples = self._num_samples
        if getattr(node, "_saved_reduction", None) == _MEAN and hasattr(node, "_saved_target"):
            num_targets = node._saved_target.numel()
            if not hasattr(node, "_saved_total_weight"):
                return self._mean(_selected(inner[0], num_samples), node._saved_target.shape, factor)
            selected = _selected(inner[0], num_samples)
            if selected is None and num_targets > num_samples and num_targets % num_samples:
                raise _refusal(
                    f"the loss is a mean over {num_targets} targets, and this worker's slice has {num_samples} samples, so how much each sample "
                    "counts is unknown"
                )
            self._refuse_pairs(node)
            source = num_targets / (selected or 1.0)
            share = _value(node._saved_total_weight) / float(max(source, num_samples)) if num_targets else 0.0
            is_of_few = selected is None and 0 < num_targets < num_samples
            return LossTerm(share, factor=factor if is_of_few else None)
        if _is_named(node, ("MeanBackward",)) and not _is_of_numbers(node):
            return self._mean(_selected(inner[0], num_samples), _shape(inner[0]), factor)
        if _is_sum(node):
            return self._sum(node, factor)
        if not _is_named(node, ("DivBackward",)) or len(inner) != 1:
            return None
        summed = inner[0]  # and divided by the script
        while (
            _is_number(summed)
            and _is_named(summed, ("MulBackward", "NegBackward"))
            and len(_children(summed)) == 1
        ):
            [summed] = _children(summed)
        return self._divided(node, summed) if _is_sum(summed) else None

    def _look_at_rows(self, node: Any) -> None:
        """Of the slices of several data, take the one whose samples this term has."""
        if len(self._slices) == 1 or not _children(node):
            return
        target = _saved(node, "_saved_target")
        sizes = tuple(target.shape) if isinstance(target, Tensor) else _shape(_children(node)[0])
        fitting = [each for each in self._slices if _has_rows(sizes, each[0])]
        exactly = [each for each in fitting if each[0] in sizes[:1]]
        self._num_samples, self._num_global = (exactly or fitting or self._slices)[0]

    def _mean(self, selected: float | None, sizes: Iterable[int], factor: float) -> LossTerm:
        if selected is not None:
            return LossTerm(selected)
        return LossTerm(1.0) if _has_rows(sizes, self._num_samples) else LossTerm(None, factor=factor)

    def _sum(self, node: Any, factor: float) -> LossTerm | None:
        """A sum times a factor: of the reciprocal of a number of samples, it is a mean."""
        if _is_of_numbers(node):
            return None
        sizes, inner = _sizes_summed(node), node
        if not _has_rows(sizes, self._num_samples) and not self._is_of_some(node):
            raise _refusal(
                f"the loss is a sum over elements of shape {sizes}, which have no row for each of the {self._num_samples} samples of this worker's slice"
            )
        while _is_named(inner, (*_REDUCTIONS, *_MULTIPLE, "NegBackward")) and len(_children(inner)) == 1:
            if _is_named(inner, _MULTIPLE):
                by = _saved(inner, "_saved_other")
                if _is_named(inner, ("DivBackward",)) and by.numel() == 1:
                    if not _is_pythons(by):
                        return LossTerm(
                            _value(by) * (self._selected_of(node) or 1.0) / (math.prod(sizes) or 1)
                        )
                    if self._is_count(_value(by), sizes, self._num_samples):
                        return LossTerm(1.0)
                factor *= _multiple_of(inner)
                self._refuse_normalised(inner)
            [inner] = _children(inner)
        is_known = abs(factor) == 1.0 or factor in self._fixed
        if not is_known and self._is_count(1 / abs(factor), sizes, self._num_samples):
            if float(f"{factor:.3g}") != factor:  # no constant that a person writes
                return LossTerm(1.0)
            raise _refusal(
                f"the loss is a sum over samples times {factor:g}, which may be one over a number of samples in this worker's slice of "
                f"{self._num_samples} (then divide by it) or the same number on every worker (then multiply by a tensor)"
            )
        self._fixed.add(factor)
        self._sums.append(node)
        return LossTerm(1.0, is_sum=True)

    def _divided(self, node: Any, summed: Any) -> LossTerm | None:
        """A sum divided by a number: of samples, of what was counted, or one that is the same on all workers."""
        if _is_of_numbers(summed):
            return None
        sizes, by = _sizes_summed(summed), _value(node._saved_other)
        counted = by * (self._selected_of(summed) or 1.0) / (math.prod(sizes) or 1)
        if not _is_pythons(node._saved_other):
            return LossTerm(counted)
        is_of_samples = self._is_count(by, sizes, self._num_samples)
        is_of_batch = any(self._is_count(by, sizes, num) for num in (self._num_global, self._num_whole))
        if self._is_of_some(summed):
            is_count = is_of_samples or math.isclose(by, max(_weight_of(summed), 1.0))
            return (
                self._sum(summed, 1.0)
                if not is_count and (is_of_batch or not by.is_integer())
                else LossTerm(counted)
            )
        if is_of_samples != is_of_batch:
            return LossTerm(1.0) if is_of_samples else self._sum(summed, 1.0)
        if not is_of_samples and not by.is_integer():
            return self._sum(summed, 1.0)
        raise _refusal(
            f"the loss is a sum over samples divided by {by:g}, which may be a count in this worker's slice of {self._num_samples} samples or the same "
            "number on every worker (then write it as a factor)"
        )

    def _selected_of(self, summed: Any) -> float | None:
        if not _is_named(summed, ("SumBackward",)):
            return None
        while _is_named(summed, ("SumBackward",)):
            [summed] = _children(summed)
        return _selected(summed, self._num_samples)

    def _is_of_some(self, summed: Any) -> bool:
        """Whether rows or elements were selected, masked or weighted before they were added up."""
        if hasattr(summed, "_saved_total_weight"):
            return not math.isclose(_value(summed._saved_total_weight), summed._saved_target.numel())
        inner = summed
        while _is_named(inner, ("SumBackward",)):
            [inner] = _children(inner)
        return inner is not summed and (_selected(inner, self._num_samples) is not None or _is_masked(inner))

    def _refuse_normalised(self, node: Any) -> None:
        """Refuse weights that the script has made add up to one over its slice."""
        for weights in (_saved(node, "_saved_other"), _saved(node, "_saved_self")):
            if not isinstance(weights, Tensor) or not weights.dim() or not weights.is_floating_point():
                continue
            is_mask = bool(((weights == 0) | (weights == 1)).all())
            if not is_mask and math.isclose(_value(weights.sum()), 1.0, rel_tol=1e-5):
                raise _refusal(
                    "the loss is a sum over samples whose weights add up to one in this worker's slice, and those of the other slices do, too"
                )

    def _is_count(self, number: float, sizes: Iterable[int], num_rows: int) -> bool:
        """Whether a number is one of rows, or of elements of so many rows."""
        [first, *others] = [*sizes] or [1]
        in_row = {1, first // self._num_samples}
        for size in others:
            in_row |= {each * size for each in in_row}
        return any(math.isclose(number, num_rows * each) for each in in_row if each)

    def _refuse_curved(self, node: Any, inner: list[Any]) -> None:
        """Refuse a root, a product or a ratio of numbers that were added up over samples."""
        if self._num_samples == 1 or not inner:
            return
        if _is_named(node, _OF_ALL):
            is_curved = _has_rows(_shape(inner[0]), self._num_samples)
        else:
            added_up = [each for each in inner if self._is_added_up(each)]
            is_curved = (_is_named(node, _CURVED) and bool(added_up)) or (
                _is_named(node, _MULTIPLE) and len(added_up) > 1
            )
        if is_curved:
            raise _refusal(
                f"the loss takes {_WORDS.get(str(node.name()).rstrip('0123456789'), 'a function')} of numbers that were added up over the samples of this "
                "worker's slice (as an RMSE, a Dice or a correlation does), and those of the slices do not add up to that of the batch",
                "use shoal.gather(output) and shoal.gather(target), which are those of the whole batch",
            )

    def _is_added_up(self, node: Any) -> bool:
        """Whether a number is one of several rows."""
        if not _is_number(node) or node.metadata.get(_EXACT) or _is_of_parameters(node):
            return False
        inner = _children(node)
        if hasattr(node, "_saved_reduction") and hasattr(node, "_saved_self"):
            return _has_rows(node._saved_self.shape, self._num_samples)
        if _is_named(node, (*_REDUCTIONS, *_OF_ALL)) and inner and not _is_number(inner[0]):
            return _has_rows(_shape(inner[0]), self._num_samples)
        return any(self._is_added_up(each) for each in inner)

    def _refuse_pairs(self, node: Any) -> None:
        """Refuse logits that compare every sample of the slice with every other, where the target is the sample's own number."""
        num_samples, shape = self._num_samples, node._saved_self.shape
        if num_samples == 1 or tuple(shape) != (num_samples, num_samples):
            return
        scores = _children(node)[0]
        while scores is not None and (
            _is_named(scores, _SHAPES) or (_is_named(scores, _MULTIPLE) and not _is_number(scores))
        ):
            scores = next((each for each in _children(scores) if not _is_number(each)), None)
        if (
            scores is None
            or not _is_named(scores, ("MmBackward",))
            or any(map(_is_of_parameters, _children(scores)))
        ):
            return
        target = node._saved_target
        if torch.equal(target, torch.arange(num_samples, device=target.device)):
            raise _refusal(
                f"the loss compares the {num_samples} samples of this worker's slice with each other (in-batch negatives), and those of the batch are more",
                "compare shoal.gather(...) of both sides, which have the rows of the whole batch",
            )


_WORDS = {
    "SqrtBackward": "the root",
    "ExpBackward": "the exponential",
    "LogBackward": "the logarithm",
    "PowBackward": "a power",
    "MulBackward": "the product",
    "DivBackward": "the ratio",
    "LinalgVectorNormBackward": "the norm",
}


def _refusal(why: str, cure: str = CURE) -> ConfigError:
    return ConfigError(f"{why}. Nothing of this step was applied; {cure}.")


def _is_sum(node: Any) -> bool:
    if getattr(node, "_saved_reduction", None) == _SUM and hasattr(node, "_saved_target"):
        return True
    return _is_number(node) and _is_named(node, ("SumBackward", "DotBackward"))


def _is_of_numbers(node: Any) -> bool:
    """Whether a sum or a mean is over losses that the script has put side by side."""
    inner = _children(node)
    return (
        len(inner) == 1
        and _is_named(inner[0], _SIDE_BY_SIDE)
        and all(math.prod(_shape(each)) == 1 for each in _children(inner[0]))
    )


def _sizes_summed(node: Any) -> tuple[int, ...]:
    if hasattr(node, "_saved_target"):
        return tuple(node._saved_target.shape)
    inner = _children(node)[0]
    while _is_named(node, ("SumBackward",)) and _is_named(inner, ("SumBackward",)):
        node, inner = inner, _children(inner)[0]
    return _shape(inner)


def _has_rows(sizes: Iterable[int], num_samples: int) -> bool:
    sizes = tuple(sizes)
    return num_samples in sizes or (bool(sizes) and sizes[0] % num_samples == 0 and sizes[0] > 0)


def _multiple_of(node: Any) -> float:
    """Python's number that another is multiplied by or divided by; 1 where it is a tensor."""
    other = next(
        (each for name in ("_saved_other", "_saved_self") if isinstance(each := _saved(node, name), Tensor)),
        None,
    )
    if other is None or other.dim() or not _is_pythons(other):
        return 1.0
    number = _value(other)
    return number if _is_named(node, ("MulBackward",)) else 1 / number if number else 1.0


def _is_pythons(number: Tensor) -> bool:
    """Whether a saved number was Python's, not a tensor: torch lets it yield to any tensor's dtype."""
    like = torch.float16 if number.is_floating_point() else torch.int8
    return number.dtype != like and torch.result_type(torch.zeros((), dtype=like), number) == like


def _is_of_parameters(node: Any) -> bool:
    """Whether a term is computed from parameters alone: a penalty."""
    waiting, seen = [node], set[Any]()
    while waiting:
        each = waiting.pop()
        if each in seen or hasattr(each, "variable"):
            continue
        seen.add(each)
        inner = _children(each)
        if not inner or not _is_named(each, _OF_PARAMETERS):
            return False
        if len(inner) < len(each.next_functions):  # with a constant, or with the batch
            is_as_large = any(_shape(child) == _shape(each) for child in inner)
            if _is_named(each, _PRODUCTS) or not is_as_large:
                return False
        waiting += inner
    return True


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


def _weight_of(summed: Any) -> float:
    """Sum of the mask or of the weights of elements that were added up."""
    if hasattr(summed, "_saved_total_weight"):
        return _value(summed._saved_total_weight)
    inner = summed
    while _is_named(inner, ("SumBackward",)):
        [inner] = _children(inner)
    weights = next(
        (
            each
            for name in ("_saved_other", "_saved_self", "_saved_condition")
            if isinstance(each := _saved(inner, name), Tensor)
        ),
        None,
    )
    mask = _saved(inner, "_saved_mask")
    if isinstance(mask, Tensor):
        weights = ~mask
    if weights is None or not weights.numel():
        return float(_size_of(inner))
    return _value(weights.sum()) * _size_of(inner) / weights.numel()


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
    return _size_of(node) == 1 and not len(_shape(node))


def _size_of(node: Any) -> int:
    """Number of elements that an operation gave."""
    return math.prod(_shape(node))


def _shape(node: Any) -> tuple[int, ...]:
    if hasattr(node, "variable"):
        return tuple(node.variable.shape)
    return tuple(node._input_metadata[0].shape)


def _value(tensor: Tensor) -> float:
    return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
