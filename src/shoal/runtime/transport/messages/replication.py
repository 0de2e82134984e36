"""What servers of the parameter server say to each other, and to the coordinator, about copies of slots."""

from __future__ import annotations

from shoal.runtime.transport.messages.message import Count, Message


class Replicate(Message, frozen=True, tag="ps-replicate"):
    """Primary to replica: one update of its slots, after aggregation, in the primary's order. Answered by Replicated.

    The replica runs the same rule on it. `record` describes the frames, see
    ps/server/records.py. Repeating it is safe within one connection: `number` counts.
    """

    view: Count
    number: Count
    record: bytes


class Replicated(Message, frozen=True, tag="ps-replicated"):
    """Replica to primary: "I have all up to this number"."""

    number: Count


class CopySlot(Message, frozen=True, tag="ps-copy-slot"):
    """Primary to a joining replica: all of one slot as it is now; later updates of it follow. Answered by Replicated."""

    view: Count
    number: Count
    slot: Count
    record: bytes


class SlotsFilled(Message, frozen=True, tag="slots-filled"):
    """Server to coordinator: "I have these slots and follow their updates"."""

    view: Count
    slots: list[Count]


class StepLost(Message, frozen=True, tag="step-lost"):
    """Server to coordinator: "a step counts elsewhere and never will here": only a checkpoint brings all slots together.

    What `rank` contributed to it is gone with its worker and with the server that had it. Said again until the view is over.
    """

    view: Count
    rank: Count


REPLICATION_MESSAGES: tuple[type[Message], ...] = (Replicate, Replicated, CopySlot, SlotsFilled, StepLost)
"""All of them; `ps_messages.py` adds them to its own."""
