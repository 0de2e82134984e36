"""Tables and queries of a real PostgreSQL server as datasets: every type, any key, lost connections, and its refusals."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from postgres_server import PASSWORD, PostgresServer
from shoal.data import Dataset
from shoal.data.formats.databases import PostgresDatabase
from shoal.errors import (
    BadSample,
    ConfigError,
    DatabaseLost,
    DatabaseRefused,
    DataError,
    EmptyDataset,
    NoSuchColumn,
    QueryRefused,
    TableChanged,
)
from shoal.runtime import events
from waiting import wait_until


@pytest.fixture
def people(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """A table of 1,000 rows whose ids have gaps."""
    numbers = np.arange(1000)
    columns = {
        "id": numbers * 7,
        "x": numbers / 4,
        "name": [f"it's \\{number % 50}" for number in numbers],
        "day": pa.array(numbers.astype(np.int32) % 90, pa.int32()).cast(pa.date32()),
        "y": numbers % 2,
    }
    postgres.ingest("people", pa.table(columns))
    postgres.run("ALTER TABLE people ADD PRIMARY KEY (id)")
    yield postgres
    postgres.run("DROP TABLE people")


def table_of(server: PostgresServer, **options: Any) -> Any:
    """What is behind the dataset: here a test says when which range is read."""
    return Dataset.from_sql("people", server.url, **options)._source.table  # type: ignore[union-attr]


def ids(data: Dataset) -> list[int]:
    return [number for batch in data.batch(300) for number in batch["id"].tolist()]


def test_a_table_is_a_dataset_in_ranges_of_its_primary_key(people: PostgresServer) -> None:
    data = Dataset.from_sql("people", people.url, label="y", partitions=8)
    table = data._source.table  # type: ignore[union-attr]
    assert [block.num_rows for block in table.blocks] == [125] * 8
    assert table.blocks[1].where == "the table 'people', id >= '875' AND id < '1750'"
    inputs, labels = next(iter(data.batch(1000)))
    assert inputs["id"].tolist() == list(range(0, 7000, 7))
    assert inputs["x"].dtype == torch.float64
    assert inputs["name"][3] == "it's \\3"
    assert labels.tolist() == [0, 1] * 500
    shuffled = data.shuffle(seed=1).batch(64)
    seen = [number for batch, _ in shuffled for number in batch["id"].tolist()]
    assert sorted(seen) == list(range(0, 7000, 7))
    assert seen != sorted(seen)


@pytest.mark.parametrize("key", ["id", "x", "name", "day", "y"])
def test_numbers_text_and_dates_are_keys(people: PostgresServer, key: str) -> None:
    data = Dataset.from_sql("SELECT * FROM people WHERE id < 3500", people.url, key=key, partitions=6)
    sizes = [block.num_rows for block in data._source.table.blocks]  # type: ignore[union-attr]
    assert sum(sizes) == 500
    assert len(sizes) == (2 if key == "y" else 6)
    found = ids(data)
    assert sorted(found) == list(range(0, 3500, 7))
    assert found == ids(
        Dataset.from_sql("SELECT * FROM people WHERE id < 3500", people.url, key=key, partitions=6)
    )


def test_every_type_arrives_as_numbers_or_text(postgres: PostgresServer) -> None:
    query = """
        SELECT 1::int2 AS a, 2::int4 AS b, 3::int8 AS c, 1.5::float4 AS d, 2.5::float8 AS e, 1.25::numeric(10, 2) AS f,
               true AS g, 'ü'::text AS h, 'y'::varchar(3) AS i, '\\x01ff'::bytea AS j, date '1970-01-02' AS k,
               timestamptz '1970-01-01 01:00:00+01' AS l, array[1, 2] AS m, array[1.5, 2.5]::float4[] AS n,
               '{"a": 1}'::jsonb AS o, 'b59f3d3e-0d4c-4e7a-8e5c-000000000001'::uuid AS p, inet '1.2.3.4' AS q
    """
    [batch] = Dataset.from_sql(query, postgres.url).batch(1)
    values = {name: value.tolist()[0] for name, value in batch.items()}
    assert values == {
        "a": 1, "b": 2, "c": 3, "d": 1.5, "e": 2.5, "f": 1.25, "g": True, "h": "ü", "i": "y", "j": b"\x01\xff",
        "k": 86_400_000_000_000, "l": 0, "m": [1, 2], "n": [1.5, 2.5], "o": '{"a": 1}',
        "p": "b59f3d3e-0d4c-4e7a-8e5c-000000000001", "q": "1.2.3.4/32",
    }  # fmt: skip
    assert (batch["a"].dtype, batch["d"].dtype, batch["f"].dtype) == (
        torch.int16,
        torch.float32,
        torch.float64,
    )
    lists = Dataset.from_sql("SELECT array['a', 'ü'] AS s, array[]::text[] AS t", postgres.url)[0]
    assert (lists["s"].tolist(), lists["t"].tolist()) == (["a", "ü"], [])
    with pytest.raises(DataError, match=r"the column 's' .* cannot be read into tensors"):
        Dataset.from_sql("SELECT array[interval '1 day'] AS s", postgres.url)


def test_null_is_a_bad_sample_or_what_fill_says(people: PostgresServer) -> None:
    people.run("UPDATE people SET x = NULL WHERE id = 14")
    with pytest.raises(
        BadSample, match=r"the table 'people' at postgresql://.*, id = 14, column 'x': the value is missing"
    ):
        Dataset.from_sql("people", people.url)[2]
    assert Dataset.from_sql("people", people.url, fill={"x": -1.0})[2]["x"] == -1
    by_x = Dataset.from_sql("people", people.url, key="x", partitions=3, fill={"x": -1.0})
    assert ids(by_x)[-1] == 14, "a row without a key is in a range of its own"
    assert len(set(ids(by_x))) == 1000


def test_a_table_that_changes_is_noticed(people: PostgresServer) -> None:
    table = table_of(people, partitions=4)
    people.run("DELETE FROM people WHERE id = 7")
    people.run("INSERT INTO people VALUES (100000, 0, 'new', '2020-01-01', 0)")
    assert table.read(1).columns["id"][50] == 2100
    with pytest.raises(TableChanged) as found:
        table.read(0)
    assert str(found.value).startswith(
        f"the table 'people' at {people.place} changed while it was read: it had 250 rows (id < '1750') when it was opened, "
        "and has 249 now."
    )
    with pytest.raises(TableChanged, match=r"250 rows \(id >= '5250'\) when it was opened, and has 251 now"):
        table.read(3)


def backends(server: PostgresServer) -> list[int]:
    """The server's processes that serve us."""
    session = PostgresDatabase(server.url).connect()
    try:
        rows = session.values(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'shoal' AND pid <> pg_backend_pid()"
        )
        return [pid for (pid,) in rows]
    finally:
        session.close()


