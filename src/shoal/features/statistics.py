"""Statistics that features need, collected in one pass by map, combine and reduce.

Moments, quantile sketches and token counts per column, each mergeable. They are
merged within every task and then in the order of the tasks, which follows from
the data alone: the same statistics come out at any number of workers, to the
bit.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.features.columns import Columns, bucket_of, columns_of, hash_ints, hash_text
from shoal.features.declared import Bag, Bucketized, Categorical, Crossed, Embedding, Feature, Numeric, Token

Floats = NDArray[np.float64]


def moments_of(values: Floats) -> Floats:
    """Moments of rows [n, width], mergeable (Chan, Golub and LeVeque).

    An array [4, width]: how many values, their mean, the sum of squared
    distances from it, how many are infinite. Missing values (NaN) do not
    count. Sums of squares would lose all digits where the mean is far from 0.
    """
    is_finite = np.isfinite(values)
    count = is_finite.sum(0).astype(np.float64)
    known = np.where(is_finite, values, 0.0)
    mean = known.sum(0) / np.maximum(count, 1.0)
    distance = np.where(is_finite, values - mean, 0.0)
    return np.stack([count, mean, (distance**2).sum(0), np.isinf(values).sum(0).astype(np.float64)])


def merge_moments(summaries: Sequence[Floats]) -> Floats:
    """Moments of all summaries together, merged in their order."""
    total = np.array(summaries[0])
    for other in summaries[1:]:
        count = total[0] + other[0]
        share = other[0] / np.maximum(count, 1.0)
        distance = other[1] - total[1]
        total[2] += other[2] + distance**2 * total[0] * share
        total[1] += distance * share
        total[0] = count
        total[3] += other[3]
    return total


def deviation_of(total: Floats) -> Floats:
    """Standard deviation of the values, as numpy's std."""
    spread: Floats = np.sqrt(total[2] / np.maximum(total[0], 1.0))
    return spread


SIZE = 4096
"""Values of a level before it is halved: 20 levels of them hold a billion within about 0.1 %."""


class Sketch:
    """The distribution of some numbers: a quantile sketch that merges, the same whenever the data is.

    Values wait in levels; one at level h stands for 2^h of them. A level that
    is full is sorted and every other value moves up, beginning with the first
    and the second in turn (Munro and Paterson's, with Manku, Rajagopalan and
    Lindsay's weights). Each time, the rank of anything changes by at most 2^h:
    `max_error` adds that up, so the bound is proved by what happened, not
    expected. Up to `SIZE` values nothing moves and quantiles are exact.

    Libraries were looked at: Apache DataSketches draws random bits that cannot
    be seeded, and its maintainers mean it so (datasketches-cpp issue 361);
    t-digests have no bound at all.
    """

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._levels: list[Floats] = [np.empty(0)]
        self._flips: list[int] = [0]
        self.count = 0
        self.max_error = 0
        """Largest error of the rank of any number."""
        self.low, self.high = np.inf, -np.inf

    def add(self, values: Floats) -> None:
        """Numbers more, none of them NaN."""
        if len(values):
            self.count += len(values)
            self.low, self.high = min(self.low, values.min()), max(self.high, values.max())
            self._levels[0] = np.concatenate([self._levels[0], values])
            self._settle()

    def merge(self, other: Sketch) -> None:
        self.count += other.count
        self.max_error += other.max_error
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        for level, values in enumerate(other._levels):
            self._reach(level)
            self._levels[level] = np.concatenate([self._levels[level], values])
        self._settle()

    def quantiles(self, shares: Floats) -> Floats:
        """The smallest value with at least each share (0 to 1) of all values at or below it."""
        values = np.concatenate(self._levels)
        weights = np.concatenate(
            [np.full(len(level), 1 << height, dtype=np.int64) for height, level in enumerate(self._levels)]
        )
        order = np.argsort(values, kind="stable")
        reached = np.cumsum(weights[order])
        wanted = np.ceil(shares * self.count).clip(1, reached[-1])
        found: Floats = values[order][np.searchsorted(reached, wanted)]
        found[shares <= 0] = self.low
        found[shares >= 1] = self.high
        return found

    def plain(self) -> dict[str, Any]:
        """The statistics as numbers and arrays, to be saved."""
        return {
            "size": self._size,
            "levels": self._levels,
            "flips": self._flips,
            "count": self.count,
            "max_error": self.max_error,
            "range": (float(self.low), float(self.high)),
        }

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Sketch:
        """Statistics restored from the result of `plain`."""
        sketch = cls(plain["size"])
        sketch._levels, sketch._flips = list(plain["levels"]), list(plain["flips"])
        sketch.count, sketch.max_error = plain["count"], plain["max_error"]
        sketch.low, sketch.high = plain["range"]
        return sketch

    def _settle(self) -> None:
        level = 0
        while level < len(self._levels):
            values = self._levels[level]
            if len(values) > self._size:
                self._reach(level + 1)
                values = np.sort(values)
                num_moving = len(values) & ~1
                moving = values[self._flips[level] : num_moving : 2]
                self._flips[level] ^= 1
                self._levels[level] = values[num_moving:]
                self._levels[level + 1] = np.concatenate([self._levels[level + 1], moving])
                self.max_error += 1 << level
            level += 1

    def _reach(self, level: int) -> None:
        while len(self._levels) <= level:
            self._levels.append(np.empty(0))
            self._flips.append(0)


