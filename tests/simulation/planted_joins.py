"""Bugs on purpose where hosts join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.cluster.hosts.seats import HostSeat, JoiningHost, JoinWait, Seats
from simulation.joining import Joining

PLANTED_JOINS: dict[str, type[Joining]] = {}
"""What is wrong: the job in which it is."""


def _plant(name: str, **parts: Any) -> None:
    PLANTED_JOINS[name] = type("PlantedJoining", (Joining,), parts)


class FreesWhoeverHasIt(Seats):
    """As it was once: a handshake that hung until its time-out freed the number, whoever had it by then."""

    def release(self, number: int, incarnation: int) -> None:
        self.taken.pop(number, None)


class ForgetsWhichMachine(Seats):
    def _number_of(self, machine: bytes) -> int | None:
        return None


class HearsTheReplaced(Seats):
    def _check_newest(self, number: int, incarnation: int) -> None:
        pass


class CountsAnew(Seats):
    def release(self, number: int, incarnation: int) -> None:
        super().release(number, incarnation)
        if number not in self.taken:
            self._incarnations.pop(number, None)


class WaitsForAgentsForEver(Seats):
    def _release_late(self, now: float) -> None:
        pass


class DoesNotSeeItCopy(Seats):
    def heard(self, number: int, incarnation: int, now: float) -> None:
        self._check_newest(number, incarnation)


class GivesTheFirstFree(Seats):
    """As it was once: whichever machine comes first has the first number that is free."""

    def take(self, joiner: JoiningHost, asked_at: float, now: float) -> tuple[int, int] | None:
        self._last_machines.clear()
        return super().take(joiner, asked_at, now)


class RefusesAtOnce(Seats):
    def take(self, joiner: JoiningHost, asked_at: float, now: float) -> tuple[int, int] | None:
        return super().take(joiner, float("-inf"), now)


class LooksOnceWhatThereIs(Seats):
    """As it was once: a joiner that waits has the numbers that there were when it came."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._looked: dict[tuple[JoiningHost, float], tuple[int, ...]] = {}

    def take(self, joiner: JoiningHost, asked_at: float, now: float) -> tuple[int, int] | None:
        self._asked_at = asked_at
        return super().take(joiner, asked_at, now)

    def _numbers_for(self, joiner: JoiningHost) -> Sequence[int]:
        return self._looked.setdefault((joiner, self._asked_at), tuple(super()._numbers_for(joiner)))


class StaysOpen(Seats):
    def _check_open(self) -> None:
        pass


class BelievesTheGivenUp(Seats):
    def _awaited(self, number: int, incarnation: int) -> HostSeat:
        self._check_open()
        self._check_newest(number, incarnation)
        return self.taken.get(number) or HostSeat(incarnation, "", 1, b"", None)


class BeginsBeforeTheyAreReady(JoinWait):
    def is_over(self, missing: Sequence[int], *, is_coming: bool, now: float) -> bool:
        return super().is_over(missing, is_coming=False, now=now)


class WaitsForTheLostHead(JoinWait):
    def is_over(self, missing: Sequence[int], *, is_coming: bool, now: float) -> bool:
        return super().is_over([*missing, 0] if missing else [], is_coming=is_coming, now=now)


_plant("a handshake that ends late frees the seat of the next (once real)", seats_class=FreesWhoeverHasIt)
_plant("a machine that joins again is given a second seat", seats_class=ForgetsWhichMachine)
_plant("an agent of an older admission is believed", seats_class=HearsTheReplaced)
_plant("an agent whose seat was taken back is believed", seats_class=BelievesTheGivenUp)
_plant("incarnations of a host are counted anew after its loss", seats_class=CountsAnew)
_plant("a host whose agent never comes keeps its seat", seats_class=WaitsForAgentsForEver)
_plant("a host that copies files is taken for lost", seats_class=DoesNotSeeItCopy)
_plant("a host that comes back is given another's seat (once real)", seats_class=GivesTheFirstFree)
_plant("a joiner does not wait for a loss to be noticed", seats_class=RefusesAtOnce)
_plant("a joiner that waits does not see added seats (once real)", seats_class=LooksOnceWhatThereIs)
_plant("a host is admitted after the end", seats_class=StaysOpen)
_plant("a head that took over begins while a host is on its way", wait_class=BeginsBeforeTheyAreReady)
_plant("a head that took over waits for the lost head's machine", wait_class=WaitsForTheLostHead)
