"""Samples that say how much they count: `with_weights`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shoal.data.order.order import Indices
from shoal.data.order.sampled import checked_weights
from shoal.data.slice import split_target
from shoal.data.sources.grouping import integers
from shoal.data.sources.source import Derived, Source, name_of
from shoal.data.sources.user_code import blame
from shoal.data.tree import Tree
from shoal.data.values import Values, find_column, label_of
from shoal.data.weights import Weighted
from shoal.errors import ConfigError, DataError

By = str | Callable[[Any], Any] | Values


class WeightedSource(Derived):
    """Another source whose samples (inputs, target) get a weight.

    A column that is the weight is no input any more.
    """

    name = "with_weights"

    def __init__(self, source: Source, by: By) -> None:
        super().__init__(source)
        self._by, self._label = by, label_of(source)
        self._array: torch.Tensor | None = None
        if callable(by):
            self.runs_user_code = True

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """The source's, with a weight each."""
        samples = self._source.samples(indices, epoch)
        if isinstance(self._by, Values):
            weights: list[Any] = list(self._weights_at(indices))
        elif isinstance(self._by, str):
            weights = [find_column(sample, self._by, self._label, "with_weights") for sample in samples]
        else:
            weights = []
            for index, sample in zip(indices, samples, strict=True):
                try:
                    weights.append(self._by(sample))
                except Exception as error:
                    blame("with_weights", self._by, error, index, epoch)
                    raise
        made = [
            self._weighted(sample, checked_weight(weight, index))
            for index, sample, weight in zip(indices, samples, weights, strict=True)
        ]
        return made

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        """The source's batch, with the weights of its samples."""
        if callable(self._by):
            return super().batch(indices, epoch)
        batch = self._source.batch(indices, epoch)
        if isinstance(self._by, Values):
            return self._weighted(batch, self._weights_at(indices))
        weights = find_column(batch, self._by, self._label, "with_weights")
        return self._weighted(batch, checked_weight(weights, indices))

    def describe(self) -> list[dict[str, Any]]:
        """The source's own, and where the weights come from."""
        by = self._by.describe() if isinstance(self._by, Values) else self._by
        return [
            *self._source.describe(),
            {"stage": "with_weights", "weights": by if isinstance(by, str) else name_of(by)},
        ]

    def _weights_at(self, indices: Indices) -> torch.Tensor:
        assert isinstance(self._by, Values)
        if self._array is None:
            self._array = torch.from_numpy(checked_weights(self._by).astype(np.float32))
        return self._array[torch.from_numpy(integers(indices))]

    def _weighted(self, sample: Any, weight: torch.Tensor) -> Weighted:
        return weighted(sample, weight, column=self._by if isinstance(self._by, str) else None)


def weighted(sample: Any, weight: torch.Tensor, *, column: str | None) -> Weighted:
    """A sample or batch (inputs, target) with its weight, which is no input any more where it was a column."""
    if isinstance(sample, Weighted):
        raise ConfigError("with_weights was called twice; multiply the weights and call it once")
    if not isinstance(sample, (tuple, list)) or len(sample) < 2:
        raise DataError(
            f"with_weights needs samples of (inputs, target), and these are a {type(sample).__name__}: without a target "
            "there is no loss to weight. Name the target with label=, or make pairs with map."
        )
    inputs, target = split_target(sample)
    if column is not None and isinstance(inputs, dict):
        inputs = {name: values for name, values in inputs.items() if name != column}
    return Weighted(inputs, target, weight)


def checked_weight(weight: Any, where: Any) -> torch.Tensor:
    """Weights as floats: finite, none below 0."""
    found = torch.as_tensor(weight).detach()
    if not found.is_floating_point():
        found = found.to(torch.float32)
    is_fine = torch.isfinite(found) & (found >= 0)
    if not bool(is_fine.all()):
        wrong = int(torch.nonzero(~is_fine.reshape(-1))[0])
        index = integers(where)[wrong] if not isinstance(where, (int, np.integer)) else where
        value = found.reshape(-1)[wrong].item()
        raise DataError(
            f"the weight of the sample with index {index} is {value}. A weight is a finite number of 0 or more; nothing was "
            "trained with it. Mend the column or the function."
        )
    return found
