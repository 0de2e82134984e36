"""A table or a query of a database as a table: ranges of a key, read one by one.

Row counts found at opening are checked when a range is read: a range with another number of rows is
refused; changed values with the same number are not noticed. Connections are pooled here; the
dialects are in `databases.py`.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from shoal.data.arguments import OnError, above_zero, by_name, skipping, whole_number
from shoal.data.files import identity_of, remembered
from shoal.data.formats.arrow import Fill, arrow_type, column_of, decoded
from shoal.data.formats.databases import (
    ConnectionGone,
    Database,
    Session,
    SqlColumn,
    SqlKey,
    database_of,
    quoted,
)
from shoal.data.formats.table import BadRows, Column, DecodedRows, TableBlock
from shoal.data.formats.table_source import TableSource, check_names, chosen, label_names
from shoal.errors import (
    ConfigError,
    DatabaseLost,
    DatabaseRefused,
    EmptyDataset,
    NoSuchColumn,
    QueryRefused,
    TableChanged,
)
from shoal.runtime import events

Result = TypeVar("Result")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
# Per process: a server allows a hundred connections, and jobs have many workers.
_MOST_AT_ONCE, _MOST_IDLE = (2, 1)


class Sessions:
    """The connections of one process to one database: two while two threads read, one kept between reads.

    A forked child leaves its parent's alone and opens its own.
    """

    def __init__(self, database: Database, timeout_s: float = 30.0) -> None:
        self.database, self._timeout_s = database, timeout_s
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._idle: list[Session] = []
        self._owner = os.getpid()
        self._close = weakref.finalize(self, _close_all, self._idle, self._owner)

    def first(self, read: Callable[[Session], Result]) -> Result:
        """First read: an error is raised at once, as it is more likely a wrong name than an outage."""
        try:
            return self._once(read)
        except ConnectionGone as gone:
            raise DatabaseRefused(place=self.database.place, reason=str(gone)) from None

    def again(self, read: Callable[[Session], Result], *, what: str) -> Result:
        """Later read: retried with a new connection if one breaks, until the time is over."""
        first_failed_at: float | None = None
        pause_s = _FIRST_PAUSE_S
        num_attempts = 0
        while True:
            num_attempts += 1
            try:
                return self._once(read)
            except ConnectionGone as gone:
                now = time.monotonic()
                first_failed_at = now if first_failed_at is None else first_failed_at
                events.emit(
                    "database connection lost",
                    database=self.database.place,
                    reading=what,
                    reason=str(gone),
                    attempt=num_attempts,
                )
                left_s = first_failed_at + self._timeout_s - now
                if left_s <= 0:
                    raise DatabaseLost(
                        place=self.database.place,
                        reading=what,
                        reason=str(gone),
                        num_attempts=num_attempts,
                        waited_s=now - first_failed_at,
                    ) from None
            # The first reconnect is immediate: a server that dropped an idle connection is likely up.
            if num_attempts > 1:
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Close every connection that is not in use."""
        self._own()
        with self._lock:
            _close_all(self._idle, self._owner)

    def _once(self, read: Callable[[Session], Result]) -> Result:
        self._own()
        with self._free:
            with self._lock:
                session = self._idle.pop() if self._idle else None
            session = session or self.database.connect()
            is_whole = False
            try:
                result = read(session)
                session.end()
                is_whole = True
                return result
            except QueryRefused:
                # The connection is usable again, once the failed transaction is over.
                try:
                    session.end()
                    is_whole = True
                except ConnectionGone:
                    pass
                raise
            finally:
                with self._lock:
                    is_kept = is_whole and len(self._idle) < _MOST_IDLE
                    if is_kept:
                        self._idle.append(session)
                if not is_kept:
                    session.close()

    def _own(self) -> None:
        """Drop the parent's connections in a forked child without closing them, which would end the parent's session."""
        if self._owner == os.getpid():
            return
        self._lock, self._free = threading.Lock(), threading.BoundedSemaphore(_MOST_AT_ONCE)
        _LEFT_TO_THE_PARENT.extend(self._idle)
        self._close.detach()
        self._idle, self._owner = [], os.getpid()
        self._close = weakref.finalize(self, _close_all, self._idle, self._owner)


