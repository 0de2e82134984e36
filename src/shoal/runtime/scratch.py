"""The scratch directory of a job: files that live as long as it runs.

All workers of a job share it. The supervisor creates it empty and removes it with the job, however
that ends; a plain process removes its own at exit, and leftovers of killed processes when it
creates it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from shoal import system
from shoal.config import job as jobs
from shoal.runtime import own_files

NAME = "scratch"
"""Name of the folder in a run directory."""

_PREFIX = "shoal-scratch-"
_OWNER = "owner"  # a file that says whose directory it is
_OWNER_BYTES = 64

_own: tuple[int, Path] | None = None


def directory(*parts: str) -> Path:
    """The scratch directory, or a folder in it, made if it is not there."""
    path = _root().joinpath(*parts)
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def _root() -> Path:
    global _own
    job = jobs.current()
    if job.launched:
        return job.run_dir / NAME
    if _own is None:
        place = Path(tempfile.mkdtemp(prefix=_PREFIX))
        (place / _OWNER).write_text(f"{os.getpid()} {system.start_of(os.getpid())}")
        _own = os.getpid(), place
        atexit.register(_remove)
        _sweep(place.parent)
    return _own[1]


def _remove() -> None:
    # A forked child inherits the handler, not the directory.
    if _own is not None and _own[0] == os.getpid():
        shutil.rmtree(_own[1], ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove directories of this user's killed processes."""
    for place in parent.glob(f"{_PREFIX}*"):
        try:
            owner = _owner_of(place)
        except (OSError, ValueError):
            continue  # another user's, or being created or removed just now
        if system.start_of(owner[0]) != owner[1]:
            shutil.rmtree(place, ignore_errors=True)


def _owner_of(place: Path) -> tuple[int, str]:
    # Any user may put a directory of this name here, with any content.
    directory = own_files.open_directory(place)
    try:
        pid, started = own_files.read(_OWNER, dir_fd=directory, max_bytes=_OWNER_BYTES).decode().split()
    finally:
        os.close(directory)
    return int(pid), started
