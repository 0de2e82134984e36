"""How much memory and disk there is for caches, on this machine and within this process's bounds."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, Protocol

import psutil

SHARE = 0.5
"""Of the memory that is free, what caches take: the rest is the model's, the user's and the kernel's."""

_CGROUPS = Path("/sys/fs/cgroup")


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


def available_bytes() -> int:
    """Memory that this process may still take without anybody being swapped out or killed."""
    free = int(psutil.virtual_memory().available)
    return max(0, min([free, *_cgroup_rooms()]))


def free_disk_bytes(directory: str | os.PathLike[str]) -> int:
    """Of the file system that a directory is, or would be, on."""
    path = Path(directory).absolute()
    while not path.exists():
        path = path.parent
    return int(psutil.disk_usage(str(path)).free)


def _cgroup_rooms() -> list[int]:
    """What the limits of this process's control groups leave, of both versions, from its own up to the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used, cached = _CGROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, used = _CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            room = _room(folder, limit, used, cached)
            rooms += [] if room is None else [room]
            if folder == base:
                break
    return rooms


def _room(group: Path, limit: str, used: str, cached: str) -> int | None:
    try:
        most = int((group / limit).read_text())  # "max": no limit, and no int
        now = int((group / used).read_text())
        figures = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # The kernel's cache of files is counted as used, and given back when somebody wants the memory.
    return most - now + int(figures.get(cached, 0))
