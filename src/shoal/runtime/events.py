"""Things worth writing down that happen deep inside: a sample skipped, a file read from its copy.

Whoever notices one tells it here and goes on. In a launched job it becomes a
line of events.jsonl; in a plain process, of this list, which forgets its oldest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

RESULTS_LET_GO = "results-let-go"
"""A worker keeps no longer what a replacement of another would need."""

_KEPT = 10_000

told: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_KEPT)
"""What this process has told, oldest first."""

_sink: Callable[[str, dict[str, Any]], None] | None = None


def tell(kind: str, /, **facts: Any) -> None:
    """Something happened; `facts` are fit for JSON. From any thread."""
    told.append((kind, facts))
    if _sink is not None:
        _sink(kind, facts)


def send_to(sink: Callable[[str, dict[str, Any]], None] | None) -> None:
    """Hand what is told from now on to `sink` as well. Called by the launcher."""
    global _sink
    _sink = sink
