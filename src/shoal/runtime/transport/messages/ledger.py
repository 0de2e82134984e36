"""The sentences about who trained what, and about workers that are too slow for their share."""

from __future__ import annotations

from shoal.runtime.transport.messages.message import Count, Message


class Noted(Message, frozen=True, tag="noted"):
    """Worker to supervisor, and on to the coordinator: "this belongs into the ledger", a fact as JSON.

    Never answered. The supervisor numbers them, from 1, so repeating one to
    the coordinator is safe; how many it has, it says in Watching.
    """

    rank: Count
    fact: str
    serial: Count = 0


class WorkerDrained(Message, frozen=True, tag="worker-drained"):
    """Coordinator to supervisor: "this worker gets no more leases but for a probe now and then". Said again to a new watcher."""

    rank: Count
    incarnation: Count
    samples_per_s: float
    others_samples_per_s: float
    slower_than: float


class WorkerReadmitted(Message, frozen=True, tag="worker-readmitted"):
    """Coordinator to supervisor: "this worker has recovered, and gets leases as the others do"."""

    rank: Count
    samples_per_s: float
    others_samples_per_s: float


LEDGER_MESSAGES: tuple[type[Message], ...] = (Noted, WorkerDrained, WorkerReadmitted)
"""All of them; `messages.py` adds them to what a decoder accepts."""
