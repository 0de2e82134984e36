"""Rows on a device with their optimizer state: lookups, sums of gradients, updates by the tables'
rules in torch's own operations.

The counterpart of `row_table.py`, which does the same in numba for rows in host memory. Rows are
addressed by place; the owner of the table maps keys to places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.embedding.kernels import sum_back, unique
from shoal.embedding.rules import rule_named

Rule = Callable[[Tensor, Tensor, Tensor, Sequence[float]], None]


def _sgd(values: Tensor, state: Tensor, grads: Tensor, numbers: Sequence[float]) -> None:
    values.sub_(grads.mul_(numbers[0]))


def _adagrad(values: Tensor, state: Tensor, grads: Tensor, numbers: Sequence[float]) -> None:
    lr, eps = numbers
    state.add_(grads * grads)
    values.sub_(grads.div_(state.sqrt().add_(eps)).mul_(lr))


def _adam(values: Tensor, state: Tensor, grads: Tensor, numbers: Sequence[float]) -> None:
    step_size, rest1, rest2, eps = numbers
    means, squares = state.chunk(2, dim=1)
    means.add_((grads - means).mul_(rest1))
    squares.add_((grads * grads).sub_(squares).mul_(rest2))
    values.sub_(means.div(squares.sqrt().add_(eps)).mul_(step_size))


ON_DEVICE: dict[str, Rule] = {"sgd": _sgd, "adagrad": _adagrad, "adam": _adam}
"""Updates by name of the rule: change values and state in place, gradients are scratch. In the order of operations of the numba loop of
that name, which is what runs on a CPU: there torch's square root has other last bits."""


def summed(places: Tensor, grads: Tensor, num_places: int) -> tuple[Tensor, Tensor]:
    """Each place once, increasing, and the sum of its gradients: in the order of the batch on the CPU, by torch elsewhere."""
    if places.device.type == "cpu":
        found, inverse = unique(places.numpy())
        sums = grads.new_empty(len(found), grads.shape[1])
        sum_back(grads.contiguous().numpy(), inverse, sums.numpy())
        return torch.from_numpy(found), sums
    whole = torch.sparse_coo_tensor(
        places.unsqueeze(0), grads, (num_places, grads.shape[1]), check_invariants=False
    ).coalesce()
    return whole.indices()[0], whole.values()


class DeviceRows:
    """A fixed number of places for rows of one table, and which of them were changed."""

    def __init__(self, values: Tensor, rule: str, settings: Mapping[str, float]) -> None:
        """`values` is kept, and changed in place: a row per place."""
        self.values, self._rule = values, rule_named(rule)
        self._update = ON_DEVICE[rule]
        self._first = self._rule.complete(settings)[self._rule.first_state] if self._rule.first_state else 0.0
        self.state = values.new_full((len(values), self._rule.state_dim(values.shape[1])), self._first)
        self.is_changed = torch.zeros(len(values), dtype=torch.bool, device=values.device)
        self.num_changes = 0  # since `take_changed`; a row may be counted several times

    @property
    def row_bytes(self) -> int:
        return (self.values.shape[1] + self.state.shape[1]) * self.values.element_size()

    def update(
        self, places: Tensor, grads: Tensor, factor: float, settings: Mapping[str, float], step: int
    ) -> None:
        """One update of these rows, each once, by gradients that may be written to; `step` counts updates from 1."""
        dtype = np.dtype(str(self.values.dtype).removeprefix("torch."))
        numbers = np.array(self._rule.numbers(self._rule.complete(settings), step), dtype)
        values, state = self.values.index_select(0, places), self.state.index_select(0, places)
        if places.device.type == "cpu":
            whole, in_order = torch.cat([values, state], dim=1), np.arange(len(places), dtype=np.int32)
            self._rule.kernel(in_order, grads.contiguous().numpy(), whole.numpy(), factor, numbers)
            values, state = whole[:, : values.shape[1]], whole[:, values.shape[1] :]
        else:
            self._update(values, state, grads if factor == 1.0 else grads.mul_(factor), numbers.tolist())
        self.values.index_copy_(0, places, values)
        if state.shape[1]:
            self.state.index_copy_(0, places, state)
        self.is_changed.index_fill_(0, places, True)
        self.num_changes += len(places)

    def take_changed(self) -> tuple[Tensor, Tensor]:
        """Places of rows that changed since the last time, increasing, and a copy of them, values and state side by side."""
        places = self.is_changed.nonzero().flatten()
        self.is_changed.zero_()
        self.num_changes = 0
        return places, torch.cat([self.values[places], self.state[places]], dim=1)

    def fill(self, places: Tensor, rows: Tensor) -> None:
        """Set rows, values and state side by side; they count as unchanged."""
        dim, rows = self.values.shape[1], rows.to(self.values.device)
        self.values.index_copy_(0, places, rows[:, :dim])
        self.state.index_copy_(0, places, rows[:, dim:])

    def set_state(self, state: NDArray[Any] | None) -> None:
        """Set the optimizer state of all rows; None: to its value before the first update."""
        if state is None:
            self.state.fill_(self._first)
        else:
            self.state.copy_(torch.from_numpy(state))

    def change_all(self) -> None:
        """Every row counts as changed."""
        self.is_changed.fill_(True)
        self.num_changes = len(self.values)

    def move(self, holes: Tensor, moved: Tensor) -> None:
        """Rows at `moved` are at `holes` from now on."""
        for tensor in (self.values, self.state, self.is_changed):
            tensor[holes] = tensor[moved]
