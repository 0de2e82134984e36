"""Moments and quantiles: whatever the pieces they are merged from, they say of the data what numpy says."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.features import statistics as moments
from shoal.features import statistics as quantiles
from shoal.features import statistics as token_counts
from shoal.features.statistics import Sketch

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


def cut(values: Any, at: list[int]) -> list[Any]:
    bounds = [0, *sorted(min(place, len(values)) for place in at), len(values)]
    return [values[begin:end] for begin, end in itertools.pairwise(bounds)]


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS | st.just(float("nan"))), min_size=1, max_size=50),
    st.lists(st.integers(0, 50)),
)
def test_moments_of_pieces_are_those_of_the_whole(rows: list[tuple[float, float]], at: list[int]) -> None:
    values = np.array(rows)
    total = moments.merge_moments([moments.moments_of(piece) for piece in cut(values, at)])
    known = [column[~np.isnan(column)] for column in values.T]
    assert total[0].tolist() == [len(column) for column in known]
    for number, column in enumerate(known):
        if len(column):
            assert total[1][number] == pytest.approx(column.mean(), rel=1e-9, abs=1e-6)
            assert moments.deviation_of(total)[number] == pytest.approx(column.std(), rel=1e-6, abs=1e-5)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    values = 1e9 + np.random.default_rng(0).normal(size=(10_000, 1))
    total = moments.merge_moments([moments.moments_of(piece) for piece in np.array_split(values, 13)])
    assert moments.deviation_of(total)[0] == pytest.approx(values.std(), rel=1e-8)


def test_infinite_values_are_counted_and_left_out() -> None:
    total = moments.moments_of(np.array([[1.0], [np.inf], [3.0], [-np.inf], [np.nan]]))
    assert total[:, 0].tolist() == [2, 2, 2, 2]


@given(st.lists(NUMBERS, min_size=1, max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_few_values_have_exact_quantiles(values: list[float], at: list[int]) -> None:
    total = Sketch()
    for piece in cut(np.array(values), at):
        part = Sketch()
        part.add(piece)
        total.merge(part)
    shares = np.linspace(0, 1, 11)
    expected = np.quantile(values, shares, method="inverted_cdf")
    assert total.quantiles(shares).tolist() == expected.tolist()
    assert total.max_error == 0


@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(100, 5000),
    st.lists(st.integers(0, 5000), max_size=8),
    st.sampled_from(["normal", "zipf", "sorted", "constant"]),
    st.integers(8, 64),
)
def test_the_rank_of_a_quantile_is_wrong_by_no_more_than_the_sketch_says(
    seed: int, count: int, at: list[int], kind: str, size: int
) -> None:
    draws = np.random.default_rng(seed)
    values = {
        "normal": lambda: draws.normal(size=count),
        "zipf": lambda: draws.zipf(1.3, size=count).astype(float),
        "sorted": lambda: np.arange(count, dtype=float),
        "constant": lambda: np.full(count, 3.0),
    }[kind]()
    total = Sketch(size)
    for piece in cut(values, at):
        part = Sketch(size)
        for begin in range(0, len(piece), 37):
            part.add(piece[begin : begin + 37])
        total.merge(part)
    shares = np.linspace(0, 1, 21)
    found = total.quantiles(shares)
    below = np.searchsorted(np.sort(values), found, side="left")
    upto = np.searchsorted(np.sort(values), found, side="right")
    assert total.count == count
    assert ((below - total.max_error <= shares * count) & (shares * count <= upto + total.max_error)).all()
    assert (np.diff(found) >= 0).all()


def test_a_million_values_keep_their_quantiles_within_a_thousandth() -> None:
    values = np.random.default_rng(0).lognormal(size=1_000_000)
    parts = []
    for piece in np.array_split(values, 16):
        part = Sketch()
        for begin in range(0, len(piece), 8192):
            part.add(piece[begin : begin + 8192])
        parts.append(part.plain())
    total = Sketch.of(quantiles.merge(("quantiles",), parts))
    shares = np.linspace(0, 1, 101)
    ranks = np.searchsorted(np.sort(values), total.quantiles(shares)) / len(values)
    assert np.abs(ranks - shares).max() < 1e-3
    assert total.max_error / total.count < 5e-3, "proved, not only observed"
    assert sum(map(len, total._levels)) < 10 * quantiles.SIZE


def test_the_same_values_give_the_same_sketch() -> None:
    def made() -> Any:
        sketch = Sketch(32)
        for begin in range(0, 5000, 100):
            sketch.add(np.random.default_rng(begin).normal(size=100))
        return sketch.plain()

    one, other = made(), made()
    assert repr(one) == repr(other)


TOKENS = st.lists(
    st.text(st.characters(exclude_characters="\x00"), min_size=1, max_size=3), max_size=60
) | st.lists(st.integers(-9, 9), max_size=60)


@given(TOKENS, st.lists(st.integers(0, 60), max_size=4))
def test_counts_of_pieces_are_those_of_the_whole(values: list[Any], at: list[int]) -> None:
    by_part: dict[int, list[Any]] = {}
    for piece in cut(np.array(values), at):
        for part, counts in token_counts.counts_by_part(piece):
            by_part.setdefault(part, []).append(counts)
    found = [
        pair
        for pieces in by_part.values()
        for pair in token_counts.count_pairs(token_counts.merge_counts(pieces))
    ]
    assert dict(found) == Counter(values)
    assert len(found) == len(set(values)), "a value is in one part only"
