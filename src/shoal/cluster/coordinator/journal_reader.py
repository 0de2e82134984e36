"""Read-only access to a run's journal, also while its coordinator writes it.

The coordinator holds its database exclusively, so a copy is read. The file
itself changes only when SQLite moves entries into it from the log beside it: a
copy of both, before and after which nothing was moved, is whole. Never writes
into the run directory.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.cluster.coordinator.journal import APPLICATION_ID, FILE_NAME, VERSION
from shoal.cluster.coordinator.journal_entries import Fact, JournalState
from shoal.cluster.coordinator.lease_service import LeaseService
from shoal.cluster.coordinator.server_registry import ServerRegistry, ServersConfig
from shoal.cluster.ledger import entries as ledger_entries
from shoal.cluster.ledger.entries import LedgerFact
from shoal.cluster.ledger.ledger import Ledger
from shoal.cluster.ledger.trained_file import Trained
from shoal.config.liveness import LivenessConfig
from shoal.runtime.transport.messages.supervisor import Noted
from shoal.runtime.transport.messages.worker_coordinator import Join

NUM_TRIES = 20
AGAIN_S = 0.01
"""Pause between two attempts. SQLite moves entries once in some thousand writes, in milliseconds."""

_SALT = slice(16, 24)  # in the header of a write-ahead log; changes when the log is restarted

T = TypeVar("T")

_facts: msgspec.json.Decoder[Fact] = msgspec.json.Decoder(Fact)


@dataclass(frozen=True, slots=True)
class Launch:
    """Entries of one launch of a run."""

    number: int
    num_workers: int
    started: float
    facts: list[tuple[float, Fact]] = field(default_factory=list)
    """Facts with their times, in seconds since 1970."""


def read_launches(run: Path) -> list[Launch]:
    """All launches in the journal of a run directory; empty where none can be read."""
    return _of_copy(run, _read) or []


def launch_times(run: Path) -> list[float]:
    """When each launch of a run began: two directories of one run agree in the first of them."""
    return _of_copy(run, lambda copy: [launch.started for launch in _read(copy, with_facts=False)]) or []


def snapshot(run: Path) -> bytes | None:
    """The journal as one file without a log beside it; None where it cannot be read."""
    return _of_copy(run, _whole)


def version(run: Path) -> object:
    """Value that changes whenever the journal was written."""
    path = run / FILE_NAME
    log = path.with_name(path.name + "-wal")
    try:
        return _version(path, log), log.stat().st_size if log.exists() else 0
    except OSError:
        return None


def _of_copy(run: Path, read: Callable[[Path], T]) -> T | None:
    path = run / FILE_NAME
    with tempfile.TemporaryDirectory(prefix="shoal-journal-") as folder:
        copy = Path(folder) / FILE_NAME
        for _ in range(NUM_TRIES if path.exists() else 0):
            with contextlib.suppress(sqlite3.Error):
                if _copied(path, copy):
                    return read(copy)
            time.sleep(AGAIN_S)
    return None


def _whole(copy: Path) -> bytes:
    whole = copy.with_name("whole.sqlite")
    whole.unlink(missing_ok=True)  # left by an earlier attempt
    with closing(sqlite3.connect(copy)) as source, closing(sqlite3.connect(whole)) as target:
        source.backup(target)
    return whole.read_bytes()


def ledger_of(launches: list[Launch], trained: list[Trained]) -> Ledger:
    """Ledger over all launches; `trained` holds the workers' own records."""
    ledger = Ledger(trained=trained)
    for launch in launches:
        for _, fact in launch.facts:
            match fact:
                case Noted(fact=text):
                    noted = ledger_entries.decode(text)
                    if noted is not None:
                        ledger.apply(launch.number, noted)
                case Join(rank, incarnation):
                    ledger.joined(launch.number, rank, incarnation)
                case _ if isinstance(fact, LedgerFact):
                    ledger.apply(launch.number, fact)
    ledger.close()
    return ledger


def leases_of(launch: Launch) -> LeaseService:
    """Leases at the end of a launch's entries."""
    state = JournalState()
    for _, fact in launch.facts:
        state.apply(fact)
    servers = ServerRegistry(ServersConfig(), LivenessConfig(), now=0.0, grace_s=0.0)
    servers.replay(state.server_facts)
    return servers.leases


def _copied(path: Path, copy: Path) -> bool:
    """Copy the database and its log; False if entries were moved between them meanwhile."""
    log, log_copy = path.with_name(path.name + "-wal"), copy.with_name(copy.name + "-wal")
    try:
        before = _version(path, log)
        shutil.copyfile(path, copy)
        log_copy.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(log, log_copy)
        return before == _version(path, log)
    except OSError:
        return False


def _version(path: Path, log: Path) -> tuple[int, int, bytes]:
    stat = path.stat()
    try:
        with open(log, "rb") as file:
            salt = file.read(32)[_SALT]
    except FileNotFoundError:
        salt = b""
    return stat.st_mtime_ns, stat.st_size, salt


def _read(path: Path, *, with_facts: bool = True) -> list[Launch]:
    with closing(sqlite3.connect(path)) as db:
        if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            return []
        if db.execute("PRAGMA user_version").fetchone()[0] > VERSION:
            return []
        rows = db.execute("SELECT launch, num_workers, started FROM launches ORDER BY launch")
        launches = {number: Launch(number, num_workers, started) for number, num_workers, started in rows}
        facts = db.execute("SELECT launch, time, fact FROM facts ORDER BY number") if with_facts else ()
        for number, at, text in facts:
            # An entry of another version, which this one cannot read.
            with contextlib.suppress(msgspec.MsgspecError):
                launches[number].facts.append((at, _facts.decode(text)))
    return list(launches.values())
