"""A filter looks once at every sample, and remembers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipelines import epoch_of, numbers, read, seen
from shoal.data import Dataset
from shoal.errors import ConfigError, DataError, EmptyDataset


class Counting:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, sample: torch.Tensor) -> bool:
        self.asked.append(int(sample))
        return int(sample) % 3 == 0


def test_every_sample_is_looked_at_once_when_somebody_wants_to_know() -> None:
    fn = Counting()
    data = numbers(30).filter(fn).map(lambda n: n + 1).shuffle(seed=1).take(8)
    assert not fn.asked
    assert repr(data) == "Dataset(not counted yet: arrays > map > filter > shuffle > take)"
    assert not fn.asked
    assert len(data) == 8
    for epoch in range(3):
        epoch_of(data, epoch)
    assert fn.asked == list(range(30))
    assert repr(data) == "Dataset(8 samples: arrays > map > filter > shuffle > take)"


def test_only_what_the_dataset_holds_is_looked_at_in_the_order_of_the_source() -> None:
    fn = Counting()
    part, _ = numbers(30).split(0.5, 0.5, seed=3)
    kept = epoch_of(part.filter(fn))
    assert kept == [n for n in epoch_of(part) if n % 3 == 0]
    assert fn.asked == sorted(epoch_of(part))


def test_after_a_shuffle_the_order_of_what_is_kept_is_that_of_the_shuffle() -> None:
    fn = Counting()
    data = numbers(30).shuffle(seed=5)
    kept = data.filter(fn)
    for epoch in (2, 0, 1):
        assert epoch_of(kept, epoch) == [n for n in epoch_of(data, epoch) if n % 3 == 0]
    assert len(fn.asked) == 30


def test_where_an_epoch_holds_other_samples_it_may_keep_another_number() -> None:
    fn = Counting()
    data = numbers(30).shuffle(seed=5).take(9)
    kept = data.filter(fn)
    for epoch in range(5):
        assert epoch_of(kept, epoch) == [n for n in epoch_of(data, epoch) if n % 3 == 0]
    assert len(fn.asked) == len(set(fn.asked))
    with pytest.raises(ConfigError, match="repeat needs epochs of one length"):
        kept.repeat(2)
    with pytest.raises(ConfigError, match="interleave needs epochs of one length"):
        Dataset.interleave([kept, numbers(5)])
    with pytest.raises(ConfigError, match="zip needs epochs of one length"):
        Dataset.zip(kept, numbers(5))


def test_a_batched_filter_gives_a_truth_value_per_row() -> None:
    data = Dataset.from_arrays({"x": torch.arange(10_000)})
    kept = data.filter(lambda batch: batch["x"] % 1000 == 1, batched=True)
    assert [sample["x"].item() for sample in kept] == list(range(1, 10_000, 1000))
    with pytest.raises(DataError, match="one truth value per sample"):
        len(data.filter(lambda batch: True, batched=True))


def test_a_filter_that_lets_nothing_pass_leaves_an_empty_dataset() -> None:
    data = numbers(5).filter(lambda n: False)
    assert len(data) == 0
    assert list(data) == []
    with pytest.raises(EmptyDataset):
        list(data.batch(2))


def test_a_filter_may_not_depend_on_chance_or_on_the_epoch() -> None:
    with pytest.raises(ConfigError, match="draws random numbers"):
        len(numbers(5).filter(lambda n: torch.rand(()) < 0.5))
    with pytest.raises(ConfigError, match="before that stage"):
        numbers(5).augment(lambda n, g: n).filter(bool)
    with pytest.raises(ConfigError, match="before that stage"):
        Dataset.zip(numbers(5).shuffle(seed=0), numbers(5)).filter(bool)


def test_an_error_in_a_filter_says_for_which_sample() -> None:
    def fails(n: torch.Tensor) -> bool:
        raise KeyError(f"at {int(n)}")

    with pytest.raises(KeyError) as caught:
        len(numbers(5).skip(2).filter(fails))
    assert "filter(" in caught.value.__notes__[0]
    assert "index 2" in caught.value.__notes__[0]


def test_a_bad_sample_is_kept_to_be_skipped_by_whoever_reads_it() -> None:
    def fragile(n: torch.Tensor) -> torch.Tensor:
        if int(n) == 4:
            raise ValueError
        return n

    batches = numbers(10).map(fragile, on_error="skip").filter(lambda n: int(n) % 2 == 0).batch(10)
    [batch] = batches
    assert batch.tolist() == [0, 2, 6, 8]
    assert [one.index for one in batches.skipped] == [4]


def test_what_was_chosen_is_part_of_what_a_dataset_is() -> None:
    one = numbers(10).filter(lambda n: int(n) < 5).batch(2).describe()
    other = numbers(10).filter(lambda n: int(n) >= 5).batch(2).describe()
    assert one["num_samples"] == other["num_samples"] == 5
    assert one["stages"][-1]["digest"] != other["stages"][-1]["digest"]


def test_a_filter_inside_a_zip_is_not_run_before_it_is_needed() -> None:
    fn = Counting()
    zipped: Any = Dataset.zip(numbers(30).filter(fn), numbers(30)).map(lambda pair: pair[0]).repeat(2)
    assert "not counted yet" in repr(zipped)
    assert not fn.asked
    assert seen(read(zipped.batch(5), num_workers=2)) == [n for n in range(30) if n % 3 == 0] * 2
    assert len(fn.asked) == 30
