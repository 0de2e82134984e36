"""Samples drawn at random, by weight, as a function of (seed, epoch, position)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelines import epoch_of, numbers
from shoal.data import Dataset
from shoal.data.select import uniform
from shoal.errors import ConfigError, NoSuchColumn


def test_hashes_are_uniform_and_never_at_the_edge() -> None:
    drawn = uniform(np.arange(200_000), 12345)
    assert 0 < drawn.min() < drawn.max() < 1
    counts = np.histogram(drawn, bins=50, range=(0, 1))[0]
    assert ((counts - 4000) ** 2 / 4000).sum() < 100  # chi-square with 49 degrees of freedom


def test_draws_follow_the_weights() -> None:
    weights = [0.0, 1.0, 2.0, 0.0, 5.0]
    drawn = Counter(epoch_of(numbers(5).sample(20_000, weights=weights, seed=3)))
    assert set(drawn) == {1, 2, 4}
    for number, share in ((1, 0.125), (2, 0.25), (4, 0.625)):
        assert drawn[number] / 20_000 == pytest.approx(share, abs=0.015)


@given(
    weights=st.lists(st.floats(0, 10, allow_subnormal=False), min_size=1, max_size=30).filter(sum),
    seed=st.integers(0, 9),
)
def test_a_weight_of_nothing_is_never_drawn(weights: list[float], seed: int) -> None:
    for replacement in (True, False):
        drawn = epoch_of(numbers(len(weights)).sample(None, weights, replacement, seed))
        assert all(weights[number] > 0 for number in drawn)
        if not replacement:
            assert sorted(drawn) == [number for number, weight in enumerate(weights) if weight > 0]


def test_without_replacement_heavier_ones_come_earlier_and_nothing_twice() -> None:
    weights = torch.tensor([1.0, 1.0, 1.0, 7.0])
    firsts: Counter[int] = Counter()
    for seed in range(1000):
        drawn = epoch_of(numbers(4).sample(2, weights=weights, replacement=False, seed=seed))
        assert len(set(drawn)) == 2
        firsts[drawn[0]] += 1
    assert firsts[3] / 1000 == pytest.approx(0.7, abs=0.04)  # as a draw from an urn
    assert firsts[0] / 1000 == pytest.approx(0.1, abs=0.03)


def test_epochs_and_seeds_draw_anew_and_repeat_themselves() -> None:
    for settings in ({}, {"weights": list(range(20))}, {"weights": list(range(20)), "replacement": False}):
        data = numbers(20).sample(seed=1, **settings)  # type: ignore[arg-type]
        assert epoch_of(data, 3) == epoch_of(data, 3)
        assert epoch_of(data, 3) != epoch_of(data, 4)
        assert epoch_of(data, 3) != epoch_of(numbers(20).sample(seed=2, **settings), 3)  # type: ignore[arg-type]


def test_weights_come_from_a_column_or_a_function() -> None:
    data = Dataset.from_arrays(({"w": torch.tensor([0.0, 1.0, 0.0]), "x": torch.arange(3)}, torch.arange(3)))
    for weights in ("w", lambda sample: sample[0]["w"], np.array([0, 1, 0])):
        drawn = data.sample(50, weights=weights).map(lambda sample: sample[0]["x"])
        assert set(epoch_of(drawn)) == {1}
    with pytest.raises(NoSuchColumn, match="no column 'v'"):
        epoch_of(data.sample(weights="v"))
    with pytest.raises(ConfigError, match="no dicts of columns"):
        epoch_of(numbers(3).sample(weights="v"))


def test_weights_are_not_read_before_somebody_draws() -> None:
    asked: list[int] = []
    data = numbers(5).sample(weights=lambda n: asked.append(int(n)) or 1.0, replacement=False)
    assert "not counted yet" in repr(data)
    assert not asked
    assert len(data) == 5
    assert asked == list(range(5))


@pytest.mark.parametrize("weights", [[1.0, -1.0, 1.0], [1.0, float("nan"), 1.0], [0.0, 0.0, 0.0]])
def test_weights_that_cannot_be_meant_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="weights of sample"):
        epoch_of(numbers(3).sample(weights=weights))


def test_weights_of_another_length_or_after_a_shuffle_are_refused() -> None:
    with pytest.raises(ConfigError, match="given 2 values, and the dataset has 3"):
        numbers(3).sample(weights=[1.0, 2.0])
    with pytest.raises(ConfigError, match="comes after a shuffle"):
        numbers(3).shuffle(seed=0).sample(weights=[1.0, 2.0, 3.0])
    with pytest.raises(ConfigError, match="1 samples with a weight above 0"):
        epoch_of(numbers(3).sample(2, weights=[0.0, 1.0, 0.0], replacement=False))
