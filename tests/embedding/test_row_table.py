"""Rows by key in one process: found, made, moved and given back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.embedding.growing_array import GrowingArray
from shoal.embedding.row_table import ArrayIndex, HashedIndex, RowTable
from shoal.errors import ConfigError
from shoal.runtime.transport.messages.client_server import TableSpec


def spec(**changes: object) -> TableSpec:
    settings = {
        "number": 3,
        "name": "t",
        "dim": 4,
        "dtype": "float32",
        "rule": "sgd",
        "settings": {"lr": 0.5},
    }
    return TableSpec(**{**settings, **changes})  # type: ignore[arg-type]


def pulled(table: RowTable, keys: list[int]) -> np.ndarray:
    out = np.full((len(keys), table.dim), np.nan, table.dtype)
    table.pull(np.array(keys, np.int64), out)
    return out


# ---- index ----


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(st.sets(st.integers(0, 400), max_size=120), max_size=6),
    row_bytes=st.sampled_from([4, 64, 128, 512]),
    is_array=st.booleans(),
)
def test_an_index_is_a_dict(batches: list[set[int]], row_bytes: int, is_array: bool) -> None:
    index = ArrayIndex(401) if is_array else HashedIndex(row_bytes)
    spread = 1 if is_array else 0x9E3779B97F4A7C1  # far apart, both signs
    model: dict[int, int] = {}
    for batch in batches:
        keys = np.array(sorted((key * spread + 2**63) % 2**64 - 2**63 for key in batch), np.int64)
        rows = np.empty(len(keys), np.int32)
        num_missing = index.find(keys, rows)
        assert rows.tolist() == [model.get(int(key), -1) for key in keys]
        assert num_missing == sum(int(key) not in model for key in keys)
        index.add(keys, rows, num_missing)
        for key in keys:
            model.setdefault(int(key), len(model))
        assert rows.tolist() == [model[int(key)] for key in keys]
    assert index.num_rows == len(model)
    left = [key for key in model if key // spread % 2 == 0]
    gone = np.array([key for key in model if key // spread % 2], np.int64)
    index.keys.array[: len(left)] = left
    index.rebuild(gone, len(left))
    keys = np.array(sorted(model), np.int64)
    rows = np.empty(len(keys), np.int32)
    assert index.find(keys, rows) == len(gone)
    assert [index.keys.array[row] for row in rows if row >= 0] == [key for key in keys if key in set(left)]


def test_an_index_is_a_tenth_of_the_rows_of_sixteen_numbers_with_adagrad() -> None:
    for num_rows in (None, 60_000):
        table = RowTable(spec(dim=16, rule="adagrad", num_rows=num_rows))
        for step in range(30):
            keys = np.arange(step * 2000, step * 2000 + 2000)
            table.set(keys, np.empty((2000, 16), np.float32), None, 0)
        assert table.num_rows == 60_000
        assert table.num_bytes == 60_000 * 128
        assert table.num_index_bytes <= 0.101 * table.num_bytes


# ---- memory ----


def test_memory_grows_beyond_what_was_reserved_and_keeps_what_is_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.embedding.growing_array._RESERVED_BYTES", 1 << 16)
    monkeypatch.setattr("shoal.embedding.growing_array._HUGE_FROM_BYTES", 1 << 20)
    memory = GrowingArray((8,), np.float32)
    for num_rows in (1, 2048, 2049, 100_000):
        memory.reserve(num_rows)
        memory.array[num_rows - 1] = num_rows
    assert [memory.array[row - 1, 0] for row in (1, 2048, 2049, 100_000)] == [1, 2048, 2049, 100_000]
    memory.shrink(2048)
    assert memory.array[2047, 0] == 2048
    assert not memory.array[2048:100_000].any()


def test_dropped_rows_give_their_memory_back() -> None:
    def private_kib() -> int:
        with open("/proc/self/smaps_rollup") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Private_Dirty"))

    table = RowTable(spec(dim=64))
    before = private_kib()
    keys = np.arange(100_000)
    table.set(keys, np.ones((len(keys), 64), np.float32), None, 0)
    full = private_kib()
    assert full - before > 20_000
    table.drop_rows(keys % 10 != 0)
    assert full - private_kib() > 15_000
    assert table.num_rows == 10_000


# ---- rows ----


@pytest.mark.parametrize("num_rows", [None, 1000])
@pytest.mark.parametrize("init", ["normal", "uniform", "zeros"])
def test_a_row_nobody_wrote_is_a_function_of_seed_table_and_key(num_rows: int | None, init: str) -> None:
    keys = [1, 5, 900]
    a = RowTable(spec(init=init, scale=0.5, seed=9, num_rows=num_rows))
    b = RowTable(spec(init=init, scale=0.5, seed=9, num_rows=num_rows))
    b.apply(np.array(keys), np.zeros((3, b.dim), b.dtype))
    assert np.array_equal(pulled(a, [5])[0], pulled(b, keys)[1])
    assert (a.num_rows, b.num_rows) == (0, 3)
    assert np.array_equal(pulled(a, keys), pulled(b, keys))
    if init != "zeros":
        for other in (spec(init=init, seed=8), spec(init=init, seed=9, number=4)):
            assert not np.isin(pulled(RowTable(other), keys), pulled(a, keys)).any()


def test_first_values_have_the_spread_that_was_asked_for() -> None:
    keys = np.arange(-20_000, 20_000)
    out = np.empty((len(keys), 3), np.float64)
    RowTable(spec(dim=3, dtype="float64", init="normal", scale=0.1)).pull(keys, out)
    assert abs(out.mean()) < 0.001
    assert abs(out.std() - 0.1) < 0.001
    assert np.abs(np.corrcoef(out.T) - np.eye(3)).max() < 0.02
    assert abs((np.abs(out) < 0.1).mean() - 0.6827) < 0.005
    RowTable(spec(dim=3, dtype="float64", init="uniform", scale=0.1)).pull(keys, out)
    assert abs(out.std() - 0.1 / 3**0.5) < 0.001
    assert np.abs(out).max() <= 0.1


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_rows=st.sampled_from([None, 50]))
def test_a_table_is_a_dict_of_rows(data: st.DataObject, num_rows: int | None) -> None:
    table = RowTable(spec(dim=2, rule="add", settings={}, num_rows=num_rows))
    model: dict[int, np.ndarray] = {}
    for step in range(data.draw(st.integers(1, 6))):
        keys = np.array(sorted(data.draw(st.sets(st.integers(0, 49)))), np.int64)
        values = np.arange(2 * len(keys), dtype=np.float32).reshape(-1, 2) + step
        match data.draw(st.sampled_from(["apply", "set", "drop"])):
            case "apply":
                table.apply(keys, values, 2.0)
                model |= {
                    int(k): model.get(int(k), np.zeros(2)) + 2 * v for k, v in zip(keys, values, strict=True)
                }
            case "set":
                table.set(keys, values, None, 0)
                model |= {int(k): v.copy() for k, v in zip(keys, values, strict=True)}
            case "drop":
                present, _, _ = table.read_rows(np.arange(table.num_rows))
                assert present.tolist() == sorted(model)
                in_order = table._index.keys.array[: table.num_rows]
                table.drop_rows(np.isin(in_order, keys))
                model = {k: v for k, v in model.items() if k not in keys}
    found, values, state = table.read_rows(np.arange(table.num_rows))
    assert found.tolist() == sorted(model)
    assert state.shape == (len(model), 0)
    assert all(np.array_equal(values[i], model[int(key)]) for i, key in enumerate(found))
    assert np.array_equal(pulled(table, sorted(model)), values)


def test_more_keys_than_a_block_are_all_served() -> None:
    table = RowTable(spec(dim=1, rule="store", settings={}))
    keys = np.arange(-30_000, 30_000) * 7
    values = np.random.default_rng(0).random((60_000, 1), np.float32)
    table.apply(keys, values)
    out = np.empty_like(values)
    table.pull(keys, out)
    assert np.array_equal(out, values)
    assert table.step == 1


def test_what_a_table_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no update rule 'lion'"):
        RowTable(spec(rule="lion"))
    with pytest.raises(ConfigError, match="has no setting 'momentum'; it has lr"):
        RowTable(spec(settings={"momentum": 0.9}))
    with pytest.raises(ConfigError, match="finite"):
        RowTable(spec()).settings = {"lr": float("nan")}
    with pytest.raises(ConfigError, match="at least 1"):
        RowTable(spec(dim=0))
    with pytest.raises(ConfigError, match=r"outside 0\.\.10-1"):
        RowTable(spec(num_rows=10)).apply(np.array([10]), np.ones((1, 4), np.float32), 1.0)


# ---- rows that changed ----


def test_stamps_tell_the_rows_written_since_a_look_also_after_rows_were_dropped() -> None:
    table = RowTable(spec())
    keys = np.arange(100)
    table.set(keys, np.zeros((100, 4), np.float32), None, 0)
    then = table.track()
    table.apply(keys[10:20], np.ones((10, 4), np.float32))
    now = table.track()
    table.apply(np.array([15, 500]), np.ones((2, 4), np.float32))
    table.drop_rows(np.arange(101) % 2 == 0)  # even numbers of rows, and so even keys and the new one

    def changed(since: int) -> list[int]:
        rows = np.arange(table.num_rows)
        return sorted(table.read_rows(rows[table.stamps(rows) > since])[0].tolist())

    assert changed(then) == [11, 13, 15, 17, 19]
    assert changed(now) == [15]
