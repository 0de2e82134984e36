"""The coordinator's journal on disk: `journal.sqlite` in the run directory.

Writes the entries of `journal_entries.py` before their promises are answered,
and gives them back as a `JournalState` to the next coordinator. Decides whether
a file may be used and says why not.

Every launch of a run adds its own entries: the promises of an earlier launch
bind nobody, because the processes they were made to are gone. So `shoal
resume` begins with an empty state, and the file keeps the run's history.

A killed process loses nothing that it has written: the page cache is the
kernel's. Syncing the disk is for power loss, and that ends the promises
together with all to whom they were made. So synchronous is NORMAL: after a
power loss the newest entries may be missing, but the file is whole.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from shoal.cluster.coordinator.journal_entries import Entry, Fact, JournalState, StoreChanged
from shoal.errors import JournalFailed, RunDirectoryError
from shoal.runtime.transport.messages.worker_coordinator import (
    StoreCount,
    StoreDone,
    StoreFlag,
    StoreRefused,
    StoreValues,
)

FILE_NAME = "journal.sqlite"
APPLICATION_ID = int.from_bytes(b"SHOL", "big")
VERSION = 1

BUSY_TIMEOUT_S = 5.0
"""Wait for a user who has the file open by hand. Two coordinators never share it: the supervisor reaps the first."""

_SCHEMA = """
CREATE TABLE launches (launch INTEGER PRIMARY KEY, started REAL NOT NULL, num_workers INTEGER NOT NULL);
CREATE TABLE facts (
    number INTEGER PRIMARY KEY, launch INTEGER NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL, fact TEXT NOT NULL
);
CREATE TABLE store (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE answers (client INTEGER PRIMARY KEY, serial INTEGER NOT NULL, answer TEXT NOT NULL);
"""

_facts: msgspec.json.Decoder[Fact] = msgspec.json.Decoder(Fact)
_answers = msgspec.json.Decoder(StoreCount | StoreDone | StoreFlag | StoreRefused | StoreValues)
_to_json = msgspec.json.Encoder().encode


class Journal:
    """One launch's entries, opened by its coordinator alone."""

    def __init__(self, path: Path, *, launch: int) -> None:
        """Open the journal for a launch that `begin_launch` has begun; JournalFailed where it cannot be used."""
        self.path, self.launch = path, launch
        try:
            self._db = _open(path)
            newest = self._db.execute("SELECT max(launch) FROM launches").fetchone()[0]
            if newest != launch:
                self._db.close()
                raise _Unusable(
                    f"it belongs to launch {newest or 0} of this run, and this is launch {launch}"
                )
        except (sqlite3.Error, _Unusable) as error:
            raise JournalFailed(path=str(path), problem=_words(error)) from None

    def load(self) -> JournalState:
        state = JournalState()
        try:
            rows = self._db.execute("SELECT fact FROM facts WHERE launch = ? ORDER BY number", (self.launch,))
            for (fact,) in rows:
                state.apply(_facts.decode(fact))
            state.store = dict(self._db.execute("SELECT key, value FROM store"))
            for client, serial, answer in self._db.execute("SELECT client, serial, answer FROM answers"):
                state.answers[client] = (serial, _answers.decode(answer))
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise JournalFailed(path=str(self.path), problem=_words(error)) from None
        return state

    def write(self, entries: Sequence[Entry]) -> None:
        """Write entries, all or none; once it returns, a kill cannot undo them."""
        try:
            self._db.execute("BEGIN")
            for entry in entries:
                self._add(entry)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise JournalFailed(path=str(self.path), problem=_words(error)) from None

    def close(self) -> None:
        self._db.close()

    def _add(self, entry: Entry) -> None:
        match entry:
            case StoreChanged(values, answers):
                self._db.executemany(
                    "DELETE FROM store WHERE key = ?",
                    [(key,) for key, value in values.items() if value is None],
                )
                self._db.executemany(
                    "INSERT OR REPLACE INTO store VALUES (?, ?)",
                    [(key, value) for key, value in values.items() if value is not None],
                )
                self._db.executemany(
                    "INSERT OR REPLACE INTO answers VALUES (?, ?, ?)",
                    [(client, serial, _to_json(answer)) for client, (serial, answer) in answers.items()],
                )
            case _:
                self._add_fact(entry)

    def _add_fact(self, fact: Fact) -> None:
        self._db.execute(
            "INSERT INTO facts (launch, time, kind, fact) VALUES (?, ?, ?, ?)",
            (self.launch, time.time(), type(fact).__struct_config__.tag, _to_json(fact).decode()),
        )


def begin_launch(path: Path, *, num_workers: int) -> int:
    """Begin a launch in a new or existing journal; returns its number, from 1.

    Raises RunDirectoryError if the file is damaged, of a newer version or not a journal; the file
    is not changed.
    """
    try:
        with closing(_open(path)) as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("DELETE FROM store")
            db.execute("DELETE FROM answers")
            launched = db.execute(
                "INSERT INTO launches (started, num_workers) VALUES (?, ?)", (time.time(), num_workers)
            )
            db.execute("COMMIT")
            launch = launched.lastrowid
            assert launch is not None
            return launch
    except (sqlite3.Error, _Unusable) as error:
        raise RunDirectoryError(
            f"the journal {path} cannot be used: {_words(error)}. Nothing was started and the file is as it was; "
            "checkpoints do not depend on it, so move it away and go on with `shoal resume`, or choose another --name.",
            path=str(path),
        ) from None


class _Unusable(Exception):
    """The file is readable and is not a journal this version can use."""


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        # One user at a time, so no shared-memory file beside it: that would not work on network file
        # systems.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        num_tables = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if num_tables and application != APPLICATION_ID:
            raise _Unusable("it is a database, but not a journal of shoal's")
        if version > VERSION:
            raise _Unusable(
                f"it was written by a newer shoal (journal version {version}, this one writes {VERSION})"
            )
        if num_tables and version < VERSION:
            raise _Unusable(
                f"it was written by an older shoal (journal version {version}, this one writes {VERSION})"
            )
        if num_tables and (damage := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise _Unusable(f"it is damaged ({damage})")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        if not num_tables:
            db.executescript(
                f"BEGIN; PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; {_SCHEMA} COMMIT;"
            )
    except BaseException:
        db.close()
        raise
    return db


def _words(error: Exception) -> str:
    match error:
        case sqlite3.OperationalError() if "full" in str(error):
            return "the disk is full"
        case sqlite3.DatabaseError() if "not a database" in str(error) or "malformed" in str(error):
            return f"it is damaged, or no database at all ({error})"
    return str(error)
