"""What the coordinator's pure parts ask of whoever carries it out, besides answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from shoal.cluster.coordinator.journal_entries import Entry
from shoal.cluster.coordinator.store_table import Answer
from shoal.runtime.transport.messages.message import Message


@dataclass(frozen=True, slots=True)
class Remember:
    """Write this down before anything is answered."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Drop:
    """Close this client's connection; `problem` says what it did wrong, if anything."""

    client: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class TellWatchers:
    """Say this to the supervisor, as soon as it watches."""

    message: Message


Action: TypeAlias = Answer | Remember | Drop
"""What comes out of `coordination.py`."""
