"""Samples and batches of a stretch of a dataset, for whoever runs a task.

A task reads positions of the first epoch. A shuffle on top is left out: it
would only make reading slower, and the pairs of a task are sorted anyway.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from shoal.data.collate import Collate, collate
from shoal.data.order.order import Order, Shuffled
from shoal.data.reader import Reader, Request
from shoal.data.skipping import SkipLog
from shoal.data.stream import Stream

_AT_ONCE = 256
"""Samples asked for at once where they are mapped one by one; with it, how much a task holds at least."""


class Piece(NamedTuple):
    """What the map function is given once."""

    what: str
    """For messages: which samples these are."""

    value: Any
    """A sample, or a batch of samples."""


class Indexed:
    """A dataset with random access."""

    def __init__(self, reader: Reader, order: Order, batch_size: int | None) -> None:
        while isinstance(order, Shuffled):
            order = order.parent
        self._order, self._batch_size = order, batch_size
        if batch_size is None:
            reader = Reader(reader.source, seed=reader.seed, collate=Collate(_as_they_are))
        self._reader = reader
        self._skips = SkipLog()
        self.num_samples = order.length(0)
        self.at_once = batch_size or _AT_ONCE

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """What to map, of the samples at positions begin..end-1."""
        for first in range(begin, end, self.at_once):
            last = min(first + self.at_once, end)
            reading = self._reader.read(Request(self._order.indices(range(first, last), 0), 0, first))
            self._skips.record(reading.skipped)
            if not len(reading.request.indices):
                continue
            if self._batch_size is not None:
                yield Piece(f"the batch of samples {first} to {last - 1}", reading.batch)
                continue
            for index, sample in zip(reading.request.indices, reading.batch, strict=True):
                yield Piece(f"the sample with index {index}", sample)


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


class Streamed:
    """A dataset that can only be read from its beginning: one task reads all of it."""

    num_samples = 1

    def __init__(self, stream: Stream, batch_size: int | None) -> None:
        self._stream, self._batch_size = stream, batch_size
        self.at_once = 1

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """What to map: everything."""
        if self._batch_size is None:
            for number, sample in enumerate(self._stream):
                yield Piece(f"sample {number} of the stream", sample)
            return
        samples, first = iter(self._stream), 0
        while batch := list(itertools.islice(samples, self._batch_size)):
            yield Piece(f"samples {first} to {first + len(batch) - 1} of the stream", collate(batch))
            first += len(batch)
