"""Events of a process for events.jsonl: a sample skipped, a file read from its copy.

A component emits an event here and continues. In a launched job the sink sends it to the
supervisor; a plain process keeps the newest in `emitted`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

RESULTS_LET_GO = "results-let-go"
"""A worker no longer keeps the results that a replacement of another would need."""

OWN_LOOP = "own-loop"
"""A script trains in a loop of its own, of which shoal saves nothing unless it calls shoal.checkpoint."""

LOOP_SAVES = "own-loop-saves"
"""Such a loop calls shoal.checkpoint; `resumes`: and shoal.resume before it."""

OWN_PROCESS_GROUP = "own-process-group"
"""The script forms a process group of its own, as under torchrun."""

_MAX_KEPT = 10_000

emitted: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_MAX_KEPT)
"""Events of this process, oldest first."""

_sink: Callable[[str, dict[str, Any]], None] | None = None


def emit(kind: str, /, **facts: Any) -> None:
    """Record an event; `facts` are fit for JSON. From any thread."""
    emitted.append((kind, facts))
    if _sink is not None:
        _sink(kind, facts)


def set_sink(sink: Callable[[str, dict[str, Any]], None] | None) -> None:
    """Pass events from now on to `sink` as well. Called by the launcher and in reader processes."""
    global _sink
    _sink = sink