def test_a_connection_that_the_server_ends_is_replaced_in_mid_epoch(people: PostgresServer) -> None:
    table = table_of(people, partitions=10)
    events.emitted.clear()
    seen: list[int] = []
    for block in range(10):
        seen += table.read(block).columns["id"].tolist()
        if block in (3, 8):
            pids = backends(people)
            assert pids, "a connection is kept between reads"
            people.run(*(f"SELECT pg_terminate_backend({pid})" for pid in pids))
            assert wait_until(lambda pids=pids: not set(pids) & set(backends(people)))
    assert seen == list(range(0, 7000, 7))
    told = [facts for kind, facts in events.emitted if kind == "database connection lost"]
    assert len(told) == 2
    assert told[0]["database"] == people.place
    assert "terminating connection due to administrator command" in told[0]["reason"]
    assert "id >= " in told[0]["reading"]


def test_a_connection_that_ends_in_the_middle_of_an_answer_is_replaced(people: PostgresServer) -> None:
    slow = "SELECT id, (SELECT 1 FROM pg_sleep(0.02 + 0 * id)) AS one FROM people WHERE id < 350"
    data = Dataset.from_sql(slow, people.url, key="id", partitions=1)
    events.emitted.clear()
    ended = threading.Event()
    session = PostgresDatabase(people.url).connect()  # before, for the answer takes only a second

    def end() -> None:
        running = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'shoal' AND state = 'active' "
            "AND query LIKE '%pg_sleep%ORDER BY%' AND pid <> pg_backend_pid()"
        )
        try:
            if wait_until(lambda: (session.end(), session.values(running))[1] != []):
                ended.set()
        finally:
            session.close()

    thread = threading.Thread(target=end)
    thread.start()
    found = ids(data)
    thread.join()
    assert ended.is_set()
    assert found == list(range(0, 350, 7))
    assert [kind for kind, _ in events.emitted if kind != "cache placed"] == ["database connection lost"]


