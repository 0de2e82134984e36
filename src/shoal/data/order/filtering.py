"""Which samples a filter lets pass: every sample is looked at once, before the first is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.collate import with_string_arrays
from shoal.data.order.order import Order
from shoal.data.randomness import PrivateGenerators
from shoal.data.skipping import SkipSamples
from shoal.data.sources.grouping import integers
from shoal.data.sources.source import Source, name_of
from shoal.data.sources.user_code import blame
from shoal.errors import ConfigError, DataError

NUM_READ_AT_ONCE = 4096


class Filter:
    """What a function says of the samples of a source, remembered in a bit each.

    Reads in the order of the source, whatever the order of the dataset.
    """

    def __init__(self, source: Source, order: Order, fn: Callable[[Any], Any], *, batched: bool) -> None:
        self._source, self._order, self._fn, self._batched = source, order, fn, batched
        self._known = self._passes = np.zeros(0, dtype=np.uint8)

    def __call__(self, epoch: int) -> NDArray[np.bool_]:
        """For each position of an epoch of the order, whether its sample passes."""
        num_samples, order = self._source.num_samples, self._order
        known, passes = _unpacked(self._known, num_samples), _unpacked(self._passes, num_samples)
        wanted = np.zeros(num_samples, dtype=bool)
        num_positions = order.length(epoch)
        for begin in range(0, num_positions, 1 << 16):
            positions = range(begin, min(begin + (1 << 16), num_positions))
            wanted[integers(order.indices(positions, epoch))] = True
        wanted &= ~known
        self._look(wanted, passes)
        if order.varies:  # another epoch has them at other positions, or other samples
            self._known, self._passes = np.packbits(known | wanted), np.packbits(passes)
        kept = np.empty(num_positions, dtype=bool)
        for begin in range(0, num_positions, 1 << 16):
            end = min(begin + (1 << 16), num_positions)
            kept[begin:end] = passes[integers(order.indices(range(begin, end), epoch))]
        return kept

    def _look(self, wanted: NDArray[np.bool_], passes: NDArray[np.bool_]) -> None:
        with PrivateGenerators(0) as generators:
            for begin in range(0, len(wanted), NUM_READ_AT_ONCE):
                indices = begin + np.flatnonzero(wanted[begin : begin + NUM_READ_AT_ONCE])
                if len(indices):
                    self._ask(indices, passes)
            if generators.were_used():
                raise ConfigError(
                    f"filter({name_of(self._fn)}) looks at every sample once, and it or a stage before it draws random "
                    "numbers: what passed would not be what is trained. Filter before that stage, and draw in augment."
                )

    def _ask(self, indices: NDArray[np.int64], passes: NDArray[np.bool_]) -> None:
        while len(indices):
            try:
                passes[indices] = self._verdicts(indices)
                return
            except SkipSamples as found:
                bad = np.array(list(found.bad), dtype=np.int64)
                passes[bad] = True  # who reads it will skip it, and write that down
                indices = np.setdiff1d(indices, bad)

    def _verdicts(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        if not self._batched:
            verdicts = []
            for index, sample in zip(indices, self._source.samples(indices), strict=True):
                try:
                    verdicts.append(bool(self._fn(sample)))
                except Exception as error:
                    blame("filter", self._fn, error, index, 0)
                    raise
            return np.array(verdicts, dtype=bool)
        batch = with_string_arrays(self._source.batch(indices), len(indices))
        try:
            given = np.asarray(self._fn(batch))
        except Exception as error:
            error.add_note(
                f"raised by filter({name_of(self._fn)}, batched=True) for the samples with indices {indices[0]} to {indices[-1]}"
            )
            raise
        if given.shape != (len(indices),):
            raise DataError(
                f"the function '{name_of(self._fn)}' of filter(batched=True) was given {len(indices)} samples and gave values of "
                f"shape {given.shape}. It must return one truth value per sample."
            )
        return given.astype(bool)


def _unpacked(bits: NDArray[np.uint8], num_samples: int) -> NDArray[np.bool_]:
    if not len(bits):
        return np.zeros(num_samples, dtype=bool)
    return np.unpackbits(bits, count=num_samples).astype(bool)
