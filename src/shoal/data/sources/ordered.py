"""A dataset taken as a source: its positions are the indices."""

from __future__ import annotations

from typing import Any

from shoal.data.order.order import Indices, InOrder, Order
from shoal.data.skipping import SkipSamples
from shoal.data.sources.grouping import integers
from shoal.data.sources.source import Derived, Source
from shoal.data.tree import Tree


def as_source(source: Source, order: Order) -> Source:
    """A source with the samples of a dataset by position."""
    return source if isinstance(order, InOrder) else Ordered(source, order)


class Ordered(Derived):
    """Another source in a given order."""

    def __init__(self, source: Source, order: Order) -> None:
        super().__init__(source)
        self.order = order
        self.uses_epoch = source.uses_epoch or order.varies
        self.reorders = source.reorders or order.varies

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # a property may stand for a plain attribute
        """As many as the order has."""
        return self.order.num_samples

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """The source's, at these positions."""
        inner = self._inner(indices, epoch)
        try:
            return self._source.samples(inner, epoch)
        except SkipSamples as found:
            raise found.renamed(indices, inner) from None

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        """The source's, at these positions."""
        inner = self._inner(indices, epoch)
        try:
            return self._source.batch(inner, epoch)
        except SkipSamples as found:
            raise found.renamed(indices, inner) from None

    def will_need(self, indices: Indices, epoch: int = 0) -> None:
        """The source's, at these positions."""
        self._source.will_need(self._inner(indices, epoch), epoch)

    def names(self) -> list[str]:
        """The source's, and the order's."""
        return [*self._source.names(), *self.order.names()]

    def describe(self) -> list[dict[str, Any]]:
        """Source and order."""
        return [*self._source.describe(), *self.order.describe()]

    def _inner(self, indices: Indices, epoch: int) -> Indices:
        return self.order.indices(integers(indices) if isinstance(indices, list) else indices, epoch)
