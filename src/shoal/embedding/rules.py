"""Update rules of rows: for each its settings, its state, its numba loop, and the torch optimizer it equals.

A rule touches only rows that a gradient came for; for those it equals torch's
optimizer on sparse gradients (SGD without momentum, Adagrad, SparseAdam).
What clients may declare, what checkpoints hold and which optimizers rows can
follow derive from `RULES`: a new rule is a section here and a name there.

A row of the table is its values and then its state. Settings reach the loops
in the table's own precision, so that float32 stays float32. Values, state and
gradient of a row are arrays of their own: so the compiler sees that it can
work on several numbers at once, at a quarter of the time for Adagrad.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import ConfigError
from shoal.runtime.kernel_cache import ask_ahead, floating_kernel, matrix, types, vector

_AVERAGES = ("beta1", "beta2")  # decay rates of averages

_SMALLEST = 2.0**-126  # below it a number may be zero in float32, which tables hold


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """An update rule for rows, kept side by side with their state."""

    name: str
    defaults: dict[str, float]
    kernel: Callable[..., None]  # kernel(rows, grads, table, factor, numbers)
    numbers: Callable[[Mapping[str, float], int], tuple[float, ...]]
    """Arguments of the kernel, of (settings, number of this update, from 1)."""

    state: tuple[str, ...] = ()  # state kept per row, in torch's names; each as wide as the row
    is_rowwise: bool = False  # then each is one number per row
    first_state: str | None = None  # setting that new rows' state begins with; None: zero
    divides_by: tuple[str, ...] = ()
    """Settings that a gradient of zero, or any, is divided by: with them at zero rows would become NaN."""

    takes_gradients: bool = True  # false where pushes are values, which are never scaled
    optimizer: str | None = None  # class of torch.optim that does the same with sparse gradients
    settings_of: Callable[[Mapping[str, Any]], dict[str, float]] | None = None
    """Settings, of one of that optimizer's param_groups."""

    def state_dim(self, dim: int) -> int:
        return len(self.state) * (1 if self.is_rowwise else dim)

    def state_columns(self, dim: int) -> dict[str, slice]:
        """Columns of each state, by its name, in what a table keeps of rows of `dim` numbers."""
        width = 1 if self.is_rowwise else dim
        return {name: slice(at * width, (at + 1) * width) for at, name in enumerate(self.state)}

    def complete(self, settings: Mapping[str, float]) -> dict[str, float]:
        """Settings with defaults for what is not given; refused where the rule has no such setting."""
        unknown = sorted(settings.keys() - self.defaults.keys())
        if unknown:
            raise ConfigError(
                f"the rule '{self.name}' has no setting {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(sorted(self.defaults)) or 'none'}. Nothing was changed."
            )
        for name, value in settings.items():
            wanted = self._requirement(name, value)
            if wanted:
                raise ConfigError(
                    f"the setting '{name}' of the rule '{self.name}' has to be {wanted}, got {value!r}: rows would become numbers "
                    "that nothing can be trained with. Nothing was changed; give another, or leave it out for "
                    f"{self.defaults[name]:g}."
                )
        return {**self.defaults, **{name: float(value) for name, value in settings.items()}}

    def _requirement(self, name: str, value: object) -> str | None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return "a finite number"
        if name in _AVERAGES and not 0 <= value < 1:
            return "at least 0 and below 1"
        if name in self.divides_by and value < _SMALLEST:
            return "above 0"
        return "at least 0" if value < 0 else None


def _types(dtype: Any) -> tuple[Any, ...]:
    return vector(types.int32), matrix(dtype), matrix(dtype, written=True), dtype, vector(dtype)


# ---- sgd -----------------------------------------------------------------------------------------


