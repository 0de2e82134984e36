"""Deduplication of pushes: per slot and stream the last seq that was applied, and the number of updates.

A seq changes in the same turn as the parameters of its slot and travels with
them; it alone makes a repeated push idempotent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shoal.cluster.coordinator.slot_map import NUM_SLOTS

Slots = npt.NDArray[np.bool_]
"""One flag per slot."""


def no_slots() -> Slots:
    """None of them."""
    return np.zeros(NUM_SLOTS, dtype=np.bool_)


def some_slots(slots: list[int]) -> Slots:
    """These."""
    mask = no_slots()
    mask[slots] = True
    return mask


class AppliedSeqs:
    """Applied seqs of all slots that a server holds, as primary or replica."""

    def __init__(self) -> None:
        self.version = np.zeros(NUM_SLOTS, dtype=np.int64)
        """Steps committed, by slot; strategies whose steps have all ranks in them."""
        self._steps: dict[int, npt.NDArray[np.int64]] = {}
        self.done_below = 0
        """Streams below this are over: nothing of them counts any more."""
        self._streams: dict[int, npt.NDArray[np.int64]] = {}

    @property
    def num_streams(self) -> int:
        """Streams of which something is remembered."""
        return len(self._streams)

    def steps(self, counter: int) -> npt.NDArray[np.int64]:
        """Updates applied, by slot: what a rule that counts its steps goes by. One counter per model: see numbering.py."""
        return self._steps.setdefault(counter, np.zeros(NUM_SLOTS, dtype=np.int64))

    def steps_of_slot(self, slot: int) -> dict[int, int]:
        """The same of one slot, by counter."""
        return {counter: int(steps[slot]) for counter, steps in sorted(self._steps.items()) if steps[slot]}

    def set_steps(self, slot: int, steps: dict[int, int]) -> None:
        """It came from another server, with these."""
        for counter in self._steps.keys() | steps.keys():
            self.steps(counter)[slot] = steps.get(counter, 0)

    def missing(self, stream: int, seq: int) -> Slots:
        """The slots in which this push does not count yet."""
        if stream < self.done_below:
            return no_slots()
        marks = self._streams.get(stream)
        return marks < seq if marks is not None else np.full(NUM_SLOTS, seq > 0)

    def count(self, stream: int, seq: int, slots: Slots) -> None:
        """The push counts in these slots now."""
        if stream < self.done_below:
            return
        marks = self._streams.get(stream)
        if marks is None:
            marks = self._streams[stream] = np.zeros(NUM_SLOTS, dtype=np.int64)
        np.maximum(marks, seq, out=marks, where=slots)

    def forget_below(self, stream: int) -> None:
        """All streams below are over."""
        if stream > self.done_below:
            self.done_below = stream
            for each in [each for each in self._streams if each < stream]:
                del self._streams[each]

    def forget_streams(self) -> None:
        """Forget all streams: their pushes are not here any more."""
        self._streams.clear()

    def drop(self, slots: Slots) -> None:
        """These slots are held no more."""
        self.version[slots] = 0
        for steps in self._steps.values():
            steps[slots] = 0
        for marks in self._streams.values():
            marks[slots] = 0

    def of_slot(self, slot: int) -> list[tuple[int, int]]:
        """(stream, seq) of everything that counts in it."""
        return [(stream, int(self._streams[stream][slot])) for stream in sorted(self._streams)]

    def set_slot(self, slot: int, marks: list[tuple[int, int]]) -> None:
        """It came from another server, with these."""
        for each in self._streams.values():
            each[slot] = 0
        one = some_slots([slot])
        for stream, seq in marks:
            self.count(stream, seq, one)

    def triples(self, slots: Slots) -> npt.NDArray[np.int64]:
        """(slot, stream, seq) of these slots, for a checkpoint; one more with seq 0 tells the stream below which all are over."""
        held = np.flatnonzero(slots)
        # Marks of those are forgotten: whoever goes on from the checkpoint must not run them again.
        over = [(int(held[0]), self.done_below, 0)] if len(held) and self.done_below else []
        found = over + [
            (slot, stream, seq) for slot in held.tolist() for stream, seq in self.of_slot(slot) if seq
        ]
        return np.array(found, dtype=np.int64).reshape(-1, 3)
