"""The receiving side of replication: records of other primaries, applied in order, each once.

Pure. The sending side is in replication.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.ps.server.actions import Action, Frame, Tell
from shoal.ps.server.applied_seqs import Slots, no_slots
from shoal.ps.server.contents import Refusal
from shoal.ps.server.replication import FollowingRecord, SlotRecord, decode, first_number, from_bits
from shoal.ps.server.state import ServerState
from shoal.runtime.transport.messages.server_coordinator import ServerView, SlotsFilled


class Replica:
    """Slots whose primary is another server, and those that are being filled."""

    def __init__(self, number: int) -> None:
        self._number, self._view = number, 0
        self._last: dict[int, int] = {}  # server -> last number applied of it in this view
        self._joining: Slots = no_slots()
        self._filled: Slots = no_slots()
        self._has_told = False
        self.primary_of: list[int] = [-1] * NUM_SLOTS

    def view(self, view: ServerView, state: ServerState) -> None:
        """Hold the slots of a new view, and no others."""
        self._view = view.view
        self._last.clear()
        self.primary_of = [holders[0] if holders else -1 for holders in view.holders]
        holds = np.array([self._number in holders for holders in view.holders], dtype=np.bool_)
        self._joining = no_slots()
        for slot, servers in view.joining.items():
            if self._number in servers and not holds[slot]:
                self._joining[slot] = True
        # What it is to be given it may have already; whether that is still right only the primary knows.
        self._filled, self._has_told = no_slots(), False
        kept = holds | self._joining
        state.drop(state.contents.held & ~kept)
        state.contents.hold(kept)

    def apply(
        self, source: int, number: int, record: bytes, frames: Sequence[Frame], state: ServerState
    ) -> int:
        """Apply one record of a primary; the number up to which all of it is here."""
        if self._is_next(source, number):
            match found := decode(record):
                case FollowingRecord(slots):
                    self._filled |= from_bits(slots) & self._joining
                case _:
                    state.follow(found, frames, np.array(self.primary_of) == source)
            self._last[source] = number
        return self._last[source]

    def take_slot(
        self, source: int, number: int, slot: int, record: bytes, frames: Sequence[Frame], state: ServerState
    ) -> int:
        """Take all of a slot from its primary; the number up to which all of it is here."""
        if self._is_next(source, number):
            found = decode(record)
            if not isinstance(found, SlotRecord) or self.primary_of[slot] != source:
                raise Refusal(
                    f"slot {slot} is copied by its primary {self.primary_of[slot]}, not by {source}"
                )
            state.take_slot(slot, found, frames)
            self._filled[slot] |= self._joining[slot]
            self._last[source] = number
        return self._last[source]

    def tell_filled(self) -> list[Action]:
        """Tell the coordinator, once per view, when all joining slots are here."""
        if self._has_told or not self._joining.any() or (self._joining & ~self._filled).any():
            return []
        self._has_told = True
        return [Tell(SlotsFilled(self._view, np.flatnonzero(self._joining).tolist()))]

    def _is_next(self, source: int, number: int) -> bool:
        last = self._last.get(source, first_number(self._view) - 1)
        if number > last + 1:
            raise Refusal(f"server-{source} is at {number}, but {last + 1} never came")
        return number == last + 1
