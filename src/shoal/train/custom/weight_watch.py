"""Weights that a script writes itself, past `optimizer.step()`: from a local gradient they differ on every worker.

Sees writes in place; those through `.data` only by comparing the workers' weights. Sums nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import ConfigError, TrainingError
from shoal.parallel import own_gradients


class WeightWatch:
    """The parameters that backward has reached since the last commit, and how often they had been written then."""

    def __init__(self, model: nn.Module) -> None:
        self._versions: dict[str, int] = {}
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.was_reached = False
        """By a backward since this was last set to False."""

        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note, name))  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """The gradients were summed or used: from here on a write is the same on every worker."""
        self._versions.clear()

    def check(self) -> None:
        for name, version in self._versions.items():
            self._refuse_written(name, version)

    def accept(self) -> None:
        """The strategy itself has written the weights: pulled them from servers."""
        self._versions = {name: self._parameters[name]._version for name in self._versions}

    def _note(self, name: str, parameter: Tensor) -> None:
        if not own_gradients.rests():
            self.was_reached = True
            self._refuse_written(name, self._versions.setdefault(name, parameter._version))

    def _refuse_written(self, name: str, version: int) -> None:
        if self._parameters[name]._version != version:
            raise ConfigError(
                f"the weights '{name}' were changed between backward() and optimizer.step(), from this worker's part of the gradient: every "
                "worker would train weights of its own. Nothing of this step was exchanged; call shoal.sum_gradients(optimizer) after backward() "
                "and before the change, and let optimizer.step() make the update."
            )


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers within a wrapper (SAM, Lookahead) that update some of the same parameters."""
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def within(outer: Optimizer) -> Iterator[Optimizer]:
        for inner in vars(outer).values():
            if isinstance(inner, Optimizer) and any(
                id(parameter) in given for group in inner.param_groups for parameter in group["params"]
            ):
                yield inner
                yield from within(inner)

    return list(dict.fromkeys(within(optimizer)))


def act_on_sums(optimizer: Optimizer, sum_gradients: Callable[[], None]) -> None:
    """Sum the gradients before each part of a step that the optimizer's own class has (`first_step` of SAM)."""

    def extended(part: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(part)
        def on_sums(*args: object, **kwargs: object) -> object:
            sum_gradients()
            return part(*args, **kwargs)

        return on_sums

    for name in dir(type(optimizer)):
        if name.endswith("_step") and not name.startswith("_") and not hasattr(Optimizer, name):
            setattr(optimizer, name, extended(getattr(optimizer, name)))


def digest(model: nn.Module) -> int:
    """A number that differs where any weight does."""
    return sum(own_gradients.bits(parameter) for parameter in model.parameters())


def refuse_different(
    settings: list[int], digests: list[int], gather: Callable[[Tensor], list[Tensor]]
) -> None:
    """Refuse settings of optimizers, or weights, that differ between workers. Collective."""
    everywhere = [each.tolist() for each in gather(torch.tensor([*settings, *digests], dtype=torch.int64))]
    differing = [rank for rank, each in enumerate(everywhere) if each != everywhere[0]]
    if not differing:
        return
    if everywhere[0][: len(settings)] != everywhere[differing[0]][: len(settings)]:
        raise TrainingError(
            f"the optimizers of workers 0 and {differing[0]} have different settings (a learning rate set from this worker's loss, by "
            "ReduceLROnPlateau say): each worker trains with its own. Nothing was saved; set them from shoal.reduce(...), which is the same on every worker."
        )
    raise TrainingError(
        f"workers 0 and {differing[0]} have different weights, so something besides optimizer.step() has changed them, from this worker's "
        "gradient or batch: each worker trains a model of its own. Nothing was saved; let the optimizer that shoal.setup was given make the "
        "update, or call shoal.sum_gradients(optimizer) before the weights are changed."
    )
