"""Splits and folds by label, by group and by time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import epoch_of, numbers
from shoal.data import Dataset
from shoal.data.select import part_sizes
from shoal.errors import ConfigError

labelled = st.lists(st.integers(0, 4), min_size=1, max_size=80)


@given(labels=labelled, seed=st.integers(0, 5), parts=st.sampled_from([(0.8, 0.2), (0.5, 0.3, 0.2), (0.6,)]))
def test_a_stratified_split_is_exact_in_size_and_nearly_so_in_each_label(
    labels: list[int], seed: int, parts: tuple[float, ...]
) -> None:
    data = numbers(len(labels))
    split = [epoch_of(part) for part in data.split(*parts, seed=seed, stratify=labels)]
    everything = [number for part in split for number in part]
    assert len(set(everything)) == len(everything)
    assert [len(part) for part in split] == part_sizes(len(labels), parts)
    total = Counter(labels)
    for part, share in zip(split, parts, strict=True):
        counts = Counter(labels[number] for number in part)
        for label in total:
            assert abs(counts[label] - share * total[label]) <= 2
        assert part == sorted(part)  # in the order of the data


@given(groups=labelled, seed=st.integers(0, 5))
def test_a_group_is_never_divided_and_nothing_is_lost(groups: list[int], seed: int) -> None:
    data = numbers(len(groups))
    split = [epoch_of(part) for part in data.split(0.5, 0.3, 0.2, seed=seed, group=groups)]
    assert sorted(number for part in split for number in part) == list(range(len(groups)))
    homes = [{groups[number] for number in part} for part in split]
    assert sum(len(home) for home in homes) == len(set(groups))


def test_many_small_groups_meet_the_sizes() -> None:
    groups = np.arange(10_000) // 7
    sizes = [len(part) for part in numbers(10_000).split(0.8, 0.1, 0.1, group=groups)]
    assert sizes == pytest.approx([8000, 1000, 1000], abs=7)


@given(times=st.lists(st.integers(0, 20), min_size=1, max_size=50))
def test_parts_by_time_are_in_order_and_later_parts_are_later(times: list[int]) -> None:
    split = [
        [times[number] for number in epoch_of(part)]
        for part in numbers(len(times)).split(0.7, 0.3, time=times)
    ]
    assert [time for part in split for time in part] == sorted(times)
    assert [len(part) for part in split] == part_sizes(len(times), (0.7, 0.3))


def test_times_may_be_dates_or_strings_but_must_be_there() -> None:
    days = np.array(["2024-03-01", "2023-01-01", "2024-01-01"])
    early, late = numbers(3).split(2, 1, time=days)
    assert (epoch_of(early), epoch_of(late)) == ([1, 2], [0])
    early, late = numbers(3).split(2, 1, time=days.astype("datetime64[D]"))
    assert (epoch_of(early), epoch_of(late)) == ([1, 2], [0])
    with pytest.raises(ConfigError, match="no time for the sample at position 1"):
        epoch_of(numbers(3).split(2, 1, time=[1.0, float("nan"), 3.0])[0])


@settings(max_examples=25)
@given(num=st.integers(2, 60), k=st.integers(2, 6), seed=st.integers(0, 3), data=st.data())
def test_folds_hold_everything_once_and_train_on_the_rest(
    num: int, k: int, seed: int, data: st.DataObject
) -> None:
    k = min(k, num)
    labels = data.draw(st.lists(st.integers(0, 3), min_size=num, max_size=num))
    for by in ({}, {"stratify": labels}):
        pairs = numbers(num).folds(k, seed=seed, **by)  # type: ignore[arg-type]
        assert len(pairs) == k
        validations = [epoch_of(validation) for _, validation in pairs]
        assert sorted(number for part in validations for number in part) == list(range(num))
        assert {len(part) for part in validations} <= {num // k, num // k + 1}
        for (train, _), validation in zip(pairs, validations, strict=True):
            assert sorted([*epoch_of(train), *validation]) == list(range(num))
            assert not num - len(validation) or epoch_of(train.shuffle(seed=1), 2)


def test_folds_by_group_keep_groups_together() -> None:
    groups = np.arange(60) // 4
    for train, validation in numbers(60).folds(3, group=groups):
        assert not {groups[n] for n in epoch_of(train)} & {groups[n] for n in epoch_of(validation)}


def test_what_parts_by_is_a_column_a_function_or_an_array() -> None:
    columns = {"user": torch.arange(12) // 3, "x": torch.arange(12)}
    data = Dataset.from_arrays((columns, torch.arange(12) % 2))
    by = ["user", lambda sample: int(sample[0]["user"]), columns["user"], columns["user"].numpy()]
    found = []
    for one in by:
        train, test = data.split(0.5, 0.5, group=one, seed=4)
        found.append([sample[0]["x"].item() for part in (train, test) for sample in part])
    assert found == [found[0]] * 4


def test_nothing_is_read_before_a_part_is() -> None:
    asked: list[int] = []

    def label(sample: torch.Tensor) -> int:
        asked.append(int(sample))
        return int(sample) % 2

    train, test = numbers(10).split(0.5, 0.5, stratify=label)
    assert not asked
    assert "not counted yet" in repr(train)
    assert len(train) + len(test) == 10
    assert sorted(asked) == list(range(10))


def test_two_ways_at_once_and_none_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes one of"):
        numbers(4).split(0.5, 0.5, stratify=[0, 0, 1, 1], group=[0, 0, 1, 1])
    with pytest.raises(ConfigError, match="needs a seed"):
        numbers(4).split(0.5, 0.5, stratify=[0, 0, 1, 1], seed=None)
    with pytest.raises(ConfigError, match="given 3 values"):
        numbers(4).split(0.5, 0.5, stratify=[0, 0, 1])


def test_samples_that_cannot_be_read_are_in_some_part_and_never_drawn() -> None:
    def fragile(n: torch.Tensor) -> torch.Tensor:
        if int(n) in (3, 4):
            raise ValueError("bad")
        return n

    data = numbers(20).map(fragile, on_error="skip")
    parts = data.split(0.5, 0.5, stratify=lambda n: int(n) % 2)
    assert sum(len(part) for part in parts) == 20
    assert sorted(n for part in parts for n in epoch_of(part)) == [n for n in range(20) if n not in (3, 4)]
    drawn = data.sample(200, weights=lambda n: 1.0)
    batches = drawn.batch(50)
    assert sum(len(batch) for batch in batches) == 200
    assert not batches.skipped
