"""One worker's share of a batch, read by index.

The place where foreign code runs (datasets, map functions, collate functions),
in this process or in a DataLoader's. It makes what they draw at random a
function of (seed, epoch, position), so a resumed run, or one on another number
of workers, sees the same samples to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.seeds import mix
from shoal.data.collate import Collate
from shoal.data.order import Indices
from shoal.data.randomness import PrivateGenerators
from shoal.data.sources.source import Source
from shoal.data.tree import Tree


@dataclass(frozen=True, slots=True)
class Request:
    """What to read."""

    indices: Indices
    """Of the source, in the order of the samples wanted."""

    epoch: int
    position: int
    """Of the first sample in the epoch; the others follow it."""


class Reader:
    """Reads requests from a source.

    Deterministic code is run once and costs 50 µs of watching per request.
    When it is seen to draw from a global generator, the request is read again,
    each sample under its own seed, and so are all requests after it.
    """

    def __init__(self, source: Source, *, seed: int, collate: Collate | None = None) -> None:
        self.source, self.seed = source, seed
        self.collate = collate or Collate()
        self._generators = PrivateGenerators(0)

    def __call__(self, request: Request) -> Tree:
        """The batch of a request."""
        if self.collate.is_default and not self.source.runs_user_code:
            return self.source.batch(request.indices, request.epoch)
        with self._generators as generators:
            if not generators.drew:
                generators.reseed(0)
                batch = self._read(request)
                generators.drew = generators.were_used()
                if not generators.drew:
                    return batch
            return self._read_seeded(request)

    def sample(self, index: int, *, epoch: int, position: int) -> Any:
        """One sample alone, the same as within a batch."""
        if not self.source.runs_user_code:
            return self.source.samples([index], epoch)[0]
        with self._generators as generators:
            generators.reseed(self._seed_of(epoch, position))
            return self.source.samples([index], epoch)[0]

    def _seed_of(self, epoch: int, position: int) -> int:
        return mix(self.seed, epoch, position)

    def _read(self, request: Request) -> Tree:
        if self.collate.is_default:
            return self.source.batch(request.indices, request.epoch)
        return self.collate(self.source.samples(request.indices, request.epoch))

    def _read_seeded(self, request: Request) -> Tree:
        indices = request.indices.tolist() if isinstance(request.indices, np.ndarray) else request.indices
        samples = []
        for number, index in enumerate(indices):
            self._generators.reseed(self._seed_of(request.epoch, request.position + number))
            samples += self.source.samples([index], request.epoch)
        # What a collate function draws is for the whole share; its seed must not be that of a sample.
        self._generators.reseed(mix(self.seed, request.epoch, request.position, len(samples)))
        return self.collate(samples)
