"""Gradients of a loop that calls backward itself, from backward to commit.

Weights each backward by the slice it came from, and distinguishes gradients written by the script
from those of backward. Exchanges nothing: `ddp.py` and `ps.py` sum, each in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError

_rests = False


class Resting:
    """Context in which a Trainer runs, perhaps on a model that a loop was set up with: its gradients are not the loop's."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        global _rests
        self._before, _rests = _rests, True

    def __exit__(self, *raised: object) -> None:
        global _rests
        _rests = self._before


def rests() -> bool:
    """Whether gradients computed now do not belong to a loop."""
    return _rests


class OwnGradients:
    """Watches `.grad` of a model's parameters.

    Before `summed` it is this rank's part of the gradient of the global batches, however many were
    accumulated; after it, the whole gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        self.weight = 1.0
        """Share of the global batch of the next backward."""

        self._all = list(model.named_parameters())
        self._watched = [(name, p) for name, p in self._all if p.requires_grad]
        self._left: dict[int, tuple[int, ...]] = {}  # by parameter: identity of the gradient after backward
        self._step = 1
        self._contributed: set[int] = set()  # parameters that a sample of this rank's own reached
        self._sums: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}  # of the step before, for the script to read
        self._uncleared: set[int] = set()  # parameters that backward has reached without a zero_grad() before
        self._nodes = []
        for number, (_, parameter) in enumerate(self._watched):
            with torch.enable_grad():
                copy = parameter.view_as(parameter)
            assert copy.grad_fn is not None
            node = copy.grad_fn.next_functions[0][0]
            assert node is not None
            # On the accumulation node, not on the parameter: torch.autograd.grad must return its usual
            # values.
            node.register_prehook(self._weigh(number))
            parameter.register_post_accumulate_grad_hook(self._note(number))  # type: ignore[no-untyped-call]
            self._nodes.append(node)  # autograd drops the hooks of an unreferenced node

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._watched]

    @property
    def is_summed(self) -> bool:
        for number in [n for n in self._sums if self._watched[n][1].grad is None]:
            del self._sums[number]
        return bool(self._sums)

    def summed(self, gradients: Sequence[Tensor | None]) -> None:
        """Replace gradients by their sums over the ranks, in the order of `parameters`."""
        self._clear()
        for number, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            parameter.grad = gradient
            if gradient is not None:
                self._sums[number] = gradient

    def check(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Refuse gradients that are neither as backward left them nor zero: summing them would be wrong. And those that the optimizer's
        `zero_grad` should have cleared: one process would have added to them.

        Afterwards a parameter that only borrowed samples reached has no gradient, like one that no
        sample reached.
        """
        for kept in list(self._kept):
            self._drop_kept(kept)
        is_summed = self.is_summed
        numbers = {id(parameter): number for number, (_, parameter) in enumerate(self._watched)}
        groups = optimizer.param_groups if optimizer is not None and self._uncleared else []
        stepped = {numbers.get(id(each), -1) for group in groups for each in group["params"]}
        for name, parameter in (self._watched[uncleared] for uncleared in stepped & self._uncleared):
            if parameter.grad is not None:
                raise ConfigError(
                    f"the gradient of '{name}' still held that of the step before when backward() ran again, and one process would have added "
                    "to it. Nothing of this step was applied; call optimizer.zero_grad() once for each step."
                )
        for name, parameter in self._all:
            if parameter.grad is None:
                continue
            number = numbers.get(id(parameter))
            if number is None:
                raise ConfigError(
                    f"'{name}' has a gradient, and was frozen (requires_grad=False) when shoal.setup was called, so its gradient "
                    "would not be exchanged. Nothing of this step was applied; call shoal.setup with every parameter that will "
                    "be trained unfrozen, and freeze them after it."
                )
            if is_summed:
                if number in self._left:
                    raise _after_the_sum(name)
            elif self._left.get(number) != self._standing(parameter.grad) and is_anything(parameter.grad):
                raise ConfigError(
                    f"the gradient of '{name}' was changed between backward() and optimizer.step(), where it is only this worker's "
                    "part: the sum over the workers would not be what one process computes. Nothing of this step was applied; "
                    "call shoal.sum_gradients(optimizer) after the last backward() of a step and change the gradients then, or "
                    "use shoal.clip_grad_norm_ or torch.nn.utils.clip_grad_norm_, which do so."
                )
            elif number not in self._contributed:
                parameter.grad = None

    def drop_borrowed(self) -> None:
        """Remove gradients, even zeros, that no sample of this rank reached: its optimizer would step on them."""
        for number, (_, parameter) in enumerate(self._watched):
            if number not in self._contributed:
                parameter.grad = None

    def forget(self) -> None:
        """The step is committed."""
        self._clear()
        self._kept.clear()
        self._step += 1
        for _, parameter in self._all:
            parameter.grad = None

    def keep(self) -> None:
        """The step is committed. Its summed gradients stay until the next backward: the script may read them, or step another optimizer."""
        self._clear()
        self._step += 1
        self._kept = {n: p.grad for n, (_, p) in enumerate(self._watched) if p.grad is not None}

    def _drop_kept(self, number: int) -> None:
        kept, parameter = self._kept.pop(number, None), self._watched[number][1]
        if kept is not None and parameter.grad is kept:
            if is_anything(kept):
                self._uncleared.add(number)
            parameter.grad = None
        elif parameter.grad is None or not is_anything(parameter.grad):
            self._uncleared.discard(number)

    def _clear(self) -> None:
        self._left.clear()
        self._contributed.clear()
        self._sums.clear()

    def _weigh(self, number: int) -> Callable[[Any], Any]:
        name, parameter = self._watched[number]

        def weigh(gradients: tuple[Tensor | None]) -> tuple[Tensor | None] | None:
            if _rests:
                return None
            if self._kept or self._uncleared:
                self._drop_kept(number)
            if self._sums and number in self._sums:
                if parameter.grad is not None and is_anything(parameter.grad):
                    raise _after_the_sum(name)
                del self._sums[number]  # the step was skipped
            (gradient,) = gradients
            if gradient is None:
                return None
            if not self.weight:
                # A borrowed sample contributes nothing, NaN or not; but `.grad` exists, as on every rank.
                return (torch.zeros_like(gradient),)
            self._contributed.add(number)
            return (gradient * self.weight,) if self.weight != 1.0 else None

        return weigh

    def _note(self, number: int) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            if _rests:
                return
            if parameter.grad is not None:
                self._left[number] = self._standing(parameter.grad)

        return note

    def _standing(self, gradient: Tensor) -> tuple[int, ...]:
        """Identity that changes with every in-place write, and with a new tensor in its place.

        torch does not count writes through `.data`: at steps 1, 2, 4, 8 and so on the values are part of it.
        """
        standing = (id(gradient), gradient._version)
        if self._step.bit_count() > 1 or gradient.layout is not torch.strided:
            return standing
        return *standing, bits(gradient)


def bits(tensor: Tensor) -> int:
    """A number that differs where any bit of the values does, but for chance."""
    flat = tensor.detach().contiguous().reshape(-1)
    return int(flat.view(torch.int8 if flat.element_size() == 1 else torch.int16).sum())


def is_anything(gradient: Tensor) -> bool:
    """Whether a gradient is not zero."""
    values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
    return bool(values.any())


def _after_the_sum(name: str) -> ConfigError:
    return ConfigError(
        f"backward() added to the gradient of '{name}' after the gradients of this step had been summed over the workers (by "
        "clip_grad_norm_, clip_grad_value_ or shoal.sum_gradients): a part of one worker on top of the sum of all. Nothing of "
        "this step was applied; sum or clip after the last backward() of a step."
    )
