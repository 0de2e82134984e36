"""Health of one process, as its own loop tells it. Nothing here listens: `observe/health.py` answers who asks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

BEAT_EVERY_S = 1.0
"""From one turn of a loop to the next, where nothing else happens."""

STALLED_AFTER_S = 30.0
"""From a loop's last turn to the verdict that it is stuck: far longer than any turn takes on a busy machine."""


@dataclass(slots=True)
class Health:
    """State that one thread, a loop, tells and others read. Every assignment is atomic, so nothing takes a lock."""

    role: str
    """coordinator, worker, server or host."""

    waits_for: str = "it is starting"
    """Why it cannot do its work yet; empty: it is ready."""

    processes: dict[str, int] = field(default_factory=dict)
    """Processes of the job under it: name -> pid."""

    figures: dict[str, float] = field(default_factory=dict)
    """Metrics without labels, by name."""

    started_at: float = field(default_factory=time.monotonic)
    _beat_at: float | None = None

    def beat(self, **figures: float) -> None:
        """The loop turned, and so it stands. Until the first of them only the process itself shows that it lives."""
        self._beat_at = time.monotonic()
        if figures:
            self.figures = figures

    def rests(self) -> None:
        """No loop runs for a while, as between two heads."""
        self._beat_at = None

    def stalled_s(self, now: float) -> float:
        """Seconds since the last turn, where those are too many; else 0."""
        since_s = now - self._beat_at if self._beat_at is not None else 0.0
        return since_s if since_s >= STALLED_AFTER_S else 0.0
