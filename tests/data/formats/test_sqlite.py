"""Tables and queries of SQLite as datasets, and what is said when they cannot be."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.data import Dataset
from shoal.errors import (
    BadSample,
    ConfigError,
    DatabaseRefused,
    EmptyDataset,
    FileDamaged,
    NoSuchColumn,
    QueryRefused,
    TableChanged,
)

Make = Callable[..., str]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A database of these statements; rows go to the last table that was made."""

    def make(*statements: str, rows: list[tuple[Any, ...]] = []) -> str:  # noqa: B006  # never written
        path = tmp_path / "data.db"
        connection = sqlite3.connect(path)
        for statement in statements:
            connection.execute(statement)
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO t VALUES ({marks})", rows)
        connection.commit()
        connection.close()
        return str(path)

    return make


PEOPLE = "CREATE TABLE t (id INTEGER PRIMARY KEY, weight REAL, name TEXT, photo BLOB, y INT)"


def people(count: int) -> list[tuple[Any, ...]]:
    return [(3 * n, n / 2, f"p{n}", b"x" * (n % 3), n % 2) for n in range(count)]


def column(dataset: Dataset, name: str) -> list[Any]:
    return [int(sample[name]) for sample in dataset]


def test_a_table_is_a_dataset_in_the_order_of_its_key(make: Make) -> None:
    path = make(PEOPLE, rows=people(50))
    for address in (path, Path(path), f"sqlite:///{path}"):
        data = Dataset.from_sql("t", address, label="y", partitions=7)
        assert len(data) == 50
        inputs, labels = next(iter(data.batch(50)))
        assert inputs["id"].tolist() == list(range(0, 150, 3))
        assert (inputs["weight"].dtype, inputs["id"].dtype) == (torch.float64, torch.int64)
        assert inputs["name"].tolist() == [f"p{n}" for n in range(50)]
        assert inputs["photo"][2] == b"xx"
        assert labels.tolist() == [n % 2 for n in range(50)]
        assert [block.num_rows for block in data._source.table.blocks] == [8, 8, 8, 8, 8, 8, 2]  # type: ignore[union-attr]


