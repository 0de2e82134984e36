"""A table cut into ranges of a key: every row in one of them, about as many in each, whatever the keys are."""

from __future__ import annotations

import sqlite3
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.data.formats.databases import SqliteDatabase
from shoal.data.formats.sql import KeyRange, cuts_query, ranges_between, rows_per_range

keys = st.one_of(
    st.lists(st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=40),
    st.lists(st.none() | st.text(max_size=3), max_size=40),
    st.lists(st.none() | st.floats(allow_nan=False), max_size=40),
    st.lists(st.binary(max_size=2), max_size=40),
)


@given(keys=keys, step=st.integers(1, 12))
@example(keys=[0.0, float("inf"), float("-inf")], step=1)
@example(keys=["", "\0", "a\0b", "a\0", 7, 7.5, b"\0", "7", None], step=1)
@settings(max_examples=150)
def test_the_ranges_hold_every_row_once_and_as_many_as_they_say(keys: list[Any], step: int) -> None:
    literal = SqliteDatabase("any.db").literal_of("k")
    with sqlite3.connect(":memory:") as connection:
        connection.execute("CREATE TABLE t (k)")
        connection.executemany("INSERT INTO t VALUES (?)", [(key,) for key in keys])
        cuts = connection.execute(cuts_query("t", "k", literal, step)).fetchall()
        num_keyed = sum(key is not None for key in keys)
        ranges = ranges_between(cuts, num_keyed=num_keyed, num_null=len(keys) - num_keyed)
        read: list[Any] = []
        for part in ranges:
            condition = part.condition("k")
            rows = connection.execute(
                f"SELECT k FROM t {'WHERE ' + condition if condition else ''} ORDER BY k"
            ).fetchall()
            assert len(rows) == part.num_rows
            read += [row[0] for row in rows]
    connection.close()
    assert read == [row[0] for row in _sorted(keys)]
    most_alike = max((keys.count(key) for key in keys), default=0)
    assert all(part.num_rows < step + most_alike for part in ranges if not part.is_null)


def _sorted(keys: list[Any]) -> list[tuple[Any]]:
    """As SQLite orders them, those without a key last."""
    with sqlite3.connect(":memory:") as connection:
        connection.execute("CREATE TABLE t (k)")
        connection.executemany("INSERT INTO t VALUES (?)", [(key,) for key in keys])
        found = connection.execute("SELECT k FROM t ORDER BY k IS NULL, k").fetchall()
    connection.close()
    return found


def test_the_outermost_ranges_are_open_so_that_a_new_row_falls_into_one() -> None:
    first, middle, last = ranges_between([("1", 0), ("5", 4), ("9", 8)], num_keyed=11, num_null=0)
    assert first == KeyRange(4, None, "5", False)
    assert middle == KeyRange(4, "5", "9", False)
    assert last == KeyRange(3, "9", None, False)
    assert [part.condition("id") for part in (first, middle, last)] == [
        "id < 5",
        "id >= 5 AND id < 9",
        "id >= 9",
    ]


def test_ranges_are_shown_short_and_without_a_key_too() -> None:
    assert KeyRange(5).shown("id") == "all rows"
    assert KeyRange(5, is_null=False).shown("id") == "id IS NOT NULL"
    assert KeyRange(5, is_null=True).shown("id") == "id IS NULL"
    assert KeyRange(5, low="'" + 60 * "x" + "'").shown("id") == "id >= '" + 36 * "x" + "..."


def test_so_many_rows_as_make_a_few_mebibytes_or_as_partitions_says() -> None:
    assert rows_per_range(10_000_000, 128, None) == 65536
    assert rows_per_range(10_000_000, 1, None) == 131072
    assert rows_per_range(10_000_000, 1 << 20, None) == 1024
    assert rows_per_range(100, 8, 7) == 15
    assert rows_per_range(3, 8, 7) == 1
