"""A job's directory on disk: claimed by one supervisor, readable by its user, before and after.

    <run-dir>/<name>/
        config.json      configuration of the launch: enough to launch it again
        events.jsonl     events, a line each
        metrics.jsonl    a line per step, written by rank 0's Trainer
        activity/        <process>.jsonl: activity of each process, about a line a second
        trace/           <process>.<incarnation>.bin: its newest spans
        logs/            worker-<rank>.log, server-<number>.log: output of each process
        checkpoints/     written by the Trainer
        summary.json     result; appears when the job has ended
        journal.sqlite   promises of the coordinator
        trained/         <launch>-<rank>-<incarnation>: the batches of a worker under a relaxed strategy
        scratch/         the job's temporary files: deleted with it
        lock             held by the live supervisor, and only by it; of a copy, by its host's agent
        copied-from      the head, where this is another host's copy of its run directory

Decides whether a directory may be used and says why not: one that belongs to another user, or is a
link that another user made, may not. Only its user can enter it (mode 0700). Does not interpret
events or know how a checkpoint is made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from shoal.cluster.coordinator import journal
from shoal.cluster.ledger import trained_file
from shoal.config.hosts import HostsConfig
from shoal.config.launch import HostFacts, RunConfig
from shoal.errors import RunDirectoryError
from shoal.runtime import own_files

COPY_MARK = "copied-from"
"""File that marks a host agent's copy of the head's directory. A job that continues the run there removes it."""

_TAIL_BYTES = 1 << 16
"""Bytes read from the end of metrics.jsonl: more than its longest line."""


class RunDirectory:
    """One job's directory, locked. Its holder is the job's only supervisor until `close`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.launch = 0  # which launch of this run we are, from 1
        self._lock_fd = lock_fd
        self._events: BinaryIO | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def claim(
        cls,
        base: Path,
        *,
        name: str | None,
        config: RunConfig,
        again: bool = False,
        overwrite: bool = False,
    ) -> RunDirectory:
        """Claim a directory for a new job: `<base>/<name>`, or the script's name with the first free number.

        A name is one run. If it is taken, `again` moves the former run aside, to `<name>.1` or the
        next free number; `overwrite` removes it.
        """
        base = base.absolute()
        _make_base(base)
        path = base / name if name is not None else _first_free(base, Path(config.script).stem)
        is_new = name is None
        if not is_new:
            try:
                if path.is_dir():
                    _refuse_foreign(path)
                    if not _is_blank(path):
                        cls._make_way(path, again=again, overwrite=overwrite)
                path.mkdir(mode=0o700)
                is_new = True
            except FileExistsError:
                pass
            except OSError as error:
                raise _unwritable(path, error) from None
        try:
            run = cls.lock(path)
        except BaseException:
            if is_new:
                path.rmdir()
            raise
        return run._filled(config, is_new=is_new)

    @classmethod
    def reopen(cls, path: Path, config: RunConfig) -> RunDirectory:
        """Directory of an ended job, to continue it."""
        _refuse_foreign(path)
        if not _is_blank(path):
            _refuse_other_job(path, config)
        return cls.lock(path)._filled(config, is_new=False)

    @classmethod
    def _make_way(cls, path: Path, *, again: bool, overwrite: bool) -> None:
        """Move an ended run aside or remove it, as requested, for a new one of its name."""
        before = read_config(path)
        aside = next(
            free for k in itertools.count(1) if not (free := path.with_name(f"{path.name}.{k}")).exists()
        )
        with cls.lock(path):  # it has ended, and nothing continues it meanwhile
            if again:
                path.rename(aside)
            elif overwrite:
                # Renamed first: an interrupted removal must not leave half a run under this name.
                removed = path.with_name(f".{aside.name}.removed")
                shutil.rmtree(removed, ignore_errors=True)  # left by an interrupted removal
                path.rename(removed)
                shutil.rmtree(removed)
            else:
                typed = shlex.join([os.path.basename(before.script), *before.args])
                began = time.strftime("%Y-%m-%d %H:%M", time.localtime(before.started))
                raise RunDirectoryError(
                    f"there is a run {path} already: {typed}, started {began}. Nothing was started, and nothing in it was "
                    f"touched. `shoal resume {path}` goes on with it; --again starts anew and keeps it as {aside.name}, "
                    "--overwrite removes it; or choose another --name.",
                    path=str(path),
                )

    @classmethod
    def lock(cls, path: Path) -> RunDirectory:
        """Lock the directory for this process; RunDirectoryError if another holds it."""
        try:
            fd = own_files.open_file(path / "lock", os.O_RDWR | os.O_CREAT)
            # A lock file of an earlier version, which other users could hold.
            os.fchmod(fd, 0o600)
        except OSError as error:
            raise _unwritable(path, error) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise _unwritable(path, error) from None
            raise RunDirectoryError(
                f"the run {path} is still alive: its supervisor holds its lock. Nothing was started; wait for it to end, "
                "stop it, or choose another --name.",
                path=str(path),
            ) from None
        return cls(path, fd)

    def _filled(self, config: RunConfig, *, is_new: bool) -> RunDirectory:
        """Create the files that every run has. Written for real: permissions alone do not show whether
        the disk accepts them.
        """
        try:
            os.chmod(self.path, 0o700)
            for folder in ("logs", "checkpoints"):
                own_files.make_directory(self.path / folder)
            self.begin_launch(config)  # first: if the journal is refused, the ended job's files stay
            (self.path / "summary.json").unlink(missing_ok=True)  # the ended job's
            (self.path / COPY_MARK).unlink(missing_ok=True)
            events = own_files.open_file(self.path / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._events = open(events, "ab", buffering=0)  # noqa: SIM115  closed in close()
        except OSError as error:
            self.close()
            if is_new:
                _remove_what_was_made(self.path)
            raise _unwritable(self.path, error) from None
        except RunDirectoryError:
            self.close()
            if is_new:
                _remove_what_was_made(self.path)
            raise
        return self

    def begin_launch(self, config: RunConfig) -> None:
        """Begin the next launch of this run."""
        self.launch = journal.begin_launch(self.journal_path, num_workers=config.workers)
        trained_file.forget_from(self.path, self.launch)
        write_atomically(self.path / "config.json", msgspec.json.encode(config))

    def write_hosts(self, hosts: list[HostFacts], asked: HostsConfig) -> None:
        """Add this launch's hosts to config.json, with the requested numbers."""
        config = read_config(self.path)
        known = {each.number: each for each in (*config.hosts, *hosts)}
        config = replace(
            config,
            hosts=[known[number] for number in sorted(known)],
            hosts_asked=replace(asked, key_file=None),
        )
        write_atomically(self.path / "config.json", msgspec.json.encode(config))

    @property
    def journal_path(self) -> Path:
        return self.path / journal.FILE_NAME

    def last_step(self) -> int:
        """Step of the newest line in metrics.jsonl; 0 where there is none."""
        try:
            with open(self.path / "metrics.jsonl", "rb") as source:
                source.seek(max(source.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
                whole = source.read().split(b"\n")[:-1]
            return int(msgspec.json.decode(whole[-1])["step"])
        except (OSError, IndexError, KeyError, TypeError, ValueError, msgspec.DecodeError):
            return 0

    def event(self, kind: str, /, **facts: Any) -> None:
        """Append a line to events.jsonl. A full disk does not end a job."""
        if self._events is None:
            return
        line = {"time": time.time(), "monotonic": time.monotonic(), "event": kind, **facts}
        with contextlib.suppress(OSError):
            self._events.write(msgspec.json.encode(line) + b"\n")

    def log_path(self, rank: int) -> Path:
        return self.path / "logs" / f"worker-{rank}.log"

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json, as the job has ended. On a full disk there is none, as after a kill."""
        with contextlib.suppress(OSError):
            # msgspec writes a NaN loss as null, since JSON has no NaN.
            write_atomically(self.path / "summary.json", msgspec.json.encode(summary))

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_config(path: Path) -> RunConfig:
    """Read config.json of a run directory; RunDirectoryError where it is not one."""
    if not path.is_dir():
        raise RunDirectoryError(
            f"there is no run {path}. Nothing was started; `shoal status` lists the runs there are.",
            path=str(path),
        )
    try:
        return msgspec.json.decode(own_files.read(path / "config.json"), type=RunConfig)
    except FileNotFoundError:
        raise RunDirectoryError(
            f"{path} exists and is not a run directory: it has no config.json. Nothing in it was touched; choose another "
            "--name or --run-dir.",
            path=str(path),
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise RunDirectoryError(
            f"{path / 'config.json'} cannot be read: {error}. Nothing was started; choose another --name.",
            path=str(path),
        ) from None


def is_alive(path: Path) -> bool:
    """True while a supervisor holds this run directory."""
    try:
        fd = own_files.open_file(path / "lock", os.O_RDONLY, any_owner=True)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file as a whole: a reader sees the old or the new, never a part."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process, or planted
        with open(own_files.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _make_base(base: Path) -> None:
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"the run directory {base} cannot be made: {error.strerror}. Nothing was started; choose another --run-dir.",
            path=str(base),
        ) from None


def _first_free(base: Path, stem: str) -> Path:
    k = 1
    while True:
        path = base / f"{stem}-{k}"
        try:
            path.mkdir(mode=0o700)  # the claim: of two simultaneous launches one succeeds
        except FileExistsError:
            k += 1
        except OSError as error:
            raise _unwritable(path, error) from None
        else:
            return path


def _refuse_foreign(path: Path) -> None:
    """Refuse another user's directory, and a link made by another user: its contents would be trusted."""
    try:
        owners = {path.lstat().st_uid, path.stat().st_uid}
    except OSError as error:
        raise _unwritable(path, error) from None
    if owners != {os.getuid()}:
        raise RunDirectoryError(
            f"the run directory {path} belongs to user {min(owners - {os.getuid()})}, and this process to user "
            f"{os.getuid()}. Nothing was started, and nothing in it was touched; choose another --name or --run-dir.",
            path=str(path),
        )


def _is_blank(path: Path) -> bool:
    """True for an empty directory, or one whose launch was killed before it wrote config.json."""
    files = {"lock", "logs", "checkpoints", journal.FILE_NAME, f"{journal.FILE_NAME}-wal"}
    return path.is_dir() and set(os.listdir(path)) <= files


def _refuse_other_job(path: Path, config: RunConfig) -> None:
    before = read_config(path)
    theirs, ours = [before.script, *before.args], [config.script, *config.args]
    if theirs != ours:
        raise RunDirectoryError(
            f"{path} is the run directory of another job: it ran {shlex.join(theirs)}, not {shlex.join(ours)}. Nothing in it "
            "was touched; go on with it as it was, or choose another --name.",
            path=str(path),
        )


def _unwritable(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"the run directory {path} cannot be written: {error.strerror}. Nothing was started; make it writable or choose "
        "another --run-dir.",
        path=str(path),
    )


def _remove_what_was_made(path: Path) -> None:
    for leftover in (path / "logs", path / "checkpoints"):
        if leftover.is_dir():
            leftover.rmdir()
    for leftover in (path / "config.json", path / "events.jsonl", path / journal.FILE_NAME, path / "lock"):
        leftover.unlink(missing_ok=True)
    path.rmdir()
