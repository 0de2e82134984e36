"""Functions applied to samples, one by one or many at once, and what is said and done when one raises."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import epoch_of, numbers, read, seen
from shoal.data import Dataset
from shoal.errors import BadSample, ConfigError, DataError, TooManySkipped
from shoal.runtime import events


def fragile(sample: torch.Tensor) -> torch.Tensor:
    if int(sample) % 5 == 2:
        raise ValueError(f"no good: {int(sample)}")
    return sample


def fragile_batch(batch: torch.Tensor) -> torch.Tensor:
    if bool((batch % 5 == 2).any()):
        raise ValueError("no good in here")
    return batch


def test_a_batched_function_sees_many_samples_at_once_and_gives_the_same() -> None:
    sizes: list[int] = []

    def double(batch: dict[str, Any]) -> dict[str, Any]:
        sizes.append(len(batch["x"]))
        return {"x": batch["x"] * 2, "y": batch["x"].numpy() + 1}

    data = Dataset.from_arrays({"x": torch.arange(20)}).map(double, batched=True)
    [first, second] = data.shuffle(seed=1).batch(10)
    assert sizes == [10, 10]
    assert torch.equal(first["y"] * 2 - 2, first["x"])
    assert sorted(first["x"].tolist() + second["x"].tolist()) == list(range(0, 40, 2))
    assert data[3]["x"] == 6
    assert [sample["y"].item() for sample in data] == list(range(1, 21))


def test_strings_reach_a_batched_function_as_arrays() -> None:
    named = numbers(4).map(lambda n: {"n": n, "name": f"s{int(n)}"})
    upper = named.map(lambda b: {"n": b["n"], "name": np.char.upper(b["name"])}, batched=True)
    [batch] = upper.batch(4)
    assert batch["name"].tolist() == ["S0", "S1", "S2", "S3"]
    assert upper[2]["name"] == "S2"
    assert [sample["name"] for sample in upper.map(lambda sample: sample)] == ["S0", "S1", "S2", "S3"]


@pytest.mark.parametrize(
    "fn", [lambda b: b[:-1], lambda b: b.sum(), lambda b: {"x": b, "n": 3}, lambda b: [b, "name"]]
)
def test_a_batched_function_must_keep_its_rows(fn: Any) -> None:
    with pytest.raises(DataError, match="one row per sample"):
        list(numbers(6).map(fn, batched=True).batch(3))


def test_what_a_batched_function_draws_is_a_function_of_the_position() -> None:
    data = Dataset.from_arrays(torch.zeros(12)).map(lambda b: b + torch.rand(len(b)), batched=True)
    one = seen(read(data.batch(4), num_workers=1))
    assert seen(read(data.batch(4), num_workers=3)) == one
    assert len(set(one)) == 12


@pytest.mark.parametrize("batched", [False, True])
def test_an_error_names_index_epoch_and_the_users_own_line(batched: bool) -> None:
    data = numbers(20).skip(5).map(fragile_batch if batched else fragile, batched=batched)
    batches = data.batch(8)
    with pytest.raises(ValueError, match="no good") as caught:
        list(batches.slices(epoch=3, start=0, rank=0, num_workers=1))
    [note] = caught.value.__notes__
    assert "index 7, in epoch 3" in note
    assert os.path.basename(__file__) in note
    assert 'raise ValueError(f"no good' in note or 'raise ValueError("no good' in note
    assert caught.traceback[-1].name in ("fragile", "fragile_batch")


def test_an_error_that_no_sample_alone_causes_is_told_as_one_of_the_batch() -> None:
    def not_together(batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > 1:
            raise RuntimeError("too many")
        return batch

    with pytest.raises(RuntimeError) as caught:
        list(numbers(6).map(not_together, batched=True, on_error="skip").batch(3))
    assert "each of them alone it does not" in caught.value.__notes__[0]


@pytest.mark.parametrize("batched", [False, True])
@settings(max_examples=25)
@given(
    num=st.integers(1, 40),
    batch_size=st.integers(3, 12),
    workers=st.sampled_from([1, 2, 3]),
    epoch=st.integers(0, 1),
)
def test_skipped_samples_are_left_out_at_any_number_of_workers(
    batched: bool, num: int, batch_size: int, workers: int, epoch: int
) -> None:
    fn = fragile_batch if batched else fragile
    data = numbers(num).map(fn, batched=batched, on_error="skip").shuffle(seed=2)
    steps = read(data.batch(batch_size), num_workers=workers, epoch=epoch)
    whole = [n for n in epoch_of(numbers(num).shuffle(seed=2), epoch) if n % 5 != 2]
    assert seen(steps) == whole
    covered = 0
    for step in steps:
        assert {part.start for part in step} == {covered}
        covered += step[0].num_global  # positions, not samples: what is skipped was there
        assert sum(part.share for part in step) == pytest.approx(1)
        for part in step:
            assert len(part.batch) == max(part.num_local, 1)
            assert [int(n) for n in part.indices] == part.batch[: part.num_local].tolist()
    assert covered == num


def test_each_skip_is_written_down() -> None:
    before = len(events.emitted)
    batches = numbers(12).map(fragile, on_error="skip").batch(4)
    list(batches)
    list(batches)
    assert [(one.epoch, one.index) for one in batches.skipped] == [(0, 2), (0, 7), (1, 2), (1, 7)]
    kind, facts = list(events.emitted)[before]
    assert kind == "sample skipped"
    assert (facts["epoch"], facts["index"], facts["where"]) == (0, 2, "map(fragile)")
    assert "ValueError: no good: 2" in facts["reason"]
    assert os.path.basename(__file__) in facts["reason"]


def test_a_budget_counts_samples_and_ends_the_pass() -> None:
    batches = numbers(20).map(fragile, on_error="skip", max_skips=3).batch(20)
    with pytest.raises(TooManySkipped, match="max_skips=3 allows no more") as caught:
        list(batches)
    assert caught.value.num_skipped == 4
    within = numbers(20).map(fragile, on_error="skip", max_skips=4).batch(20)
    for _ in range(3):
        [batch] = within  # the same four each epoch
        assert len(batch) == 16


def test_stages_have_budgets_of_their_own() -> None:
    def other(sample: torch.Tensor) -> torch.Tensor:
        return sample // (int(sample) % 7 != 3)  # by zero for 3, 10, 17

    data = numbers(20).map(fragile, on_error="skip", max_skips=4).map(other, on_error="skip", max_skips=3)
    batches = data.batch(20)
    [batch] = batches
    assert len(batch) == 20 - 6  # 17 is bad for both, and skipped once
    assert len(batches.skipped) == 6


def test_a_skip_says_its_index_in_the_words_of_whoever_asked() -> None:
    skipping = numbers(20).map(fragile, on_error="skip")
    zipped = Dataset.zip(skipping.skip(5), numbers(20))
    [batch] = zipped.batch(15)
    assert batch[0].tolist() == [n for n in range(5, 20) if n % 5 != 2]
    assert (batch[0] - batch[1]).tolist() == [5] * 12  # side by side still
    for data in (
        skipping.repeat(2),
        Dataset.interleave([skipping, numbers(20)], block=3),
        skipping.sample(30),
    ):
        got = [n for batch in data.batch(8) for n in batch.tolist()]
        assert len(got) + len(data.batch(8).skipped) < len(data)
    together = epoch_of(Dataset.interleave([skipping, numbers(20)], block=3))
    assert sorted(together) == sorted([n for n in range(20) if n % 5 != 2] + list(range(20)))


def test_a_share_that_is_all_bad_is_borrowed_and_one_without_any_good_is_refused() -> None:
    def last_only(sample: torch.Tensor) -> torch.Tensor:
        if int(sample) < 9:
            raise ValueError
        return sample

    batches = numbers(10).map(last_only, on_error="skip").batch(5)
    steps = read(batches, num_workers=2)
    assert [[part.num_local for part in step] for step in steps] == [[0, 0], [0, 1]]
    assert all(part.batch.tolist() == [9] for step in steps for part in step)
    assert [batch.tolist() for batch in batches] == [[9]]  # a batch of nothing is none
    with pytest.raises(DataError, match="none of the 9 samples"):
        list(numbers(9).map(last_only, on_error="skip").batch(5))


def test_one_sample_alone_says_what_is_wrong_with_it() -> None:
    data = numbers(10).map(fragile, on_error="skip")
    with pytest.raises(BadSample, match="no good: 7"):
        data[7]
    assert [int(n) for n in data] == [0, 1, 3, 4, 5, 6, 8, 9]


def test_what_is_bad_by_chance_is_bad_by_position() -> None:
    def unlucky(sample: torch.Tensor) -> torch.Tensor:
        if torch.rand(()) < 0.3:
            raise ValueError("bad luck")
        return sample

    data = numbers(60).map(unlucky, on_error="skip")
    one = seen(read(data.batch(12), num_workers=1))
    assert 20 < len(one) < 58
    assert seen(read(data.batch(12), num_workers=3)) == one
    again = data.batch(12)
    assert seen(read(again, num_workers=2, start=24)) == one[len([n for n in one if n < 24]) :]


def test_settings_that_cannot_be_meant_are_refused() -> None:
    for settings_of in (
        {"on_error": "ignore"},
        {"max_skips": 3},
        {"on_error": "skip", "max_skips": -1},
        {"workers": -1},
    ):
        with pytest.raises(ConfigError):
            numbers(3).map(fragile, **settings_of)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a function of a sample"):
        numbers(3).map(3)  # type: ignore[arg-type]
