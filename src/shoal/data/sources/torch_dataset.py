"""Samples from a map-style torch Dataset, or anything with `__len__` and `__getitem__`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from shoal.data.order.order import Indices
from shoal.data.sources.arrays import ArraySource
from shoal.data.sources.source import Source
from shoal.errors import ConfigError


def torch_source(dataset: Any) -> Source:
    """The source a map-style dataset stands for; torch's own TensorDataset is read as the arrays it is."""
    if type(dataset) is TensorDataset and all(tensor.layout is torch.strided for tensor in dataset.tensors):
        return ArraySource(tuple(dataset.tensors))
    return TorchSource(dataset)


class TorchSource(Source):
    """A foreign dataset, asked the way torch's DataLoader would ask it."""

    runs_user_code = True

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        try:
            self.num_samples = len(dataset)
        except (TypeError, NotImplementedError):
            raise ConfigError(
                f"the dataset {type(dataset).__name__} has no length, so its samples cannot be shuffled or shared out. "
                "Give it a __len__, or make it an IterableDataset, which is read as a stream."
            ) from None

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """The dataset's items; many at once where it offers `__getitems__`."""
        # Plain ints: a dataset that looks its index up in a dict or a list must not meet numpy's.
        wanted = indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
        if getattr(self._dataset, "__getitems__", None):
            samples: list[Any] = self._dataset.__getitems__(wanted)
            return samples
        items = []
        for index in wanted:
            try:
                items.append(self._dataset[index])
            except Exception as error:
                error.add_note(f"raised by {type(self._dataset).__name__} for the sample with index {index}")
                raise
        return items

    def describe(self) -> list[dict[str, Any]]:
        """The dataset's class and length."""
        return [
            {"source": "torch", "dataset": type(self._dataset).__qualname__, "num_samples": self.num_samples}
        ]
