"""Copy of the head's run directory on a host that does not share its file system.

Kept up to date in the background while the job runs, so that the run can continue here when the
head is lost: config.json, the journal, metrics and events, and the newest checkpoints. Files are
replaced atomically, so a kill leaves the old or the new one; a checkpoint is renamed into place
once every file of it has the hash in its manifest.

A directory is a copy of a run if its journal begins with the same launch. One whose newest launch
the head does not know is another continuation of the run: `history` and `refuse_fork` detect that
before the host is admitted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path, PurePosixPath

from shoal.cluster.coordinator import journal, journal_reader
from shoal.cluster.hosts.files import APPENDED, CONFIG, HeadFiles
from shoal.cluster.launch.run_directory import COPY_MARK, RunDirectory, is_alive, write_atomically
from shoal.errors import HostNotAdmitted, RunDirectoryError
from shoal.runtime.replace_directory import replace_directory, temporary_name
from shoal.runtime.transport.messages.hosts import FileEntry
from shoal.runtime.transport.tls import Credentials

MANIFEST = "manifest.json"
"""Of a checkpoint: the files beside it, with their hashes."""

OVERLAP_BYTES = 4096
"""Bytes at the end of a growing file that are compared with the head's before more is appended."""

END_S = 1.0
"""Time that an ending agent waits for a copy in progress."""

MAX_PAUSE_S = 0.25
"""Longest pause between two pieces of a background copy, which takes at most half of the link."""

_STEP = re.compile(r"step-(\d+)")
_TEMPORARY = re.compile(r"\..+\.tmp-[0-9a-f]{8}")