NUM_PARTS = 16

Counts = dict[str, int] | tuple[NDArray[np.int64], NDArray[np.int64]]


def counts_by_part(values: NDArray[Any]) -> Iterator[tuple[int, Counts]]:
    """The counts of some values, cut by hash into parts, so that no piece holds a whole vocabulary.

    A piece is a dict of strings, or a pair of arrays (values, counts) of whole
    numbers: a pair per value, as word counts have it, costs ten times as much.
    """
    if not values.size:
        return
    found, counts = np.unique(values, return_counts=True)
    is_text = found.dtype.kind == "U"
    parts = bucket_of(hash_text(found, 0) if is_text else hash_ints(found, 0), NUM_PARTS)
    order = np.argsort(parts, kind="stable")
    bounds = np.searchsorted(parts[order], np.arange(NUM_PARTS + 1))
    for part in range(NUM_PARTS):
        rows = order[bounds[part] : bounds[part + 1]]
        if not len(rows):
            continue
        if is_text:
            yield part, dict(zip(found[rows].tolist(), counts[rows].tolist(), strict=True))
        else:
            yield part, (found[rows], counts[rows].astype(np.int64))


def merge_counts(pieces: Sequence[Counts]) -> Counts:
    if isinstance(pieces[0], dict):
        total: dict[str, int] = dict(pieces[0])
        for other in pieces[1:]:
            assert isinstance(other, dict)
            for token, count in other.items():
                total[token] = total.get(token, 0) + count
        return total
    numbers: Any = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    values, places = np.unique(numbers[0], return_inverse=True)
    counts = np.zeros(len(values), np.int64)
    np.add.at(counts, places, numbers[1])
    return values, counts


def count_pairs(counts: Counts) -> Iterator[tuple[Token, int]]:
    if isinstance(counts, dict):
        return iter(counts.items())
    return zip(counts[0].tolist(), counts[1].tolist(), strict=True)


Key = tuple[Any, ...]

_MOMENTS, _SKETCH, _COUNT = "moments", "quantiles", "count"


