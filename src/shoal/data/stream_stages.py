"""What can be done to a stream, sample after sample: each stage reads the one before it from its beginning.

A stage is a function of (how to read what comes before, epoch), without state
of its own, so reading again gives the same and a repetition is an epoch more.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from shoal.data.skipping import SkipLog, Skipped
from shoal.data.sources.augmented import augment_seed
from shoal.data.sources.source import name_of
from shoal.data.sources.user_code import bad_sample, blame
from shoal.data.sources.weighted import checked_weight, weighted
from shoal.data.values import find_column
from shoal.data.weights import keep_weights
from shoal.runtime.seeds import mix

Open = Callable[[int], Iterator[Any]]
"""Reads what comes before, of an epoch, from its beginning."""

_BUFFER = 0x425546464552  # keeps shuffle(seed=0) of a stream apart from other uses of the seed
_MANY = 1 << 32  # repetitions between two epochs of an endless stream, which only a take after it can end


class StreamStage(Protocol):
    """One thing done to a stream."""

    def run(self, before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        """The samples of an epoch."""

    def describe(self) -> dict[str, Any]:
        """Fit for JSON."""


class MapStream:
    """A function of each sample."""

    def __init__(
        self, fn: Callable[[Any], Any], *, on_error: str = "raise", max_skips: int | None = None
    ) -> None:
        self._fn, self._on_error, self._max_skips = fn, on_error, max_skips

    def run(self, before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        """`fn` of each."""
        for number, sample in enumerate(before(epoch)):
            try:
                made = keep_weights(sample, self._fn(sample))
            except Exception as error:
                if self._on_error == "raise":
                    blame("map", self._fn, error, number, epoch)
                    raise
                bad = bad_sample("map", self._fn, error, number)
                skips.record([Skipped(epoch, number, bad, f"map({name_of(self._fn)})", self._max_skips)])
                continue
            yield made

    def describe(self) -> dict[str, Any]:
        """The function's name."""
        skips = {"on_error": "skip"} if self._on_error == "skip" else {}
        return {"stage": "map", "fn": name_of(self._fn), **skips}


class FilterStream:
    """Only samples for which a function is true."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self._fn = fn

    def run(self, before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        """Those that pass."""
        for number, sample in enumerate(before(epoch)):
            try:
                passes = self._fn(sample)
            except Exception as error:
                blame("filter", self._fn, error, number, epoch)
                raise
            if passes:
                yield sample

    def describe(self) -> dict[str, Any]:
        """The function's name."""
        return {"stage": "filter", "fn": name_of(self._fn)}


class AugmentStream:
    """A function of each sample and a generator seeded by (seed, epoch, its number in the stream)."""

    def __init__(self, fn: Callable[[Any, torch.Generator], Any], seed: int) -> None:
        self._fn, self._seed = fn, seed

    def run(self, before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        """`fn` of each."""
        generator = torch.Generator()
        for number, sample in enumerate(before(epoch)):
            generator.manual_seed(augment_seed(self._seed, epoch, number))
            try:
                made = keep_weights(sample, self._fn(sample, generator))
            except Exception as error:
                blame("augment", self._fn, error, number, epoch)
                raise
            yield made

    def describe(self) -> dict[str, Any]:
        """The function's name and the seed."""
        return {"stage": "augment", "fn": name_of(self._fn), "seed": self._seed}


class WeightStream:
    """A weight for each sample."""

    def __init__(self, by: str | Callable[[Any], Any]) -> None:
        self._by = by

    def run(self, before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        """(inputs, target, weight) of each."""
        for number, sample in enumerate(before(epoch)):
            if isinstance(self._by, str):
                weight = find_column(sample, self._by, None, "with_weights")
            else:
                try:
                    weight = self._by(sample)
                except Exception as error:
                    blame("with_weights", self._by, error, number, epoch)
                    raise
            column = self._by if isinstance(self._by, str) else None
            yield weighted(sample, checked_weight(weight, number), column=column)

    def describe(self) -> dict[str, Any]:
        """Where the weights come from."""
        by = self._by if isinstance(self._by, str) else name_of(self._by)
        return {"stage": "with_weights", "weights": by}


class TakeStream:
    """Only the first samples."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def run(self, before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        """So many, and not one more is read."""
        return itertools.islice(before(epoch), self._num_samples)

    def describe(self) -> dict[str, Any]:
        """How many."""
        return {"stage": "take", "num_samples": self._num_samples}


class SkipStream:
    """All but the first samples, which are read and dropped."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def run(self, before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        """What comes after them."""
        return itertools.islice(before(epoch), self._num_samples, None)

    def describe(self) -> dict[str, Any]:
        """How many."""
        return {"stage": "skip", "num_samples": self._num_samples}


class RepeatStream:
    """The stream several times, or without end; each time as an epoch of its own."""

    def __init__(self, times: int | None) -> None:
        self.times = times

    def run(self, before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        """One repetition after the other."""
        for repetition in itertools.count() if self.times is None else range(self.times):
            is_empty = True
            for sample in before(epoch * (self.times or _MANY) + repetition):
                is_empty = False
                yield sample
            if is_empty:
                return  # nor would the next one give anything

    def describe(self) -> dict[str, Any]:
        """How often."""
        return {"stage": "repeat", "times": self.times}


class ShuffleStream:
    """Samples leave a buffer at random when others come in."""

    def __init__(self, seed: int, num_samples: int) -> None:
        self._seed, self._num_samples = seed, num_samples

    def run(self, before: Open, epoch: int, skips: SkipLog) -> Iterator[Any]:
        """In an order that is a function of (seed, epoch) and of the stream."""
        drawn = random.Random(mix(_BUFFER, self._seed, epoch))
        buffer: list[Any] = []
        for sample in before(epoch):
            if len(buffer) < self._num_samples:
                buffer.append(sample)
                continue
            at = drawn.randrange(len(buffer))
            leaving, buffer[at] = buffer[at], sample
            yield leaving
        drawn.shuffle(buffer)
        yield from buffer

    def describe(self) -> dict[str, Any]:
        """Seed and size of the buffer."""
        return {"stage": "shuffle", "seed": self._seed, "buffer": self._num_samples}
