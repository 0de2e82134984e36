"""Atomic writes of a directory of files, on a local disk and on remote storage.

On a local disk the directory is written under a temporary name beside its place, synced and
renamed; an existing one is exchanged with it in one system call. Remote storage has no atomic
rename, so the manifest is written last and removed first. Independent of the files' contents.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from shoal.runtime.file_systems import open_file_system, open_to_read
from shoal.runtime.replace_directory import replace_directory, temporary_name

Open = Callable[[str], AbstractContextManager[Any]]
"""Opens a new file of the directory by its name."""

MANIFEST = "manifest.json"
"""Written last and removed first: a directory without it is no checkpoint."""

_STEP = re.compile(r"step-(\d{9,})")
_TEMPORARY = re.compile(r"\.(?P<of>.+)\.tmp-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Place:
    """A directory by its URL: its filesystem and path."""

    url: str
    fs: Any
    path: str

    @classmethod
    def at(cls, url: str | os.PathLike[str]) -> Place:
        text = os.fspath(url)
        fs, path = open_file_system(text)
        return cls(text, fs, path)

    @property
    def local(self) -> Path | None:
        return Path(self.path) if isinstance(self.fs, LocalFileSystem) else None

    def child(self, name: str) -> Place:
        return Place(f"{self.url.rstrip('/')}/{name}", self.fs, f"{self.path.rstrip('/')}/{name}")

    def names(self) -> list[str]:
        """Names in the directory; none if it does not exist."""
        self.fs.invalidate_cache()
        try:
            return sorted(
                entry.rstrip("/").rpartition("/")[2] for entry in self.fs.ls(self.path, detail=False)
            )
        except FileNotFoundError:
            return []

    def file(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"

    def has(self, name: str) -> bool:
        return bool(self.fs.isfile(self.file(name)))

    def open(self, name: str) -> Any:
        return open_to_read(self.fs, self.file(name))


def step_name(step: int) -> str:
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


@contextlib.contextmanager
def writing(place: Place) -> Iterator[Open]:
    """Context in which files are written; leaving it without an exception puts the directory in place."""
    _refuse_foreign(place)
    local = place.local
    with _writing_local(local) if local is not None else _writing_elsewhere(place) as open_file:
        yield open_file


def remove(place: Place) -> None:
    """Remove a checkpoint atomically: no moment shows half of one."""
    if place.local is not None:
        temporary = temporary_name(place.local)
        os.rename(place.local, temporary)
        shutil.rmtree(temporary)
    else:
        if place.has(MANIFEST):
            place.fs.rm_file(place.file(MANIFEST))
        place.fs.rm(place.path, recursive=True)


@contextlib.contextmanager
def _writing_local(target: Path) -> Iterator[Open]:
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    temporary = temporary_name(target)
    temporary.mkdir()
    # Held until the end: a process that gets this lock knows that the directory's writer is gone.
    lock = os.open(temporary, os.O_RDONLY)
    try:
        # Some network filesystems cannot lock directories; then nothing is swept, either.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lambda name: _synced(temporary / name)
        os.fsync(lock)
        replace_directory(temporary, target)
        _sync_directory(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def shared_temporary(target: Path) -> Path:
    """The directory in which all ranks of a job write their parts of `target`."""
    return target.with_name(f".{target.name}.tmp-{hashlib.sha256(str(target).encode()).hexdigest()[:8]}")


def begin_together(place: Place) -> int:
    """Make the empty directory for the parts of all ranks; return its lock, which the caller closes."""
    _refuse_foreign(place)
    target = place.local
    assert target is not None
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    temporary = shared_temporary(target)
    shutil.rmtree(temporary, ignore_errors=True)  # of this job, before it was restarted
    temporary.mkdir()
    lock = os.open(temporary, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def write_together(temporary: Path, name: str) -> AbstractContextManager[Any]:
    return _synced(temporary / name)


def end_together(place: Place, lock: int) -> None:
    """Put the directory in place, once everything is in it."""
    target = place.local
    assert target is not None
    os.fsync(lock)
    replace_directory(shared_temporary(target), target)
    _sync_directory(target.parent)
    # The previous directory has been exchanged with it.
    shutil.rmtree(shared_temporary(target), ignore_errors=True)


@contextlib.contextmanager
def _writing_elsewhere(place: Place) -> Iterator[Open]:
    place.fs.makedirs(place.path, exist_ok=True)
    if place.has(MANIFEST):
        place.fs.rm_file(place.file(MANIFEST))
    try:
        yield lambda name: place.fs.open(place.file(name), "wb")
    except BaseException:
        with contextlib.suppress(Exception):
            place.fs.rm(place.path, recursive=True)
        raise


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[Any]:
    with path.open("xb", buffering=0) as handle:
        yield _Whole(handle)
        os.fsync(handle.fileno())


class _Whole:
    """A raw file whose write takes all bytes: the system may take fewer, most of all near a full disk."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def write(self, data: Any) -> None:
        left = memoryview(data)
        while left:
            left = left[self._handle.write(left) :]


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(target: Path) -> None:
    """Remove leftovers of killed writers: of this name, or of any step if this is one."""
    for path in target.parent.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        of = match["of"]
        if of == target.name or (step_of(of) is not None and step_of(target.name) is not None):
            _remove_unless_held(path)


def _remove_unless_held(path: Path) -> None:
    with contextlib.suppress(OSError):
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
        finally:
            os.close(lock)


def _refuse_foreign(place: Place) -> None:
    """Refuse to replace a directory that is no checkpoint: it may hold other files of the user."""
    if place.fs.isfile(place.path):
        raise FileExistsError(errno.EEXIST, "there is a file of that name")
    others = [name for name in place.names() if name != MANIFEST and not name.endswith(".safetensors")]
    if others:
        raise FileExistsError(
            errno.EEXIST,
            f"the directory holds what is no checkpoint's ({', '.join(others[:3])}), and would be replaced",
        )
