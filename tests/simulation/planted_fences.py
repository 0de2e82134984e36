"""Bugs on purpose that let a replaced worker's push count."""

from __future__ import annotations

from typing import Any

from shoal.cluster.coordinator.membership import Membership
from simulation.fencing import Coordinator, Fencing, Server

PLANTED_FENCES: dict[str, type[Fencing]] = {}


def _plant(name: str, **parts: Any) -> None:
    PLANTED_FENCES[name] = type("PlantedFencing", (Fencing,), parts)


class TakesAnyView(Server):
    def takes(self, view: int) -> bool:
        return self.view >= self._least


class PromisesNothing(Server):
    """It says that it takes nothing of the old view any more, and does until it hears of the new one."""

    def takes(self, view: int) -> bool:
        return view == self.view


class FormsTooSoon(Coordinator):
    def _may_form(self) -> bool:
        return bool(self._promised)


class HearsTheReplaced(Membership):
    def is_fenced(self, rank: int, incarnation: int) -> bool:
        return False


class ForgetsWhoWasReplaced(Coordinator):
    membership_class = HearsTheReplaced


class LetsTheReplacedIn(Coordinator):
    """As if the one who was given up were the one who counts: it is told of the new view."""

    def joins(self, worker: Any) -> None:
        if self.membership.is_fenced(worker.rank, worker.incarnation) and not self._preparing:
            self.job.post(worker, worker.enters, self.view)
        else:
            super().joins(worker)


_plant("a push of any view is taken", server_class=TakesAnyView)
_plant("a server promises and takes the old view all the same", server_class=PromisesNothing)
_plant("a worker that was replaced may join again", coordinator_class=ForgetsWhoWasReplaced)
_plant("a view is formed before every server has promised", coordinator_class=FormsTooSoon)
_plant("a replaced worker is told of the new view", coordinator_class=LetsTheReplacedIn)
