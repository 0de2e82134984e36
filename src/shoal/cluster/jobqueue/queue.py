"""The job queue on disk: an SQLite database with every job and its state, and the lock of its one runner.

    <queue>/
        queue.sqlite   jobs and the pool that they share
        lock           held by the live runner, and only by it
        logs/          <id>.log: what `shoal run` of a job printed
        runs/          run directories: job-<id>

Any number of processes may submit, list and cancel; only the runner starts jobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from shoal.cluster.jobqueue.scheduler import Amount, JobRequest, Pool
from shoal.errors import ConfigError

BUSY_TIMEOUT_S = 30.0

_SCHEMA = """
create table if not exists jobs (
    id integer primary key autoincrement, state text not null, user text not null, priority integer not null,
    cores integer not null, gpus integer not null, memory integer not null, hosts integer not null,
    words text not null, cwd text not null, submitted real not null, started real, ended real, exit integer,
    pid integer, born real, placed text not null default '{}', resumed integer not null default 0,
    cancelled integer not null default 0, reason text not null default ''
);
create table if not exists pool (one integer primary key check (one = 1), content text not null);
"""


class JobState(StrEnum):
    """State of a job in the queue."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"  # it asks for more than the runner's pool has


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """A job, as the database has it."""

    id: int
    state: JobState
    user: str
    priority: int
    cores: int
    gpus: int
    memory: int
    hosts: int
    words: list[str]
    """Arguments of `shoal run`."""

    cwd: str
    submitted: float
    started: float | None
    ended: float | None
    exit: int | None
    pid: int | None
    """Process of its `shoal run`."""

    born: float | None
    """Creation time of that process, since pids are reused."""

    placed: dict[str, Any]
    """Hosts, cores and GPUs that it was given."""

    resumed: int
    cancelled: bool
    """Its end was requested."""

    reason: str

    @property
    def request(self) -> JobRequest:
        need = Amount(cores=self.cores, gpus=self.gpus, memory=self.memory)
        return JobRequest(id=self.id, need=need, hosts=self.hosts, user=self.user, priority=self.priority)

    @property
    def run(self) -> str:
        return f"job-{self.id}"


class Queue:
    """One queue. Every change is a transaction of its own, so a kill at any moment leaves it consistent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._lock_fd: int | None = None
        try:
            for each in (self.folder, self.logs, self.runs):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                self.folder / "queue.sqlite", timeout=BUSY_TIMEOUT_S, isolation_level=None
            )
            self._db.row_factory = sqlite3.Row
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"the queue {self.folder} cannot be opened: {error}. Nothing was changed; name another with --queue."
            ) from None

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def close(self) -> None:
        self._db.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)

    # ---- the one runner -------------------------------------------------------------------------

    def claim(self) -> None:
        """Become the runner of this queue until `close`. ConfigError where there is one."""
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(fd, 32).decode(errors="replace").strip()
            os.close(fd)
            raise ConfigError(
                f"the queue {self.folder} has a runner already, process {holder}. Nothing was started; submit jobs to it, end that "
                "process, or name another queue with --queue."
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        self._lock_fd = fd

    @property
    def has_runner(self) -> bool:
        try:
            fd = os.open(self.folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except PermissionError:  # another user's process, which tells no more
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    # ---- jobs -----------------------------------------------------------------------------------

    def submit(self, request: JobRequest, words: list[str], cwd: str) -> int:
        """Add a job and return its number; the request's own id is ignored."""
        need = request.need
        found = self._db.execute(
            "insert into jobs (state, user, priority, cores, gpus, memory, hosts, words, cwd, submitted) "
            "values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(JobState.WAITING, request.user, request.priority, need.cores, need.gpus, need.memory),
                *(request.hosts, json.dumps(words), cwd, time.time()),
            ),
        )
        assert found.lastrowid is not None
        return found.lastrowid

    def jobs(self, *states: JobState) -> list[QueueEntry]:
        """Jobs in these states, or all, in the order of their submission."""
        where = f"where state in ({', '.join('?' * len(states))})" if states else ""
        return [_job(row) for row in self._db.execute(f"select * from jobs {where} order by id", states)]

    def job(self, id: int) -> QueueEntry:
        row = self._db.execute("select * from jobs where id = ?", (id,)).fetchone()
        if row is None:
            there = [each.id for each in self.jobs()]
            known = f"it has {there[0]} to {there[-1]}" if there else "it has none"
            raise ConfigError(
                f"the queue {self.folder} has no job {id}; {known}. Nothing was changed; `shoal jobs list` shows them."
            )
        return _job(row)

    def cancel(self, id: int) -> QueueEntry:
        """Remove a waiting job, or request the end of a running one; returns the job as it was."""
        with self._transaction():
            job = self.job(id)
            if job.state is JobState.WAITING:
                self.update(id, state=JobState.CANCELLED, ended=time.time(), cancelled=1)
            elif job.state is JobState.RUNNING:
                self.update(id, cancelled=1)
        return job

    def update(self, id: int, **values: Any) -> None:
        self._db.execute(
            f"update jobs set {', '.join(f'{name} = ?' for name in values)} where id = ?",
            (*values.values(), id),
        )

    def begin(self, id: int, placed: dict[str, Any]) -> bool:
        """Mark a waiting job as running before its process is started; False where it was cancelled meanwhile."""
        changed = self._db.execute(
            "update jobs set state = ?, started = ?, placed = ? where id = ? and state = ?",
            (JobState.RUNNING, time.time(), json.dumps(placed), id, JobState.WAITING),
        )
        return changed.rowcount == 1

    # ---- the pool -------------------------------------------------------------------------------

    @property
    def pool(self) -> Pool | None:
        """Capacity of the last runner; None before the first."""
        row = self._db.execute("select content from pool").fetchone()
        if row is None:
            return None
        said = json.loads(row["content"])
        return Pool(
            hosts={name: Amount(**amount) for name, amount in said["hosts"].items()},
            quotas={name: Amount(**amount) for name, amount in said["quotas"].items()},
        )

    @pool.setter
    def pool(self, pool: Pool) -> None:
        content = {
            "hosts": {name: _plain(amount) for name, amount in pool.hosts.items()},
            "quotas": {name: _plain(amount) for name, amount in pool.quotas.items()},
        }
        self._db.execute("insert or replace into pool values (1, ?)", (json.dumps(content),))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("begin immediate")
        try:
            yield
        except BaseException:
            self._db.execute("rollback")
            raise
        self._db.execute("commit")


def _plain(amount: Amount) -> dict[str, int]:
    return {"cores": amount.cores, "gpus": amount.gpus, "memory": amount.memory}


def _job(row: sqlite3.Row) -> QueueEntry:
    said = {name: row[name] for name in row.keys()}  # noqa: SIM118  # a Row iterates over its values
    said |= {"words": json.loads(row["words"]), "placed": json.loads(row["placed"])}
    said |= {"state": JobState(row["state"]), "cancelled": bool(row["cancelled"])}
    return QueueEntry(**said)