@floating_kernel(_types)
def _sgd(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """values -= lr * gradient."""
    lr, dim = numbers[0], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        values, grad = table[rows[i]], grads[i]
        for d in range(dim):
            values[d] -= lr * (factor * grad[d])


SGD = UpdateRule(
    name="sgd",
    defaults={"lr": 1e-3},
    kernel=_sgd,
    numbers=lambda settings, step: (settings["lr"],),
    optimizer="SGD",
    settings_of=lambda group: {"lr": float(group["lr"])},
)


# ---- adagrad -------------------------------------------------------------------------------------


@floating_kernel(_types)
def _adagrad(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """sum += g²; values -= lr * g / (sqrt(sum) + eps)."""
    lr, eps, dim = numbers[0], numbers[1], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        values, squares, grad = table[rows[i], :dim], table[rows[i], dim:], grads[i]
        for d in range(dim):
            g = factor * grad[d]
            total = squares[d] + g * g
            squares[d] = total
            values[d] -= lr * (g / (math.sqrt(total) + eps))


@floating_kernel(_types)
def _rowwise_adagrad(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """Adagrad with one sum for the row: of the mean of its g²."""
    lr, eps, dim = numbers[0], numbers[1], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row, grad = table[rows[i]], grads[i]
        squares = factor * 0
        for d in range(dim):
            g = factor * grad[d]
            squares += g * g
        total = row[dim] + squares / table.dtype.type(dim)
        row[dim] = total
        scale = lr / (math.sqrt(total) + eps)
        for d in range(dim):
            row[d] -= scale * (factor * grad[d])


def _adagrad_numbers(settings: Mapping[str, float], step: int) -> tuple[float, ...]:
    return (settings["lr"] / (1 + (step - 1) * settings["lr_decay"]), settings["eps"])


_ADAGRAD_DEFAULTS = {"lr": 0.01, "lr_decay": 0.0, "eps": 1e-10, "initial_accumulator_value": 0.0}

ADAGRAD = UpdateRule(
    name="adagrad",
    defaults=_ADAGRAD_DEFAULTS,
    kernel=_adagrad,
    numbers=_adagrad_numbers,
    state=("sum",),
    first_state="initial_accumulator_value",
    divides_by=("eps",),
    optimizer="Adagrad",
    settings_of=lambda group: {name: float(group[name]) for name in _ADAGRAD_DEFAULTS},
)
ROWWISE_ADAGRAD = UpdateRule(
    name="rowwise-adagrad",
    defaults=_ADAGRAD_DEFAULTS,
    kernel=_rowwise_adagrad,
    numbers=_adagrad_numbers,
    state=("sum",),
    is_rowwise=True,
    first_state="initial_accumulator_value",
    divides_by=("eps",),
)


# ---- adam ----------------------------------------------------------------------------------------


@floating_kernel(_types)
def _adam(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """torch's SparseAdam: both averages of a row move only when a gradient comes for it."""
    step_size, rest1, rest2, eps, dim = numbers[0], numbers[1], numbers[2], numbers[3], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        values, grad = table[rows[i], :dim], grads[i]
        means, squares = table[rows[i], dim : 2 * dim], table[rows[i], 2 * dim :]
        for d in range(dim):
            g = factor * grad[d]
            mean, square = means[d], squares[d]
            mean += (g - mean) * rest1
            square += (g * g - square) * rest2
            means[d] = mean
            squares[d] = square
            values[d] -= step_size * (mean / (math.sqrt(square) + eps))


def _adam_numbers(settings: Mapping[str, float], step: int) -> tuple[float, ...]:
    beta1, beta2 = settings["beta1"], settings["beta2"]
    step_size = settings["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    return (step_size, 1 - beta1, 1 - beta2, settings["eps"])


def _adam_settings(group: Mapping[str, Any]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    return {
        "lr": float(group["lr"]),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(group["eps"]),
    }


ADAM = UpdateRule(
    name="adam",
    defaults={"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    kernel=_adam,
    numbers=_adam_numbers,
    state=("exp_avg", "exp_avg_sq"),
    divides_by=("eps",),
    optimizer="SparseAdam",
    settings_of=_adam_settings,
)


# ---- ftrl ----------------------------------------------------------------------------------------


@floating_kernel(_types)
def _ftrl(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """FTRL-proximal (McMahan et al. 2013); state: z, then n."""
    lr, beta, l1, l2, dim = numbers[0], numbers[1], numbers[2], numbers[3], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        values, grad = table[rows[i], :dim], grads[i]
        zs, squares = table[rows[i], dim : 2 * dim], table[rows[i], 2 * dim :]
        for d in range(dim):
            g = factor * grad[d]
            before = squares[d]
            after = before + g * g
            sigma = (math.sqrt(after) - math.sqrt(before)) / lr
            z = zs[d] + g - sigma * values[d]
            zs[d] = z
            squares[d] = after
            if abs(z) <= l1:
                values[d] = 0
            else:
                toward = z - l1 if z > 0 else z + l1
                values[d] = -toward / ((beta + math.sqrt(after)) / lr + l2)


FTRL = UpdateRule(
    name="ftrl",
    defaults={"lr": 0.1, "beta": 1.0, "l1": 0.0, "l2": 0.0},
    kernel=_ftrl,
    numbers=lambda settings, step: (settings["lr"], settings["beta"], settings["l1"], settings["l2"]),
    state=("z", "n"),
    divides_by=("lr",),
)


# ---- store and add: what was pushed is no gradient -----------------------------------------------


@floating_kernel(_types)
def _store(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """values = what was pushed."""
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row = rows[i]
        for d in range(grads.shape[1]):
            table[row, d] = grads[i, d]


@floating_kernel(_types)
def _add(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """values += what was pushed."""
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row = rows[i]
        for d in range(grads.shape[1]):
            table[row, d] += factor * grads[i, d]


STORE = UpdateRule(
    name="store", defaults={}, kernel=_store, numbers=lambda settings, step: (), takes_gradients=False
)
ADD = UpdateRule(
    name="add", defaults={}, kernel=_add, numbers=lambda settings, step: (), takes_gradients=False
)


# ---- the registry --------------------------------------------------------------------------------

RULES: dict[str, UpdateRule] = {
    rule.name: rule for rule in (SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, FTRL, STORE, ADD)
}


def rule_named(name: str) -> UpdateRule:
    if name not in RULES:
        raise ConfigError(
            f"there is no update rule '{name}'; rows know {', '.join(RULES)}. Nothing was declared."
        )
    return RULES[name]


def rule_of_optimizer(optimizer: str, group: Mapping[str, Any]) -> tuple[str, dict[str, float]] | str:
    """Rule and settings by which rows do what this optimizer of torch.optim does to them with sparse gradients.

    `group` is one of its param_groups. A sentence instead, where no rule does: what stands in the way.
    """
    for name in ("momentum", "weight_decay", "maximize", "dampening", "nesterov"):
        if group.get(name):
            return f"{optimizer} with {name}={group[name]} changes rows that no gradient came for, or in another direction"
    for rule in RULES.values():
        if rule.optimizer == optimizer and rule.settings_of is not None:
            return rule.name, rule.settings_of(group)
    *others, last = (rule.optimizer for rule in RULES.values() if rule.optimizer is not None)
    return f"{optimizer} has no rule for rows; {', '.join(others)} and {last} have"
