"""The disk of the coordinator's host: a journal that keeps what was synced, and the newest checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.cluster.coordinator.journal_entries import Entry, JournalState


class Disk:
    """Outlives every process. A write is a transaction: after a crash in its midst nothing of it is there."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.checkpoint: dict[str, Any] | None = None
        self.num_writes = 0

    def write(self, entries: Sequence[Entry]) -> None:
        self.entries += entries
        self.num_writes += 1

    def read(self) -> JournalState | None:
        """What the next coordinator begins with; None where there is nothing to go on from."""
        memory = JournalState()
        for entry in self.entries:
            memory.apply(entry)
        return memory if self.entries else None
