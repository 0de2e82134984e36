"""What of a data set lies in RAM and what on disk, and why."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shoal.core import happenings
from shoal.core import job as jobs
from shoal.core.errors import ConfigError

NUM_AHEAD = 3
"""Pieces that are in memory at most: one in use, one whole, one being read."""

Where = Literal["auto", "ram", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Where a cache keeps what it holds."""

    where: Where = "auto"
    """"auto": in RAM what fits, on disk the rest. "ram", "disk": all of it."""

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
        """From what people write: a word, or one of these."""
        return cache if isinstance(cache, cls) else cls(where=cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How many of the blocks, from the first on, are in RAM."""

    num_in_ram: int
    ram_bytes: int
    disk_bytes: int
    why: str
    """For people, to stand behind "because"."""


def place(sizes: Sequence[int], config: CacheConfig, *, budget_bytes: int, num_sharers: int = 1) -> Placement:
    """Cut the blocks: as many as fit from the first on in RAM.

    A cut, and not the blocks in use: a shuffled epoch uses all of them alike,
    and whatever was moved in would only move others out.
    """
    total = sum(sizes)
    if config.where == "disk":
        return Placement(num_in_ram=0, ram_bytes=0, disk_bytes=total, why="cache='disk'")
    if config.where == "ram" and config.ram_bytes is None:
        return Placement(num_in_ram=len(sizes), ram_bytes=total, disk_bytes=0, why="cache='ram'")
    limit = budget_bytes if config.ram_bytes is None else config.ram_bytes
    each = f" for each of {num_sharers} workers" if num_sharers > 1 else ""
    whose = (
        f"ram_bytes is {amount(limit)}"
        if config.ram_bytes is not None
        else f"half of the free memory is {amount(limit)}{each}"
    )
    number, fitting = _fitting(sizes, limit)
    if number < len(sizes):  # what is read ahead from disk takes its part of the limit
        number, fitting = _fitting(sizes, limit - NUM_AHEAD * piece_bytes(limit))
    if config.where == "ram" and number < len(sizes):
        raise ConfigError(
            f"cache='ram' would need {amount(total)}, but {whose}. Nothing was read; raise ram_bytes, or let the rest lie on "
            "disk with cache='auto'."
        )
    return Placement(
        num_in_ram=number,
        ram_bytes=fitting,
        disk_bytes=total - fitting,
        why=f"it is {amount(total)} and {whose}",
    )


def _fitting(sizes: Sequence[int], limit: int) -> tuple[int, int]:
    """How many of the blocks, from the first on, stay within a limit; and their bytes."""
    total = 0
    for number, size in enumerate(sizes):
        if total + size > limit:
            return number, total
        total += size
    return len(sizes), total


def piece_bytes(limit: int) -> int:
    """How much is read ahead at a time by a cache with this limit."""
    return min(32 << 20, limit // 16)


def say_where(what: str, placed: Placement, directory: Any) -> None:
    """Write down which part of a cache lies where, and why; on the screen too, if a part is on disk."""
    if not placed.disk_bytes:
        where = "in RAM"
    elif not placed.ram_bytes:
        where = f"on disk ({directory})"
    else:
        where = f"{amount(placed.ram_bytes)} in RAM, {amount(placed.disk_bytes)} on disk ({directory})"
    happenings.tell(
        "cache placed",
        what=what,
        ram_bytes=placed.ram_bytes,
        disk_bytes=placed.disk_bytes,
        because=placed.why,
        directory=str(directory) if placed.disk_bytes else None,
    )
    if placed.disk_bytes and jobs.rank() == 0:
        print(f"shoal: the cache of {what} is {where}, because {placed.why}", file=sys.stderr)


def amount(num_bytes: float) -> str:
    """Bytes as people read them."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
