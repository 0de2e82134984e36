"""Memory limit of a server: refusals in time, and pages given back after bulk transfers.

A server that refuses in time ends a job with a sentence; one that does not is
ended by the kernel without one, and its replacement after it. What malloc
keeps of copies long gone counts as held: of a table of 128 MB that was
written in blocks of 16 MB, 35 MB stayed for as long as the server lived.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from pathlib import Path

from shoal.runtime.memory import available_bytes
from shoal.runtime.transport.messages.client_server import (
    CopySlot,
    DeclareDense,
    DeclareTable,
    PullRows,
    PushDense,
    PushRows,
    ReadChunk,
    ReadRows,
    WriteChunk,
    WriteRows,
)
from shoal.runtime.transport.messages.message import Message

LOOK_EVERY_S = 0.02
"""At what this process holds: one file of the kernel's, 20 µs."""

LOOK_AROUND_EVERY_S = 0.2
"""At what all others have left, through every control group: 300 µs. In between, what this process takes is taken off."""

SHARE = 0.8
"""Of the memory that is available when a server starts."""

RESERVE_SHARE = 0.05
"""Of the same. Once less than this is available, whoever uses the rest, nothing is taken any more."""

GROWING = (DeclareTable, DeclareDense, PushRows, PushDense, WriteRows, WriteChunk, PullRows)
"""Requests of clients that may make a server hold more than before."""

BULKY = (ReadRows, ReadChunk, WriteRows, WriteChunk, CopySlot)
"""Requests that move whole tables, with copies on the way that no step needs again."""

GIVE_BACK_AFTER_S = 0.2
"""Without any of those: then they are over for now."""


class MemoryGuard:
    """Knows how much this process holds, and refuses what would make it more once that is too much."""

    def __init__(self, name: str, limit_bytes: int = 0) -> None:
        """`limit_bytes` 0: a share of what is available now."""
        self.name = name
        available = available_bytes()
        self.limit_bytes = limit_bytes or int(SHARE * available) + private_bytes()
        self.reserve_bytes = int(RESERVE_SHARE * available)
        self._held, self._looked_at = 0, float("-inf")
        self._available, self._looked_around_at = available, float("-inf")
        self._bulky_at: float | None = None

    def problem(self, nbytes: int = 0) -> str | None:
        """Why `nbytes` more cannot be taken, as a paragraph."""
        self._look()
        if self._held + nbytes > self.limit_bytes:
            return (
                f"{self.name} holds {self._held:,} bytes of its own and was to take {nbytes:,} more, where its limit is "
                f"{self.limit_bytes:,} (server_memory_bytes). Nothing of this request was done, and all that is held is "
                "whole; use more servers (--servers), smaller tables or optimizer state, or raise server_memory_bytes where "
                "the machine has room."
            )
        if self._available < self.reserve_bytes:
            return (
                f"{self.name} holds {self._held:,} bytes, and this machine has only {self._available:,} left, less than the "
                f"{self.reserve_bytes:,} that must stay free lest the system ends a process. Nothing of this request was "
                "done, and all that is held is whole; end what else uses the memory, use smaller tables, or a larger machine."
            )
        return None

    def refusal(self, message: Message) -> str | None:
        """Why this request is not to be heard, as a paragraph."""
        if isinstance(message, BULKY):
            self._bulky_at = time.monotonic()
        return self.problem() if isinstance(message, GROWING) else None

    def tick(self, now: float) -> None:
        """Time has passed: give back what nothing needs any more."""
        if self._bulky_at is not None and now - self._bulky_at >= GIVE_BACK_AFTER_S:
            self._bulky_at = None
            give_back()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < LOOK_EVERY_S:
            return
        held = private_bytes()
        if now - self._looked_around_at >= LOOK_AROUND_EVERY_S:
            self._available, self._looked_around_at = available_bytes(), now
        else:
            self._available -= held - self._held
        self._held, self._looked_at = held, now


def private_bytes() -> int:
    """Memory that only this process has: neither files nor what clients share with it."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def give_back() -> None:
    """Have malloc return the pages of what was freed, also of those between others that are in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others do so by themselves, or cannot
    if trim is not None:
        trim(0)
