"""Atomic replacement of a directory: a reader sees the old one or the new one, complete."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from pathlib import Path


def temporary_name(target: Path) -> Path:
    """Name beside `target` under which its replacement is written; identifies leftovers of a killed writer."""
    return target.parent / f".{target.name}.tmp-{secrets.token_hex(4)}"


def replace_directory(new: Path, target: Path) -> None:
    """Put `new` in the place of `target`; the previous directory may remain as `new`."""
    try:
        os.rename(new, target)  # a new name, or over an empty directory
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange(new, target):
            old = temporary_name(target)
            os.rename(target, old)
            os.rename(new, target)
            shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; False if the filesystem cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, exchange = -100, 2
    return (
        renameat2 is not None
        and renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0
    )
