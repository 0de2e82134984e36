"""Progress of a server: the last seq applied per slot and stream, and the clocks of the ranks.

A seq changes in the same turn as the parameters of its slot and is copied with them; it alone makes
a repeated push idempotent. Clocks count the batches of relaxed strategies: a rank's clock advances
when this server gets its StepEnd for the first time from that incarnation, whether or not the batch
counted. A replica sets its primary's clocks aside until it takes over.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.cluster.coordinator.slot_map import NUM_SLOTS

Slots = npt.NDArray[np.bool_]  # one flag per slot

Vector = npt.NDArray[np.float64]


def no_slots() -> Slots:
    return np.zeros(NUM_SLOTS, dtype=np.bool_)


def some_slots(slots: list[int]) -> Slots:
    mask = no_slots()
    mask[slots] = True
    return mask


class AppliedSeqs:
    """Applied seqs of all slots that a server holds, as primary or replica."""

    def __init__(self) -> None:
        # Steps committed, by slot; strategies whose steps have all ranks in them.
        self.version = np.zeros(NUM_SLOTS, dtype=np.int64)
        self._steps: dict[int, npt.NDArray[np.int64]] = {}
        self.done_below = 0  # streams below this are over: nothing of them counts any more
        self._streams: dict[int, npt.NDArray[np.int64]] = {}

    def steps(self, counter: int) -> npt.NDArray[np.int64]:
        """Updates applied, by slot: what a rule that counts its steps goes by. One counter per model: see numbering.py."""
        return self._steps.setdefault(counter, np.zeros(NUM_SLOTS, dtype=np.int64))

    def steps_of_slot(self, slot: int) -> dict[int, int]:
        return {counter: int(steps[slot]) for counter, steps in sorted(self._steps.items()) if steps[slot]}

    def set_steps(self, slot: int, steps: dict[int, int]) -> None:
        for counter in self._steps.keys() | steps.keys():
            self.steps(counter)[slot] = steps.get(counter, 0)

    def missing(self, stream: int, seq: int, num_batches: int = 1) -> Slots:
        """Slots in which nothing of this push counts yet: batches seq - num_batches + 1 to seq."""
        if stream < self.done_below:
            return no_slots()
        applied = self._streams.get(stream)
        return applied <= seq - max(num_batches, 1) if applied is not None else np.full(NUM_SLOTS, seq > 0)

    def count(self, stream: int, seq: int, slots: Slots) -> None:
        if stream < self.done_below:
            return
        applied = self._streams.get(stream)
        if applied is None:
            applied = self._streams[stream] = np.zeros(NUM_SLOTS, dtype=np.int64)
        np.maximum(applied, seq, out=applied, where=slots)

    def forget_below(self, stream: int) -> None:
        if stream > self.done_below:
            self.done_below = stream
            for each in [each for each in self._streams if each < stream]:
                del self._streams[each]

    def drop(self, slots: Slots) -> None:
        self.version[slots] = 0
        for steps in self._steps.values():
            steps[slots] = 0
        for applied in self._streams.values():
            applied[slots] = 0

    def of_slot(self, slot: int) -> list[tuple[int, int]]:
        return [(stream, int(self._streams[stream][slot])) for stream in sorted(self._streams)]

    def set_slot(self, slot: int, seqs: list[tuple[int, int]]) -> None:
        for each in self._streams.values():
            each[slot] = 0
        one = some_slots([slot])
        for stream, seq in seqs:
            self.count(stream, seq, one)

    def triples(self, slots: Slots) -> npt.NDArray[np.int64]:
        """(slot, stream, seq) of these slots, for a checkpoint; one more with seq 0 tells the stream below which all are over."""
        held = np.flatnonzero(slots)
        # Applied seqs of finished streams are dropped: a resumed job must not run them again.
        over = [(int(held[0]), self.done_below, 0)] if len(held) and self.done_below else []
        found = over + [
            (slot, stream, seq) for slot in held.tolist() for stream, seq in self.of_slot(slot) if seq
        ]
        return np.array(found, dtype=np.int64).reshape(-1, 3)


STOP, CHECKPOINT, LEAVE = 1, 2, 4

ClockState: TypeAlias = list[tuple[int, int, dict[int, int]]]
"""(rank, clock, last seq counted by stream), as it travels between servers."""

MAX_STREAMS = 8  # streams of which a rank's last seq is remembered; it works on one or two leases at a time


class Clocks:
    """Clocks of all ranks on this server. A dead rank leaves the minimum; its replacement enters at it."""

    def __init__(self) -> None:
        self._clocks: dict[int, int] = {}
        self._counted: dict[int, dict[int, int]] = {}
        self._absent: set[int] = set()
        self._heard: dict[int, tuple[int, dict[int, int]]] = {}
        self._control_flags: dict[int, int] = {}
        self._sticky = 0
        self._call = 0

    def expect(self, num_workers: int) -> None:
        for rank in range(num_workers):
            self._clocks.setdefault(rank, 0)

    def finished(self, rank: int, stream: int, seq: int, num_batches: int = 1) -> None:
        """Record batches pushed by the rank. A repeat is safe."""
        self.returned(rank)
        counted = self._counted.setdefault(rank, {})
        if seq > counted.get(stream, 0):
            counted[stream] = seq
            self._clocks[rank] = self._clocks.get(rank, 0) + num_batches
            while len(counted) > MAX_STREAMS:
                del counted[next(iter(counted))]

    def finished_by_another(self, rank: int, stream: int, seq: int, num_batches: int) -> None:
        """The same within another worker's push. A rank that died or rests meanwhile stays out."""
        if rank in self._clocks and rank not in self._absent:
            self.finished(rank, stream, seq, num_batches)

    def begin_call(self, call: int) -> None:
        """A push of this call came: control flags of earlier calls are void."""
        if call > self._call:
            self._call, self._sticky = call, 0
            self._control_flags.clear()

    def set_control_flags(self, rank: int, vector: Vector, *, call: int = 0) -> None:
        """Record the control flags of a rank's vector: stop, checkpoint, leave. Those of an earlier call are void."""
        self.begin_call(call)
        bits = sum(
            bit for bit, value in zip((STOP, CHECKPOINT, LEAVE), vector[1:4], strict=False) if value > 0
        )
        self._control_flags[rank] = bits
        self._sticky |= bits & (STOP | LEAVE)

    @property
    def control_flags(self) -> int:
        """Flags of all workers; stop and leave persist, a checkpoint until its rank clears it."""
        flags = self._sticky
        for bits in self._control_flags.values():
            flags |= bits
        return flags

    def clock(self, rank: int) -> int:
        return self._clocks.get(rank, 0)

    def slowest(self) -> int:
        """Smallest clock of the present ranks; without any, the largest so far."""
        there = [clock for rank, clock in self._clocks.items() if rank not in self._absent]
        return min(there) if there else max(self._clocks.values(), default=0)

    def have_reached(self, clock: int, *, besides: int | None) -> bool:
        """True once all present ranks have come so far. A rank does not wait for itself."""
        return all(
            mine >= clock
            for rank, mine in self._clocks.items()
            if rank not in self._absent and rank != besides
        )

    def behind(self, clock: int) -> list[int]:
        return [rank for rank, mine in self._clocks.items() if mine < clock and rank not in self._absent]

    def at_least(self, rank: int, clock: int) -> None:
        """The rank reports its clock: this server may be new, and not have counted all of it."""
        if rank in self._clocks:
            self.returned(rank)
            self._clocks[rank] = max(self._clocks[rank], clock)

    def left(self, rank: int) -> None:
        """Dead, unreachable, or idle: nothing waits for it."""
        if rank in self._clocks:
            self._absent.add(rank)

    def returned(self, rank: int) -> None:
        """It is back: at its clock, or at the slowest one's, which did not wait for it."""
        if rank in self._absent:
            self._clocks[rank] = max(self._clocks[rank], self.slowest())
            self._absent.discard(rank)

    def entered(self, rank: int) -> None:
        """A replacement: it begins with the slowest."""
        self._absent.add(rank)
        self._clocks[rank] = self.slowest()
        self._counted.pop(rank, None)
        self._heard.pop(rank, None)
        self._control_flags.pop(rank, None)
        self._absent.discard(rank)

    # ---- between servers ------------------------------------------------------------------------

    def state(self, rank: int | None = None) -> ClockState:
        ranks = sorted(self._clocks) if rank is None else [rank]
        return [(each, self._clocks.get(each, 0), dict(self._counted.get(each, {}))) for each in ranks]

    def heard(self, state: ClockState) -> None:
        """Set aside another server's clocks, for a failover."""
        for rank, clock, counted in state:
            old, old_counted = self._heard.get(rank, (0, {}))
            self._heard[rank] = (max(old, clock), _newest(old_counted, counted))

    def take_over(self) -> None:
        """Take over the clocks of a lost server, with the slots that this one got of it."""
        for rank, (clock, counted) in self._heard.items():
            self._clocks[rank] = max(self._clocks.get(rank, 0), clock)
            self._counted[rank] = _newest(self._counted.get(rank, {}), counted)
        self._heard.clear()


def _newest(old: dict[int, int], new: dict[int, int]) -> dict[int, int]:
    merged = old | {stream: max(seq, old.get(stream, 0)) for stream, seq in new.items()}
    return dict(list(merged.items())[-MAX_STREAMS:])
