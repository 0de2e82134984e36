"""The source behind `repeat`: index r·n + i is sample i in repetition r."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.order.order import ENDLESS, Indices
from shoal.data.order.repeated import inner_epoch
from shoal.data.skipping import SkipSamples
from shoal.data.sources.grouping import gather_batch, gather_samples, integers
from shoal.data.sources.source import Derived, Source
from shoal.data.tree import Tree


class RepeatedSource(Derived):
    """Another source, as often as wanted, each time as in an epoch of its own."""

    def __init__(self, source: Source, times: int | None) -> None:
        super().__init__(source)
        self._times = times

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # a property may stand for a plain attribute
        """Indices, over all repetitions."""
        return ENDLESS if self._times is None else self._times * self._source.num_samples

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """The source's, in the epochs of their repetitions."""
        repetitions, inner = self._located(indices)
        asked = integers(indices)
        return gather_samples(
            repetitions, lambda number, rows: self._samples(asked[rows], inner[rows], epoch, number)
        )

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        """The source's, in the epochs of their repetitions."""
        if isinstance(indices, range):
            number, first = divmod(indices.start, self._source.num_samples)
            if first + len(indices) <= self._source.num_samples:  # a stretch of one repetition stays one
                return self._batch(indices, range(first, first + len(indices)), epoch, number)
        repetitions, inner = self._located(indices)
        asked = integers(indices)
        return gather_batch(
            repetitions, lambda number, rows: self._batch(asked[rows], inner[rows], epoch, number)
        )

    def will_need(self, indices: Indices, epoch: int = 0) -> None:
        """The source's, whichever repetition they are of."""
        self._source.will_need(self._located(indices)[1], epoch)

    def describe(self) -> list[dict[str, Any]]:
        """The source's own: the order says how often."""
        return self._source.describe()

    def _located(self, indices: Indices) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        repetitions, inner = np.divmod(integers(indices), self._source.num_samples)
        # Where the epoch makes no difference, all repetitions are read as one.
        return repetitions if self._source.uses_epoch else np.zeros_like(repetitions), inner

    def _samples(self, asked: Indices, inner: Indices, epoch: int, number: int) -> list[Any]:
        try:
            return self._source.samples(inner, inner_epoch(epoch, number, self._times))
        except SkipSamples as found:
            raise found.renamed(asked, inner) from None

    def _batch(self, asked: Indices, inner: Indices, epoch: int, number: int) -> Tree:
        try:
            return self._source.batch(inner, inner_epoch(epoch, number, self._times))
        except SkipSamples as found:
            raise found.renamed(asked, inner) from None
