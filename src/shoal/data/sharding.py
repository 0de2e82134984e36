"""Sharding: which worker computes which part of a global batch.

Pure: cuts follow from (start, stop, number of workers, epoch), and for `balanced` from the costs of
the samples, which come from an array or are read once per process. Cuts are contiguous, so the
order of the ranks is the order of the data; any cuts give an exact strategy the result of one
process, because sums are added and divided by the global count.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.config.choices import DRAIN_SLOWER_THAN, MEASURED, SHARD_KINDS, parse_shard
from shoal.data.order import Indices, Order
from shoal.data.randomness import PrivateGenerators
from shoal.data.skipping import SkipSamples
from shoal.data.slice import split_target
from shoal.data.sources.source import Source, name_of
from shoal.errors import ConfigError, DataError

Costs = NDArray[np.float64]

_HALVINGS = 64  # of the interval between the mean load and all of it: beyond the precision of a float


def balanced_cuts(costs: Costs, num_parts: int) -> list[int]:
    """`num_parts` + 1 ascending bounds in [0, len(costs)]; no cuts give a lighter heaviest part.

    Costs are finite and not negative. Where all of them are 0 the parts are
    equal in length. The smallest load that suffices is found by bisection over
    what a part may carry; within it each cut is laid as near as it can be to
    where an even share would end, so that parts are not merely small enough.
    """
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    total, num_costs = sums[-1], len(costs)
    if num_parts == 1 or not total:
        return [num_costs * part // num_parts for part in range(num_parts + 1)]
    limit = _smallest_limit(sums, num_parts, max(total / num_parts, float(costs.max())))
    # From the right: earliest beginning of part `part` for which the rest fits into the parts from it on.
    earliest = [num_costs] * (num_parts + 1)
    for part in range(num_parts - 1, -1, -1):
        earliest[part] = int(np.searchsorted(sums, sums[earliest[part + 1]] - limit, side="left"))
    cuts = [0]
    for part in range(1, num_parts):
        latest = _reach(sums, cuts[-1], limit)
        cuts.append(min(max(_nearest(sums, total * part / num_parts), earliest[part], cuts[-1]), latest))
    return [*cuts, num_costs]


@dataclass(frozen=True, slots=True)
class CutLoad:
    """Load of some cuts: over all batches, the heaviest parts divided by the mean parts. 1 is even."""

    max_over_mean: float
    num_batches: int

    @classmethod
    def of(cls, batches: list[tuple[Costs, list[int]]]) -> CutLoad:
        """Over batches, each as its costs and its cuts. A step lasts as long as its heaviest part."""
        heaviest = mean = 0.0
        for costs, cuts in batches:
            sums = np.concatenate([[0.0], np.cumsum(costs)])
            loads = np.diff(sums[cuts])
            heaviest += float(loads.max())
            mean += float(loads.mean())
        return cls(heaviest / mean if mean else 1.0, len(batches))


def _smallest_limit(sums: Costs, num_parts: int, low: float) -> float:
    """The load that suffices for so many parts, to the precision of a float. `low` is not above it."""
    if _fits(sums, num_parts, low):
        return low
    high = float(sums[-1])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if _fits(sums, num_parts, middle):
            high = middle
        else:
            low = middle
    return high


def _fits(sums: Costs, num_parts: int, limit: float) -> bool:
    at = len(sums) - 1
    # From the right, as the cuts are checked: rounding must not let one direction pass and the other fail.
    for _ in range(num_parts):
        at = int(np.searchsorted(sums, sums[at] - limit, side="left"))
        if at == 0:
            return True
    return False


def _reach(sums: Costs, begin: int, limit: float) -> int:
    end = int(np.searchsorted(sums, sums[begin] + limit, side="right")) - 1
    # sums[end] - limit, as the check from the right has it, may round to the other side.
    while end + 1 < len(sums) and sums[end + 1] - limit <= sums[begin]:
        end += 1
    return end


def _nearest(sums: Costs, wanted: float) -> int:
    above = int(np.searchsorted(sums, wanted, side="left"))
    return above - 1 if above and wanted - sums[above - 1] < sums[above] - wanted else above


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
        """Name in messages."""
        self.identity = ""
        """Identity that ranks compare."""
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
        known_epoch, begin, end, costs = self._block
        if known_epoch != epoch or not begin <= start <= stop <= end:
            begin, end = start, max(stop, min(start + _BLOCK, self._order.length(epoch)))
            if self._cost_of is not None:
                end = stop  # prefetching is not this function's task
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
        with PrivateGenerators(0):  # a dataset's random draws must not disturb training's
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


_NUM_LOOKED_AT = 64
"""Batches by which a fit says how even its cuts are."""


class Sharding:
    """One way of cutting batches over workers: into parts that differ by at most one sample, unless said otherwise."""

    name = ""
    """Name as in `Batches.shard`; "" where nothing was said."""

    def cuts(self, start: int, stop: int, num_workers: int, epoch: int) -> Sequence[int]:
        """`num_workers` + 1 ascending bounds within [0, stop - start], of the batch at these positions."""
        return [(stop - start) * part // num_workers for part in range(num_workers + 1)]

    def check(self, num_workers: int) -> None:
        """Refuse a number of workers for which there are no cuts."""

    def describe(self) -> str:
        """Description in words; equal on ranks that cut alike."""
        return "equal"


class EqualParts(Sharding):
    """Parts of equal size: `Batches.shard("equal")`, and the default."""

    name = "equal"


UNSAID = Sharding()
"""The default, until `shard` or `--shard` says otherwise."""


@dataclass(frozen=True)
class DynamicRanges(Sharding):
    """Relaxed strategies: ranges of the epoch are handed out while it runs. Evaluation, which is exact, cuts equally."""

    drain_slower_than: float | None = DRAIN_SLOWER_THAN
    """Slowdown against the median of the others at which a worker is given no more ranges; None: as slow as it likes."""

    backup: bool = True
    """Hand the last ranges of an epoch to a second worker where the first is a straggler."""

    probe_every_s: float = 10.0
    """Seconds between two ranges for a drained worker, which show whether it has recovered."""

    name = "dynamic"

    def __post_init__(self) -> None:
        if self.drain_slower_than is not None and not _is_between(self.drain_slower_than, 1):
            raise ConfigError(
                f"drain_slower_than is how many times slower than the others a worker may be, a number above 1 or None, got "
                f"{self.drain_slower_than!r}."
            )
        if not _is_between(self.probe_every_s, 0):
            raise ConfigError(
                f"probe_every_s must be a positive number of seconds, got {self.probe_every_s!r}."
            )

    def describe(self) -> str:
        return f"dynamic, drain_slower_than={self.drain_slower_than}, backup={self.backup}"


@dataclass(frozen=True)
class ByWeight(Sharding):
    """Parts in proportion to given weights."""

    weights: tuple[float, ...]
    name = "weighted"

    def __post_init__(self) -> None:
        if not self.weights or not all(math.isfinite(each) and each >= 0 for each in self.weights):
            raise ConfigError(
                f"weights are numbers that are not negative, one for each worker, got {list(self.weights)}."
            )
        if not sum(self.weights):
            raise ConfigError("weights are all 0, and somebody has to compute.")

    def cuts(self, start: int, stop: int, num_workers: int, epoch: int) -> Sequence[int]:
        """Cuts at the sums of the weights before each worker. One process alone computes all."""
        self.check(num_workers)
        return weighted_cuts(stop - start, self.weights) if num_workers > 1 else [0, stop - start]

    def check(self, num_workers: int) -> None:
        if num_workers != 1 and len(self.weights) != num_workers:
            raise ConfigError(
                f"shard('weighted', weights={list(self.weights)}) has a weight for each of {len(self.weights)} workers, and this job "
                f"has {num_workers}. Nothing was trained; give {num_workers} weights, or weights='measured'."
            )

    def describe(self) -> str:
        return f"weighted by {list(self.weights)}"


class BySpeed(Sharding):
    """Parts in proportion to how fast workers have been. The caller sets `weights`, on all ranks alike."""

    name = "weighted"

    def __init__(self) -> None:
        self.weights: tuple[float, ...] = ()
        """Weights of the present workers; empty: equal, nothing was measured yet."""

    def cuts(self, start: int, stop: int, num_workers: int, epoch: int) -> Sequence[int]:
        if len(self.weights) != num_workers:
            return super().cuts(start, stop, num_workers, epoch)
        return weighted_cuts(stop - start, self.weights)

    def describe(self) -> str:
        """Not the weights: they change."""
        return "weighted by measured speed"


class Loads(NamedTuple):
    """Load of some cuts, beside that of equal ones."""

    mine: CutLoad
    equal: CutLoad
    """If the parts were equal."""

    cuts: tuple[tuple[int, ...], ...]
    """The cuts themselves, for ranks to compare."""


class ByCost(Sharding):
    """Parts whose heaviest is as light as contiguous cuts can make it."""

    name = "balanced"

    def __init__(self, costs: SampleCosts) -> None:
        self._costs = costs
        self.by = costs.name
        """Name of the costs, for messages."""

    def cuts(self, start: int, stop: int, num_workers: int, epoch: int) -> Sequence[int]:
        if num_workers == 1:
            return [0, stop - start]
        return balanced_cuts(self._costs.at(start, stop, epoch), num_workers)

    def describe(self) -> str:
        return f"balanced by {self._costs.identity}"

    def loads(self, batches: Iterable[tuple[int, int]], num_workers: int, epoch: int) -> Loads:
        mine, equal = [], []
        for start, stop in itertools.islice(batches, _NUM_LOOKED_AT):
            costs = self._costs.at(start, stop, epoch)
            mine.append((costs, balanced_cuts(costs, num_workers)))
            equal.append((costs, list(UNSAID.cuts(start, stop, num_workers, epoch))))
        return Loads(CutLoad.of(mine), CutLoad.of(equal), tuple(tuple(cuts) for _, cuts in mine))


def _is_between(value: Any, low: float) -> bool:
    return isinstance(value, (int, float)) and low < value < math.inf


def weighted_cuts(num_samples: int, weights: Sequence[float]) -> list[int]:
    """Bounds in proportion to `weights`; with equal ones, those of `EqualParts`."""
    total, before, cuts = math.fsum(weights), 0.0, [0]
    for weight in weights[:-1]:
        before += weight
        cuts.append(min(max(int(num_samples * before / total), cuts[-1]), num_samples))
    return [*cuts, num_samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """Arguments of `Batches.shard`; a feed makes a Sharding of them."""

    how: str
    """One of SHARD_KINDS."""

    cost: Any = None
    """Cost that `balanced` balances."""

    weights: Any = None
    """Weights of `weighted`."""

    drain_slower_than: float | None = DRAIN_SLOWER_THAN
    """Of `dynamic`."""

    backup: bool = True
    """Of `dynamic`."""

    probe_every_s: float = 10.0
    """Of `dynamic`."""

    def __post_init__(self) -> None:
        if self.how not in SHARD_KINDS:
            raise ConfigError(
                f"batches are cut over the workers by one of {', '.join(SHARD_KINDS)}, got {self.how!r}."
            )
        if (self.cost is None) == (self.how == "balanced"):
            raise ConfigError(
                "shard('balanced') needs to know what a sample costs: cost='length', 'bytes', the name of a column, an array "
                "with a number per sample, or a function of the sample."
                if self.cost is None
                else f"cost= is for shard('balanced'), got it with {self.how!r}."
            )
        if (self.weights is None) == (self.how == "weighted"):
            raise ConfigError(
                "shard('weighted') needs weights: a number for each worker, as in weights=[2, 1, 1], or weights='measured'."
                if self.weights is None
                else f"weights= is for shard('weighted'), got it with {self.how!r}."
            )

    @classmethod
    def parse(cls, text: str) -> ShardPlan:
        words = parse_shard(text)
        return cls(
            how=words.how,
            cost=words.cost,
            weights=words.weights,
            drain_slower_than=words.drain_slower_than,
        )

    def of_stream(self) -> Sharding:
        """Cuts of data that is read from its beginning, by arithmetic alone."""
        if self.how == "balanced" or self.weights == MEASURED:
            said = "'balanced'" if self.how == "balanced" else "'weighted', weights='measured'"
            raise ConfigError(
                f"shard({said}) needs random access, and this data is a stream, or a loader whose items are batches already. "
                "Nothing was read; use shard('equal') or shard('weighted', weights=[...]), or a source with random access."
            )
        return self._by_arithmetic()

    def of_source(self, source: Source, order: Order) -> Sharding:
        if self.how == "balanced":
            return ByCost(SampleCosts(self.cost, source, order))
        return self._by_arithmetic()

    def _by_arithmetic(self) -> Sharding:
        match self.how:
            case "equal":
                return EqualParts()
            case "dynamic":
                return DynamicRanges(self.drain_slower_than, self.backup, self.probe_every_s)
        if isinstance(self.weights, str) and self.weights == MEASURED:
            return BySpeed()
        try:
            return ByWeight(tuple(float(weight) for weight in self.weights))
        except (TypeError, ValueError):
            raise ConfigError(
                f"weights are numbers, one for each worker, or 'measured'; got {self.weights!r}."
            ) from None
