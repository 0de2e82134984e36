"""Bugs on purpose in the leases and in their journal."""

from __future__ import annotations

import heapq
from typing import Any

from shoal.cluster.coordinator.actions import Tick
from shoal.cluster.coordinator.leases import (
    Action,
    EndEpoch,
    FinishLeases,
    LeaseHolder,
    LeaseState,
    LeaseTable,
    WorkerAsked,
)
from simulation.leasing import Leasing

PLANTED_LEASES: dict[str, type[Leasing]] = {}


def _plant(name: str, **parts: Any) -> None:
    PLANTED_LEASES[name] = type("PlantedLeasing", (Leasing,), parts)


class ReturnsTwice(LeaseTable):
    def _fence(self, rank: int, incarnation: int) -> None:
        held = {number for number in self._holders if self.state(number) is LeaseState.HELD}
        super()._fence(rank, incarnation)
        for number in held:
            if self.state(number) is LeaseState.TODO:
                heapq.heappush(self._todo, number)


class ReturnsNothing(LeaseTable):
    def _fence(self, rank: int, incarnation: int) -> None:
        self.incarnations[rank] = max(incarnation, self.incarnations.get(rank, 0))


class EndsEarly(LeaseTable):
    def _end_epoch(self) -> list[Action]:
        if len(self._done) == self.config.num_leases - 1 and not self._is_over:
            self.epoch += 1
            self._is_over = self.epoch == self.config.num_epochs
            self._begin_epoch()
            return [EndEpoch(self.epoch - 1, 0)]
        return super()._end_epoch()


class HandsOutTheHeld(LeaseTable):
    def _top_up(self, holder: LeaseHolder, at: float) -> None:
        super()._top_up(holder, at)
        for holders in self._holders.values():
            if not any(holder in each for each in self._holders.values()):
                holders.append(holder)


class ForgetsWhoWaits(LeaseTable):
    def _serve(self, at: float) -> list[Action]:
        actions = super()._serve(at)
        self._waiting.clear()
        return actions


class CountsBothHolders(LeaseTable):
    """Both holders of a lease are said to have done it."""

    def _finish(self, asked: WorkerAsked) -> list[Action]:
        again = [
            self.config.lease(each)
            for each in asked.finished
            if self.state(each) is LeaseState.DONE and each // self.config.num_leases == self.epoch
        ]
        return [*super()._finish(asked), *([FinishLeases(asked.by, tuple(again))] if again else [])]


_plant("a lease is returned twice", leases_class=ReturnsTwice)
_plant("the leases of the dead stay with them", leases_class=ReturnsNothing)
_plant("an epoch ends with a lease under way", leases_class=EndsEarly)
_plant("a lease that is held is handed out again", leases_class=HandsOutTheHeld)
_plant("who waits for a lease is forgotten", leases_class=ForgetsWhoWaits)
_plant("a lease that two have run is two workers' in the ledger", leases_class=CountsBothHolders)
_plant("a lease is all theirs who finish it", workers_write=False)
_plant("leases: answers before it writes", answers_first=True)
_plant("the journal has no leases", forgets=(WorkerAsked,))
_plant("the journal does not know what was handed out by the clock", forgets=(Tick,))
