"""How much memory this process may still take: what the machine has free, within the limits of its control groups."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Memory that this process may still take without anybody being swapped out or killed."""
    free = int(psutil.virtual_memory().available)
    return max(0, min([free, *_cgroup_rooms()]))


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
    return (
        most - now + sum(int(figures.get(each, 0)) for each in (cached, cached.replace("inactive", "active")))
    )
