"""Averages of weights as state of the optimizer: beside each parameter, updated with it.

Optimizer state is sharded, held by servers, saved, and transferred to replacements with its
parameter. An average that is such state is exact under every strategy, and over every recovery,
without code of its own.
"""

from __future__ import annotations

from typing import Any

import torch

AVERAGE = "average"
"""Key of the state."""

DECAY, TAKE = "average_decay", "average_take"
"""Settings of a group. Decay: after each update average = decay * average + (1 - decay) * weights; 0: not so. Take: before
the next update average += take * (weights - average); 0: not so, 1: begin with the weights."""

PREFIX = "Averaged"


class KeepsAverage(torch.optim.Optimizer):
    """Mixed into an optimizer's class by `averaged`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        begun: list[tuple[torch.Tensor, torch.Tensor]] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.state.get(parameter):
                    if group[TAKE]:
                        self._move(parameter, float(group[TAKE]))
                elif parameter.grad is not None and not group[DECAY]:
                    # It never changed, so every average so far equals it. Not in the state before the
                    # update: torch initialises only an empty state.
                    begun.append((parameter, parameter.detach().clone()))
        result = super().step(closure)  # of the class that it is mixed into
        for parameter, weights in begun:
            self.state[parameter][AVERAGE] = weights
        for group in self.param_groups:
            if group[DECAY]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._move(parameter, 1.0 - group[DECAY])
        return result

    def _move(self, parameter: torch.Tensor, weight: float) -> None:
        state, weights = self.state[parameter], parameter.detach()
        if AVERAGE not in state:
            state[AVERAGE] = weights.clone()
        elif weight == 1.0:
            state[AVERAGE].copy_(weights)
        else:
            state[AVERAGE].lerp_(weights, weight)


_made: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {}


def averaged(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class of optimizers like `kind` that keep an average. Its name tells servers which one it is."""
    if kind not in _made:
        _made[kind] = type(f"{PREFIX}{kind.__name__}", (KeepsAverage, kind), {"__module__": __name__})
    return _made[kind]


def base_of(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class without its average."""
    return kind.__mro__[2] if issubclass(kind, KeepsAverage) else kind


def keep_average(optimizer: torch.optim.Optimizer, *, decay: float) -> torch.optim.Optimizer:
    """Make an existing optimizer keep an average from now on."""
    if not isinstance(optimizer, KeepsAverage):
        optimizer.__class__ = averaged(type(optimizer))
        for group in (optimizer.defaults, *optimizer.param_groups):
            group.update({DECAY: decay, TAKE: 0.0})
    return optimizer
