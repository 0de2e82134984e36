"""Dialects of SQL: read-only sessions with SQLite and PostgreSQL. Passwords are kept out of messages.

SQLite, by Python's own driver, allows a type per value. A column has the type that its table
declares; without a declaration, as for an expression, the type of most of its values, found by
reading them once. A value of another type makes its row bad.

PostgreSQL comes through ADBC, which gives Arrow's columns. Its transactions are repeatable: each
sees the state of the data at its first query.
"""

from __future__ import annotations

import os
import re
import sqlite3
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from shoal.config.extras import install_command
from shoal.errors import ConfigError, FileDamaged, QueryRefused

BadValue: TypeAlias = tuple[int, str, str]
"""Row, column and reason of a value that is not of its column's type."""


class SqlColumn(NamedTuple):
    """A column that a query gives."""

    name: str
    kind: pa.DataType
    """Type as it arrives."""

    expression: str
    """SQL for it: its name, quoted, perhaps in a cast."""

    as_text: str = ""
    """SQL for it as text, where its values may be of several types and only text is common to all."""


class SqlKey(NamedTuple):
    """The column whose ranges are read apart."""

    expression: str
    is_unique: bool
    """No two rows share a value, so their order is certain."""

    shown: str
    """For people."""


class Session(Protocol):
    """One connection, in one transaction that only reads and sees one state of the data."""

    def columns(self, relation: str) -> list[SqlColumn]:
        """Columns of `SELECT * FROM relation`, in order."""

    def default_key(self, table: str) -> SqlKey | None:
        """The primary key of a table; None where there is none of one column."""

    def values(self, sql: str) -> list[tuple[Any, ...]]:
        """A few rows, as Python has them."""

    def rows(self, sql: str, columns: Sequence[SqlColumn]) -> tuple[pa.Table, list[BadValue]]:
        """Many rows, of these columns."""

    def end(self) -> None:
        """End the transaction; the next question begins another."""

    def close(self) -> None:
        """Close the connection. Never raises."""


class Database(Protocol):
    """A dialect: opens sessions, whose methods raise `ConnectionGone` or `QueryRefused`."""

    place: str
    """Address for messages: a URL without its password."""

    def connect(self) -> Session:
        """A new session, or `ConnectionGone` with the reason."""

    def stamp(self) -> str:
        """Changes with the data, as far as that can be told without reading it."""

    def literal_of(self, expression: str) -> str:
        """SQL that gives, as text, SQL for the value of an expression, exactly."""


def quoted(name: str) -> str:
    """A name as SQL has it, in both dialects."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def short_query(text: str) -> str:
    """A query on one line, cut short where it is long."""
    flat = " ".join(text.split())
    return flat if len(flat) <= 200 else f"{flat[:197]}..."


class ConnectionGone(Exception):
    """Internal: the connection ended, or could not be made. The reason is for the user, without a password."""


def database_of(connection: str | os.PathLike[str]) -> Database:
    """The database behind a URL, or a path of a file of SQLite."""
    if not isinstance(connection, (str, os.PathLike)):
        raise ConfigError(
            f"from_sql takes the address of a database, got a {type(connection).__name__}: every worker opens its own "
            "connection. Give 'postgresql://user:password@host/name', 'sqlite:///file.db', or the path of a file of SQLite."
        )
    address = os.fspath(connection)
    scheme = address.partition("://")[0].lower() if "://" in address else ""
    if scheme in ("postgresql", "postgres"):
        return PostgresDatabase(address)
    if scheme == "sqlite":
        path = address[len("sqlite://") :]
        if not path.startswith("/"):
            raise ConfigError(
                f"the address {address} is no URL of SQLite: it has three slashes before a path, sqlite:///file.db, and four "
                "before one from the root, sqlite:////data/file.db. Nothing was read."
            )
        return SqliteDatabase(path[1:])
    if scheme:
        raise ConfigError(
            f"from_sql reads PostgreSQL (postgresql://...) and SQLite (sqlite:///...), and the address begins with "
            f"{scheme}://. Nothing was read."
        )
    return SqliteDatabase(address)


# ---- SQLite ----

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
            # Sessions move between threads, but are never used by two at once.
            connection = sqlite3.connect(
                url, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise ConnectionGone(_sqlite_said(error)) from None
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
        """SQLite's own quote(), except for infinities, which it writes unreadably, and text behind a NUL."""
        infinite = " ".join(f"WHEN {expression} = {number} THEN '{number}'" for number in ("9e999", "-9e999"))
        # The sign prevents the cast from changing the values it is compared with.
        whole = f"'+CAST(x''' || hex({expression}) || ''' AS TEXT)'"
        has_nul = f"typeof({expression}) = 'text' AND instr(CAST({expression} AS BLOB), x'00') > 0"
        return f"CASE {infinite} WHEN {has_nul} THEN {whole} ELSE quote({expression}) END"