def test_a_server_that_is_shut_down_is_waited_for_and_then_given_up(people: PostgresServer) -> None:
    patient = table_of(people, partitions=4, timeout_s=60.0)
    hasty = table_of(people, partitions=4, timeout_s=0.3)
    assert patient.read(0).columns["id"][0] == hasty.read(0).columns["id"][0] == 0
    people.stop()
    try:
        with pytest.raises(DatabaseLost) as found:
            hasty.read(2)
        with pytest.raises(DatabaseRefused, match="Connection refused"):
            Dataset.from_sql("people", people.url)
        found_again: list[int] = []
        reader = threading.Thread(target=lambda: found_again.append(patient.read(3).columns["id"][-1]))
        events.emitted.clear()
        reader.start()
        assert wait_until(lambda: len(events.emitted) > 1), "it tries again"
    finally:
        people.go_on()
    reader.join()
    assert found_again == [6993], "it came back in time"
    said = str(found.value)
    assert said.startswith(
        f"the connection to the database {people.place} was lost while reading the table 'people', id >= '3500' AND id < "
        f"'5250', and {found.value.num_attempts} attempts within 0."
    )
    assert "Connection refused" in said
    assert "go on with `shoal resume`" in said
    assert found.value.num_attempts >= 3
    assert PASSWORD not in said


def test_a_forked_child_reads_by_a_connection_of_its_own(people: PostgresServer) -> None:
    table = table_of(people, partitions=4)
    assert table.read(0).columns["id"][0] == 0
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if table.read(3).columns["id"][-1] == 6993 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    events.emitted.clear()
    assert table.read(2).columns["id"][0] == 3500
    assert not events.emitted, "the parent's connection was not hurt"


