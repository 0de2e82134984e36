"""A table of Arrow's columns written to a database, in place of what was there."""

from __future__ import annotations

import contextlib
import sqlite3

import pyarrow as pa


def fill_sqlite(path: str, name: str, columns: pa.Table) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"DROP TABLE IF EXISTS {name}")
        connection.execute(f"CREATE TABLE {name} ({', '.join(columns.column_names)})")
        marks = ", ".join("?" * columns.num_columns)
        rows = zip(*columns.to_pydict().values(), strict=True)
        connection.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)


def fill_postgres(url: str, name: str, columns: pa.Table) -> None:
    from adbc_driver_postgresql import dbapi

    with dbapi.connect(url) as connection, connection.cursor() as cursor:
        cursor.adbc_ingest(name, columns, mode="replace")
        connection.commit()
