"""A table or a query of a database as a table: ranges of a key, read one by one.

What is counted when it is opened is held against what comes when it is read:
a range with another number of rows is refused. Rows whose values change while
their number stays are not noticed.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal.data.arguments import OnError, above_zero, by_name, skipping, whole_number
from shoal.data.cache.disk_cache import identity_of, remembered
from shoal.data.formats.arrow import BadRows, Fill, decoded
from shoal.data.formats.database import (
    BadValue,
    Database,
    ReconnectConfig,
    Session,
    Sessions,
    SqlColumn,
    SqlKey,
)
from shoal.data.formats.key_ranges import KeyRange, cuts_query, ranges_between, rows_per_range
from shoal.data.formats.postgres import PostgresDatabase
from shoal.data.formats.schema import arrow_type, check_names, chosen, column_of, label_names
from shoal.data.formats.source import TableSource
from shoal.data.formats.sqlite import SqliteDatabase
from shoal.data.formats.table import Block, Column, Rows
from shoal.errors import ConfigError, EmptyDataset, NoSuchColumn, QueryRefused, TableChanged

if TYPE_CHECKING:
    import pyarrow as pa

_NAME = re.compile(r'[^\s();"]+|"[^"]+"(\."[^"]+")?')
_TEXT_BYTES = 32  # about, of a string or a list nobody has looked at

_asking = threading.Lock()
_times_asked: Counter[str] = Counter()


def open_sql(
    query: str,
    connection: str | os.PathLike[str],
    *,
    key: str | None = None,
    partitions: int | None = None,
    label: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    schema: Mapping[str, Any] | None = None,
    fill: Mapping[str, Any] | None = None,
    cache: Any = "auto",
    on_error: OnError = "raise",
    max_skips: int | None = None,
    timeout_s: float = 30.0,
) -> TableSource:
    """The source of `Dataset.from_sql`."""
    on_error, max_skips = skipping("", on_error, max_skips)
    if partitions is not None:
        partitions = whole_number("from_sql(partitions=)", partitions, at_least=1)
    timeout_s = above_zero("from_sql(timeout_s=)", timeout_s, "seconds")
    sessions = Sessions(database_of(connection), ReconnectConfig(timeout_s=timeout_s))
    wish = _Wish(key, partitions, columns, tuple(label_names(label)), by_name("schema=", schema), fill)
    table = SqlTable(sessions, relation_of(query, sessions.database), wish)
    return TableSource(table, label=label, cache=cache, on_error=on_error, max_skips=max_skips)


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


class Relation(NamedTuple):
    """What stands behind FROM."""

    sql: str
    is_table: bool
    shown: str
    """For people."""


def relation_of(query: str, database: Database) -> Relation:
    """A table where the text is a name (perhaps with its schema), else a query."""
    text = query.strip().rstrip(";").strip() if isinstance(query, str) else ""
    if not text:
        raise ConfigError(f"from_sql takes the name of a table or a query, got {query!r}")
    if _NAME.fullmatch(text):
        if text.startswith('"'):
            return Relation(text, True, f"the table {text}")
        name = ".".join(database.quoted(part) for part in text.split("."))
        return Relation(name, True, f"the table '{text}'")
    flat = " ".join(text.split())
    shown = flat if len(flat) <= 80 else f"{flat[:77]}..."
    # On a line of its own: a comment at the query's end must not swallow the bracket.
    return Relation(f"({text}\n) AS shoal_query", False, f"the query '{shown}'")


class _Wish(NamedTuple):
    """What the user said about a table."""

    key: str | None
    partitions: int | None
    columns: Sequence[str] | None
    labels: tuple[str, ...]
    schema: Mapping[str, Any] | None
    fill: Mapping[str, Any] | None


class _Opened(NamedTuple):
    """What one transaction found."""

    columns: list[SqlColumn]
    key: SqlKey | None
    ranges: list[KeyRange]


class SqlTable:
    """Rows of a relation in the order of a key, in ranges of it.

    Without a key the whole is one range, ordered by all its columns: rows that
    are equal in all of them may change places, and nobody can tell.
    """

    def __init__(self, sessions: Sessions, relation: Relation, wish: _Wish) -> None:
        self._sessions, self._relation, self._wish = sessions, relation, wish
        self._where = f"{relation.shown} at {sessions.database.place}"
        try:
            self._asked, self._key, self._ranges = sessions.first(self._open)
        except QueryRefused as refused:
            place = sessions.database.place
            raise QueryRefused(place=place, what=relation.shown, reason=refused.reason) from None
        self.columns: tuple[Column, ...] = self._columns(self._asked)
        self._fill = Fill(wish.fill, self.columns)
        row_bytes = sum(_row_bytes(column) for column in self.columns)
        blocks, first_row = [], 0
        for part in self._ranges:
            blocks.append(Block(part.num_rows, part.num_rows * row_bytes, self._address(part), first_row))
            first_row += part.num_rows
        self.blocks: tuple[Block, ...] = tuple(blocks)
        self._unread = set(range(len(blocks)))
        if not first_row:
            sessions.close()
            raise EmptyDataset(what=f"from_sql ({self._where})")

    @property
    def identity(self) -> str:
        """Of the relation, its key, and the number of rows in each range."""
        return identity_of([], stamp=self._sessions.database.stamp(), **self.describe(), fill=self._wish.fill)

    def read(self, block: int) -> Rows:
        """The rows of one range, if they are as many as there were."""
        part = self._ranges[block]
        sql = self._select(part)

        def rows(session: Session) -> tuple[pa.Table, list[BadValue]]:
            return session.rows(sql, self._asked)

        table, bad_values = self._sessions.again(rows, what=self._address(part))
        self._was_read(block)
        if table.num_rows != part.num_rows:
            raise TableChanged(
                table=self._relation.shown,
                place=self._sessions.database.place,
                rows=part.shown(self._key.shown if self._key else ""),
                then=part.num_rows,
                now=table.num_rows,
            )
        # For messages: the value of the key is what people can look up, where it was read.
        keys = self._key.shown if self._key and self._key.shown in table.column_names else None
        first_row = self.blocks[block].first_row

        def address(row: int) -> dict[str, Any]:
            if keys is None:
                return {"where": self._where, "row": first_row + row + 1}
            return {"where": f"{self._where}, {keys} = {table.column(keys)[row].as_py()!r}"}

        decoded_rows = decoded(table, self.columns, self._fill, address)
        if not bad_values:
            return decoded_rows
        # Their values came as null; the reason that is told is the real one.
        bad = BadRows(address)
        for value in bad_values:
            bad.add(value.row, value.column, value.reason)
        for row in decoded_rows.bad:
            found = decoded_rows.bad[row]
            bad.add(row, found.column, found.reason)
        return Rows(decoded_rows.num_rows, decoded_rows.columns, bad)

    def describe(self) -> dict[str, Any]:
        """Database, relation, key and ranges."""
        return {
            "format": "sql",
            "database": self._sessions.database.place,
            "relation": self._relation.shown,
            "key": self._key.shown if self._key else None,
            "num_ranges": len(self._ranges),
            "ranges": identity_of([], ranges=self._ranges),
        }

    def _was_read(self, block: int) -> None:
        """Once every range was read, its rows are in somebody's store: no connection is kept for nothing."""
        self._unread.discard(block)
        if not self._unread:
            self._unread = set(range(len(self.blocks)))
            self._sessions.close()

    def _open(self, session: Session) -> _Opened:
        there = session.columns(self._relation.sql)
        names = [column.name for column in there]
        wanted = chosen(names, self._wish.columns, self._where, needed=self._wish.labels)
        check_names("schema=", self._wish.schema, wanted, self._where)
        check_names("fill=", self._wish.fill, wanted, self._where)
        by_name = {column.name: column for column in there}
        asked = [self._as_said(by_name[name]) for name in wanted]
        key = self._find_key(session, names)
        row_bytes = sum(_row_bytes(column) for column in self._columns(asked))
        ranges = remembered(self._question(key, asked), lambda: self._count(session, key, row_bytes))
        return _Opened(asked, key, [KeyRange(*part) for part in ranges])

    def _as_said(self, column: SqlColumn) -> SqlColumn:
        """As `schema=` says it, where text is asked for and values may be of several types."""
        import pyarrow as pa

        said = (self._wish.schema or {}).get(column.name)
        if said is None or not column.as_text or arrow_type(column.name, said) != pa.string():
            return column
        return column._replace(kind=pa.string(), expression=column.as_text)

    def _question(self, key: SqlKey | None, asked: Sequence[SqlColumn]) -> str:
        """A name for "which ranges?" that all workers of a job give it, and only they.

        The script asks the same in the same order on every rank and after a
        restart, so the number of times it was asked here is part of the name.
        """
        said = [
            self._sessions.database.place,
            self._relation,
            key,
            self._wish,
            [str(column) for column in asked],
        ]
        text = json.dumps(said, default=str)
        with _asking:
            _times_asked[text] += 1
            return identity_of([], format="sql", asked=text, number=_times_asked[text])

    def _count(self, session: Session, key: SqlKey | None, row_bytes: int) -> list[KeyRange]:
        """In one state of the data: how many rows there are, and where the key is cut."""
        relation, database = self._relation.sql, self._sessions.database
        if key is None:
            [(num_rows,)] = session.values(f"SELECT count(*) AS num_rows FROM {relation}")
            return [KeyRange(num_rows)]
        [(num_rows, num_keyed)] = session.values(
            f"SELECT count(*) AS num_rows, count({key.expression}) AS num_keyed FROM {relation}"
        )
        step = rows_per_range(num_keyed, row_bytes, self._wish.partitions)
        query = cuts_query(relation, key.expression, database.literal_of("k"), step)
        cuts = session.values(query) if num_keyed else []
        return ranges_between(cuts, num_keyed=num_keyed, num_null=num_rows - num_keyed)

    def _find_key(self, session: Session, names: list[str]) -> SqlKey | None:
        known = session.default_key(self._relation.sql) if self._relation.is_table else None
        asked = self._wish.key
        if asked is None:
            if self._wish.partitions not in (None, 1) and known is None:
                raise ConfigError(
                    f"{self._where} has no key of one column by which it could be cut into {self._wish.partitions} ranges. "
                    "Nothing was read; name a column that orders its rows: key='id'."
                )
            return known
        if known is not None and asked == known.shown:
            return known
        if asked not in names:
            raise NoSuchColumn(asked=[asked], there=names, where=self._where, asked_by="key=")
        return SqlKey(self._sessions.database.quoted(asked), False, asked)

    def _columns(self, asked: Sequence[SqlColumn]) -> tuple[Column, ...]:
        schema = self._wish.schema or {}
        return tuple(
            column_of(
                column.name,
                arrow_type(column.name, schema[column.name]) if column.name in schema else column.kind,
                self._where,
            )
            for column in asked
        )

    def _select(self, part: KeyRange) -> str:
        database = self._sessions.database
        outputs = [f"{column.expression} AS {database.quoted(column.name)}" for column in self._asked]
        # Rows that share a key are told apart by what is read of them; where nothing differs, nothing matters.
        order = [str(number + 1) for number in range(len(outputs))]
        condition = ""
        if self._key is not None:
            order = [self._key.expression, *(() if self._key.is_unique else order)]
            condition = part.condition(self._key.expression)
        where = f" WHERE {condition}" if condition else ""
        return f"SELECT {', '.join(outputs)} FROM {self._relation.sql}{where} ORDER BY {', '.join(order)}"

    def _address(self, part: KeyRange) -> str:
        return f"{self._relation.shown}, {part.shown(self._key.shown if self._key else '')}"


def _row_bytes(column: Column) -> int:
    if column.is_ragged:
        return _TEXT_BYTES
    return column.dtype.itemsize * int(np.prod(column.shape))