@pytest.mark.parametrize(
    ("query", "options", "error", "said"),
    [
        (
            "nowhere",
            {},
            QueryRefused,
            "refuses the table 'nowhere': it says 'relation \"nowhere\" does not exist'",
        ),
        ("SELECT colour FROM people", {}, QueryRefused, "it says 'column \"colour\" does not exist'"),
        (
            "SELECT FROM WHERE",
            {},
            QueryRefused,
            "refuses the query 'SELECT FROM WHERE': it says 'syntax error",
        ),
        ("SELECT 1/0 AS a", {}, QueryRefused, "division by zero"),
        (
            "people",
            {"label": "z"},
            NoSuchColumn,
            "has no column 'z', which label= asks for. It has id, x, name",
        ),
        ("people", {"key": "z"}, NoSuchColumn, "has no column 'z', which key= asks for"),
        (
            "SELECT * FROM people WHERE id < 0",
            {},
            EmptyDataset,
            "(the query 'SELECT * FROM people WHERE id < 0' at",
        ),
        (
            "SELECT * FROM people",
            {"partitions": 3},
            ConfigError,
            "name a column that orders its rows: key='id'",
        ),
    ],
)
def test_what_the_server_refuses_is_told_in_its_words(
    people: PostgresServer, query: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as found:
        list(Dataset.from_sql(query, people.url, **options))
    assert said in str(found.value)
    assert PASSWORD not in str(found.value)


def test_nothing_can_be_written(people: PostgresServer) -> None:
    people.run(
        "CREATE FUNCTION forget() RETURNS int LANGUAGE sql AS 'DELETE FROM people RETURNING 1'",
    )
    with pytest.raises(QueryRefused, match="cannot execute DELETE in a read-only transaction"):
        Dataset.from_sql("SELECT forget() AS a", people.url)
    people.run("DROP FUNCTION forget")
    assert len(Dataset.from_sql("people", people.url)) == 1000


def test_who_is_not_let_in_is_told_and_no_password_is(people: PostgresServer) -> None:
    for url, said in [
        (people.url_as("wrong secret"), 'password authentication failed for user "shoal"'),
        (people.url_as("wrong secret", user="nobody"), 'password authentication failed for user "nobody"'),
        (people.url_as(PASSWORD, database="elsewhere"), 'database "elsewhere" does not exist'),
        ("postgresql://me:wrong%20secret@127.0.0.1:1/db", "Connection refused"),
        ("postgresql://me:wrong%20secret@no.such.host.invalid/db", "could not translate host name"),
        ("postgresql://me@127.0.0.1:1/db?password=wrong%20secret", "Connection refused"),
        ("postgresql://me:wrong%20secret@127.0.0.1/db?nonsense=1", 'invalid URI query parameter: "nonsense"'),
    ]:
        with pytest.raises(DatabaseRefused) as found:
            Dataset.from_sql("people", url)
        text = str(found.value)
        assert said in text
        assert "check the address, the user and the password" in text
        for secret in ("wrong secret", "wrong%20secret", PASSWORD):
            assert secret not in text
            assert secret not in str(found.value.__cause__)


def test_no_password_is_in_what_a_dataset_says_of_itself(people: PostgresServer) -> None:
    data = Dataset.from_sql("people", people.url, label="y")
    said = [repr(data), str(data.batch(5).describe()), data._source.table.identity]  # type: ignore[union-attr]
    said += [block.where for block in data._source.table.blocks]  # type: ignore[union-attr]
    assert people.place in said[1]
    assert not [text for text in said if PASSWORD in text or "sesame" in text]


def test_a_socket_in_a_directory_is_an_address_too() -> None:
    database = PostgresDatabase("postgresql:///ads?host=/run/postgresql&user=me&password=secret")
    assert database.place == "postgresql:///ads?host=/run/postgresql&user=me"
    assert database.scrubbed("it says secret") == "it says ***"


def test_a_host_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://me:secret@127.0.0.1:{silent.getsockname()[1]}/db?connect_timeout=2"
        with pytest.raises(DatabaseRefused, match="timeout expired"):
            Dataset.from_sql("people", url)


def test_without_the_driver_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adbc_driver_postgresql", None)
    with pytest.raises(
        ConfigError, match=r"ADBC, which is not installed here.*pip install 'adbc-driver-manager"
    ):
        Dataset.from_sql("people", "postgresql://me@127.0.0.1/db")


def test_rows_that_share_a_key_come_in_one_order(postgres: PostgresServer) -> None:
    postgres.ingest("ties", pa.table({"k": [1] * 300 + [2] * 300, "id": list(range(599, -1, -1))}))
    first = ids(Dataset.from_sql("ties", postgres.url, key="k", partitions=6))
    # Written again, rows lie elsewhere in the table.
    postgres.run("UPDATE ties SET k = k WHERE id % 3 = 0")
    assert ids(Dataset.from_sql("ties", postgres.url, key="k", partitions=6)) == first
    assert first == [*range(300, 600), *range(300)]
    postgres.run("DROP TABLE ties")
