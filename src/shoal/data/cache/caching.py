"""`Dataset.cache`: samples are made once and kept, in RAM as far as they fit, else on disk.

Every sample for itself: one that nobody asked for is not made. What is kept
is what the source gives in its first epoch, so that a run that resumes, with
an empty cache, sees the same.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.cache import CacheConfig
from shoal.data.cache.sample_store import MISSING, SampleStore
from shoal.data.order.order import Indices
from shoal.data.randomness import PrivateGenerators
from shoal.data.sources.grouping import integers
from shoal.data.sources.source import Derived, Source
from shoal.data.tree import Tree
from shoal.errors import ConfigError


def cached(
    source: Source,
    where: str = "auto",
    ram_bytes: int | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> Cached:
    """The source, with its samples kept."""
    folder = None if directory is None else os.fspath(directory)
    return Cached(source, CacheConfig(where=where, ram_bytes=ram_bytes, directory=folder))  # type: ignore[arg-type]  # checked there


class Cached(Derived):
    """Another source whose samples are kept."""

    name = "cache"

    def __init__(self, source: Source, config: CacheConfig) -> None:
        super().__init__(source)
        # The functions before it are watched here, and only when they run.
        self.runs_user_code = False
        self._config = config
        self._store: SampleStore | None = None
        self._lock = threading.Lock()
        self._generators = PrivateGenerators(0)

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """From the cache; what is not there yet is made."""
        numbers = integers(indices)
        return self._filled(numbers).samples(numbers)

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        """From the cache; what is not there yet is made."""
        numbers = integers(indices)
        return self._filled(numbers).batch(numbers)

    @property
    def looks_ahead(self) -> bool:  # type: ignore[override]  # a property may stand for a plain attribute
        """Whether something may be on disk, of the cache or of what it is made of."""
        return (self._store is not None and self._store.looks_ahead) or self._source.looks_ahead

    def will_need(self, indices: Indices, epoch: int = 0) -> None:
        """What is there is read ahead from the cache, what is not from the source."""
        numbers, store = integers(indices), self._opened()
        missing = store.flags[numbers] == MISSING
        if not missing.any():
            store.will_need(numbers)
        elif self._source.looks_ahead:
            self._source.will_need(numbers[missing], 0)

    def share(self) -> None:
        """Processes that are forked from now on fill one cache together."""
        super().share()
        self._opened()

    def describe(self) -> list[dict[str, Any]]:
        """The source's own: the samples are the same."""
        return self._source.describe()

    def _opened(self) -> SampleStore:
        with self._lock:
            if self._store is None:
                name = " > ".join(self._source.names())
                self._store = SampleStore(self.num_samples, self._config, name=name)
            return self._store

    def _filled(self, numbers: NDArray[np.int64]) -> SampleStore:
        """The store, with these samples in it."""
        store = self._opened()
        missing = np.unique(numbers[store.flags[numbers] == MISSING])
        if len(missing):
            store.keep(missing, self._made(missing))
        return store

    def _made(self, numbers: NDArray[np.int64]) -> list[Any]:
        if not self._source.runs_user_code:
            return self._source.samples(numbers, 0)
        with self._generators as generators:
            generators.reseed(0)
            samples = self._source.samples(numbers, 0)
            if generators.were_used():
                raise ConfigError(
                    "cache keeps a sample for all epochs, but a stage before it draws from the random generators of torch, "
                    "numpy or Python: what is kept would depend on when it was first read, and a resumed run would see "
                    "something else. Nothing was kept; call cache before that stage, and make it an augment."
                )
        return samples
