"""Claims on tasks: a file lock that dies with its process, and who holds it.

A task's file holds a line per attempt. The process that has the file's lock
runs the task; the kernel releases the lock when that process ends, however it
ends, so a dead process's task is free at once. The locks are POSIX ones: they
are not inherited by what a user's function forks, and the kernel says whose
they are.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from pathlib import Path

import msgspec

from shoal.config import job as jobs

_BEAT_S = 1.0
_FLOCK = struct.Struct("hhqqi")  # Linux's struct flock on 64 bits: type, whence, start, length, pid


class Attempt(msgspec.Struct, frozen=True):
    """One line of a task's file: somebody began to run it and has not finished."""

    who: str
    run: str
    """Which start of the program this was; attempts of others say nothing about ours."""


class Claim:
    """A task that is ours until `release`. `beat` shows that it goes on."""

    def __init__(self, path: Path, fd: int, attempts: list[Attempt], num_bytes: int) -> None:
        self._path, self._fd, self._begin = path, fd, num_bytes
        self.attempts = attempts
        """Those before this one."""
        self._next_beat = 0.0

    def beat(self) -> None:
        """Let whoever waits see that the task goes on; cheap enough for every sample."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_S
            os.utime(self._fd)

    def release(self) -> None:
        """The task is done, or was given up in order: the attempt is not held against it."""
        os.ftruncate(self._fd, self._begin)
        _forget(self._path)
        os.close(self._fd)


class Claims:
    """The claims on the tasks of one directory."""

    def __init__(self, directory: Path, *, run: str) -> None:
        self._directory, self._run = directory, run
        self._directory.mkdir(parents=True, exist_ok=True)

    def take(self, name: str) -> Claim | None:
        """The task, or None while somebody else has it."""
        path = self._directory / name
        if not _remember(path):
            return None
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            _forget(path)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        text = os.pread(fd, 1 << 20, 0)
        whole = text[: text.rfind(b"\n") + 1]  # a process may die within a line
        mine = msgspec.json.encode(Attempt(_who(), self._run)) + b"\n"
        os.pwrite(fd, mine, len(whole))
        return Claim(path, fd, [one for one in _attempts(whole) if one.run == self._run], len(whole))

    def standing(self, names: list[str]) -> dict[str, int]:
        """When each of these tasks last showed a sign of life; a change is what counts."""
        found = {}
        for name in names:
            try:
                found[name] = (self._directory / name).stat().st_mtime_ns
            except FileNotFoundError:
                found[name] = 0
        return found

    def holder(self, name: str) -> str:
        """Who has a task, for people."""
        path = self._directory / name
        if path in _held[1]:
            return "this process"  # opening and closing the file would let go of its lock
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return "nobody"
        try:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
            if kind == fcntl.F_UNLCK:
                return "nobody"
            attempts = _attempts(os.pread(fd, 1 << 20, 0))
            return attempts[-1].who if attempts else f"process {pid}"
        finally:
            os.close(fd)


def _who() -> str:
    job = jobs.current()
    return f"rank {job.rank} (process {os.getpid()})" if job.launched else f"process {os.getpid()}"


def _attempts(text: bytes) -> list[Attempt]:
    attempts = []
    for line in text.splitlines():
        try:
            attempts.append(msgspec.json.decode(line, type=Attempt))
        except msgspec.MsgspecError:
            continue
    return attempts


# A POSIX lock does not keep a process from itself, so what this one has is remembered, per process.
_held: tuple[int, set[Path]] = (os.getpid(), set())
_guard = threading.Lock()


def _remember(path: Path) -> bool:
    global _held
    with _guard:
        if _held[0] != os.getpid():
            _held = (os.getpid(), set())
        if path in _held[1]:
            return False
        _held[1].add(path)
        return True


def _forget(path: Path) -> None:
    with _guard:
        _held[1].discard(path)
