from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import Dataset
from shoal.data.select import part_sizes
from shoal.errors import ConfigError


@given(st.integers(0, 10_000), st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_fractions_of_one_lose_no_sample_and_round_each_part_by_less_than_one(
    num: int, weights: list[int]
) -> None:
    fractions = [weight / sum(weights) for weight in weights]
    sizes = part_sizes(num, fractions)
    assert sum(sizes) == num
    assert all(abs(size - num * fraction) < 1 + 1e-6 for size, fraction in zip(sizes, fractions, strict=True))


@given(st.integers(0, 10_000), st.lists(st.floats(0, 0.2), min_size=1, max_size=5))
def test_fractions_below_one_take_no_more_than_they_ask_for(num: int, fractions: list[float]) -> None:
    sizes = part_sizes(num, fractions)
    assert all(size >= 0 for size in sizes)
    assert sum(sizes) <= num * sum(fractions) + 1e-4
    assert sum(sizes) > num * sum(fractions) - 1


def test_the_largest_remainder_gets_the_sample_that_is_left() -> None:
    assert part_sizes(10, [0.75, 0.25]) == [8, 2]  # 7.5 and 2.5: the first of equals
    assert part_sizes(11, [0.5, 0.3, 0.2]) == [6, 3, 2]  # 5.5, 3.3, 2.2
    assert part_sizes(3, [0.8, 0.1, 0.1]) == [3, 0, 0]
    assert part_sizes(10, [0.7, 0.2, 0.1]) == [7, 2, 1]  # 0.7 + 0.2 + 0.1 is below 1 in floats


def test_whole_numbers_are_numbers_of_samples() -> None:
    assert part_sizes(10, [7, 3]) == [7, 3]
    assert part_sizes(10, [1]) == [1]
    assert part_sizes(10, [1.0]) == [10]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([], "takes fractions"),
        (["0.8", 0.2], "takes fractions"),
        ([True], "takes fractions"),
        ([0.9, -0.1], "0 or more"),
        ([float("nan")], "0 or more"),
        ([0.8, 0.3], "1.1 times the dataset"),
        ([8, 3], "asks for 11 samples and the dataset has 10"),
        ([0.5, 3], "mixes fractions and numbers"),
    ],
)
def test_what_cannot_be_meant_is_refused(parts: list[float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        part_sizes(10, parts)


@given(
    st.integers(0, 300), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.none() | st.integers(0, 99)
)
def test_parts_are_disjoint_and_complete(num_samples: int, weights: list[int], seed: int | None) -> None:
    data = Dataset.from_function(lambda indices: indices, num_samples)
    parts = data.split(*(weight / sum(weights) for weight in weights), seed=seed)
    seen = [int(sample) for part in parts for sample in part]
    assert sorted(seen) == list(range(num_samples))
    if seed is None:
        assert seen == list(range(num_samples))


def test_a_part_stays_the_same_part_in_every_epoch() -> None:
    train, test = Dataset.from_function(lambda indices: indices, 100).split(0.9, 0.1, seed=3)
    kept = {int(sample) for sample in test}
    batches = train.shuffle(seed=0).batch(90)
    for _ in range(3):
        [batch] = batches
        assert not kept & set(batch.tolist())


def test_another_seed_is_another_split() -> None:
    data = Dataset.from_function(lambda indices: indices, 100)
    tests = {tuple(int(sample) for sample in data.split(0.9, 0.1, seed=seed)[1]) for seed in range(10)}
    assert len(tests) == 10


def test_split_after_shuffle_is_refused_because_test_data_would_leak() -> None:
    with pytest.raises(ConfigError, match="Split first"):
        Dataset.from_function(lambda indices: indices, 100).shuffle(seed=0).split(0.9, 0.1)


def test_a_part_can_be_split_again() -> None:
    data = Dataset.from_function(lambda indices: indices, 100)
    rest, test = data.split(0.8, 0.2, seed=0)
    train, validation = rest.split(0.75, 0.25, seed=0)
    assert sorted(int(sample) for part in (train, validation, test) for sample in part) == list(range(100))
