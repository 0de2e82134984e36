"""Clocks of the ranks in relaxed strategies: batches finished, and who waits for whom.

A rank counts a batch when this server hears its StepEnd for the first time
from that incarnation, whether or not the batch counted: a lease may be run
again. Servers hear the same StepEnds, each in its own time; what a replica
hears of its primary's clocks is set aside until it takes over.
"""

from __future__ import annotations

from typing import TypeAlias

from shoal.ps.server.contents import Vector

STOP, CHECKPOINT, LEAVE = 1, 2, 4

ClockState: TypeAlias = list[tuple[int, int, dict[int, int]]]
"""(rank, clock, last seq counted by stream), as it travels between servers."""

MAX_STREAMS = 8
"""Streams of which a rank's last seq is remembered; it works on one or two leases at a time."""


class Clocks:
    """The clocks of all ranks, here. A dead rank leaves the minimum; its replacement enters at it."""

    def __init__(self) -> None:
        self._clocks: dict[int, int] = {}
        self._counted: dict[int, dict[int, int]] = {}
        self._absent: set[int] = set()
        self._heard: dict[int, tuple[int, dict[int, int]]] = {}
        self._wishes: dict[int, int] = {}
        self._sticky = 0
        self._call = 0

    def expect(self, num_workers: int) -> None:
        """So many ranks there are; those that were not heard of yet stand at 0."""
        for rank in range(num_workers):
            self._clocks.setdefault(rank, 0)

    def finished(self, rank: int, stream: int, seq: int) -> None:
        """The rank has ended a batch. A repeat is safe."""
        self.returned(rank)
        counted = self._counted.setdefault(rank, {})
        if seq > counted.get(stream, 0):
            counted[stream] = seq
            self._clocks[rank] = self._clocks.get(rank, 0) + 1
            while len(counted) > MAX_STREAMS:
                del counted[next(iter(counted))]

    def wish(self, rank: int, vector: Vector, *, call: int = 0) -> None:
        """Take the control flags of a rank's vector: stop, checkpoint, leave. Those of an earlier call are over."""
        if call > self._call:
            self._call, self._sticky = call, 0
            self._wishes.clear()
        bits = sum(
            bit for bit, value in zip((STOP, CHECKPOINT, LEAVE), vector[1:4], strict=False) if value > 0
        )
        self._wishes[rank] = bits
        self._sticky |= bits & (STOP | LEAVE)

    @property
    def wishes(self) -> int:
        """Of all workers; stop and leave stay, a checkpoint is wished until its rank wishes it no more."""
        wishes = self._sticky
        for bits in self._wishes.values():
            wishes |= bits
        return wishes

    def clock(self, rank: int) -> int:
        """Batches the rank has finished."""
        return self._clocks.get(rank, 0)

    def slowest(self) -> int:
        """The smallest clock of those that are there; where nobody is, the largest there was."""
        there = [clock for rank, clock in self._clocks.items() if rank not in self._absent]
        return min(there) if there else max(self._clocks.values(), default=0)

    def have_reached(self, clock: int, *, besides: int | None) -> bool:
        """True once all present ranks have come so far. Nobody waits for itself."""
        return all(
            mine >= clock
            for rank, mine in self._clocks.items()
            if rank not in self._absent and rank != besides
        )

    def behind(self, clock: int) -> list[int]:
        """Present ranks that have not come so far."""
        return [rank for rank, mine in self._clocks.items() if mine < clock and rank not in self._absent]

    def at_least(self, rank: int, clock: int) -> None:
        """The rank says so itself: this server may be new, and not have counted all of it."""
        if rank in self._clocks:
            self.returned(rank)
            self._clocks[rank] = max(self._clocks[rank], clock)

    def left(self, rank: int) -> None:
        """Dead, out of reach, or without work: nobody waits for it."""
        if rank in self._clocks:
            self._absent.add(rank)

    def returned(self, rank: int) -> None:
        """It is back: where it was, or with the slowest, who did not wait for it."""
        if rank in self._absent:
            self._clocks[rank] = max(self._clocks[rank], self.slowest())
            self._absent.discard(rank)

    def entered(self, rank: int) -> None:
        """A replacement: it begins with the slowest."""
        self._absent.add(rank)
        self._clocks[rank] = self.slowest()
        self._counted.pop(rank, None)
        self._heard.pop(rank, None)
        self._wishes.pop(rank, None)
        self._absent.discard(rank)

    def restart(self, clock: int) -> None:
        """After a checkpoint was loaded: all ranks stand here."""
        self._clocks = dict.fromkeys(self._clocks, clock)
        self._counted.clear()
        self._heard.clear()
        self._wishes.clear()
        self._sticky = 0

    # ---- between servers ------------------------------------------------------------------------

    def state(self, rank: int | None = None) -> ClockState:
        """Of one rank, or all."""
        ranks = sorted(self._clocks) if rank is None else [rank]
        return [(each, self._clocks.get(each, 0), dict(self._counted.get(each, {}))) for each in ranks]

    def heard(self, state: ClockState) -> None:
        """Set aside another server's clocks, for a failover."""
        for rank, clock, counted in state:
            old, old_counted = self._heard.get(rank, (0, {}))
            self._heard[rank] = (max(old, clock), _newest(old_counted, counted))

    def take_over(self) -> None:
        """Slots of another server are ours now: what it counted counts here."""
        for rank, (clock, counted) in self._heard.items():
            self._clocks[rank] = max(self._clocks.get(rank, 0), clock)
            self._counted[rank] = _newest(self._counted.get(rank, {}), counted)
        self._heard.clear()


def _newest(old: dict[int, int], new: dict[int, int]) -> dict[int, int]:
    merged = old | {stream: max(seq, old.get(stream, 0)) for stream, seq in new.items()}
    return dict(list(merged.items())[-MAX_STREAMS:])
