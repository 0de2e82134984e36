"""What a database must offer to be read as a table, and connections to it that are opened, kept and replaced.

Knows no dialect: `sqlite.py` and `postgres.py` are the two there are. What a
user may never see in a message, a password, is kept out of here by them.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from shoal.errors import DatabaseLost, DatabaseRefused, QueryRefused
from shoal.runtime import events as happenings

if TYPE_CHECKING:
    import pyarrow as pa

Result = TypeVar("Result")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_MOST_AT_ONCE, _MOST_IDLE = 2, 1  # of one process: a server lets a hundred in, and jobs have many workers


class SqlColumn(NamedTuple):
    """A column that a query gives."""

    name: str
    kind: pa.DataType
    """As it arrives."""

    expression: str
    """How to ask for it: its name, quoted, perhaps in a cast."""

    as_text: str = ""
    """How to ask for it as text, where its values may be of several types and only all of them as text are of one."""


class SqlKey(NamedTuple):
    """The column whose ranges are read apart."""

    expression: str
    is_unique: bool
    """No two rows share a value, so their order is certain."""

    shown: str
    """For people."""


class BadValue(NamedTuple):
    """A value that is not of its column's type."""

    row: int
    column: str
    reason: str


class Session(Protocol):
    """One connection, in one transaction that only reads and sees one state of the data."""

    def columns(self, relation: str) -> list[SqlColumn]:
        """What `SELECT * FROM relation` gives, in order."""

    def default_key(self, table: str) -> SqlKey | None:
        """What orders the rows of a table without being asked: its primary key; None where there is none of one column."""

    def values(self, sql: str) -> list[tuple[Any, ...]]:
        """A few rows, as Python has them."""

    def rows(self, sql: str, columns: Sequence[SqlColumn]) -> tuple[pa.Table, list[BadValue]]:
        """Many rows, of these columns."""

    def end(self) -> None:
        """End the transaction; the next question begins another."""

    def close(self) -> None:
        """Let go of the connection. Never raises."""


class Database(Protocol):
    """Where sessions come from. Methods of sessions raise `ConnectionGone` or `QueryRefused`."""

    place: str
    """For people: a URL without its password."""

    def connect(self) -> Session:
        """A new session, or `ConnectionGone` with the reason."""

    def stamp(self) -> str:
        """Changes with the data, as far as that can be told without reading it."""

    def quoted(self, name: str) -> str:
        """A name as SQL has it."""

    def literal_of(self, expression: str) -> str:
        """SQL that gives, as text, SQL for the value of an expression, exactly."""


class ConnectionGone(Exception):
    """Not an error yet: the connection ended, or never came to be. The reason is for people, without a password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconnectConfig:
    """How long a database that went away is waited for."""

    timeout_s: float = 30.0
    """From the first failure on, until a read of one range succeeds."""


class Sessions:
    """The connections of one process to one database: two while two threads read, one kept between reads.

    A forked child leaves its parent's alone and opens its own.
    """

    def __init__(self, database: Database, config: ReconnectConfig) -> None:
        self.database, self._config = database, config
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._idle: list[Session] = []
        self._owner = os.getpid()
        self._close = weakref.finalize(self, _close_all, self._idle, self._owner)

    def first(self, read: Callable[[Session], Result]) -> Result:
        """Read for the first time: what fails is told at once, for it is likelier a wrong name than an accident."""
        try:
            return self._once(read)
        except ConnectionGone as gone:
            raise DatabaseRefused(place=self.database.place, reason=str(gone)) from None

    def again(self, read: Callable[[Session], Result], *, what: str) -> Result:
        """Read what was there before: where the connection breaks, with a new one, until the time is over."""
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
                happenings.tell(
                    "database connection lost",
                    database=self.database.place,
                    reading=what,
                    reason=str(gone),
                    attempt=num_attempts,
                )
                left_s = first_failed_at + self._config.timeout_s - now
                if left_s <= 0:
                    raise DatabaseLost(
                        place=self.database.place,
                        reading=what,
                        reason=str(gone),
                        num_attempts=num_attempts,
                        waited_s=now - first_failed_at,
                    ) from None
            # The first new connection is tried at once: a server that dropped an idle one is there all the same.
            if num_attempts > 1:
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Let go of every connection that is not in use."""
        self._own()
        with self._lock:
            _close_all(self._idle, self._owner)

    def _once(self, read: Callable[[Session], Result]) -> Result:
        self._own()
        with self._free:
            session = self._take()
            is_whole = False
            try:
                result = read(session)
                session.end()
                is_whole = True
                return result
            except QueryRefused:
                # The connection is as good as before, once the failed transaction is over.
                try:
                    session.end()
                    is_whole = True
                except ConnectionGone:
                    pass
                raise
            finally:
                if not (is_whole and self._keep(session)):
                    session.close()

    def _own(self) -> None:
        """In a forked child: leave what is the parent's. To close a connection would say goodbye in the parent's name."""
        if self._owner == os.getpid():
            return
        self._lock, self._free = threading.Lock(), threading.BoundedSemaphore(_MOST_AT_ONCE)
        _LEFT_TO_THE_PARENT.extend(self._idle)
        self._close.detach()
        self._idle, self._owner = [], os.getpid()
        self._close = weakref.finalize(self, _close_all, self._idle, self._owner)

    def _keep(self, session: Session) -> bool:
        with self._lock:
            if len(self._idle) >= _MOST_IDLE:
                return False
            self._idle.append(session)
            return True

    def _take(self) -> Session:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self.database.connect()


_LEFT_TO_THE_PARENT: list[Session] = []


def _close_all(sessions: list[Session], owner: int) -> None:
    if owner != os.getpid():
        return
    while sessions:
        sessions.pop().close()
