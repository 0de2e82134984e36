"""What has to be known of the data before features can be computed: collected by map, combine and reduce.

One pass over the data, whatever the features are. A summary per column and
kind is merged within every task, and those in the order of the tasks, which
follows from the data alone: so the same statistics come out at any number of
workers, to the bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.errors import DataError
from shoal.features import moments, quantiles, token_counts
from shoal.features.columns import Columns, columns_of
from shoal.features.declared import Bag, Bucketized, Categorical, Crossed, Embedding, Feature, Numeric, Token
from shoal.features.quantiles import Sketch
from shoal.features.vocabulary import most_frequent

Key = tuple[Any, ...]

_MOMENTS, _SKETCH, _COUNT = "moments", "quantiles", "count"


@dataclass(frozen=True, slots=True)
class Scale:
    """How a numeric column is normalised, per number of a row."""

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
    """Whether something of the data has to be known for it."""
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
        yield (_MOMENTS, feature.column), lambda: iter([((_MOMENTS, feature.column), moments.summary(rows))])
        if _needs_quantiles(feature):
            yield (_SKETCH, feature.column), functools.partial(_sketches, feature.column, rows)


def merge(key: Key, values: Sequence[Any]) -> Any:
    """The combine and reduce function."""
    if key[0] == _MOMENTS:
        return moments.merged(values)
    return quantiles.merged(values) if key[0] == _SKETCH else token_counts.merged(values)


def conclude(features: Sequence[Feature], found: Iterable[tuple[Key, Any]], num_samples: int) -> Statistics:
    """What the merged summaries mean for each feature. `found` is by increasing key."""
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
        counts_of = itertools.chain.from_iterable(token_counts.pairs(part) for _, part in group)
        streams = itertools.tee(counts_of, len(users))
        for user, counts in zip(users, streams, strict=True):
            statistics.vocabularies[user.name] = most_frequent(counts, user)
    for feature in fitted:
        if isinstance(feature, (Numeric, Bucketized)):
            _conclude_numbers(feature, summaries, statistics)
    return statistics


def _conclude_numbers(
    feature: Numeric | Bucketized, summaries: dict[Key, Any], statistics: Statistics
) -> None:
    total = summaries[_MOMENTS, feature.column]
    _refuse_useless(feature, total, statistics.num_samples)
    statistics.scales[feature.name] = Scale(
        tuple(total[1].tolist()), tuple(moments.deviation(total).tolist())
    )
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
    return ((((*key, part), counts)) for part, counts in token_counts.counted(found.values[known]))


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