class SqliteSession:
    """One connection."""

    def __init__(self, connection: sqlite3.Connection, place: str) -> None:
        self._connection, self._place = connection, place

    def columns(self, relation: str) -> list[SqlColumn]:
        """Columns as declared; without a declaration all values are read."""
        with self._speaking(relation):
            # A view has the types of its columns' tables.
            self._execute(f"CREATE TEMP VIEW shoal_read AS SELECT * FROM {relation}")
            try:
                described = self._execute("PRAGMA temp.table_info(shoal_read)").fetchall()
                declared = {str(name): _declared(str(kind)) for _, name, kind, *_ in described}
                unknown = [name for name, kind in declared.items() if kind is None]
                seen = self._seen(relation, unknown) if unknown else {}
            finally:
                self._execute("DROP VIEW temp.shoal_read")
        return [
            SqlColumn(name, _arrow_type(kind or seen[name]), quoted(name), f"CAST({quoted(name)} AS TEXT)")
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
                raise ConnectionGone(_sqlite_said(error)) from None
            if any(name.startswith(damaged) for damaged in _DAMAGED):
                raise FileDamaged(url=self._place, problem=_sqlite_said(error)) from None
            raise QueryRefused(
                place=self._place, what=f"the query {short_query(what)}", reason=_sqlite_said(error)
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
    types: dict[str, pa.DataType] = {"integer": pa.int64(), "real": pa.float64(), "text": pa.string()}
    return types.get(kind, pa.binary())


def _array(column: SqlColumn, values: Sequence[Any], bad: list[BadValue]) -> pa.Array[Any]:
    unfit = (TypeError, ValueError, OverflowError)  # Arrow's own are among the first two
    try:
        return pa.array(values, type=column.kind)
    except unfit:
        kept = []
        for row, value in enumerate(values):
            try:
                pa.scalar(value, type=column.kind)
                kept.append(value)
            except unfit:
                kept.append(None)
                reason = (
                    f"{short_query(repr(value))} is no {column.kind}, as the others are; choose one type in the "
                    f"query, or read all as text: schema={{'{column.name}': 'str'}}"
                )
                bad.append((row, column.name, reason))
        return pa.array(kept, type=column.kind)


def _sqlite_said(error: Exception) -> str:
    return f"SQLite says '{error}'"


# ---- PostgreSQL ----

_SETTINGS = {
    "default_transaction_read_only": "on",
    "default_transaction_isolation": r"repeatable\ read",
    # Values of the key are sent as text, which must mean the same on every connection.
    "DateStyle": "ISO",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
}
_DEFAULTS = {
    "connect_timeout": "10",
    "application_name": "shoal",
    # A host that vanished silently is noticed within a minute.
    "keepalives_idle": "20",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
_SECRETS = ("password", "sslpassword", "passfile")
# Types that ADBC returns as something other than numbers or text, and the types to request instead.
_CASTS = {"numeric": "float8", "money": "numeric::float8"}
_NATIVE = {
    *("int2", "int4", "int8", "float4", "float8", "bool", "text", "varchar", "bpchar", "name", "bytea"),
    *("date", "timestamp", "timestamptz", "time"),
}


class PostgresDatabase:
    """A database behind a URL of libpq: postgresql://user:password@host:port/name?option=value."""

    def __init__(self, url: str) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            options = urllib.parse.parse_qsl(parts.query, keep_blank_values=True)
        except ValueError as error:
            raise ConfigError(
                f"the URL of the database cannot be read: {error}. Nothing was opened."
            ) from None
        self._secrets = [value for name, value in options if name in _SECRETS and value]
        if parts.password:
            self._secrets += [parts.password, urllib.parse.unquote(parts.password)]
        self.place = _without_secrets(parts, options)
        given = dict(options)
        settings = " ".join(f"-c {name}={value}" for name, value in _SETTINGS.items())
        given["options"] = f"{settings} {given.get('options', '')}".strip()
        query = urllib.parse.urlencode({**_DEFAULTS, **given}, quote_via=urllib.parse.quote)
        self._url = f"postgresql://{parts.netloc}{parts.path}?{query}"

    def connect(self) -> PostgresSession:
        try:
            from adbc_driver_postgresql import dbapi
        except ImportError:
            raise ConfigError(
                "PostgreSQL is read through ADBC, which is not installed here. Nothing was read; install it with "
                f"`{install_command('postgres')}`."
            ) from None
        try:
            return PostgresSession(dbapi.connect(self._url), dbapi.Error, self)
        except dbapi.Error as error:
            raise ConnectionGone(self.scrubbed(_postgres_said(error))) from None

    def stamp(self) -> str:
        """Empty: only a read would tell."""
        return ""

    def literal_of(self, expression: str) -> str:
        """Every type that has an order can be written as text; a literal takes the type it is compared with."""
        return f"quote_literal({expression}::text)"

    def scrubbed(self, text: str) -> str:
        """The text without a password, wherever it may have come from."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


class PostgresSession:
    """One connection."""

    def __init__(self, connection: Any, error: type[Exception], database: PostgresDatabase) -> None:
        self._connection, self._error, self._database = connection, error, database

    def columns(self, relation: str) -> list[SqlColumn]:
        """Columns by the server's types; what ADBC has no type for is requested as text."""
        schema = self._table(f"SELECT * FROM {relation} LIMIT 0").schema
        asked = [f"{self._asked(field)} AS {quoted(field.name)}" for field in schema]
        arriving = self._table(f"SELECT {', '.join(asked)} FROM {relation} LIMIT 0").schema
        return [
            SqlColumn(field.name, arrived.type, self._asked(field))
            for field, arrived in zip(schema, arriving, strict=True)
        ]

    def _asked(self, field: Any) -> str:
        name = quoted(field.name)
        kind = (field.metadata or {}).get(b"POSTGRESQL:type", b"").decode()
        if kind in _NATIVE or (kind.startswith("_") and kind[1:] in _NATIVE):
            return name
        if kind.startswith("_"):
            return f"{name}::float8[]" if kind == "_numeric" else name
        return f"{name}::{_CASTS.get(kind, 'text')}"

    def default_key(self, table: str) -> SqlKey | None:
        literal = table.replace("'", "''")
        found = self.values(
            "SELECT a.attname::text FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = i.indrelid "
            f"AND a.attnum = ANY(i.indkey) WHERE i.indisprimary AND i.indrelid = '{literal}'::regclass"
        )
        if len(found) != 1:
            return None
        return SqlKey(quoted(found[0][0]), True, found[0][0])

    def values(self, sql: str) -> list[tuple[Any, ...]]:
        table = self._table(sql)
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))

    def rows(self, sql: str, columns: Sequence[SqlColumn]) -> tuple[pa.Table, list[BadValue]]:
        """Many rows; the server has validated their types."""
        return self._table(sql), []

    def end(self) -> None:
        with self._speaking("the end of a transaction"):
            self._connection.rollback()

    def close(self) -> None:
        try:
            self._connection.close()
        except self._error:  # nothing is imported here: this may run in a finalizer
            pass

    def _table(self, sql: str) -> pa.Table:
        with self._speaking(sql), self._connection.cursor() as cursor:
            cursor.execute(sql)
            table: pa.Table = cursor.fetch_arrow_table()
            return table

    @contextmanager
    def _speaking(self, what: str) -> Iterator[None]:
        from adbc_driver_manager import AdbcStatusCode

        try:
            yield
        except self._error as error:
            state = str(getattr(error, "sqlstate", None) or "")
            gone = (AdbcStatusCode.IO, AdbcStatusCode.TIMEOUT, AdbcStatusCode.CANCELLED)
            is_gone = getattr(error, "status_code", None) in gone
            # Classes of SQLSTATE: connection, resources, the operator; 40 is a conflict with somebody's change.
            if state[:2] in ("08", "53", "57", "40") or (is_gone and not state):
                raise ConnectionGone(self._database.scrubbed(_postgres_said(error))) from None
            asked = self._database.scrubbed(short_query(what))
            raise QueryRefused(
                place=self._database.place,
                what=f"the query {asked}",
                reason=self._database.scrubbed(_postgres_said(error)),
            ) from None


def _without_secrets(parts: urllib.parse.SplitResult, options: list[tuple[str, str]]) -> str:
    user, _, host = parts.netloc.rpartition("@")
    netloc = f"{user.partition(':')[0]}@{host}" if user else host
    shown = [(name, value) for name, value in options if name in ("host", "port", "user", "dbname")]
    query = "&".join(f"{name}={value}" for name, value in shown)
    return f"postgresql://{netloc}{parts.path}{'?' if query else ''}{query}"


def _postgres_said(error: Any) -> str:
    """The server's own sentence, or libpq's."""
    for name, value in getattr(error, "details", None) or ():
        if name in ("PG_DIAG_MESSAGE_PRIMARY", b"PG_DIAG_MESSAGE_PRIMARY"):
            return f"it says '{value.decode(errors='replace')}'"
    text = str(error).partition("\n\nQuery was:")[0]
    text = re.sub(r"^[A-Z_]+: (\[libpq\] )?", "", text)
    lines = [line for line in text.splitlines() if not line.startswith("\t")]  # without libpq's guesses
    return " ".join(" ".join(lines).split()).rstrip(".")
