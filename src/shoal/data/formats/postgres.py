"""PostgreSQL through ADBC, which gives Arrow's columns.

A session's transactions are read-only and repeatable: one sees the state of
the data at its first question. libpq's words reach the user, the password never.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shoal.data.formats.sql import BadValue, ConnectionGone, SqlColumn, SqlKey, quoted, short_query
from shoal.errors import ConfigError, QueryRefused

if TYPE_CHECKING:
    import pyarrow as pa

_SETTINGS = {
    "default_transaction_read_only": "on",
    "default_transaction_isolation": r"repeatable\ read",
    # Values of the key travel as text, which must mean the same on every connection.
    "DateStyle": "ISO",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
}
_DEFAULTS = {
    "connect_timeout": "10",
    "application_name": "shoal",
    # A host that vanished without a word is noticed within a minute.
    "keepalives_idle": "20",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
_SECRETS = ("password", "sslpassword", "passfile")
# Types that ADBC hands over as something else than numbers or text, and what they are asked for as.
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
                "`pip install 'shoal[postgres]'`."
            ) from None
        try:
            return PostgresSession(dbapi.connect(self._url), dbapi.Error, self)
        except dbapi.Error as error:
            raise ConnectionGone(self.scrubbed(_said(error))) from None

    def stamp(self) -> str:
        """Nothing tells without reading."""
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
        """By the types that the server tells; what ADBC has no type for is asked for as text."""
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
        """Many rows; the server has seen to their types."""
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
            is_gone = getattr(error, "status_code", None) in (
                AdbcStatusCode.IO,
                AdbcStatusCode.TIMEOUT,
                AdbcStatusCode.CANCELLED,
            )
            # Classes of SQLSTATE: connection, resources, the operator; 40 is a conflict with somebody's change.
            if state[:2] in ("08", "53", "57", "40") or (is_gone and not state):
                raise ConnectionGone(self._database.scrubbed(_said(error))) from None
            asked = self._database.scrubbed(short_query(what))
            raise QueryRefused(
                place=self._database.place,
                what=f"the query {asked}",
                reason=self._database.scrubbed(_said(error)),
            ) from None


def _without_secrets(parts: urllib.parse.SplitResult, options: list[tuple[str, str]]) -> str:
    user, _, host = parts.netloc.rpartition("@")
    netloc = f"{user.partition(':')[0]}@{host}" if user else host
    shown = [(name, value) for name, value in options if name in ("host", "port", "user", "dbname")]
    query = "&".join(f"{name}={value}" for name, value in shown)
    return f"postgresql://{netloc}{parts.path}{'?' if query else ''}{query}"


def _said(error: Any) -> str:
    """The server's own sentence, or libpq's."""
    for name, value in getattr(error, "details", None) or ():
        if name in ("PG_DIAG_MESSAGE_PRIMARY", b"PG_DIAG_MESSAGE_PRIMARY"):
            return f"it says '{value.decode(errors='replace')}'"
    text = str(error).partition("\n\nQuery was:")[0]
    text = re.sub(r"^[A-Z_]+: (\[libpq\] )?", "", text)
    lines = [line for line in text.splitlines() if not line.startswith("\t")]  # without libpq's guesses
    return " ".join(" ".join(lines).split()).rstrip(".")