def test_every_worker_asks_for_the_ranges_its_samples_lie_in(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(PEOPLE, rows=people(40))
    data = Dataset.from_sql("t", path, partitions=4)
    table = data._source.table  # type: ignore[union-attr]
    read: list[int] = []
    monkeypatch.setattr(
        table, "read", lambda block, read_block=table.read: read.append(block) or read_block(block)
    )
    [part] = data.batch(20).slices(epoch=0, start=20, rank=1, num_workers=2)
    assert part.batch["id"].tolist() == list(range(90, 120, 3))
    assert set(read) == {3}


def test_a_query_is_read_by_any_column_that_has_an_order(make: Make) -> None:
    path = make(PEOPLE, rows=people(30))
    for key in ("id", "name", "weight", "y"):
        data = Dataset.from_sql(
            "SELECT id, name, weight, y FROM t WHERE id >= 30 -- not all", path, key=key, partitions=5
        )
        assert sorted(column(data, "id")) == list(range(30, 90, 3))
        again = Dataset.from_sql(
            "SELECT id, name, weight, y FROM t WHERE id >= 30", path, key=key, partitions=5
        )
        assert column(data, "id") == column(again, "id")


def test_without_a_key_rows_are_ordered_by_all_they_hold(make: Make) -> None:
    path = make("CREATE TABLE t (a INT, b INT)", rows=[(2, 1), (1, 2), (1, 1), (2, 1)])
    data = Dataset.from_sql("SELECT a, b FROM t", path)
    assert [(int(row["a"]), int(row["b"])) for row in data] == [(1, 1), (1, 2), (2, 1), (2, 1)]
    assert Dataset.from_sql("t", path).batch(2).describe()["stages"][0]["key"] == "rowid"
    with pytest.raises(ConfigError, match=r"no key of one column by which it could be cut into 3 ranges"):
        Dataset.from_sql("SELECT a, b FROM t", path, partitions=3)


def test_rows_that_share_a_key_stay_together_and_those_without_one_come_last(make: Make) -> None:
    rows = [(n % 3 if n % 5 else None, n) for n in range(40)]
    path = make("CREATE TABLE t (k INT, n INT)", rows=rows)
    data = Dataset.from_sql("t", path, key="k", partitions=20, columns=["n"])
    table = data._source.table  # type: ignore[union-attr]
    assert [block.where for block in table.blocks] == [
        "the table 't', k < 1",
        "the table 't', k >= 1 AND k < 2",
        "the table 't', k >= 2",
        "the table 't', k IS NULL",
    ]
    expected = sorted(rows, key=lambda row: (row[0] is None, row[0] or 0, row[1]))
    assert column(data, "n") == [n for _, n in expected]


def test_types_that_nothing_declares_are_those_of_the_values(make: Make) -> None:
    path = make("CREATE TABLE t (a, b, c NUMERIC, d)", rows=[(1, 1, "x", None), (2, 1.5, "y", b"z")])
    data = Dataset.from_sql("SELECT a + 1 AS a, b, c, d FROM t", path, fill={"d": b""})
    [batch] = data.batch(2)
    assert batch["a"].tolist() == [2, 3]
    assert batch["b"].tolist() == [1.0, 1.5]
    assert batch["c"].tolist() == ["x", "y"]
    assert batch["d"].tolist() == [b"", b"z"]


def test_among_values_of_several_types_the_rare_ones_are_bad_samples(make: Make) -> None:
    path = make("CREATE TABLE t (a, b)", rows=[(1, 2), (2, 2.5), ("x", 3), (None, 4)])
    data = Dataset.from_sql("t", path)
    with pytest.raises(
        BadSample, match=r"row 3, column 'a': 'x' is no int64, as the others are; .*schema={'a': 'str'}"
    ):
        data[2]
    skipping = Dataset.from_sql("t", path, on_error="skip", max_skips=2).batch(4)
    [batch] = skipping
    assert (batch["a"].tolist(), batch["b"].tolist()) == ([1, 2], [2.0, 2.5])
    assert [(bad.index, bad.error.column) for bad in skipping.skipped] == [(2, "a"), (3, "a")]
    as_text = Dataset.from_sql("t", path, schema={"a": "str"}, fill={"a": ""})
    assert [sample["a"] for sample in as_text] == ["1", "2", "x", ""]


def test_other_types_are_asked_for_with_schema(make: Make) -> None:
    path = make(PEOPLE, rows=people(4))
    data = Dataset.from_sql("t", path, schema={"weight": "float32", "y": "bool"}, columns=["weight", "y"])
    [batch] = data.batch(4)
    assert (batch["weight"].dtype, batch["y"].dtype) == (torch.float32, torch.bool)


def test_a_value_of_another_type_or_none_is_told_by_its_key(make: Make) -> None:
    path = make(PEOPLE, rows=[(1, 1.0, "a", b"", 0), (4, "heavy", "b", b"", 1), (7, 2.0, None, b"", 1)])
    data = Dataset.from_sql("t", path)
    with pytest.raises(BadSample) as found:
        data[1]
    assert str(found.value).startswith(
        f"the table 't' at sqlite:///{path}, id = 4, column 'weight': 'heavy' is no double, as the others are;"
    )
    with pytest.raises(BadSample, match=r"id = 7, column 'name': the value is missing, and fill="):
        data[2]
    skipping = Dataset.from_sql("t", path, on_error="skip").batch(3)
    assert [batch["id"].tolist() for batch in skipping] == [[1]]
    assert [one.index for one in skipping.skipped] == [1, 2]
    without_key = Dataset.from_sql("t", path, columns=["weight"])
    with pytest.raises(BadSample, match=r"row 2, column 'weight'"):
        without_key[1]


@pytest.mark.parametrize("change", ["INSERT INTO t VALUES (5, 1, 'n', x'', 0)", "DELETE FROM t WHERE id = 3"])
def test_a_table_that_changes_is_noticed(make: Make, change: str) -> None:
    path = make(PEOPLE, rows=people(20))
    table = Dataset.from_sql("t", path, partitions=2)._source.table  # type: ignore[union-attr]
    make(change)
    now = 11 if "INSERT" in change else 9
    assert table.read(1).columns["id"][5] == 45, "the range that did not change is read"
    with pytest.raises(TableChanged) as found:
        table.read(0)
    assert str(found.value).startswith(
        f"the table 't' at sqlite:///{path} changed while it was read: it had 10 rows (id < 30) when it was opened, and has "
        f"{now} now."
    )
    assert len(Dataset.from_sql("t", path)) == 10 + now


def test_an_equal_table_is_equal_data_and_a_longer_one_is_not(make: Make) -> None:
    path = make(PEOPLE, rows=people(20))
    first, second = (Dataset.from_sql("t", path).batch(5).describe() for _ in range(2))
    assert first == second
    make("INSERT INTO t VALUES (1000, 1, 'n', x'', 0)")
    assert Dataset.from_sql("t", path).batch(5).describe() != first


@pytest.mark.parametrize(
    ("query", "options", "error", "said"),
    [
        ("nowhere", {}, QueryRefused, "refuses the table 'nowhere': SQLite says 'no such table: nowhere'"),
        ("SELECT colour FROM t", {}, QueryRefused, "SQLite says 'no such column: colour'"),
        (
            "SELECT FROM WHERE",
            {},
            QueryRefused,
            "refuses the query 'SELECT FROM WHERE': SQLite says 'near \"FROM\"",
        ),
        ("DELETE FROM t", {}, QueryRefused, "syntax error"),
        (
            "t",
            {"label": "z"},
            NoSuchColumn,
            "has no column 'z', which label= asks for. It has id, weight, name",
        ),
        ("t", {"key": "z"}, NoSuchColumn, "has no column 'z', which key= asks for"),
        ("t", {"columns": ["id", "z"]}, NoSuchColumn, "which columns= asks for"),
        ("t", {"fill": {"z": 0}}, NoSuchColumn, "which fill= asks for"),
        (
            "SELECT * FROM t WHERE id < 0",
            {},
            EmptyDataset,
            "from_sql (the query 'SELECT * FROM t WHERE id < 0' at",
        ),
        ("", {}, ConfigError, "the name of a table or a query"),
        ("t", {"partitions": 0}, ConfigError, "at least 1, got 0"),
    ],
)
def test_what_cannot_be_read_is_told(
    make: Make, query: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    path = make(PEOPLE, rows=people(3))
    with pytest.raises(error) as found:
        Dataset.from_sql(query, path, **options)
    assert said in str(found.value)
    assert len(Dataset.from_sql("t", path)) == 3, "nothing was changed"


def test_databases_that_are_none_are_told(tmp_path: Path) -> None:
    with pytest.raises(DatabaseRefused, match=r"there is no file .*/no\.db"):
        Dataset.from_sql("t", tmp_path / "no.db")
    (tmp_path / "text.db").write_text("not a database, " * 100)
    with pytest.raises(FileDamaged, match="file is not a database"):
        Dataset.from_sql("t", tmp_path / "text.db")
    for address, said in [
        (":memory:", "in the memory of one connection"),
        ("sqlite://data.db", "three slashes before a path"),
        ("mysql://me:secret@host/db", r"reads PostgreSQL .* begins with mysql://\."),
        (sqlite3, "takes the address of a database, got a module"),
    ]:
        with pytest.raises(ConfigError, match=said) as found:
            Dataset.from_sql("t", address)  # type: ignore[arg-type]
        assert "secret" not in str(found.value)


def test_names_with_quotes_and_schemas_are_names(make: Make) -> None:
    path = make('CREATE TABLE "a ""b" (x INT, "y z" TEXT)', 'INSERT INTO "a ""b" VALUES (1, \'q\')')
    assert Dataset.from_sql('SELECT * FROM "a ""b"', path, key="y z")[0]["y z"] == "q"
    path = make("CREATE TABLE plain (x INT)", "INSERT INTO plain VALUES (7)")
    assert int(Dataset.from_sql("main.plain", path)[0]["x"]) == 7
    assert int(Dataset.from_sql('"plain"', path)[0]["x"]) == 7


def test_a_lock_that_lasts_is_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.data.formats.databases._BUSY_S", 0.01)
    path = make(PEOPLE, rows=people(3))
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    with pytest.raises(DatabaseRefused, match="SQLite says 'database is locked'"):
        Dataset.from_sql("t", path)
    writer.execute("ROLLBACK")
    data = Dataset.from_sql("t", path, timeout_s=60.0)
    writer.execute("BEGIN EXCLUSIVE")
    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 3 and writer.in_transaction:
            writer.execute("ROLLBACK")

    monkeypatch.setattr("shoal.data.formats.sql.time.sleep", sleep)
    assert column(data, "id") == [0, 3, 6]
    assert pauses == [0.05, 0.1, 0.2]
    writer.close()
