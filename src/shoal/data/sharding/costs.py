"""What each sample costs: its length, its bytes, a column, an array, or a function of the user's.

An array is looked up. Everything else is read from the samples, each of them
once per process, when a batch is first cut that holds it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.order.order import Indices, Order
from shoal.data.randomness import PrivateGenerators
from shoal.data.sharding.balancing import Costs
from shoal.data.skipping import SkipSamples
from shoal.data.slice import split_target
from shoal.data.sources.source import Source, name_of
from shoal.errors import ConfigError, DataError

MAX_KEPT = 1 << 26
"""Samples whose costs are kept, four bytes each. Of larger data they are worked out again for every batch."""

_BLOCK = 8192  # positions looked up at once: that is cheaper than batch by batch


class SampleCosts:
    """Costs by position of an epoch."""

    def __init__(self, cost: Any, source: Source, order: Order) -> None:
        self._source, self._order = source, order
        self._cost_of: Callable[[Any], float] | None = None
        self._column: str | None = None
        self._kept: NDArray[Any] | None = None
        self.name = ""
        """For people."""
        self.identity = ""
        """For ranks to compare."""
        if isinstance(cost, str):
            self.name = cost if cost in _KNOWN else f"column '{cost}'"
            self._column = None if cost in _KNOWN else cost
            self._cost_of = _KNOWN.get(cost) or (lambda sample: _of_column(sample, cost))
        elif callable(cost):
            self.name, self._cost_of = f"{name_of(cost)}()", cost
        else:
            self._kept = _as_costs(cost, source.num_samples)
            self.name = "an array of costs"
        self.identity = self.name
        if self._kept is not None:
            self.identity += f" ({hashlib.sha256(self._kept.tobytes()).hexdigest()[:12]})"
        elif source.num_samples <= MAX_KEPT:
            self._kept = np.full(source.num_samples, np.nan, dtype=np.float32)
        self._block: tuple[int, int, int, Costs] = (-1, 0, 0, np.empty(0))

    def at(self, start: int, stop: int, epoch: int) -> Costs:
        """Of the samples at positions start..stop-1."""
        known_epoch, begin, end, costs = self._block
        if known_epoch != epoch or not begin <= start <= stop <= end:
            begin, end = start, max(stop, min(start + _BLOCK, self._order.length(epoch)))
            if self._cost_of is not None:
                end = stop  # reading ahead is not ours to do
            costs = self._of(self._order.indices(range(begin, end), epoch), epoch)
            self._block = (epoch, begin, end, costs)
        return costs[start - begin : stop - begin]

    def _of(self, indices: Indices, epoch: int) -> Costs:
        if isinstance(indices, range):
            indices = np.arange(indices.start, indices.stop, dtype=np.int64)
        if not isinstance(indices, np.ndarray):
            if self._cost_of is None:
                raise ConfigError(
                    "an array of costs is looked up by sample number, and this loader's sampler names its samples otherwise. "
                    "Nothing was read; give a function of the sample: shard('balanced', cost=lambda sample: ...)."
                )
            return self._read(np.array(indices, dtype=object), epoch)
        if self._kept is None:
            return self._read(indices, epoch)
        costs = self._kept[indices].astype(np.float64)
        missing = np.isnan(costs)
        if missing.any():
            read = self._read(indices[missing], epoch)
            self._kept[indices[missing]] = read
            costs[missing] = self._kept[indices[missing]]  # rounded, as they will be next time
        return costs

    def _read(self, indices: NDArray[Any], epoch: int) -> Costs:
        with PrivateGenerators(0):  # what a dataset draws at random is not what training draws
            found = self._read_column(indices, epoch)
            costs = found if found is not None else self._read_samples(indices, epoch)
        bad = np.flatnonzero(~np.isfinite(costs) | (costs < 0))
        if len(bad):
            raise DataError(
                f"the cost of sample {indices[bad[0]]} by {self.name} is {costs[bad[0]]}: costs are finite and not negative. "
                "Nothing was trained on this batch; mend the cost of shard('balanced', cost=...)."
            )
        return costs

    def _read_column(self, indices: NDArray[Any], epoch: int) -> Costs | None:
        """A column of numbers, read at once where no code of the user's makes it."""
        if self._column is None or self._source.runs_user_code or indices.dtype == object:
            return None
        try:
            inputs, target = split_target(self._source.batch(indices, epoch))
        except SkipSamples:
            return None
        for part in (inputs, target):
            column = part.get(self._column) if isinstance(part, dict) else None
            if isinstance(column, torch.Tensor) and column.shape == (len(indices),):
                numbers: Costs = column.double().numpy()
                return numbers
        return None

    def _read_samples(self, indices: NDArray[Any], epoch: int) -> Costs:
        assert self._cost_of is not None
        costs = np.zeros(len(indices))  # of a sample that is bad, and left out, it stays
        wanted = np.arange(len(indices))
        while len(wanted):
            asked = indices[wanted]
            try:
                samples = self._source.samples(asked if asked.dtype != object else asked.tolist(), epoch)
            except SkipSamples as skip:
                wanted = np.array([each for each in wanted if indices[each] not in skip.bad], dtype=np.int64)
                continue
            for each, sample in zip(wanted, samples, strict=True):
                costs[each] = self._cost(indices[each], sample)
            break
        return costs

    def _cost(self, index: Any, sample: Any) -> float:
        assert self._cost_of is not None
        try:
            return float(self._cost_of(sample))
        except _NoCost as error:
            raise DataError(
                f"sample {index} has no cost by {self.name}: {error}. Nothing was trained on this batch; give shard('balanced', "
                "cost=...) 'length', 'bytes', the name of a column, an array with a number per sample, or a function."
            ) from None
        except Exception as error:
            error.add_note(f"raised by the cost of shard('balanced') for the sample with index {index}")
            raise


