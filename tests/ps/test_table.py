"""A table on a server: sums in rank order, and everything by slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.ps.layout import slot_of
from shoal.ps.server.contents import ServerTable
from shoal.runtime.transport.messages.client_server import TableSpec

KEYS = st.sets(st.integers(-40, 40), max_size=40)


def table_of(
    dtype: str = "float32", *, rule: str = "adagrad", num_rows: int | None = None, dim: int = 3
) -> ServerTable:
    return ServerTable(TableSpec(2, "t", dim, dtype, rule, {}, num_rows=num_rows, init="normal"))  # type: ignore[arg-type]


def contribution(keys: set[int], seed: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((len(keys), 3)) * 10.0 ** rng.integers(-3, 4, (len(keys), 1))).astype(dtype)
    return np.array(sorted(keys), np.int64), rows


@settings(max_examples=60, deadline=None)
@given(ranks=st.lists(KEYS, max_size=5), dtype=st.sampled_from(["float32", "float64"]))
def test_a_sum_adds_the_ranks_in_their_order(ranks: list[set[int]], dtype: str) -> None:
    table = table_of(dtype)
    model: dict[int, np.ndarray] = {}
    squares = np.zeros(256)
    for number, keys in enumerate(ranks):
        pushed, rows = contribution(keys, number, dtype)
        pushed.flags.writeable = rows.flags.writeable = False  # memory of a worker's
        table.accumulate(pushed, rows)
        for key, row in zip(pushed.tolist(), rows, strict=True):
            model[key] = model[key] + row if key in model else row
    table.sum_of_squares(squares)
    keys_found, rows_found = table.take_sum()
    assert keys_found.tolist() == sorted(model)
    assert rows_found.dtype == dtype
    assert all(np.array_equal(row, model[int(key)]) for key, row in zip(keys_found, rows_found, strict=True))
    expected = np.zeros(256)
    np.add.at(expected, slot_of(2, keys_found), np.square(rows_found.astype(np.float64)).sum(1))
    np.testing.assert_allclose(squares, expected, rtol=1e-12)
    assert len(table.take_sum()[0]) == 0


def equal(rows: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(rows, others, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    pushes=st.lists(KEYS, max_size=4),
    dropped=st.sets(st.integers(0, 255)),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_slots_move_from_one_server_to_another(pushes: list[set[int]], dropped: set[int], dtype: str) -> None:
    table, other = table_of(dtype), table_of(dtype)
    for number, keys in enumerate(pushes):
        table.apply(*contribution(keys, number, dtype), 1.0)
    everything = table.read_rows(np.arange(table.num_rows))
    slots = slot_of(2, everything[0])
    for slot in set(slots.tolist()):
        keys_read, values, state = table.read(slot)
        assert (slot_of(2, keys_read) == slot).all()
        assert (keys_read[1:] > keys_read[:-1]).all()
        other.set(keys_read, values, state, table.step)
    assert other.num_rows == table.num_rows
    assert equal(other.read_rows(np.arange(other.num_rows)), everything)
    mask = np.isin(np.arange(256), list(dropped))
    table.drop_slots(mask)
    left = table.read_rows(np.arange(table.num_rows))
    assert equal(left, [each[~mask[slots]] for each in everything])
    for mine in (table, other):  # both go on alike, dropped rows anew
        mine.apply(*contribution({1, 2, 3}, 9, dtype), 1.0)
    for slot in np.flatnonzero(~mask).tolist():
        assert equal(table.read(slot), other.read(slot))


@pytest.mark.parametrize(
    ("keys", "place"),
    [([3, 3], 1), ([5, 4], 1), ([0, 1, 2, 1], 3), ([-1, 4], 0), ([0, 100], 1), ([0, 2**63 - 1], 1)],
)
def test_keys_out_of_order_or_range_are_refused_by_place(keys: list[int], place: int) -> None:
    with pytest.raises(
        ConfigError, match=f"'t' must be strictly increasing and in 0..99, but at place {place} of"
    ):
        table_of(num_rows=100).check_keys(np.array(keys))


def test_any_int64_is_a_key_of_a_table_without_limit() -> None:
    table = table_of()
    table.check_keys(np.array([-(2**63), -1, 0, 2**63 - 1]))
    with pytest.raises(ConfigError, match="strictly increasing, but at place 1 of 2 they are 0, -1"):
        table.check_keys(np.array([0, -1]))
