"""Loss rules: a user's loss as a local sum and a count.

Sums of slices can be added and divided once by the global count; means cannot, as soon as a mask or
a weight makes slices count differently. So torch's losses run with reduction="sum" beside their own
denominator, and any other callable is treated as a mean over samples and checked once.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shoal.config import job as jobs
from shoal.data.slice import LABELS, split_target
from shoal.data.tree import Tree, map_tensors, tensors
from shoal.errors import ConfigError, LossComparesSamples, LossDoesNotRecombine, TrainingError
from shoal.parallel import gathering

Value = Callable[[Tree, Tree], Any]


def elementwise(
    module: Any,
    counts: Callable[[Any, Tensor, Tensor], Tensor],
    output: Tensor,
    target: Tensor,
    weight: Tensor,
) -> tuple[Tensor, float]:
    """A torch loss with reduction="none": its weighted sum and weighted count. `counts` gives the count of each row."""
    losses: Tensor = module(output, target)
    losses = losses.reshape(max(losses.shape[0], 1) if losses.dim() else 1, -1)
    per_row = spread(weight, len(losses), type(module).__name__).to(losses.dtype)
    counted = counts(module, losses, target).to(losses.dtype)
    return (losses.sum(1) * per_row).sum(), float((counted * per_row).sum())


def elements_of_row(module: Any, losses: Tensor, target: Tensor) -> Tensor:
    return torch.full((len(losses),), float(losses.shape[1]), device=losses.device, dtype=losses.dtype)


def samples_of_row(module: Any, losses: Tensor, target: Tensor) -> Tensor:
    return torch.ones(len(losses), device=losses.device, dtype=losses.dtype)


def labels_of_row(module: Any, losses: Tensor, target: Tensor) -> Tensor:
    """Labels that are not ignored, each by the weight of its class."""
    if target.is_floating_point():  # class probabilities
        return elements_of_row(module, losses, target)
    counted: Tensor = target != module.ignore_index
    if module.weight is not None:
        # An ignored label is no class: a valid one stands in for it, with count zero.
        counted = module.weight[torch.where(counted, target, torch.zeros_like(target))] * counted
    return counted.reshape(len(losses), -1).sum(1)


def spread(weight: Tensor, num_rows: int, name: str) -> Tensor:
    """Weight of each row of the loss: one row per sample, or an equal number of rows per sample."""
    if weight.dim() != 1 or len(weight) == 0 or num_rows % len(weight):
        raise TrainingError(
            f"the loss '{name}' gives {num_rows} rows for weights of shape {tuple(weight.shape)}, so shoal cannot tell which "
            "weight belongs to which. Nothing was trained. Let output and target have one row per sample, or a loss of your "
            "own take the weights: loss(output, target, sample_weight)."
        )
    return weight if len(weight) == num_rows else weight.repeat_interleave(num_rows // len(weight))


class EachAlone:
    """Any callable, evaluated on each sample alone: all at once by vmap if possible, else one by one."""

    def __init__(self, value: Value, name: str) -> None:
        """`value(output, target)` is the loss of a batch: one number, or a pair (sum, count)."""
        self._value, self._name = value, name
        self._vectorised = True

    def __call__(self, output: Tree, target: Tree, weight: Tensor) -> tuple[Tensor, float]:
        """The weighted sum and the weighted count."""
        num_samples = len(weight)
        for tensor in [*tensors(output), *tensors(target)]:
            if tensor.dim() == 0 or tensor.shape[0] % num_samples:
                raise TrainingError(
                    f"the loss '{self._name}' cannot be weighted: it is computed from a tensor of shape {tuple(tensor.shape)} "
                    f"that does not hold the {num_samples} samples in its first dimension. Nothing was trained. Let the loss "
                    "take the weights itself, loss(output, target, sample_weight), and return a pair (sum, count)."
                )
        if self._vectorised:
            try:
                losses = self._at_once(output, target, num_samples)
                return (losses * weight.to(losses.dtype)).sum(), float(weight.double().sum())
            # Vmap supports no branch on a value, no .item(), and no pair with a plain number.
            except Exception:
                self._vectorised = False
        totals, count = [], 0.0
        for sample in range(num_samples):
            value = self._value(*_part((output, target), sample, sample + 1, num_samples))
            total, counted = value if isinstance(value, tuple) else (value, 1.0)
            totals.append(total * weight[sample].to(total.dtype))
            count += float(counted) * float(weight[sample])
        return torch.stack(totals).sum(), count

    def _at_once(self, output: Tree, target: Tree, num_samples: int) -> Tensor:
        flat = [
            tensor.reshape(num_samples, tensor.shape[0] // num_samples, *tensor.shape[1:])
            for tensor in [*tensors(output), *tensors(target)]
        ]

        def one(*parts: Tensor) -> Tensor:
            left = iter(parts)
            value = self._value(_filled(output, left), _filled(target, left))
            if not isinstance(value, Tensor):
                raise TypeError("a pair of sum and count")
            return value

        losses: Tensor = torch.func.vmap(one)(*flat)
        return losses


def _filled(tree: Tree, parts: Iterator[Tensor]) -> Tree:
    return map_tensors(lambda _: next(parts), tree)


def without_reduction(module: nn.Module) -> Any:
    """The same loss, element by element; shares the weights of its classes."""
    each: Any = copy.copy(module)
    each.reduction = "none"
    return each


OutputKind = Literal["logits", "probabilities", "log_probabilities"]


class LossRule(Protocol):
    """One loss, ready to be divided over workers."""

    name: str
    outputs_are: OutputKind

    is_in_forward: bool = False
    """Whether the model's forward computes it: then `check_forward` verifies it."""

    is_checked: bool = True
    """Whether `check` compares anything; torch's own losses recombine by construction."""

    @property
    def must_check(self) -> bool:
        """Whether the newest loss may count its samples unevenly, so that `check` has to look at this step, due or not."""
        return False

    @property
    def named(self) -> Mapping[str, tuple[float, float]]:
        """Sum and count of the newest loss's named parts beside its total, for the logs."""

    def __call__(
        self, output: Tree, target: Tree, num_local: int, num_global: int, weight: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """Sum over this slice, with its graph, and its divisor once all slices are added.

        With a `weight` for each sample, both count each sample by its weight.
        """

    def check(self, output: Tree, target: Tree, num_local: int, weight: Tensor | None = None) -> None:
        """Refuse a loss that would mean something else when its batch is divided."""

    def check_forward(
        self, call: Callable[[Tree], Tree], parts: Sequence[tuple[Tree, int]], num_global: int, like: Tree
    ) -> None:
        """Refuse a loss within forward that would mean something else when its batch is divided."""
        return None

    def gap_of_gradients(
        self,
        call: Callable[[Tree], Tree],
        parts: Sequence[tuple[Tree, int]],
        num_global: int,
        trained: Sequence[Tensor],
    ) -> float:
        """Largest difference between gradients of a loss within forward over a slice and over its halves, relative to the gradients."""
        return 0.0

    def run(self, call: Callable[[], Tree], inputs: Tree, num_local: int, num_global: int) -> Tree:
        """Model output, by `call`; the rule observes the forward if it needs to."""
        return call()

    def predictions(self, output: Tree) -> Tree:
        """Output without a loss that the model computed itself."""
        if isinstance(output, Mapping) and len(output) > 1 and is_number(output.get("loss")):
            return without(output, "loss")
        return output


def loss_rule(loss: Any, *, is_compiled: bool = False) -> LossRule:
    if isinstance(loss, str) and loss == "model":
        return OwnLoss(watches=not is_compiled)
    if not callable(loss):
        raise ConfigError(
            f"loss must be callable as loss(output, target), got {loss!r}. Use a torch loss such as nn.CrossEntropyLoss(), a "
            "function, or loss='model' for a model that computes its loss itself."
        )
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise ConfigError(
            f"loss= was given the class {loss.__name__}, and takes a loss made of it: {loss.__name__}(). Nothing was trained."
        )
    plain = _FUNCTIONAL.get(loss) if isinstance(loss, type(F.cross_entropy)) else None
    module = plain() if plain is not None else loss
    denominator = _DENOMINATORS.get(type(module))
    if denominator is None:
        return MeanOverSamples(loss)
    if module.reduction == "sum":
        return SumOverBatch(module)
    if module.reduction not in ("mean", "batchmean"):
        raise ConfigError(
            f"{type(module).__name__} was given reduction='{module.reduction}', so a batch has no single loss. Use the "
            "default reduction='mean', or 'sum'."
        )
    return SumAndCount(module, denominator)


class SumAndCount(LossRule):
    """A torch loss, run as a sum beside its own denominator."""

    named: Mapping[str, tuple[float, float]] = {}
    is_checked = False

    def __init__(self, module: Any, denominator: Callable[[Any, Tensor, Tensor], float]) -> None:
        self.name = type(module).__name__
        self.outputs_are: OutputKind = _OUTPUTS_ARE.get(type(module), "logits")
        self._denominator = denominator
        self._mean = module
        self._sum: Any = copy.copy(module)  # shares weights, so that a later .to() reaches both
        self._sum.reduction = "sum"
        self._each = without_reduction(module)
        # Those that a loss of this class can have; to ask one for a name that it does not know takes microseconds.
        self._class_weights = [name for name in ("weight", "pos_weight") if hasattr(module, name)]
        per_sample = denominator is _samples or module.reduction == "batchmean"
        self._counts = (
            labels_of_row if denominator is _labels else samples_of_row if per_sample else elements_of_row
        )

    def __call__(
        self, output: Tree, target: Tree, num_local: int, num_global: int, weight: Tensor | None = None
    ) -> tuple[Tensor, float]:
        output = logits_of(output)
        self._follow(output)
        if num_local < num_global and self._denominator in (_elements, _divergence):
            _refuse_pairs(self.name, output, target)
        if weight is not None:
            return elementwise(self._each, self._counts, output, target, weight)
        return self._sum(output, target), self._denominator(self._mean, output, target)

    def check(self, output: Tree, target: Tree, num_local: int, weight: Tensor | None = None) -> None:
        """torch's own losses recombine by construction."""

    def _follow(self, output: Tensor) -> None:
        # Class weights belong to the loss; the model may have moved to another device or precision since.
        for name in self._class_weights:
            weight = getattr(self._mean, name)
            if weight is not None and (weight.device != output.device or weight.dtype != output.dtype):
                moved = weight.to(device=output.device, dtype=output.dtype)
                setattr(self._mean, name, moved)
                setattr(self._sum, name, moved)
                setattr(self._each, name, moved)


class SumOverBatch(LossRule):
    """A torch loss with reduction="sum": the batch's loss is the sum, without a divisor.

    If bad samples were skipped it is scaled up to the whole batch, in proportion.
    """

    named: Mapping[str, tuple[float, float]] = {}
    is_checked = False

    def __init__(self, module: nn.Module) -> None:
        self.name = type(module).__name__
        self.outputs_are: OutputKind = _OUTPUTS_ARE.get(type(module), "logits")
        self._module, self._each = module, without_reduction(module)
        self._is_elementwise = _DENOMINATORS[type(module)] in (_elements, _divergence)

    def __call__(
        self, output: Tree, target: Tree, num_local: int, num_global: int, weight: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """The shares of all slices add up to a count of one."""
        output = logits_of(output)
        if num_local < num_global and self._is_elementwise:
            _refuse_pairs(self.name, output, target)
        if weight is not None:
            total, _ = elementwise(self._each, elements_of_row, output, target, weight)
            return total, num_local / num_global
        return self._module(output, target), num_local / num_global

    def check(self, output: Tree, target: Tree, num_local: int, weight: Tensor | None = None) -> None:
        """A sum always recombines."""


class MeanOverSamples(LossRule):
    """Any callable: a mean over samples, or a pair (sum, count); or a dict of such, of which "loss" is the total."""

    named: Mapping[str, tuple[float, float]] = {}

    def __init__(self, loss: Callable[..., Any]) -> None:
        self.name = getattr(loss, "__name__", type(loss).__name__)
        self.outputs_are: OutputKind = "logits"
        self._loss = loss
        self._takes_weights = _takes_weights(loss)
        self._takes_target, self._takes_label = _takes_target(loss), _takes_target(loss, of_mapping=True)
        self._is_label = False
        self._each_alone = EachAlone(self._value, self.name)
        self._besides: dict[str, Any] = {}
        self._is_uneven = False

    @property
    def must_check(self) -> bool:
        return self._is_uneven

    def __call__(
        self, output: Tree, target: Tree, num_local: int, num_global: int, weight: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """A loss that takes `sample_weight` receives it; otherwise each sample's own loss is weighted."""
        if weight is not None and not self._takes_weights:
            return self._each_alone(output, target, weight)
        with CountedLosses() as seen:
            value = self._value(output, target, weight)
        known = count_on(value)
        if seen.gathered and not seen.ignored_some:
            known = None  # counts rows of all workers; the samples of the slice weigh it
        is_guess = known is None and not isinstance(value, tuple)
        self._is_uneven = is_guess and (seen.ignored_some or seen.counts_itself)
        if known is not None:
            # A sum counts its samples here, so that an epoch's mean is that of one process.
            value = (value * num_global, num_local) if known < 0 else _sum_of_mean(value, known, 1.0)
        counted = float(num_local) if weight is None else float(weight.double().sum())
        self.named = {
            name: (float(each[0]), float(each[1]))
            if isinstance(each, tuple)
            else (float(each) * counted if counted else 0.0, counted)
            for name, each in self._besides.items()
        }
        if isinstance(value, tuple):
            total, count = value
            return total, float(count)
        if value.dtype is torch.float16:  # a sum overflows in fp16
            value = value.float()
        if not counted:  # a mean over nothing is NaN, and must not reach the batch's sum
            return sum((tensor.sum() for tensor in tensors(output)), start=value.new_zeros(())) * 0.0, 0.0
        return value * counted, counted

    def check(self, output: Tree, target: Tree, num_local: int, weight: Tensor | None = None) -> None:
        """The losses of two halves must recombine to the loss of the whole, and so must its gradients
        by the output and by other tensors it reads.

        Values alone show neither a penalty on parameters nor, over a batch of thousands, a loss that
        compares samples (Dice, a correlation): it changes each sample's gradient and hardly the mean.
        Under `torch.no_grad` only values are compared.
        """
        is_each_alone = weight is not None and not self._takes_weights
        if num_local < 2 or is_each_alone:
            return
        output = map_tensors(lambda tensor: tensor.detach(), self.predictions(output))

        def part_of(begin: int, end: int, given: Tree) -> _LossOfPart:
            rows: Any = given if end - begin == num_local else _part(given, begin, end, num_local)
            return self._of_part(rows[0], rows[1], _rows(weight, begin, end), float(end - begin))

        whole = part_of(0, num_local, (output, target))
        for tensor in [*tensors(output), *tensors(target)]:
            if tensor.dim() == 0 or tensor.shape[0] % num_local:
                if whole.is_pair:
                    return  # it returns its own count; only its author knows how halves count
                raise TrainingError(
                    f"the loss '{self.name}' cannot be cut over workers: it is computed from a tensor of shape "
                    f"{tuple(tensor.shape)} that does not hold the {num_local} samples of the slice in its first "
                    "dimension, so shoal cannot tell what it averages over. Nothing was trained. Let the loss "
                    "return a pair (sum, count): the sum over what it counts, and how much that was."
                )
        half = num_local // 2
        edges = (0, half), (half, num_local)
        halves = [part_of(*edge, (output, target)) for edge in edges]
        shares = [1.0, 1.0]
        if not whole.is_pair:
            counted = [
                float(end - begin if weight is None else weight[begin:end].sum()) for begin, end in edges
            ]
            shares = [each / (sum(counted) or 1.0) for each in counted]
        _refuse_cut(self.name, whole, halves, shares, tolerance_of(output))
        is_coarse = _coarsest(output) > torch.finfo(torch.float32).eps
        if not is_coarse and whole.gap(halves, shares) <= GRADIENT_TOLERANCE:
            return
        # A gap may be rounding, or lost in it; but not in float64.
        again = part_of(0, num_local, (output, target))
        if whole.gap([again], [1.0]) > GRADIENT_TOLERANCE:
            return  # it draws random numbers, or keeps state
        rounding = max(1e-4, 8 * _coarsest(output))
        # A loss with constants of its own in another precision may refuse wider ones.
        with contextlib.suppress(Exception), torch.autocast(_device_of(output), enabled=False):
            wide = map_tensors(
                lambda each: each.double() if each.is_floating_point() else each, (output, target)
            )
            whole, *halves = (part_of(*edge, wide) for edge in ((0, num_local), *edges))
            rounding = GRADIENT_TOLERANCE if whole.total.dtype is torch.float64 else 1e-4
        gap = whole.gap(halves, shares)
        if gap > rounding:
            raise LossComparesSamples(name=self.name, gap=gap)

    def _of_part(self, output: Tree, target: Tree, weight: Tensor | None, num_samples: float) -> _LossOfPart:
        """The loss of some rows; copies of them: a loss may write into what it is given, which backward still needs."""
        reads = [
            each.detach().requires_grad_() if each.is_floating_point() and torch.is_grad_enabled() else each
            for each in tensors(output)
        ]
        given = iter(reads)
        with CountedLosses():
            value = self._value(
                map_tensors(lambda _: next(given).clone(), output), map_tensors(Tensor.clone, target), weight
            )
        known = count_on(value)
        if known is not None:
            value = _sum_of_mean(value, known, num_samples)
        is_pair = isinstance(value, tuple)
        total, count = value if is_pair else (value, num_samples)
        return _LossOfPart(total, float(count), is_pair, [each for each in reads if each.requires_grad])

    def run(self, call: Callable[[], Tree], inputs: Tree, num_local: int, num_global: int) -> Tree:
        self._is_label = isinstance(inputs, Mapping) and any(key in inputs for key in LABELS)
        return call()

    def _value(self, output: Tree, target: Tree, weight: Tensor | None = None) -> Any:
        weights = {} if weight is None else {"sample_weight": weight}
        takes_it = self._takes_label if self._is_label else self._takes_target
        given = (output, target) if target is not None and takes_it else (output,)
        value = self._loss(*given, **weights)
        if isinstance(value, Mapping) and "loss" in value:
            self._besides = {
                name: each.detach() if isinstance(each, Tensor) else each
                for name, each in value.items()
                if name != "loss"
            }
            value = value["loss"]
        if isinstance(value, tuple) and len(value) == 2:
            return value
        if not isinstance(value, Tensor) or value.dim() != 0:
            what = (
                f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else f"a {type(value).__name__}"
            )
            raise TrainingError(
                f"the loss '{self.name}' returned {what}. It must return one number as a tensor (the mean over the "
                "samples), or a pair (sum, count); or a dict of such with the total as 'loss'."
            )
        return value


class OwnLoss(LossRule):
    """`loss="model"`: the loss that the model's forward returns, beside its divisor.

    Means of torch's own losses are recognised while forward runs, so that slices add up to the mean
    over the whole batch, however many labels each of them ignores. Internally the loss is a row of
    sum and count: rows of slices and micro-batches are joined like any other output.
    """

    name = "model"
    is_in_forward = True
    is_checked = False
    outputs_are: OutputKind = "logits"
    named: Mapping[str, tuple[float, float]] = {}
    _may_drift = True
    """Whether a loss that recombined at first, but whose count is a guess, may cease to."""

    def __init__(self, *, watches: bool) -> None:
        """`watches`: not for a compiled model, whose inside cannot be observed."""
        self._watches = watches
        self._key: str | int | None = None
        self._has_noted = self._is_guess = self._has_passed = False

    def __call__(
        self, output: Tree, target: Tree, num_local: int, num_global: int, weight: Tensor | None = None
    ) -> tuple[Tensor, float]:
        if weight is not None:
            raise TrainingError(
                "batches have weights, and loss='model' leaves the loss to the model, which does not know them. Nothing was "
                "trained; use a loss function, loss(output, target), or leave with_weights out."
            )
        rows = output if self._key is None else output[self._key]
        return rows[:, 0].sum(), float(rows[:, 1].detach().sum())

    def check(self, output: Tree, target: Tree, num_local: int, weight: Tensor | None = None) -> None:
        """Needs the model, not its output: see `check_forward`."""

    def check_forward(
        self, call: Callable[[Tree], Tree], parts: Sequence[tuple[Tree, int]], num_global: int, like: Tree
    ) -> None:
        """Refuse a forward whose sums and counts over two halves do not add up to those of the whole.

        `parts` are the inputs and sizes of the whole and its halves, `like` tensors of the
        precisions that forward computes in.
        """
        rule = copy.copy(self)
        rule._has_noted = True
        try:
            whole, *halves = (
                rule(
                    rule.run(functools.partial(call, inputs), inputs, size, num_global),
                    None,
                    size,
                    num_global,
                )
                for inputs, size in parts
            )
        except TrainingError:
            return  # computes no loss in evaluation mode
        tolerance, eps = tolerance_of(like), _coarsest(like)
        # A mean is rounded before it is multiplied by its count.
        slack = max(tolerance * 1e-2, eps) * max(1.0, float(whole[1])), tolerance * 1e-2
        for at, what in enumerate(("sum", "count")):
            value, added = float(whole[at]), sum(float(half[at]) for half in halves)
            if math.isfinite(value) and not math.isclose(value, added, rel_tol=tolerance, abs_tol=slack[at]):
                refusal = LossDoesNotRecombine(
                    whole=value, recombined=added, name=self.name, is_pair=True, what=what, in_forward=True
                )
                refusal.is_drift = self._may_drift and self._has_passed and rule._is_guess
                raise refusal
        self._has_passed = True

    def gap_of_gradients(
        self,
        call: Callable[[Tree], Tree],
        parts: Sequence[tuple[Tree, int]],
        num_global: int,
        trained: Sequence[Tensor],
    ) -> float:
        rule = copy.copy(self)
        rule._has_noted = True
        left: list[Tensor] = []
        sizes: list[float] = []
        for at, (inputs, size) in enumerate(parts):
            row = rule.run(functools.partial(call, inputs), inputs, size, num_global)
            gradients = _gradients(rule(row, None, size, num_global)[0], list(trained))
            if not at:
                left, sizes = gradients, [float(each.abs().max()) for each in gradients]
            else:
                left = [each - part for each, part in zip(left, gradients, strict=True)]
        # A gradient that is zero except for rounding, as of a bias before a norm, says nothing.
        floor = 1e-3 * max(sizes, default=0.0)
        gaps = [
            float(each.abs().max()) / size for each, size in zip(left, sizes, strict=True) if size > floor
        ]
        return max((gap for gap in gaps if math.isfinite(gap)), default=0.0)

    def run(self, call: Callable[[], Tree], inputs: Tree, num_local: int, num_global: int) -> Tree:
        """The output with a row (sum, count) in place of the loss."""
        if not self._watches:
            output = call()
        else:
            with CountedLosses():
                output = call()
        self._key = _key_of_loss(output)
        loss = output if self._key is None else output[self._key]
        if isinstance(loss, tuple):
            total, count = loss[0], float(loss[1])
        else:
            known = count_on(loss)
            self._is_guess = known is None
            count = self._guess(inputs, num_local) if known is None else known
            total, count = _sum_of_mean(loss, count, num_local / num_global)
        if total.dtype in (torch.float16, torch.bfloat16):  # too coarse to count in
            total = total.float()
        row = torch.stack([total, total.new_tensor(count)]).unsqueeze(0)
        return row if self._key is None else replaced(output, self._key, row)

    def predictions(self, output: Tree) -> Tree:
        if self._key is None:
            return output
        return without(output, self._key) if isinstance(self._key, str) else replaced(output, self._key, None)

    def _guess(self, inputs: Tree, num_local: int) -> float:
        labels = split_target(inputs)[1] if isinstance(inputs, Mapping) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() < 2:
            labels = None
        if not self._has_noted and jobs.current().rank == 0:
            how = (
                "the number of its labels that are not -100"
                if labels is not None
                else "its number of samples"
            )
            print(
                f"note: the model's loss is none of torch's own as it stands, so a slice counts by {how}; `shoal verify` shows "
                "whether that is what one process computes",
                file=sys.stderr,
                flush=True,
            )
        self._has_noted = True
        return float(num_local) if labels is None else float(torch.ne(labels, -100).sum())


class StepLoss(OwnLoss):
    """Loss returned by a user's `training_step`: a mean over samples, or a pair (sum, count)."""

    name = "training_step"
    _may_drift = False

    def __init__(self) -> None:
        super().__init__(watches=True)

    def predictions(self, output: Tree) -> Tree:
        return output

    def _guess(self, inputs: Tree, num_local: int) -> float:
        return float(num_local)  # `check_forward` verifies the assumption


_COUNT = "_shoal_count"


def count_on(loss: Any) -> float | None:
    """Divisor of a mean that one of torch's losses returned, -1 for a sum; None if it is not such a result, unchanged."""
    count, version = getattr(loss, _COUNT, (0.0, None))
    # `loss += penalty` leaves the note of what the loss was before.
    return None if version is None or loss._version != version else float(count)


def _sum_of_mean(loss: Tensor, count: float, count_of_sum: float) -> tuple[Tensor, float]:
    """Sum and count of a mean over `count`; where that is -1 it is a sum, which counts `count_of_sum`."""
    if loss.dtype is torch.float16:  # in which a sum overflows
        loss = loss.float()
    if count < 0:
        return loss, count_of_sum
    # Of nothing but ignored labels the mean is no number.
    return (loss * count if count else torch.nan_to_num(loss) * 0.0), count


class CountedLosses(TorchFunctionMode):
    """Records on each result of torch's losses its divisor, -1 for a sum, and the tensor's version."""

    ignored_some = False
    """Whether one of them was divided by something else than the number of its targets: ignored labels, weights."""

    counts_itself = False
    """Whether something was divided by a number that a tensor held, or rows were selected: a mean of a mask's own, say."""

    gathered = False
    """Whether rows of all workers were gathered meanwhile, and not only before."""

    def __enter__(self) -> CountedLosses:
        self._scope = gathering.current()
        self._was_used = self._scope is not None and self._scope.is_used
        if self._scope is not None:
            self._scope.is_used = False
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if self._scope is not None:
            self.gathered = self._scope.is_used
            self._scope.is_used |= self._was_used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.where:
            self.counts_itself |= len(args) + len(kwargs or {}) == 1  # the places of a mask
        elif func in _SELECTING:
            self.counts_itself |= func not in _BY_ARGUMENT or any(map(_is_count_or_mask, args))
        elif func in _COUNTED and isinstance(result, Tensor) and result.dim() == 0:
            defaults = _defaults(func)
            given = {**defaults, **dict(zip(defaults, args, strict=False)), **(kwargs or {})}
            count = _count_of(func, SimpleNamespace(**given))
            if count is not None and not result.is_inference():  # inference tensors have no version
                setattr(result, _COUNT, (count, result._version))
                target = given.get("target")
                self.ignored_some |= (
                    func in _OF_LABELS and target is not None and count not in (-1.0, target.numel())
                )
        return result


@functools.cache
def _defaults(func: Any) -> dict[str, Any]:
    return {each.name: each.default for each in inspect.signature(func).parameters.values()}


def _is_count_or_mask(given: Any) -> bool:
    """Whether an operand is a single number, computed in tensors, which no gradient passes through; or a mask of rows."""
    if isinstance(given, tuple):
        return any(map(_is_count_or_mask, given))
    if not isinstance(given, Tensor):
        return False
    return given.dtype is torch.bool or (given.numel() == 1 and not given.requires_grad)


def _count_of(func: Any, given: Any) -> float | None:
    size_average, reduce = getattr(given, "size_average", None), getattr(given, "reduce", None)
    if size_average is not None or reduce is not None:  # deprecated, and take precedence over reduction
        return -1.0 if size_average is False and reduce is not False else None
    if given.reduction == "sum":
        return -1.0
    if func is F.ctc_loss:
        return float(len(given.input_lengths))
    denominator = _DENOMINATORS[_FUNCTIONAL[func]]
    if denominator is _elements and func not in _BINARY and getattr(given, "weight", None) is not None:
        return None  # divided by the weights
    return denominator(given, given.input, given.target)


def _key_of_loss(output: Tree) -> str | int | None:
    """Key or position of the loss in a model's output; None if it is the whole output."""
    if is_number(output):
        return None
    if isinstance(output, Mapping) and "loss" in output:
        return "loss"
    if isinstance(output, (tuple, list)):
        found = [at for at, each in enumerate(output) if is_number(each)]
        if len(found) == 1:
            return found[0]
    has = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
    raise TrainingError(
        f"loss='model' takes the loss that the model returns, and it returned a {type(output).__name__}{has}, in which there is "
        "no loss: none called so, no single number. Nothing was trained; let batches be dicts that hold what forward computes "
        "its loss from (labels=...), or give a loss function."
    )


def is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def logits_of(output: Tree) -> Any:
    """Scores of a model that returns several named outputs."""
    return output["logits"] if isinstance(output, Mapping) and "logits" in output else output


def without(output: Any, key: str) -> Any:
    """The same mapping without a key, in its own class."""
    rest = {name: value for name, value in output.items() if name != key}
    if dataclasses.is_dataclass(output):  # a ModelOutput, whose fields cannot be deleted
        kind: Any = type(output)
        return kind(**rest)
    left = copy.copy(output)
    del left[key]
    return left


def replaced(output: Any, key: str | int, value: object) -> Any:
    """The same container with another value under a key."""
    if isinstance(output, tuple):
        values = [value if at == key else each for at, each in enumerate(output)]
        kind: Any = type(output)
        return kind(*values) if hasattr(output, "_fields") else tuple(values)
    changed = copy.copy(output)
    changed[key] = value
    return changed


def _takes_weights(loss: Callable[..., Any]) -> bool:
    try:
        return "sample_weight" in inspect.signature(getattr(loss, "forward", loss)).parameters
    except (TypeError, ValueError):  # written in C
        return False


def _takes_target(loss: Callable[..., Any], *, of_mapping: bool = False) -> bool:
    """Whether a forward takes the target. `of_mapping`: the target is a key of the inputs; an optional
    parameter then does not receive it.
    """
    try:
        parameters = inspect.signature(getattr(loss, "forward", loss)).parameters.values()
    except (TypeError, ValueError):  # written in C
        return True
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [each for each in parameters if each.name != "sample_weight" and each.kind in by_place]
    if len(taken) > 1:
        second = taken[1]
        return not of_mapping or second.default is inspect.Parameter.empty or second.name in LABELS
    return any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)


GRADIENT_TOLERANCE = 1e-6
"""Difference between gradients of a whole and of its halves, relative to the largest, that is no rounding in float64.

Losses that compare samples differ by 2e-6 (a small variance beside a mean) to 0.3 (a correlation); means by nothing at all.
"""


@dataclasses.dataclass(slots=True)
class _LossOfPart:
    """A loss of some rows of a slice: its sum and count, or its mean if it is no pair."""

    total: Tensor
    count: float
    is_pair: bool
    outputs: list[Tensor]
    """What it was computed from, which gradients are taken by."""

    _by_outputs: list[Tensor] | None = None

    @property
    def is_opaque(self) -> bool:
        """Whether its backward may do more than compute: exchange, push rows, run a layer again."""
        return any(isinstance(node, BackwardCFunction) for node in nodes_of(self.total))

    def by_outputs(self) -> list[Tensor]:
        if self._by_outputs is None:
            self._by_outputs = [each.detach() for each in _gradients(self.total, self.outputs)]
        return self._by_outputs

    def gap(self, parts: Sequence[_LossOfPart], shares: Sequence[float]) -> float:
        """Largest difference of gradients by outputs to those of the parts, relative to the largest gradient."""
        if not self.total.requires_grad or self.is_opaque or any(part.is_opaque for part in parts):
            return 0.0
        apart = [[by * share for by in part.by_outputs()] for part, share in zip(parts, shares, strict=True)]
        together = [torch.cat(each) for each in zip(*apart, strict=True)]
        pairs = list(zip(self.by_outputs(), together, strict=True))
        size = max(
            (float(torch.maximum(one.abs().max(), other.abs().max())) for one, other in pairs), default=0
        )
        # What is not finite at the edge of a function (a root of 0) says nothing.
        gap = max((float((one - other).abs().max()) for one, other in pairs), default=0.0)
        return gap / size if size and math.isfinite(gap) and math.isfinite(size) else 0.0


def _refuse_cut(
    name: str, whole: _LossOfPart, halves: Sequence[_LossOfPart], shares: Sequence[float], tolerance: float
) -> None:
    """Refuse a loss whose halves do not recombine: sums add up, means by the count of each half."""
    parts = [whole, *halves]
    values = [float(part.total.detach()) for part in parts]
    recombined = values[1] * shares[0] + values[2] * shares[1]
    if math.isfinite(values[0]) and not math.isclose(
        values[0], recombined, rel_tol=tolerance, abs_tol=tolerance * 1e-2
    ):
        raise LossDoesNotRecombine(whole=values[0], recombined=recombined, name=name, is_pair=whole.is_pair)
    if whole.is_pair:
        counts = halves[0].count + halves[1].count
        if not math.isclose(whole.count, counts, rel_tol=tolerance):
            raise LossDoesNotRecombine(
                whole=whole.count, recombined=counts, name=name, is_pair=True, what="count"
            )
    if whole.is_opaque:
        return
    # A leaf that the loss creates itself, to differentiate by, is another one each time.
    shared = {id(leaf) for half in halves for leaf in leaves_of(nodes_of(half.total))}
    read = [leaf for leaf in leaves_of(nodes_of(whole.total)) if leaf.numel() and id(leaf) in shared]
    of_whole, of_first, of_second = (_gradients(part.total, read) for part in parts)
    for by, first, second in zip(of_whole, of_first, of_second, strict=True):
        summed = first * shares[0] + second * shares[1]
        size = torch.stack([by.abs().max(), first.abs().max(), second.abs().max()]).max()
        if bool((summed - by).abs().max() > tolerance * size):
            raise LossDoesNotRecombine(
                whole=float(by.norm()),
                recombined=float(summed.norm()),
                name=name,
                is_pair=whole.is_pair,
                what="gradient by a parameter that it reads",
            )


def nodes_of(total: Tensor, beyond: Iterable[Any] = ()) -> list[Any]:
    """Graph nodes that computed a tensor, without the nodes `beyond` and their ancestors."""
    seen: set[Any] = {None, *beyond}
    waiting: list[Any] = [total.grad_fn]
    found = []
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            found.append(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def made_before(total: Tensor, outputs: Iterable[Any]) -> list[Any]:
    """Nodes of a forward that a loss reads beside the nodes of its outputs: those made before the last of these."""
    known = [node for node in outputs if node is not None]
    if not known or total.grad_fn is None:
        return []
    last = max(node._sequence_nr() for node in known)
    seen: set[Any] = {None, *known}
    waiting: list[Any] = [total.grad_fn]
    found = []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() <= last:
            found.append(node)
        else:
            waiting += [following for following, _ in node.next_functions]
    return found


def leaves_of(nodes: Iterable[Any]) -> list[Tensor]:
    """The tensors at which these nodes would accumulate gradients."""
    return [node.variable for node in nodes if node.name() == "torch::autograd::AccumulateGrad"]


def _gradients(total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    if not leaves or not total.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    # Retained: the training backward still has to pass through the forward's graph.
    found = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    return [
        torch.zeros_like(leaf) if by is None else by.to_dense()
        for leaf, by in zip(leaves, found, strict=True)
    ]


def _refuse_pairs(name: str, output: Tensor, target: Tensor) -> None:
    """Refuse shapes that torch broadcasts over the samples: each output would meet every target of its own slice alone."""
    if output.dim() != target.dim() and output.dim() and target.dim():
        raise TrainingError(
            f"{name} was given outputs of shape {tuple(output.shape)} and targets of shape {tuple(target.shape)}, which torch broadcasts to "
            f"{tuple(torch.broadcast_shapes(output.shape, target.shape))}: every output is compared with the targets of all samples of the "  # type: ignore[no-untyped-call]
            "batch, of which a worker has a part. Nothing of this step was updated. Give both the same shape: output.squeeze(-1) in forward, "
            "or target[:, None] in the data."
        )


def _rows(weight: Tensor | None, begin: int, end: int) -> Any:
    return None if weight is None else weight[begin:end]


def _part(given: Tree, begin: int, end: int, num_samples: int) -> Any:
    def narrow(tensor: Tensor) -> Tensor:
        rows = tensor.shape[0] // num_samples
        return tensor[begin * rows : end * rows]

    return map_tensors(narrow, given)


def _device_of(output: Tree) -> str:
    return next((each.device.type for each in tensors(output)), "cpu")


def tolerance_of(output: Tree) -> float:
    """Rounding allowed in a mean, by the coarsest precision among the outputs: 1e-3 in float32, 6e-2 in bf16."""
    coarsest = _coarsest(output)
    return 1e-6 if coarsest < 1e-12 else max(1e-3, 8 * coarsest)


def _coarsest(output: Tree) -> float:
    return max((torch.finfo(t.dtype).eps for t in tensors(output) if t.is_floating_point()), default=1e-7)


def _elements(loss: Any, output: Tensor, target: Tensor) -> float:
    if output.shape == target.shape:  # broadcast_shapes costs 0.1 ms
        return float(output.numel())
    return float(math.prod(torch.broadcast_shapes(output.shape, target.shape)))  # type: ignore[no-untyped-call]


def _samples(loss: Any, output: Tensor, target: Tensor) -> float:
    return float(output.shape[0]) if output.dim() > 1 else 1.0


def _divergence(loss: Any, output: Tensor, target: Tensor) -> float:
    return float(output.shape[0]) if loss.reduction == "batchmean" else _elements(loss, output, target)


def _labels(loss: Any, output: Tensor, target: Tensor) -> float:
    """Divisor of cross entropy: labels that are not ignored, each by the weight of its class."""
    if target.is_floating_point():  # class probabilities
        return output.numel() / output.shape[1 if output.dim() > 1 else 0]
    counted = target != loss.ignore_index
    if loss.weight is None:
        return float(counted.sum())
    return float(loss.weight[target[counted]].sum())


_DENOMINATORS: dict[type, Callable[[Any, Tensor, Tensor], float]] = {
    nn.CrossEntropyLoss: _labels,
    nn.NLLLoss: _labels,
    nn.BCELoss: _elements,
    nn.BCEWithLogitsLoss: _elements,
    nn.MSELoss: _elements,
    nn.L1Loss: _elements,
    nn.SmoothL1Loss: _elements,
    nn.HuberLoss: _elements,
    nn.PoissonNLLLoss: _elements,
    nn.SoftMarginLoss: _elements,
    nn.HingeEmbeddingLoss: _elements,
    nn.KLDivLoss: _divergence,
    nn.MultiMarginLoss: _samples,
    nn.MultiLabelMarginLoss: _samples,
    nn.MultiLabelSoftMarginLoss: _samples,
}

_OUTPUTS_ARE: dict[type, OutputKind] = {nn.BCELoss: "probabilities", nn.NLLLoss: "log_probabilities"}

_FUNCTIONAL: dict[Any, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
}

_OF_LABELS = (F.cross_entropy, F.nll_loss)

_COUNTED = frozenset({*_FUNCTIONAL, F.ctc_loss})

_BY_ARGUMENT = frozenset(
    {
        Tensor.__getitem__,
        Tensor.__rdiv__,
        Tensor.reciprocal,
        Tensor.div,
        Tensor.div_,
        Tensor.true_divide,
        Tensor.pow,
        Tensor.__pow__,
        torch.pow,
        torch.reciprocal,
        torch.div,
        torch.true_divide,
    }
)

# A number read out of a tensor may divide, and rows that are selected may be few.
_SELECTING = _BY_ARGUMENT | {
    Tensor.item,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.tolist,
    Tensor.masked_select,
    torch.masked_select,
    Tensor.nonzero,
    torch.nonzero,
    Tensor.argwhere,
    torch.argwhere,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.unique,
    torch.unique,
    Tensor.nanmean,
    torch.nanmean,
}

# Mean over elements, weighted or not.
_BINARY = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
