"""A directory for what a job keeps on disk while it runs, and nobody wants afterwards.

All workers of a job share it. The supervisor makes it empty and takes it away
with the job, however that ends; a plain process removes its own at exit.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from shoal.core import job as jobs

NAME = "scratch"
"""Of the folder in a run directory."""

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
        _own = os.getpid(), Path(tempfile.mkdtemp(prefix="shoal-"))
        atexit.register(_remove)
    return _own[1]


def _remove() -> None:
    # A forked child inherits the handler, not the directory.
    if _own is not None and _own[0] == os.getpid():
        shutil.rmtree(_own[1], ignore_errors=True)
