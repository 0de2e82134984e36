"""How much memory and disk there is for caches, on this machine and within this process's bounds."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, Protocol

import psutil

from shoal.runtime.free_memory import available_bytes

SHARE = 0.5
"""Of the memory that is free, what caches take: the rest is the model's, the user's and the kernel's."""


class Borrower(Protocol):
    """Whoever was granted memory."""

    granted_bytes: int

    def filled_bytes(self) -> int:
        """How much of it is in use, and so not free any more."""


_borrowers: weakref.WeakSet[Any] = weakref.WeakSet()


def for_caches(*, num_sharers: int = 1) -> int:
    """Bytes that one more cache may take: a share of what is free and not promised, divided by those who ask alike."""
    promised = sum(max(0, each.granted_bytes - each.filled_bytes()) for each in list(_borrowers))
    return max(0, int((available_bytes() - promised) * SHARE) // num_sharers)


def grant(borrower: Borrower) -> None:
    """Remember a promise, for as long as its borrower lives."""
    _borrowers.add(borrower)


def free_disk_bytes(directory: str | os.PathLike[str]) -> int:
    """Of the file system that a directory is, or would be, on."""
    path = Path(directory).absolute()
    while not path.exists():
        path = path.parent
    return int(psutil.disk_usage(str(path)).free)
