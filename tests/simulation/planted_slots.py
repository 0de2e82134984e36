"""Bugs on purpose in replication, failover and moves. The parameter server's own will come beside these."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shoal.cluster.coordinator.slot_map import MoveState
from simulation.serving import Server, Serving, SlotCoordinator

PLANTED_SLOTS: dict[str, type[Serving]] = {}


def _plant(name: str, **parts: Any) -> None:
    PLANTED_SLOTS[name] = type("PlantedServing", (Serving,), parts)


class AcknowledgesFirst(Server):
    def _others(self, slot: int) -> set[str]:
        return set()


class TrustsItsMark(Server):
    """What it has was acknowledged, it thinks; after a failover the others may not have it."""

    def pushed(self, view: int, slot: int, seq: int) -> None:
        if self._serves(view, slot) and seq <= self.mark(slot):
            self.job.post(self.job.client, self.job.client.acknowledged, slot, seq)
        else:
            super().pushed(view, slot, seq)


class HasNoMarks(Server):
    def pushed(self, view: int, slot: int, seq: int) -> None:
        if self._serves(view, slot) and seq <= self.mark(slot):
            self._apply(slot, seq)
        super().pushed(view, slot, seq)


class LeavesOutWhoCopies(Server):
    """A push that comes while a slot is copied is acknowledged without the copy."""

    def _others(self, slot: int) -> set[str]:
        assert self.map is not None
        return set(self.map.holders[slot]) - {self.name}


class CopiesTooSoon(Server):
    """As it was once in this toy: a copy that comes before the map goes with the old slots."""

    def _follows(self, view: int) -> bool:
        return view >= self.promised and (self.map is None or view >= self.map.view)


class SwitchesTooSoon(SlotCoordinator):
    def _plan(self) -> None:
        super()._plan()
        self._moves = [replace(move, state=MoveState.READY) for move in self._moves]
        if self._moves:
            self._prepare()


class GoesOnAsBefore(SlotCoordinator):
    """As it was once in this toy: after a restart it takes the present view for whole."""

    def _go_on(self) -> None:
        if self.job.disk["dead"]:
            self._prepare()
        else:
            self._plan()


_plant("a push is acknowledged before it is replicated", server_class=AcknowledgesFirst)
_plant("a doubled push is acknowledged by its mark alone", server_class=TrustsItsMark)
_plant("a doubled push is applied twice", server_class=HasNoMarks)
_plant("a push is acknowledged without the copy that is under way", server_class=LeavesOutWhoCopies)
_plant("a copy is taken before its view's map (once real)", server_class=CopiesTooSoon)
_plant("a slot is switched before its copy has caught up", coordinator_class=SwitchesTooSoon)
_plant("a restarted coordinator goes on with the old view (once real)", coordinator_class=GoesOnAsBefore)