@dataclass(frozen=True, slots=True)
class Scale:
    """Normalisation of a numeric column, per number of a row."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Everything that fit finds out, by the name of the feature."""

    scales: dict[str, Scale] = field(default_factory=dict)
    quantiles: dict[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    """Values at equal steps of rank, per number of a row; of bucketized features, their boundaries."""

    vocabularies: dict[str, tuple[Token, ...]] = field(default_factory=dict)
    num_samples: int = 0


def parts_of(features: Iterable[Feature]) -> list[Feature]:
    """The features and those inside of them, each once."""
    found: dict[Feature, None] = {}
    for feature in features:
        inner: list[Feature] = []
        if isinstance(feature, Embedding) and not isinstance(feature.of, str):
            inner = [feature.of]
        elif isinstance(feature, Crossed):
            inner = [part for part in feature.of if not isinstance(part, str)]
        elif isinstance(feature, Bag):
            inner = [feature.ids]
        found |= dict.fromkeys((feature, *parts_of(inner)))
    return list(found)


def needs_fit(feature: Feature) -> bool:
    """True for a feature that needs statistics of the data."""
    match feature:
        case Numeric(normalize=normalize, missing=missing):
            return normalize is not None or missing == "mean"
        case Bucketized(boundaries=boundaries):
            return boundaries is None
        case Categorical(vocabulary=vocabulary):
            return vocabulary is None
        case _:
            return False


@dataclass(frozen=True, slots=True)
class Collect:
    """The map function: what a batch says about each column that a feature has to know of."""

    features: tuple[Feature, ...]
    """All of them, those inside of others too."""

    def __call__(self, batch: Any) -> Iterator[tuple[Key, Any]]:
        """Summaries by (kind, column)."""
        columns, _ = columns_of(batch)
        done: set[Key] = set()
        for feature in filter(needs_fit, self.features):
            for key, make in self._summaries(feature, columns):
                if key not in done:  # two features may look at one column
                    done.add(key)
                    yield from make()

    def _summaries(
        self, feature: Feature, columns: Columns
    ) -> Iterator[tuple[Key, Callable[[], Iterator[tuple[Key, Any]]]]]:
        if isinstance(feature, Categorical):
            key = _count_key(feature, self.features)
            yield key, functools.partial(_counts, key, feature, columns)
            return
        assert isinstance(feature, (Numeric, Bucketized))
        rows = columns.numbers(feature.column, asked(feature))
        yield (_MOMENTS, feature.column), lambda: iter([((_MOMENTS, feature.column), moments_of(rows))])
        if _needs_quantiles(feature):
            yield (_SKETCH, feature.column), functools.partial(_sketches, feature.column, rows)


def merge(key: Key, values: Sequence[Any]) -> Any:
    """The combine and reduce function."""
    if key[0] == _MOMENTS:
        return merge_moments(values)
    if key[0] == _COUNT:
        return merge_counts(values)
    total = Sketch.of(values[0])
    for other in values[1:]:
        total.merge(Sketch.of(other))
    return total.plain()


def conclude(features: Sequence[Feature], found: Iterable[tuple[Key, Any]], num_samples: int) -> Statistics:
    """Statistics of each feature, from the merged summaries. `found` is by increasing key."""
    statistics = Statistics(num_samples=num_samples)
    fitted = [feature for feature in features if needs_fit(feature)]
    vocabularies = {
        feature.name: _count_key(feature, features) for feature in fitted if isinstance(feature, Categorical)
    }
    statistics.vocabularies.update(dict.fromkeys(vocabularies, ()))
    summaries: dict[Key, Any] = {}
    for head, group in itertools.groupby(
        found, key=lambda item: item[0][:-1] if item[0][0] == _COUNT else item[0]
    ):
        if head[0] != _COUNT:
            summaries |= dict(group)
            continue
        users = [
            feature
            for feature in fitted
            if isinstance(feature, Categorical) and vocabularies[feature.name] == head
        ]
        counts_of = itertools.chain.from_iterable(count_pairs(part) for _, part in group)
        streams = itertools.tee(counts_of, len(users))
        for user, counts in zip(users, streams, strict=True):
            statistics.vocabularies[user.name] = most_frequent(counts, user)
    for feature in fitted:
        if isinstance(feature, (Numeric, Bucketized)):
            _conclude_numbers(feature, summaries, statistics)
    return statistics


def most_frequent(counts: Iterable[tuple[Token, int]], feature: Categorical) -> tuple[Token, ...]:
    """The vocabulary of a feature: the most frequent first, of equals the smaller first."""
    kept = ((-count, token) for token, count in counts if count >= feature.min_count)
    if feature.max_size is None:
        return tuple(token for _, token in sorted(kept))
    return tuple(token for _, token in heapq.nsmallest(feature.max_size, kept))


def _conclude_numbers(
    feature: Numeric | Bucketized, summaries: dict[Key, Any], statistics: Statistics
) -> None:
    total = summaries[_MOMENTS, feature.column]
    _refuse_useless(feature, total, statistics.num_samples)
    statistics.scales[feature.name] = Scale(tuple(total[1].tolist()), tuple(deviation_of(total).tolist()))
    if not _needs_quantiles(feature):
        return
    num_steps = feature.num_quantiles - 1 if isinstance(feature, Numeric) else feature.quantiles
    assert num_steps is not None
    shares = np.linspace(0, 1, num_steps + 1)
    sketches = [Sketch.of(summaries[_SKETCH, feature.column, number]) for number in range(total.shape[1])]
    points = [sketch.quantiles(shares) for sketch in sketches]
    if isinstance(feature, Bucketized):  # the ends bound nothing, and equal ones only once
        points = [np.unique(one[1:-1]) for one in points]
    statistics.quantiles[feature.name] = tuple(tuple(one.tolist()) for one in points)


def _needs_quantiles(feature: Numeric | Bucketized) -> bool:
    return isinstance(feature, Bucketized) or feature.normalize == "quantile"


def _count_key(feature: Categorical, features: Sequence[Feature]) -> Key:
    is_bag = any(isinstance(other, Bag) and other.ids == feature for other in features)
    return (_COUNT, feature.column, int(is_bag), str(feature.missing_value))


def _counts(key: Key, feature: Categorical, columns: Columns) -> Iterator[tuple[Key, Any]]:
    is_bag = bool(key[2])
    if is_bag:
        found = columns.token_lists(feature.column, asked(feature))
    else:
        found = columns.tokens(feature.column, asked(feature), missing_value=feature.missing_value)
    known = ~found.missing
    if is_bag and not found.is_text:
        known &= found.values >= 0
    return ((((*key, part), counts)) for part, counts in counts_by_part(found.values[known]))


def _sketches(column: str, rows: Any) -> Iterator[tuple[Key, Any]]:
    for number in range(rows.shape[1]):
        sketch = Sketch()
        values = rows[:, number]
        sketch.add(values[np.isfinite(values)])
        yield (_SKETCH, column, number), sketch.plain()


def asked(feature: Feature) -> str:
    """A feature as its author knows it."""
    column = getattr(feature, "column", feature.name)
    return f"{type(feature).__name__.lower()}('{column}')"


def _refuse_useless(feature: Numeric | Bucketized, total: Any, num_samples: int) -> None:
    if total[3].any():
        raise DataError(
            f"the column '{feature.column}' of {asked(feature)} has {int(total[3].sum())} infinite values, so it has no mean "
            "and no quantiles. Nothing was fitted; map them to NaN, which is missing, or to a number."
        )
    if not total[0].all():
        raise DataError(
            f"the column '{feature.column}' of {asked(feature)} has no value in {num_samples} samples: all are missing. "
            "Nothing was fitted; leave the feature out, or look where the column is read."
        )
