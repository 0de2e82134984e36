"""Rows over RAM and disk: the same as rows in memory, whatever is evicted, dropped or moved to another table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal import system
from shoal.config.parallel_options import TABLE_KEEP
from shoal.embedding.row_table import RowTable
from shoal.embedding.tiered_rows import BLOCK, RowBudget, RowFile, TieredRows
from shoal.errors import TableMemoryTooSmall, TablesFull
from shoal.runtime.transport.messages.client_server import TableSpec

ROW_BYTES = 8 * 4


def spec(number: int = 0, *, num_rows: int | None = None, dim: int = 4) -> TableSpec:
    return TableSpec(
        number=number, name="t", dim=dim, dtype="float32", rule="adagrad", settings={"lr": 0.5}, init="normal",
        scale=1.0, num_rows=num_rows,
    )  # fmt: skip


def rows_of(table: RowTable) -> TieredRows:
    assert isinstance(table._table, TieredRows)
    return table._table


def whole(table: RowTable) -> list[bytes]:
    return [array.tobytes() for array in table.read_rows(np.arange(table.num_rows))]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1), is_array=st.booleans(), num_tables=st.integers(1, 3))
def test_rows_past_the_limit_are_those_without_one(
    seed: int, is_array: bool, num_tables: int, tmp_path: Path
) -> None:
    random = np.random.default_rng(seed)
    budget = RowBudget((num_tables + 1) * BLOCK * ROW_BYTES, str(tmp_path))
    specs = [spec(number, num_rows=20_000 if is_array else None) for number in range(num_tables)]
    pairs = [(RowTable(each), RowTable(each, budget)) for each in specs]
    for _ in range(20):
        plain, tiered = pairs[random.integers(num_tables)]
        keys = np.sort(random.choice(20_000, random.integers(1, 3000), replace=False))
        values = random.standard_normal((len(keys), 4), np.float32)
        match random.integers(6):
            case 0:
                pulled = [np.empty((len(keys), 4), np.float32) for _ in range(2)]
                plain.pull(keys, pulled[0])
                tiered.pull(keys, pulled[1])
                np.testing.assert_array_equal(*pulled)
            case 1:
                is_dropped = random.random(plain.num_rows) < random.choice([0.1, 0.9])
                plain.drop_rows(is_dropped)
                tiered.drop_rows(is_dropped)
            case 2:
                plain.set(keys, values, None, 3)
                tiered.set(keys, values, None, 3)
            case _:
                plain.apply(keys, values)
                tiered.apply(keys, values)
        assert budget.used_bytes <= budget.limit_bytes
    for plain, tiered in pairs:
        assert whole(plain) == whole(tiered)
        keys = plain.read_rows(np.arange(plain.num_rows))[0]
        assert plain.read_whole(keys).tobytes() == tiered.read_whole(keys).tobytes()


def test_hot_rows_stay_in_memory(tmp_path: Path) -> None:
    table = RowTable(spec(), RowBudget(2 * BLOCK * ROW_BYTES, str(tmp_path)))
    grads = np.ones((BLOCK, 4), np.float32)
    hot, rows = np.arange(BLOCK), rows_of(table)
    for step in range(1, 30):
        table.apply(hot, grads)
        table.apply(hot + step * BLOCK, grads)
    # Each step brings as many new rows as are hot.
    assert rows.num_misses < 1.2 * 30 * BLOCK
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("keep", "num_missing"), [("recent", BLOCK), ("frequent", 0)])
def test_rows_used_often_outlast_others_where_uses_are_counted(
    tmp_path: Path, keep: str, num_missing: int
) -> None:
    table = RowTable(spec(), RowBudget(2 * BLOCK * ROW_BYTES, str(tmp_path), most_uses=TABLE_KEEP[keep]))
    often, grads = np.arange(BLOCK), np.ones((BLOCK, 4), np.float32)
    for _ in range(30):
        table.apply(often, grads)
    for number in range(1, 6):
        for _ in range(2):
            table.apply(often + number * BLOCK, grads)
    before = rows_of(table).num_misses
    table.apply(often, grads)
    assert rows_of(table).num_misses - before == num_missing


def test_a_table_that_comes_late_gets_its_share(tmp_path: Path) -> None:
    budget = RowBudget(8 * BLOCK * ROW_BYTES, str(tmp_path))
    first, second = RowTable(spec(0), budget), RowTable(spec(1), budget)
    grads = np.ones((20 * BLOCK, 4), np.float32)
    first.apply(np.arange(20 * BLOCK), grads)
    assert budget.used_bytes == budget.limit_bytes
    second.apply(np.arange(20 * BLOCK), grads)
    assert rows_of(second).num_frames == pytest.approx(4 * BLOCK, rel=0.1)
    assert budget.used_bytes <= budget.limit_bytes


def test_a_wide_table_gets_a_block_from_narrow_ones_that_are_smaller_than_it(tmp_path: Path) -> None:
    """A table with fewer frames than rows of one call would look for a frame for ever."""
    wide, narrow = spec(0, dim=64), spec(1, dim=1)
    budget = RowBudget(768 << 10, str(tmp_path))
    first, second = RowTable(wide, budget), RowTable(narrow, budget)
    second.apply(np.arange(100_000), np.ones((100_000, 1), np.float32))
    first.apply(np.arange(800), np.ones((800, 64), np.float32))
    first.apply(np.arange(BLOCK) + 1000, np.ones((BLOCK, 64), np.float32))
    assert rows_of(first).num_frames >= BLOCK
    assert budget.used_bytes <= budget.limit_bytes


def test_a_limit_below_what_is_worked_on_at_once_is_refused_with_both_numbers(tmp_path: Path) -> None:
    budget = RowBudget(BLOCK * ROW_BYTES, str(tmp_path))
    RowTable(spec(0), budget)
    with pytest.raises(TableMemoryTooSmall, match=r"32,768 bytes on each server, and 2 tables need 65,536"):
        RowTable(spec(1), budget)


def test_a_full_disk_is_told_before_anything_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = RowTable(spec(), RowBudget(2 * BLOCK * ROW_BYTES, str(tmp_path)))
    table.apply(np.arange(3 * BLOCK), np.ones((3 * BLOCK, 4), np.float32))
    before = whole(table)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(system, "allocate", full)
    with pytest.raises(TablesFull, match=r"No space left on device.*the newest checkpoint is whole"):
        table.expect(np.arange(3 * BLOCK, 100 * BLOCK), 100)
    assert whole(table) == before
    keys = np.arange(0, 3 * BLOCK, 2)
    table.pull(keys, np.empty((len(keys), 4), np.float32))  # what there is can still be read


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TablesFull, match="No such file"):
        RowFile(4, np.float32, str(tmp_path / "none")).reserve(10)