class RunCopy:
    """One host's copy, locked, so that nothing continues the run from it while the job is alive."""

    def __init__(self, held: RunDirectory, localise: Callable[[bytes], bytes]) -> None:
        """`localise` rewrites the paths in config.json for this host."""
        self.path = held.path
        self._held, self._localise = held, localise
        self._lock = threading.Lock()
        self._hashes: dict[str, str] = {}  # of the head's files as they were copied last
        self._copied: set[PurePosixPath] = set()  # checkpoints that came from the head
        self._is_aligned = False
        self._is_closed = threading.Event()
        self._files: HeadFiles | None = None
        for folder in (self.path, self.path / "checkpoints"):
            for leftover in folder.glob(".*.tmp-*"):  # left by an agent that was killed
                if _TEMPORARY.fullmatch(leftover.name):
                    shutil.rmtree(leftover, ignore_errors=True)

    @classmethod
    def claim(
        cls, base: Path, name: str, launches: Sequence[float], localise: Callable[[bytes], bytes]
    ) -> RunCopy:
        """Claim a directory for the copy: `base/name`, or with a number if another run or host has that one."""
        base.mkdir(parents=True, exist_ok=True)
        for path in (base / f"{name}{suffix}" for suffix in ("", *(f"-copy-{k}" for k in range(1, 1000)))):
            path.mkdir(exist_ok=True, mode=0o700)
            known = journal_reader.launch_times(path)
            if known[:1] != list(launches[:1]) and (known or (path / CONFIG).exists()):
                continue  # another run of this name
            try:
                held = RunDirectory.lock(path)
            except RunDirectoryError:
                continue  # the copy of another agent
            (path / "checkpoints").mkdir(exist_ok=True, mode=0o700)
            (path / "summary.json").unlink(missing_ok=True)
            write_atomically(path / COPY_MARK, b"the head of this run\n")
            return cls(held, localise)
        raise RunDirectoryError(f"{base} has no room for a copy of the run {name}.", path=str(base))

    def sync(self, head: str, credentials: Credentials, *, in_background: bool) -> None:
        """Copy everything the head has saved and this host lacks."""
        pause = self._pause if in_background else None
        with self._lock, HeadFiles.opened(head, credentials, is_shipped=False, pause=pause) as files:
            self._files = files
            if self._is_closed.is_set():  # in this order: `close` does it the other way round
                return
            entries = files.listed()
            wholes = {
                PurePosixPath(entry.path).parent: entry
                for entry in entries
                if PurePosixPath(entry.path).name == MANIFEST
            }
            self._align(wholes)
            for entry in entries:
                place = PurePosixPath(entry.path)
                if place.parent in wholes or place.parts[0] == "checkpoints":
                    continue  # handled below, or not finished yet
                if entry.path in APPENDED:
                    self._append(files, entry)
                else:
                    self._copy_file(files, entry)
            for folder, manifest in sorted(wholes.items(), reverse=True):  # the newest checkpoint first
                if not _is_same(manifest, self.path / manifest.path):
                    inside = [entry for entry in entries if PurePosixPath(entry.path).parent == folder]
                    self._copy_whole(files, folder, inside)
            self._prune(wholes.keys())

    def close(self) -> None:
        """Release the directory. A copy in progress is cut short: the head may be silent, and the run
        may continue from here.
        """
        self._is_closed.set()
        if self._files is not None:
            self._files.interrupt()
        # A thread that still waits for a connection has no file of the directory open, and will open none.
        is_idle = self._lock.acquire(timeout=END_S)
        self._held.close()
        if is_idle:
            self._lock.release()

    def _pause(self, took_s: float) -> None:
        if self._is_closed.wait(min(took_s, MAX_PAUSE_S)):
            raise InterruptedError("the agent ends")

    def _align(self, wholes: dict[PurePosixPath, FileEntry]) -> None:
        """Move checkpoints aside, once, that are newer than the head's: the run continued from an older one elsewhere."""
        if self._is_aligned:
            return
        newest = max((_step(folder.name) for folder in wholes), default=-1)
        here = self.path / "checkpoints"
        later = [path for path in here.iterdir() if _step(path.name) > newest]
        if later:
            aside = next(path for k in itertools.count(1) if not (path := here / f"before-{k}").exists())
            aside.mkdir()
            for path in later:
                path.rename(aside / path.name)
        self._is_aligned = True

    def _append(self, files: HeadFiles, entry: FileEntry) -> None:
        target = self.path / entry.path
        with open(target, "ab+") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - OVERLAP_BYTES)
            file.seek(start)
            known = file.read()
            if entry.nbytes == size and not known:
                return
            data = files.read(entry.path, start)
            if not data.startswith(known):
                file.truncate(0)  # the file was restarted
                size = start = 0
                known, data = b"", files.read(entry.path, 0)
            while lines := data[len(known) : data.rfind(b"\n") + 1]:
                file.write(lines)
                size, known = size + len(lines), b""
                data = files.read(entry.path, size)

    def _copy_file(self, files: HeadFiles, entry: FileEntry) -> None:
        target = self.path / entry.path
        if entry.sha256:
            if self._hashes.get(entry.path) == entry.sha256:
                return
        elif _is_same(entry, target) or (entry.path.startswith("loop/") and _is_newer(target, entry)):
            return  # a rank writes the state of its own loop locally
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(target)
        try:
            if files.fetch(entry, temporary) is None:
                return
            if entry.path == journal.FILE_NAME:
                # The log of the previous file would be read as this one's.
                target.with_name(f"{target.name}-wal").unlink(missing_ok=True)
            if entry.path == CONFIG:
                write_atomically(target, self._localise(temporary.read_bytes()))
            else:
                os.replace(temporary, target)
            self._hashes[entry.path] = entry.sha256
        finally:
            temporary.unlink(missing_ok=True)

    def _copy_whole(self, files: HeadFiles, folder: PurePosixPath, inside: list[FileEntry]) -> None:
        target = self.path / folder
        temporary = temporary_name(target)
        temporary.mkdir(parents=True)
        try:
            hashes = {
                name: files.fetch(entry, temporary / name)
                for entry in inside
                if (name := PurePosixPath(entry.path).name)
            }
            if hashes[MANIFEST] is None or not _is_whole(temporary / MANIFEST, hashes):
                return  # removed or replaced while it was read: the next sync finds the new state
            _sync_directory(temporary)
            replace_directory(temporary, target)
            _sync_directory(target.parent)
            self._copied.add(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _prune(self, listed: Collection[PurePosixPath]) -> None:
        """Remove copies of checkpoints that are no longer among the head's newest."""
        for folder in [each for each in self._copied if each not in listed]:
            self._copied.discard(folder)
            removed = temporary_name(self.path / folder)
            with contextlib.suppress(OSError):
                (self.path / folder).rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


def newest_step(run: Path) -> int:
    """Step of the newest checkpoint in a run directory; 0 where there is none."""
    return max(
        (_step(path.parent.name) for path in (run / "checkpoints").glob(f"step-*/{MANIFEST}")), default=0
    )


def has_checkpoint(run: Path) -> bool:
    return newest_step(run) > 0 and (run / CONFIG).exists()


def history(base: Path, name: str, launches: Sequence[float]) -> tuple[list[float], str]:
    """Launches of the run recorded in a directory on this host; and its path, if a supervisor is using it."""
    path = base / name
    known = journal_reader.launch_times(path)
    if not known or known[:1] != list(launches[:1]):
        return [], ""
    return known, str(path) if is_alive(path) and not (path / COPY_MARK).exists() else ""


def refuse_fork(hostname: str, theirs: Sequence[float], alive: str, ours: Sequence[float]) -> None:
    """Refuse a host on which the run continued without this head."""
    if alive:
        raise HostNotAdmitted(
            f"{hostname} is at work with this run itself: the supervisor of {alive} holds its lock. Two continuations of one run "
            "must not be mixed; end one of them, and join again"
        )
    if list(theirs) != list(ours[: len(theirs)]):
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(theirs[-1]))
        raise HostNotAdmitted(
            f"this run went on from the copy on {hostname}: its launch {len(theirs)} began there at {began}, and the head of "
            f"launch {len(ours)} does not know of it. Two continuations of one run must not be mixed; go on with `shoal resume` "
            f"on {hostname} instead, or move that copy away and join again"
        )


def _step(name: str) -> int:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else -1


def _is_same(entry: FileEntry, path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (entry.nbytes, entry.mtime_ns)


def _is_newer(path: Path, entry: FileEntry) -> bool:
    try:
        return path.stat().st_mtime_ns > entry.mtime_ns
    except OSError:
        return False


def _is_whole(manifest: Path, hashes: dict[str, str | None]) -> bool:
    try:
        named = json.loads(manifest.read_bytes())["files"]
        return all(hashes.get(name) == record["sha256"] for name, record in named.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
