"""What every source of samples offers: samples by index, one by one or as a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from shoal.data.collate import collate
from shoal.data.order import Indices
from shoal.data.tree import Tree


class Source(ABC):
    """A function from (index, epoch) to sample. Asked twice for one index in one epoch, it gives the same sample."""

    num_samples: int

    runs_user_code: bool
    """False where reading is ours alone: nothing can draw random numbers, and nothing has to be watched."""

    @abstractmethod
    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """The samples at these indices, in their order. At least one index."""

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        """The same as one batch."""
        return collate(self.samples(indices, epoch))

    @abstractmethod
    def describe(self) -> list[dict[str, Any]]:
        """The source and what is done to its samples, fit for JSON."""


class Mapped(Source):
    """Another source with a function applied to each sample."""

    runs_user_code = True

    def __init__(self, source: Source, fn: Callable[[Any], Any]) -> None:
        self._source, self._fn = source, fn
        self.num_samples = source.num_samples

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """`fn` of each of the source's samples."""
        mapped = []
        for index, sample in zip(indices, self._source.samples(indices, epoch), strict=True):
            try:
                mapped.append(self._fn(sample))
            except Exception as error:
                error.add_note(f"raised by map({name_of(self._fn)}) for the sample with index {index}")
                raise
        return mapped

    def describe(self) -> list[dict[str, Any]]:
        """The source's own, and the function's name."""
        return [*self._source.describe(), {"stage": "map", "fn": name_of(self._fn)}]


def name_of(fn: Any) -> str:
    """A function's name as its author knows it."""
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)
