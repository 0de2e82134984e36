"""Atomic writes of a directory of files, on a local disk and on remote storage.

On a local disk it is written under a temporary name beside its place, synced
and renamed; a replaced one changes places with it in one system call. Elsewhere
nothing can be renamed at once, so the manifest is written last and taken away
first. Knows nothing of what is in the files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from shoal.train.checkpoint import manifest

Open = Callable[[str], AbstractContextManager[Any]]
"""Opens a new file of the directory by its name."""

_STEP = re.compile(r"step-(\d{9,})")
_TEMPORARY = re.compile(r"\.(?P<of>.+)\.tmp-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Place:
    """A directory by its URL: which filesystem, and where on it."""

    url: str
    fs: Any
    path: str

    @classmethod
    def at(cls, url: str | os.PathLike[str]) -> Place:
        """The place of a local path or an fsspec URL."""
        text = os.fspath(url)
        fs, path = fsspec.core.url_to_fs(text)
        return cls(text, fs, path)

    @property
    def local(self) -> Path | None:
        """The path, where it is a local one."""
        return Path(self.path) if isinstance(self.fs, LocalFileSystem) else None

    def child(self, name: str) -> Place:
        return Place(f"{self.url.rstrip('/')}/{name}", self.fs, f"{self.path.rstrip('/')}/{name}")

    def names(self) -> list[str]:
        """Names in the directory; none when it is not there."""
        self.fs.invalidate_cache()
        try:
            return sorted(
                entry.rstrip("/").rpartition("/")[2] for entry in self.fs.ls(self.path, detail=False)
            )
        except FileNotFoundError:
            return []

    def file(self, name: str) -> str:
        """Path of a file of the directory, for `fs`."""
        return f"{self.path.rstrip('/')}/{name}"

    def has(self, name: str) -> bool:
        return bool(self.fs.isfile(self.file(name)))

    def open(self, name: str) -> Any:
        """A file of the directory, to be read."""
        return self.fs.open(self.file(name), "rb")


def step_name(step: int) -> str:
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step of such a name, None for any other."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


@contextlib.contextmanager
def writing(place: Place) -> Iterator[Open]:
    """Within it files are written; leaving it without an exception puts the directory in place."""
    _refuse_foreign(place)
    local = place.local
    with _writing_local(local) if local is not None else _writing_elsewhere(place) as open_file:
        yield open_file


def remove(place: Place) -> None:
    """Remove a checkpoint, such that no moment shows half of one."""
    if place.local is not None:
        temporary = _temporary_name(place.local)
        os.rename(place.local, temporary)
        shutil.rmtree(temporary)
    else:
        if place.has(manifest.NAME):
            place.fs.rm_file(place.file(manifest.NAME))
        place.fs.rm(place.path, recursive=True)


@contextlib.contextmanager
def _writing_local(target: Path) -> Iterator[Open]:
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    temporary = _temporary_name(target)
    temporary.mkdir()
    # Held until the end: whoever finds the directory and gets this lock knows that its writer is gone.
    lock = os.open(temporary, os.O_RDONLY)
    try:
        with contextlib.suppress(
            OSError
        ):  # some network filesystems lock no directories; then nobody sweeps, either
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lambda name: _synced(temporary / name)
        os.fsync(lock)
        _put(temporary, target)
        _sync_directory(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def _writing_elsewhere(place: Place) -> Iterator[Open]:
    place.fs.makedirs(place.path, exist_ok=True)
    if place.has(manifest.NAME):
        place.fs.rm_file(place.file(manifest.NAME))
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
    """A raw file whose write takes all it is given: the system may take less, most of all near a full disk."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def write(self, data: Any) -> None:
        left = memoryview(data)
        while left:
            left = left[self._handle.write(left) :]


def _put(temporary: Path, target: Path) -> None:
    try:
        os.rename(temporary, target)  # a new name, or over an empty directory
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange(temporary, target):
            old = _temporary_name(target)
            os.rename(target, old)
            os.rename(temporary, target)
            shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places at once; False where the filesystem cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, exchange = -100, 2
    return (
        renameat2 is not None
        and renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0
    )


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _temporary_name(target: Path) -> Path:
    return target.parent / f".{target.name}.tmp-{secrets.token_hex(4)}"


def _sweep(target: Path) -> None:
    """Remove what writers that were killed left behind: of this name, or of any step when this is one."""
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
    """A checkpoint replaces a checkpoint, never a directory in which somebody keeps other things."""
    if place.fs.isfile(place.path):
        raise FileExistsError(errno.EEXIST, "there is a file of that name")
    others = [name for name in place.names() if name != manifest.NAME and not name.endswith(".safetensors")]
    if others:
        raise FileExistsError(
            errno.EEXIST,
            f"the directory holds what is no checkpoint's ({', '.join(others[:3])}), and would be replaced",
        )
