"""Cache placement: the memory budget of caches, the split between RAM and disk, and the figures of all caches.

Reports each decision with its reason. Holds no data.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil

from shoal.config import job as jobs
from shoal.errors import ConfigError
from shoal.runtime import events
from shoal.runtime.memory import available_bytes

NUM_AHEAD = 3
"""Most pieces in memory: one in use, one complete, one being read."""

Where = Literal["auto", "ram", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Place and limits of a cache."""

    where: Where = "auto"
    """"auto": as much as fits in RAM, the rest on disk. "ram", "disk": all of it."""

    ram_bytes: int | None = None
    """At most so much RAM; None for half of what is free when the cache is made."""

    directory: str | None = None
    """Where the disk part lies; None for the job's scratch directory."""

    def __post_init__(self) -> None:
        if self.where not in ("auto", "ram", "disk"):
            raise ConfigError(f"a cache is 'auto', 'ram' or 'disk', got {self.where!r}")
        if self.ram_bytes is not None and self.ram_bytes < 0:
            raise ConfigError(f"ram_bytes must be 0 or more, got {self.ram_bytes}")

    @classmethod
    def of(cls, cache: Any) -> CacheConfig:
        return cache if isinstance(cache, cls) else cls(where=cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlacement:
    """How many of the rows, from the first on, are in RAM."""

    num_ram_rows: int
    ram_bytes: int
    disk_bytes: int
    why: str
    """Reason, phrased to follow "because"."""


def place(
    num_rows: int, bytes_per_row: float, config: CacheConfig, *, budget_bytes: int, num_sharers: int = 1
) -> CachePlacement:
    """Place as many rows as fit, from the first on, in RAM.

    A fixed split, not the most recently used rows: a shuffled epoch uses all of them alike, and
    every row moved in would only evict another.
    """

    def cut(num_ram_rows: int, why: str) -> CachePlacement:
        total, in_ram = round(num_rows * bytes_per_row), round(num_ram_rows * bytes_per_row)
        return CachePlacement(num_ram_rows=num_ram_rows, ram_bytes=in_ram, disk_bytes=total - in_ram, why=why)

    if config.where == "disk":
        return cut(0, "cache='disk'")
    if config.where == "ram" and config.ram_bytes is None:
        return cut(num_rows, "cache='ram'")
    limit = budget_bytes if config.ram_bytes is None else config.ram_bytes
    each = f" for each of {num_sharers} workers" if num_sharers > 1 else ""
    whose = (
        f"ram_bytes is {amount(limit)}"
        if config.ram_bytes is not None
        else f"half of the free memory is {amount(limit)}{each}"
    )
    total = num_rows * bytes_per_row
    why = f"it is {amount(total)} and {whose}"
    if total <= limit:
        return cut(num_rows, why)
    if config.where == "ram":
        raise ConfigError(
            f"cache='ram' would need {amount(total)}, but {whose}. Nothing was read; raise ram_bytes, or let the rest lie on "
            "disk with cache='auto'."
        )
    # Prefetching from disk takes its part of the limit.
    return cut(int((limit - NUM_AHEAD * piece_bytes(limit)) / bytes_per_row), why)


def piece_bytes(limit: int) -> int:
    return min(32 << 20, limit // 16)


def say_where(what: str, placed: CachePlacement, directory: Any) -> None:
    """Log which part of a cache is where, and why; also on the screen, if a part is on disk."""
    if not placed.disk_bytes:
        where = "in RAM"
    elif not placed.ram_bytes:
        where = f"on disk ({directory})"
    else:
        where = f"{amount(placed.ram_bytes)} in RAM, {amount(placed.disk_bytes)} on disk ({directory})"
    events.emit(
        "cache placed",
        what=what,
        ram_bytes=placed.ram_bytes,
        disk_bytes=placed.disk_bytes,
        because=placed.why,
        directory=str(directory) if placed.disk_bytes else None,
    )
    if placed.disk_bytes and jobs.current().rank == 0:
        print(f"shoal: the cache of {what} is {where}, because {placed.why}", file=sys.stderr)


def amount(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


SHARE = 0.5
"""Share of the free memory that caches take: the rest is for the model, the user and the kernel."""


class Cache(Protocol):
    """A store or cache of this process."""

    name: str
    granted_bytes: int
    """RAM granted to it."""

    def filled_bytes(self) -> int:
        """How much of that is in use, and so not free any more."""

    def figures(self) -> dict[str, Any]:
        """Hit rates and bytes moved, fit for JSON."""


_caches: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()


def register(cache: Cache) -> None:
    """Record its granted memory, and include its figures, for as long as it lives."""
    with _lock:
        _caches.add(cache)


def _living() -> list[Any]:
    with _lock:
        return sorted(_caches, key=lambda cache: str(cache.name))


def for_caches(*, num_sharers: int = 1) -> int:
    """Bytes that one more cache may take: a share of what is free and not granted, divided by the
    number of equal requests.
    """
    promised = sum(max(0, each.granted_bytes - each.filled_bytes()) for each in _living())
    return max(0, int((available_bytes() - promised) * SHARE) // num_sharers)


def free_disk_bytes(directory: str | os.PathLike[str]) -> int:
    """Free bytes of the file system that a directory is, or would be, on."""
    path = Path(directory).absolute()
    while not path.exists():
        path = path.parent
    return int(psutil.disk_usage(str(path)).free)


def emit_figures(**about: Any) -> None:
    """Write hit rates and bytes moved so far to the events, where there are any stores or caches."""
    stores = stats()
    if stores:
        events.emit("memory figures", stores=stores, **about)


def stats() -> list[dict[str, Any]]:
    """Hit rates and bytes moved of every store and cache of this process.

    for store in shoal.memory.stats():
        print(store["name"], store["ram"]["hit_rate"])
    """
    return [{"name": cache.name, **cache.figures()} for cache in _living()]


def hit_rate(num_hits: int, num_misses: int) -> float:
    total = num_hits + num_misses
    return round(num_hits / total, 4) if total else 1.0
