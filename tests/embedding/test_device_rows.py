"""Rows on a device: updates as the numba rules make them to the bit, sums in the order of the batch, changes handed over once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.embedding.device_rows import ON_DEVICE, DeviceRows, summed
from shoal.embedding.row_table import RowTable
from shoal.runtime.transport.messages.client_server import TableSpec

SETTINGS = {
    "sgd": {"lr": 0.3},
    "adagrad": {"lr": 0.1, "lr_decay": 0.01, "eps": 1e-10, "initial_accumulator_value": 0.1},
    "adam": {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", sorted(ON_DEVICE))
def test_updates_have_the_bits_of_the_servers_rule(rule: str, dtype: str) -> None:
    generator = np.random.default_rng(3)
    spec = TableSpec(
        number=0, name="rows", dim=5, dtype=dtype, rule=rule, settings=SETTINGS[rule], num_rows=40
    )
    table, first = RowTable(spec), generator.normal(size=(40, 5)).astype(dtype)
    table.set(np.arange(40), first, None, 0)
    rows = DeviceRows(torch.from_numpy(first.copy()), rule, SETTINGS[rule])
    for step in range(1, 6):
        keys = np.sort(generator.choice(40, 17, replace=False)).astype(np.int64)
        grads = generator.normal(size=(17, 5)).astype(dtype)
        settings = {**SETTINGS[rule], "lr": SETTINGS[rule]["lr"] / step}
        table.settings = settings
        table.apply(keys, grads, 0.7)
        rows.update(torch.from_numpy(keys), torch.from_numpy(grads.copy()), 0.7, settings, step)
    keys, values, state = table.read_all()
    assert np.array_equal(rows.values.numpy()[keys], values)
    assert np.array_equal(rows.state.numpy()[keys], state)


def test_gradients_of_one_row_are_added_in_the_order_of_the_batch() -> None:
    places = torch.tensor([7, 2, 7, 7])
    grads = torch.tensor([[1e8], [5.0], [1.0], [-1e8]])
    found, sums = summed(places, grads, 10)
    assert found.tolist() == [2, 7]
    assert sums.tolist() == [[5.0], [0.0]]  # 1e8 + 1 is 1e8 in float32


def test_a_change_is_handed_over_once_and_as_it_was() -> None:
    rows = DeviceRows(torch.zeros(6, 2), "adagrad", SETTINGS["adagrad"])
    rows.update(torch.tensor([4, 1]), torch.ones(2, 2), 1.0, SETTINGS["adagrad"], 1)
    places, taken = rows.take_changed()
    assert places.tolist() == [1, 4]
    before = taken.clone()
    rows.update(torch.tensor([1]), torch.ones(1, 2), 1.0, SETTINGS["adagrad"], 2)
    assert torch.equal(taken, before)
    assert rows.take_changed()[0].tolist() == [1]
    assert rows.take_changed()[0].tolist() == []


def test_rows_that_were_filled_in_are_no_change() -> None:
    rows = DeviceRows(torch.zeros(6, 2), "adam", SETTINGS["adam"])
    whole = torch.arange(12.0).reshape(2, 6)
    rows.fill(torch.tensor([5, 0]), whole)
    assert rows.values[5].tolist() == [0.0, 1.0]
    assert rows.state[0].tolist() == [8.0, 9.0, 10.0, 11.0]
    assert not rows.is_changed.any()
