"""Several datasets in turns: `Dataset.interleave`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.order.interleaving import Interleaving
from shoal.data.order.order import Indices
from shoal.data.skipping import SkipSamples
from shoal.data.sources.grouping import gather_batch, gather_samples, integers
from shoal.data.sources.source import Derived, Source
from shoal.data.tree import Tree


class Interleaved(Derived):
    """The samples of all sources, in turns."""

    def __init__(self, sources: Sequence[Source], block: int) -> None:
        super().__init__(*sources)
        self._sources, self._block = list(sources), block

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # a property may stand for a plain attribute
        """Of all sources together."""
        return sum(source.num_samples for source in self._sources)

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """Each from its source."""
        asked = integers(indices)
        which, places = self._turns(asked)

        def read(number: int, rows: NDArray[np.int64]) -> list[Any]:
            try:
                return self._sources[number].samples(places[rows], epoch)
            except SkipSamples as found:
                raise found.renamed(asked[rows], places[rows]) from None

        return gather_samples(which, read)

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        """One batch from each source, put together."""
        asked = integers(indices)
        which, places = self._turns(asked)

        def read(number: int, rows: NDArray[np.int64]) -> Tree:
            try:
                return self._sources[number].batch(places[rows], epoch)
            except SkipSamples as found:
                raise found.renamed(asked[rows], places[rows]) from None

        return gather_batch(which, read)

    def will_need(self, indices: Indices, epoch: int = 0) -> None:
        """Each source's own."""
        which, places = self._turns(integers(indices))
        for number, source in enumerate(self._sources):
            source.will_need(places[which == number], epoch)

    def names(self) -> list[str]:
        """One source, made of several."""
        return ["interleave"]

    def describe(self) -> list[dict[str, Any]]:
        """All sources, and how long each turn is."""
        of = [source.describe() for source in self._sources]
        return [{"source": "interleave", "block": self._block, "of": of}]

    @functools.cached_property
    def _turns(self) -> Interleaving:
        return Interleaving([source.num_samples for source in self._sources], self._block)
