"""Samples that say how much they count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shoal.data import Dataset
from shoal.data.slice import Slice, Weighted, split_target
from shoal.errors import ConfigError, DataError, NoSuchColumn

COLUMNS = {"x": torch.arange(8.0), "w": torch.arange(8) * 0.5}
DATA = Dataset.from_arrays((COLUMNS, torch.arange(8)))


def test_batches_are_inputs_target_and_weight() -> None:
    for weights in (lambda sample: sample[0]["w"], COLUMNS["w"], COLUMNS["w"].numpy(), COLUMNS["w"].tolist()):
        inputs, target, weight = next(iter(DATA.with_weights(weights).shuffle(seed=1).batch(4)))
        assert set(inputs) == {"x", "w"}
        assert torch.equal(weight, target * 0.5)


def test_a_column_of_weights_is_no_input_any_more() -> None:
    data = DATA.with_weights("w").shuffle(seed=1)
    inputs, target, weight = next(iter(data.batch(4)))
    assert set(inputs) == {"x"}
    assert torch.equal(weight, target * 0.5)
    sample = data[0]
    assert isinstance(sample, Weighted)
    assert sample.weight == sample.target * 0.5


def test_an_array_is_in_the_order_of_the_dataset_as_it_stands() -> None:
    part = DATA.split(5, 3, seed=2)[0]
    target = torch.tensor([int(sample[1]) for sample in part])
    weighted = part.with_weights(target * 2.0).shuffle(seed=1)
    for _, got, weight in weighted.batch(2):
        assert torch.equal(weight, got * 2.0)
    with pytest.raises(ConfigError, match="given 8 values, and the dataset has 5"):
        part.with_weights(np.ones(8))
    with pytest.raises(ConfigError, match="comes after a shuffle"):
        DATA.shuffle(seed=0).with_weights(np.ones(8))


def test_weights_stay_with_what_comes_after() -> None:
    data = DATA.with_weights("w")
    doubled = data.map(lambda s: (s[0], s[1] * 2, s[2]))
    assert isinstance(next(iter(doubled.batch(3))), Weighted)
    batched = data.map(lambda b: (b.inputs, b.target, b.weight * 2), batched=True)
    assert next(iter(batched.batch(3))).weight.tolist() == [0.0, 1.0, 2.0]
    assert isinstance(batched[0], Weighted)
    after = data.batch(3).map(lambda b: (b[0], b[1], b[2] + 1))
    assert next(iter(after)).weight.tolist() == [1.0, 1.5, 2.0]
    augmented = data.augment(lambda s, g: (s[0], s[1], s[2]))
    assert isinstance(next(iter(augmented.batch(3))), Weighted)
    for lost in (lambda s: s[:2], lambda s: s.inputs):
        with pytest.raises(DataError, match="weights would be lost"):
            list(data.map(lost).batch(3))
    zipped = Dataset.interleave([data, data]).batch(4)
    assert isinstance(next(iter(zipped)), Weighted)


def test_a_batch_with_weights_is_cut_with_them() -> None:
    batch = next(iter(DATA.with_weights("w").batch(8)))
    part = Slice(batch, num_local=8, num_global=8)
    assert split_target(batch) == (batch.inputs, batch.target)
    assert [piece.weight.tolist() for piece in part.cut(2)] == [[0.0, 0.5, 1.0, 1.5], [2.0, 2.5, 3.0, 3.5]]  # type: ignore[union-attr]
    assert Slice((batch.inputs, batch.target), num_local=8, num_global=8).weight is None


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_weights_that_cannot_be_meant_are_refused(bad: float) -> None:
    column = torch.ones(8)
    column[5] = bad
    data = Dataset.from_arrays(({"x": torch.arange(8), "w": column}, torch.arange(8)))
    with pytest.raises(DataError, match="sample with index 5"):
        list(data.with_weights("w").batch(4))
    with pytest.raises(DataError, match="sample with index 5"):
        list(data.with_weights(lambda sample: sample[0]["w"]).batch(4))
    with pytest.raises(ConfigError, match="that of sample 5"):
        list(data.with_weights(column).batch(4))


def test_what_has_no_target_or_no_such_column_is_refused() -> None:
    with pytest.raises(DataError, match="without a target"):
        list(Dataset.from_arrays({"x": torch.arange(4)}).with_weights([1.0] * 4).batch(2))
    with pytest.raises(NoSuchColumn, match="no column 'weight'"):
        list(DATA.with_weights("weight").batch(2))
    with pytest.raises(ConfigError, match="twice"):
        list(DATA.with_weights("w").with_weights("x").batch(2))


def test_several_inputs_stay_several() -> None:
    data: Any = Dataset.from_arrays((torch.arange(4), torch.arange(4), torch.arange(4))).with_weights(
        [1.0] * 4
    )
    batch = next(iter(data.batch(2)))
    assert len(batch.inputs) == 2
