"""SQLite, by Python's own driver: one file, opened to be read only.

SQLite lets every value have a type of its own. A column has the type that its
table declares; where nothing is declared, as of an expression, the one that
most of its values have, found by looking at them once. A value of another type
makes its row a bad one.
"""

from __future__ import annotations

import os
import sqlite3
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shoal.data.formats.sql import BadValue, ConnectionGone, SqlColumn, SqlKey, quoted, short_query
from shoal.errors import ConfigError, FileDamaged, QueryRefused

if TYPE_CHECKING:
    import pyarrow as pa

_BUSY_S = 5.0  # a writer's lock is waited for inside one attempt
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_GONE = {"SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_PROTOCOL"}


class SqliteDatabase:
    """A file of SQLite."""

    def __init__(self, path: str) -> None:
        if path in ("", ":memory:"):
            raise ConfigError(
                "a database in the memory of one connection cannot be read by another. Nothing was read; write it to a "
                "file: connection.backup(sqlite3.connect('data.db'))."
            )
        self._path = os.path.abspath(os.path.expanduser(path))
        self.place = f"sqlite:///{path}"

    def connect(self) -> SqliteSession:
        if not os.path.isfile(self._path):
            raise ConnectionGone(f"there is no file {self._path}")
        url = f"file:{urllib.parse.quote(self._path)}?mode=ro"
        try:
            # Sessions pass from thread to thread, never used by two at once.
            connection = sqlite3.connect(
                url, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise ConnectionGone(_said(error)) from None
        return SqliteSession(connection, self.place)

    def stamp(self) -> str:
        """Size and time of the file, and of the log of what is not yet in it."""
        stamps = []
        for path in (self._path, f"{self._path}-wal"):
            if os.path.exists(path) and os.path.getsize(path):
                found = os.stat(path)
                stamps.append(f"{found.st_size}.{found.st_mtime_ns}")
        return "-".join(stamps)

    def literal_of(self, expression: str) -> str:
        """SQLite's own function for that, but for infinities, which it writes as no version reads them, and text behind a NUL."""
        infinite = " ".join(f"WHEN {expression} = {number} THEN '{number}'" for number in ("9e999", "-9e999"))
        # The sign takes from the cast what it would do to values that it is compared with.
        whole = f"'+CAST(x''' || hex({expression}) || ''' AS TEXT)'"
        has_nul = f"typeof({expression}) = 'text' AND instr(CAST({expression} AS BLOB), x'00') > 0"
        return f"CASE {infinite} WHEN {has_nul} THEN {whole} ELSE quote({expression}) END"


class SqliteSession:
    """One connection."""

    def __init__(self, connection: sqlite3.Connection, place: str) -> None:
        self._connection, self._place = connection, place

    def columns(self, relation: str) -> list[SqlColumn]:
        """By what is declared, and by a look at all values where nothing is."""
        with self._speaking(relation):
            # A view tells the types that its columns have in their tables.
            self._execute(f"CREATE TEMP VIEW shoal_read AS SELECT * FROM {relation}")
            try:
                described = self._execute("PRAGMA temp.table_info(shoal_read)").fetchall()
                declared = {str(name): _declared(str(kind)) for _, name, kind, *_ in described}
                unknown = [name for name, kind in declared.items() if kind is None]
                seen = self._seen(relation, unknown) if unknown else {}
            finally:
                self._execute("DROP VIEW temp.shoal_read")
        return [
            SqlColumn(
                name,
                _arrow_type(kind or seen[name]),
                quoted(name),
                as_text=f"CAST({quoted(name)} AS TEXT)",
            )
            for name, kind in declared.items()
        ]

    def _seen(self, relation: str, names: list[str]) -> dict[str, str]:
        """The type that most values of a column have."""
        kinds = ("integer", "real", "text", "blob")
        sums = [f"total(typeof({quoted(name)}) = '{kind}')" for name in names for kind in kinds]
        [counts] = self._execute(f"SELECT {', '.join(sums)} FROM {relation}").fetchall()
        found = {}
        for number, name in enumerate(names):
            of_kind = dict(zip(kinds, counts[4 * number : 4 * number + 4], strict=True))
            if of_kind["real"]:  # whole numbers among others are numbers too
                of_kind["real"], of_kind["integer"] = of_kind["real"] + of_kind["integer"], 0
            found[name] = max(kinds, key=lambda kind: of_kind[kind])
        return found

    def default_key(self, table: str) -> SqlKey | None:
        """The primary key of one column, or SQLite's own number of the row."""
        schema, _, name = table.rpartition(".")
        with self._speaking(table):
            described = self._execute(f"PRAGMA {schema + '.' if schema else ''}table_info({name})").fetchall()
            keys = [str(column) for _, column, _, _, _, place in described if place]
            if len(keys) == 1:
                return SqlKey(quoted(keys[0]), True, keys[0])
            try:
                self._connection.execute(f"SELECT rowid FROM {table} LIMIT 0").close()
            except sqlite3.OperationalError:  # a view, or a table without it
                return None
            return SqlKey("rowid", True, "rowid")

    def values(self, sql: str) -> list[tuple[Any, ...]]:
        with self._speaking(sql):
            return self._execute(sql).fetchall()

    def rows(self, sql: str, columns: Sequence[SqlColumn]) -> tuple[pa.Table, list[BadValue]]:
        """Many rows; a value of another type than its column's is bad, and null."""
        import pyarrow as pa

        with self._speaking(sql):
            fetched = self._execute(sql).fetchall()
        bad: list[BadValue] = []
        listed = list(zip(*fetched, strict=True)) if fetched else [()] * len(columns)
        arrays = [_array(column, values, bad) for column, values in zip(columns, listed, strict=True)]
        return pa.table(arrays, names=[column.name for column in columns]), bad

    def end(self) -> None:
        with self._speaking("the end of a transaction"):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def close(self) -> None:
        try:
            self._connection.close()
        except sqlite3.Error:
            pass

    def _execute(self, sql: str) -> sqlite3.Cursor:
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN")
        return self._connection.execute(sql)

    @contextmanager
    def _speaking(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, sqlite3.Warning) as error:
            name = str(getattr(error, "sqlite_errorname", ""))
            if any(name.startswith(gone) for gone in _GONE):
                raise ConnectionGone(_said(error)) from None
            if any(name.startswith(damaged) for damaged in _DAMAGED):
                raise FileDamaged(url=self._place, problem=_said(error)) from None
            raise QueryRefused(
                place=self._place, what=f"the query {short_query(what)}", reason=_said(error)
            ) from None


def _declared(kind: str) -> str | None:
    """SQLite's own rules for the type that a declaration means; None where it leaves it open."""
    kind = kind.upper()
    if "INT" in kind:
        return "integer"
    if any(part in kind for part in ("CHAR", "CLOB", "TEXT")):
        return "text"
    if any(part in kind for part in ("REAL", "FLOA", "DOUB")):
        return "real"
    return None


def _arrow_type(kind: str) -> pa.DataType:
    import pyarrow as pa

    by_name: dict[str, pa.DataType] = {
        "integer": pa.int64(),
        "real": pa.float64(),
        "text": pa.string(),
        "blob": pa.binary(),
    }
    return by_name[kind]


def _array(column: SqlColumn, values: Sequence[Any], bad: list[BadValue]) -> pa.Array[Any]:
    import pyarrow as pa

    try:
        return pa.array(values, type=column.kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError, UnicodeError):
        kept = []
        for row, value in enumerate(values):
            try:
                pa.scalar(value, type=column.kind)
                kept.append(value)
            except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError, UnicodeError):
                kept.append(None)
                reason = (
                    f"{short_query(repr(value))} is no {column.kind}, as the others are; choose one type in the "
                    f"query, or read all as text: schema={{'{column.name}': 'str'}}"
                )
                bad.append(BadValue(row, column.name, reason))
        return pa.array(kept, type=column.kind)


def _said(error: Exception) -> str:
    return f"SQLite says '{error}'"
