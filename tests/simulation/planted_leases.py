"""Bugs on purpose in the leases and in their journal."""

from __future__ import annotations

import heapq
from typing import Any

from shoal.cluster import leases
from shoal.cluster.leases import Asked, EndEpoch, Holder, Leases, LeaseState
from simulation.leasing import Leasing

PLANTED_LEASES: dict[str, type[Leasing]] = {}


def _plant(name: str, **parts: Any) -> None:
    PLANTED_LEASES[name] = type("PlantedLeasing", (Leasing,), parts)


class ReturnsTwice(Leases):
    def _fence(self, rank: int, incarnation: int) -> None:
        held = {number for number in self._holders if self.state(number) is LeaseState.HELD}
        super()._fence(rank, incarnation)
        for number in held:
            if self.state(number) is LeaseState.TODO:
                heapq.heappush(self._todo, number)


class ReturnsNothing(Leases):
    def _fence(self, rank: int, incarnation: int) -> None:
        self._incarnations[rank] = max(incarnation, self._incarnations.get(rank, 0))


class EndsEarly(Leases):
    def _end_epoch(self) -> list[leases.Action]:
        if len(self._done) == self.config.num_leases - 1 and not self._is_over:
            self.epoch += 1
            self._is_over = self.epoch == self.config.num_epochs
            self._begin_epoch()
            return [EndEpoch(self.epoch - 1, 0)]
        return super()._end_epoch()


class HandsOutTheHeld(Leases):
    def _top_up(self, holder: Holder, at: float) -> None:
        super()._top_up(holder, at)
        for holders in self._holders.values():
            if not any(holder in each for each in self._holders.values()):
                holders[holder] = at


class ForgetsWhoWaits(Leases):
    def _serve(self, at: float) -> list[leases.Action]:
        actions = super()._serve(at)
        self._waiting.clear()
        return actions


_plant("a lease is returned twice", leases_class=ReturnsTwice)
_plant("the leases of the dead stay with them", leases_class=ReturnsNothing)
_plant("an epoch ends with a lease under way", leases_class=EndsEarly)
_plant("a lease that is held is handed out again", leases_class=HandsOutTheHeld)
_plant("who waits for a lease is forgotten", leases_class=ForgetsWhoWaits)
_plant("leases: answers before it writes", answers_first=True)
_plant("the journal has no leases", forgets=(Asked,))
