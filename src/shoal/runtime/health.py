"""Health of one process, as reported by its own loop. `observe/health.py` serves it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from shoal.config.liveness import LivenessConfig

BEAT_EVERY_S = 1.0
"""Interval of a loop that has nothing else to do."""


@dataclass(slots=True)
class Health:
    """State written by one thread, a loop, and read by others. Every assignment is atomic, so nothing takes a lock."""

    role: str
    """coordinator, worker, server or host."""

    waits_for: str = "it is starting"
    """Why it cannot do its work yet; empty: it is ready."""

    processes: dict[str, int] = field(default_factory=dict)
    """Processes of the job under it: name -> pid."""

    figures: dict[str, float] = field(default_factory=dict)
    """Metrics without labels, by name."""

    stalled_after_s: float = LivenessConfig().loop_stalled_after_s

    started_at: float = field(default_factory=time.monotonic)
    _beat_at: float | None = None

    def beat(self, **figures: float) -> None:
        """Record a turn of the loop. Before the first, only the process itself shows that it is alive."""
        self._beat_at = time.monotonic()
        if figures:
            self.figures = figures

    def rests(self) -> None:
        """No loop runs for a while, for example between two heads."""
        self._beat_at = None

    def stalled_s(self, now: float) -> float:
        """Seconds since the last turn, where those are too many; else 0."""
        since_s = now - self._beat_at if self._beat_at is not None else 0.0
        return since_s if since_s >= self.stalled_after_s else 0.0