_LEFT_TO_THE_PARENT: list[Session] = []


def _close_all(sessions: list[Session], owner: int) -> None:
    if owner != os.getpid():
        return
    while sessions:
        sessions.pop().close()


_TARGET_BYTES = 8 << 20
_FEWEST_ROWS, _MOST_ROWS = 1024, 1 << 17


class KeyRange(NamedTuple):
    """Rows whose key lies in [low, high), where None is no limit; or rows without a key; or all rows."""

    num_rows: int
    low: str | None = None
    """A value as SQL has it."""

    high: str | None = None
    is_null: bool | None = None
    """True for rows without a key, False for rows with one; None where there is no key at all."""

    def condition(self, key: str) -> str:
        """SQL for which rows they are; "" for all."""
        if self.is_null:
            return f"{key} IS NULL"
        limits = [] if self.low is None else [f"{key} >= {self.low}"]
        limits += [] if self.high is None else [f"{key} < {self.high}"]
        if not limits and self.is_null is False:
            return f"{key} IS NOT NULL"
        return " AND ".join(limits)

    def shown(self, key: str) -> str:
        return self._replace(low=_short(self.low), high=_short(self.high)).condition(key) or "all rows"


def rows_per_range(num_rows: int, row_bytes: int, partitions: int | None) -> int:
    """Rows of a range: as `partitions` says, or a few MiB."""
    if partitions is not None:
        return max(-(-num_rows // partitions), 1)
    return max(min(_TARGET_BYTES // max(row_bytes, 1), _MOST_ROWS), _FEWEST_ROWS)


def cuts_query(relation: str, key: str, literal: str, step: int) -> str:
    """SQL for every step-th value of a key, and how many rows lie before it: one pass, in the order of the key.

    `literal` is SQL that gives the value named k as a literal.

    A value that many rows share is given once, and its rows stay together.
    """
    return (
        f"SELECT DISTINCT {literal} AS cut, num_before FROM ("
        f"SELECT {key} AS k, row_number() OVER (ORDER BY {key}) - 1 AS number, "
        f"rank() OVER (ORDER BY {key}) - 1 AS num_before FROM {relation} WHERE {key} IS NOT NULL"
        f") AS numbered WHERE number % {step} = 0 ORDER BY num_before"
    )


def ranges_between(cuts: Sequence[tuple[str, int]], *, num_keyed: int, num_null: int) -> list[KeyRange]:
    """Ranges from cut to cut; the first cut is the smallest key.

    The outermost ranges are open, so that a later row falls into one of them and is noticed; rows
    without a key are a range of their own.
    """
    limits = [None, *(value for value, _ in cuts[1:]), None]
    starts = [*(int(start) for _, start in cuts), num_keyed]
    ranges = [
        KeyRange(starts[number + 1] - starts[number], limits[number], limits[number + 1], is_null=False)
        for number in range(len(cuts))
    ]
    return ranges + ([KeyRange(num_null, is_null=True)] if num_null else [])


def _short(literal: str | None) -> str | None:
    return literal if literal is None or len(literal) <= 40 else f"{literal[:37]}..."


_NAME = re.compile(r'[^\s();"]+|"[^"]+"(\."[^"]+")?')
_TEXT_BYTES = 32  # estimate for an unread string or list


def _row_bytes(columns: Sequence[Column]) -> int:
    return sum(_TEXT_BYTES if column.is_ragged else column.row_bytes for column in columns)


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
    """Rows of a table, or of a query, in PostgreSQL ("postgresql://user:password@host/name") or SQLite (a path).

    Rows are read in ranges of `key`, a column with an order (the primary
    key, if nothing is said), about as many rows in each; `partitions` says
    how many ranges. So each worker asks for the ranges its samples lie in.
    Without a key the whole is one range. `schema` gives columns other
    types ({"price": "float32"}), `fill` says what stands for NULL.

    Everything is read in read-only transactions, each range in its own. A
    range that has another number of rows than when the table was opened
    is refused; values that change while their number stays are not
    noticed, so let nobody write while you train, or read from a copy. A
    database that closes the connection is asked again for `timeout_s`.

        Dataset.from_sql("clicks", "postgresql://me@db.example/ads", label="clicked")
        Dataset.from_sql("SELECT * FROM visits WHERE day < '2024-05-01'", "visits.db", key="id", partitions=64)
    """
    on_error, max_skips = skipping("", on_error, max_skips)
    if partitions is not None:
        partitions = whole_number("from_sql(partitions=)", partitions, at_least=1)
    timeout_s = above_zero("from_sql(timeout_s=)", timeout_s, "seconds")
    sessions = Sessions(database_of(connection), timeout_s)
    wish = _Wish(key, partitions, columns, tuple(label_names(label)), by_name("schema=", schema), fill)
    table = SqlTable(sessions, relation_of(query), wish)
    return TableSource(table, label=label, cache=cache, on_error=on_error, max_skips=max_skips)


class Relation(NamedTuple):
    """The relation behind FROM."""

    sql: str
    is_table: bool
    shown: str
    """For people."""


def relation_of(query: str) -> Relation:
    """A table where the text is a name (perhaps with its schema), else a query."""
    text = query.strip().rstrip(";").strip() if isinstance(query, str) else ""
    if not text:
        raise ConfigError(f"from_sql takes the name of a table or a query, got {query!r}")
    if _NAME.fullmatch(text):
        if text.startswith('"'):
            return Relation(text, True, f"the table {text}")
        name = ".".join(quoted(part) for part in text.split("."))
        return Relation(name, True, f"the table '{text}'")
    flat = " ".join(text.split())
    shown = flat if len(flat) <= 80 else f"{flat[:77]}..."
    # On a line of its own: a comment at the query's end must not swallow the bracket.
    return Relation(f"({text}\n) AS shoal_query", False, f"the query '{shown}'")


class _Wish(NamedTuple):
    """Options of the user for a table."""

    key: str | None
    partitions: int | None
    columns: Sequence[str] | None
    labels: tuple[str, ...]
    schema: Mapping[str, Any] | None
    fill: Mapping[str, Any] | None


class SqlTable:
    """Rows of a relation in the order of a key, in ranges of it.

    Without a key the whole is one range, ordered by all its columns: only rows equal in all of them
    may swap, which makes no difference.
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
        row_bytes = _row_bytes(self.columns)
        blocks, first_row = [], 0
        for part in self._ranges:
            num_bytes = part.num_rows * row_bytes
            blocks.append(TableBlock(part.num_rows, num_bytes, self._address(part), first_row))
            first_row += part.num_rows
        self.blocks: tuple[TableBlock, ...] = tuple(blocks)
        self._unread = set(range(len(blocks)))
        if not first_row:
            sessions.close()
            raise EmptyDataset(what=f"from_sql ({self._where})")

    @property
    def identity(self) -> str:
        """Identity by the relation, its key and the number of rows in each range."""
        return identity_of([], stamp=self._sessions.database.stamp(), **self.describe(), fill=self._wish.fill)

    def read(self, block: int) -> DecodedRows:
        part = self._ranges[block]
        sql = self._select(part)
        table, bad_values = self._sessions.again(
            lambda session: session.rows(sql, self._asked), what=self._address(part)
        )
        self._was_read(block)
        if table.num_rows != part.num_rows:
            raise TableChanged(
                table=self._relation.shown,
                place=self._sessions.database.place,
                rows=part.shown(self._key.shown if self._key else ""),
                then=part.num_rows,
                now=table.num_rows,
            )
        # For messages: users can look up the value of the key, if it was read.
        keys = self._key.shown if self._key and self._key.shown in table.column_names else None
        first_row = self.blocks[block].first_row

        def address(row: int) -> dict[str, Any]:
            if keys is None:
                return {"where": self._where, "row": first_row + row + 1}
            return {"where": f"{self._where}, {keys} = {table.column(keys)[row].as_py()!r}"}

        # Bad values came as null; the first reason given for a row is the real one.
        bad = BadRows(address)
        for bad_value in bad_values:
            bad.add(*bad_value)
        return decoded(table, self.columns, self._fill, bad)

    def describe(self) -> dict[str, Any]:
        return {
            "format": "sql",
            "database": self._sessions.database.place,
            "relation": self._relation.shown,
            "key": self._key.shown if self._key else None,
            "num_ranges": len(self._ranges),
            "ranges": identity_of([], ranges=self._ranges),
        }

    def _was_read(self, block: int) -> None:
        """Close connections once every range was read: its rows are cached by then."""
        self._unread.discard(block)
        if not self._unread:
            self._unread = set(range(len(self.blocks)))
            self._sessions.close()

    def _open(self, session: Session) -> tuple[list[SqlColumn], SqlKey | None, list[KeyRange]]:
        """Schema, key and ranges, found in one transaction."""
        there = session.columns(self._relation.sql)
        names = [column.name for column in there]
        wanted = chosen(names, self._wish.columns, self._where, needed=self._wish.labels)
        check_names("schema=", self._wish.schema, wanted, self._where)
        check_names("fill=", self._wish.fill, wanted, self._where)
        by_name = {column.name: column for column in there}
        asked = [self._as_said(by_name[name]) for name in wanted]
        key = self._find_key(session, names)
        row_bytes = _row_bytes(self._columns(asked))
        ranges = remembered(self._question(key, asked), lambda: self._count(session, key, row_bytes))
        return asked, key, [KeyRange(*part) for part in ranges]

    def _as_said(self, column: SqlColumn) -> SqlColumn:
        """As `schema=` says it, where text is asked for and values may be of several types."""
        said = (self._wish.schema or {}).get(column.name)
        if said is None or not column.as_text or arrow_type(column.name, said) != pa.string():
            return column
        return column._replace(kind=pa.string(), expression=column.as_text)

    def _question(self, key: SqlKey | None, asked: Sequence[SqlColumn]) -> str:
        """Name of the request for the ranges, equal for all workers of a job, and only for them.

        The script makes the same requests in the same order on every rank and after a restart, so
        the number of requests so far is part of the name.
        """
        types = [str(column) for column in asked]
        text = json.dumps(
            [self._sessions.database.place, self._relation, key, self._wish, types], default=str
        )
        with _asking:
            _times_asked[text] += 1
            return identity_of([], format="sql", asked=text, number=_times_asked[text])

    def _count(self, session: Session, key: SqlKey | None, row_bytes: int) -> list[KeyRange]:
        """Number of rows and cuts of the key, in one state of the data."""
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
        return SqlKey(quoted(asked), False, asked)

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
        outputs = [f"{column.expression} AS {quoted(column.name)}" for column in self._asked]
        # Rows that share a key are ordered by the columns read; rows equal in all of them are
        # interchangeable.
        order = [str(number + 1) for number in range(len(outputs))]
        condition = ""
        if self._key is not None:
            order = [self._key.expression, *(() if self._key.is_unique else order)]
            condition = part.condition(self._key.expression)
        where = f" WHERE {condition}" if condition else ""
        return f"SELECT {', '.join(outputs)} FROM {self._relation.sql}{where} ORDER BY {', '.join(order)}"

    def _address(self, part: KeyRange) -> str:
        return f"{self._relation.shown}, {part.shown(self._key.shown if self._key else '')}"