class _NoCost(Exception):
    """A sample without what its cost is taken from."""


def _as_costs(given: Any, num_samples: int) -> Costs:
    try:
        costs = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(
            f"shard('balanced', cost=...) takes 'length', 'bytes', the name of a column, a function of the sample, or an array "
            f"of numbers, got a {type(given).__name__}. Nothing was read."
        ) from None
    if costs.shape != (num_samples,):
        raise ConfigError(
            f"the data has {num_samples} samples, and the array of costs has the shape {costs.shape}: it takes one number for each "
            "sample, in the order of the source. Nothing was read."
        )
    if not np.isfinite(costs).all() or (costs < 0).any():
        at = int(np.flatnonzero(~np.isfinite(costs) | (costs < 0))[0])
        raise ConfigError(
            f"the cost of sample {at} is {costs[at]}: costs are finite and not negative. Nothing was read."
        )
    return costs


def _length(sample: Any) -> float:
    lengths = list(_lengths(split_target(sample)[0]))
    if not lengths:
        raise _NoCost("nothing in it has a length")
    return max(lengths)


def _lengths(part: Any) -> Iterator[float]:
    """Of texts, lists of numbers and arrays."""
    if isinstance(part, dict):
        for value in part.values():
            yield from _lengths(value)
    elif isinstance(part, tuple):
        for value in part:
            yield from _lengths(value)
    elif (length := _length_of(part)) is not None:
        yield length


def _length_of(value: Any) -> float | None:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return float(value.shape[0]) if value.ndim else None
    return float(len(value)) if isinstance(value, (str, bytes, list, range)) else None


def _num_bytes(sample: Any) -> float:
    match sample:
        case dict():
            return math.fsum(map(_num_bytes, sample.values()))
        case tuple() | list():
            return math.fsum(map(_num_bytes, sample))
        case torch.Tensor() | np.ndarray():
            return float(sample.nbytes)
        case str():
            return float(len(sample.encode(errors="surrogatepass")))
        case bytes() | bytearray():
            return float(len(sample))
    return 8.0


def _of_column(sample: Any, column: str) -> float:
    for part in split_target(sample):
        if isinstance(part, dict) and column in part:
            value = part[column]
            length = _length_of(value)
            if length is not None:
                return length
            return float(value)
    raise _NoCost(f"it has no column '{column}'")


_KNOWN: dict[str, Callable[[Any], float]] = {"length": _length, "bytes": _num_bytes}
