"""How a row changes when a gradient comes: names, hyper-parameters and state of each rule.

The arithmetic is in rule_kernels.py. A rule touches only rows that a gradient
came for; for those it equals torch's optimizer of that name on sparse
gradients (SGD without momentum, Adagrad, SparseAdam).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.embedding import rule_kernels
from shoal.errors import ConfigError

_AVERAGES = ("beta1", "beta2")
"""How much of an average stays when a gradient comes."""

_SMALLEST = 2.0**-126
"""Below it a number may be zero in float32, which tables hold."""


@dataclass(frozen=True, slots=True)
class Rule:
    """An update rule for rows of `dim` numbers, kept side by side with `state_dim(dim)` numbers of state."""

    name: str
    defaults: dict[str, float]
    state_dim: Callable[[int], int]
    numbers: Callable[[Mapping[str, float], int], tuple[float, ...]]
    """What the kernel needs, of (settings, number of this update, from 1)."""

    kernel: Callable[..., None]
    """kernel(rows, grads, table, factor, numbers)."""

    first_state: str | None = None
    """The setting that new rows' state begins with; None: zero."""

    divides_by: tuple[str, ...] = ()
    """Settings that a gradient of zero, or any, is divided by: with them at zero rows would become NaN."""

    def complete(self, settings: Mapping[str, float]) -> dict[str, float]:
        """The settings with defaults for what is not given; refused where the rule has no such setting."""
        unknown = sorted(settings.keys() - self.defaults.keys())
        if unknown:
            raise ConfigError(
                f"the rule '{self.name}' has no setting {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(sorted(self.defaults)) or 'none'}. Nothing was changed."
            )
        for name, value in settings.items():
            wanted = self._why_not(name, value)
            if wanted:
                raise ConfigError(
                    f"the setting '{name}' of the rule '{self.name}' has to be {wanted}, got {value!r}: rows would become numbers "
                    "that nothing can be trained with. Nothing was changed; give another, or leave it out for "
                    f"{self.defaults[name]:g}."
                )
        return {**self.defaults, **{name: float(value) for name, value in settings.items()}}

    def _why_not(self, name: str, value: object) -> str | None:
        """What a setting has to be, where it is not."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return "a finite number"
        if name in _AVERAGES and not 0 <= value < 1:
            return "at least 0 and below 1"
        if name in self.divides_by and value < _SMALLEST:
            return "above 0"
        return "at least 0" if value < 0 else None


def _sgd(settings: Mapping[str, float], step: int) -> tuple[float, ...]:
    return (settings["lr"],)


def _adagrad(settings: Mapping[str, float], step: int) -> tuple[float, ...]:
    return (settings["lr"] / (1 + (step - 1) * settings["lr_decay"]), settings["eps"])


def _adam(settings: Mapping[str, float], step: int) -> tuple[float, ...]:
    beta1, beta2 = settings["beta1"], settings["beta2"]
    step_size = settings["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    return (step_size, 1 - beta1, 1 - beta2, settings["eps"])


def _ftrl(settings: Mapping[str, float], step: int) -> tuple[float, ...]:
    return (settings["lr"], settings["beta"], settings["l1"], settings["l2"])


def _nothing(settings: Mapping[str, float], step: int) -> tuple[float, ...]:
    return ()


_ADAGRAD = {"lr": 0.01, "lr_decay": 0.0, "eps": 1e-10, "initial_accumulator_value": 0.0}
_ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
_FTRL = {"lr": 0.1, "beta": 1.0, "l1": 0.0, "l2": 0.0}

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("sgd", {"lr": 1e-3}, lambda dim: 0, _sgd, rule_kernels.sgd),
        Rule(
            "adagrad",
            _ADAGRAD,
            lambda dim: dim,
            _adagrad,
            rule_kernels.adagrad,
            "initial_accumulator_value",
            ("eps",),
        ),
        Rule(
            "rowwise-adagrad",
            _ADAGRAD,
            lambda dim: 1,
            _adagrad,
            rule_kernels.rowwise_adagrad,
            "initial_accumulator_value",
            ("eps",),
        ),
        Rule("adam", _ADAM, lambda dim: 2 * dim, _adam, rule_kernels.adam, divides_by=("eps",)),
        Rule("ftrl", _FTRL, lambda dim: 2 * dim, _ftrl, rule_kernels.ftrl, divides_by=("lr",)),
        Rule("store", {}, lambda dim: 0, _nothing, rule_kernels.store),
        Rule("add", {}, lambda dim: 0, _nothing, rule_kernels.add),
    )
}
"""Every rule by its name; a new one is a line here and a kernel."""


def rule_named(name: str) -> Rule:
    """The rule, or a refusal that lists them."""
    if name not in RULES:
        raise ConfigError(
            f"there is no update rule '{name}'; rows know {', '.join(RULES)}. Nothing was declared."
        )
    return RULES[name]


def rule_of_optimizer(optimizer: str, group: Mapping[str, Any]) -> tuple[str, dict[str, float]] | str:
    """The rule and settings by which rows do what this optimizer of torch.optim does to them with sparse gradients.

    `group` is one of its param_groups. A sentence instead, where no rule does: what stands in the way.
    """
    for name in ("momentum", "weight_decay", "maximize", "dampening", "nesterov"):
        if group.get(name):
            return f"{optimizer} with {name}={group[name]} changes rows that no gradient came for, or in another direction"
    match optimizer:
        case "SGD":
            return "sgd", {"lr": float(group["lr"])}
        case "Adagrad":
            return "adagrad", {name: float(group[name]) for name in _ADAGRAD}
        case "SparseAdam":
            beta1, beta2 = group["betas"]
            return "adam", {
                "lr": float(group["lr"]), "beta1": float(beta1), "beta2": float(beta2), "eps": float(group["eps"])
            }  # fmt: skip
    return f"{optimizer} has no rule for rows; SGD, Adagrad and SparseAdam have"
