"""Several datasets side by side: `Dataset.zip`."""

from __future__ import annotations

from typing import Any

from shoal.data.order.order import Indices
from shoal.data.sources.source import Derived, Source
from shoal.data.tree import Tree


class Zipped(Derived):
    """Tuples of one sample of each source; as many as the shortest has."""

    def __init__(self, *sources: Source) -> None:
        super().__init__(*sources)
        self._sources = sources

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # a property may stand for a plain attribute
        """Those of the shortest."""
        return min(source.num_samples for source in self._sources)

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """The sources' samples, side by side."""
        columns = [source.samples(indices, epoch) for source in self._sources]
        return list(zip(*columns, strict=True))

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        """The sources' batches, side by side."""
        return tuple(source.batch(indices, epoch) for source in self._sources)

    def names(self) -> list[str]:
        """One source, made of several."""
        return ["zip"]

    def describe(self) -> list[dict[str, Any]]:
        """All sources."""
        return [{"source": "zip", "of": [source.describe() for source in self._sources]}]
