"""Bugs on purpose: each breaks one rule of the protocol, in the way an honest mistake would.

A simulator that finds nothing proves nothing until it has found these. Those
marked (once real) were found by it in this project's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.cluster.coordinator import calls, views
from shoal.cluster.coordinator.actions import Answer
from shoal.cluster.coordinator.calls import Calls
from shoal.cluster.coordinator.journal_entries import Entry, Granted, JournalState, Persist
from shoal.cluster.coordinator.membership import Membership
from shoal.cluster.coordinator.state import Action, Coordination
from shoal.cluster.coordinator.views import Views
from shoal.recovery.replay_log import ExchangeLog
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.supervisor import Suspect
from shoal.runtime.transport.messages.worker_coordinator import (
    BeginCall,
    CallGranted,
    EnterView,
    Join,
    Leave,
    ScriptEnded,
    ViewFormed,
)
from simulation.cluster import Cluster
from simulation.coordinator import Coordinator
from simulation.disk import Disk
from simulation.groups import Done, Group
from simulation.supervisor import Supervisor
from simulation.training import Label, Life, Weights
from simulation.worker import Worker

PLANTED: dict[str, type[Cluster]] = {}
"""What is wrong: the cluster in which it is."""


def _plant(name: str, **parts: Any) -> None:
    """A cluster with these parts: of the cluster, its worker, the worker's life and log, its coordination."""
    life = type("PlantedLife", (parts.pop("life", Life),), {"log_class": parts.pop("log", ExchangeLog)})
    worker = type("PlantedWorker", (parts.pop("worker", Worker),), {"life_class": life})
    PLANTED[name] = type("PlantedCluster", (Cluster,), {"worker_class": worker, **parts})


# ---- what a rank holds ----------------------------------------------------------------------------


class ForgetsAtAnchor(ExchangeLog):
    def anchor(self) -> None:
        self.anchored_at = self.num_finished
        self.results.clear()


class KeepsItsLegacyToItself(ExchangeLog):
    def inherit(self, results: dict[int, Any], *, starts_at: int | None = None) -> None:
        ExchangeLog.inherit(self, results, starts_at=starts_at)
        if starts_at is not None:
            self.results.clear()


class CountsOnlyFinished(Life):
    @property
    def standing(self) -> int:
        return self.log.num_finished if self.has_state else -1


class UpdatesTwice(Worker):
    """Takes the weights after the step, and then the step."""

    def _go(self, value: Any) -> None:
        if isinstance(value, tuple) and value[1] is False:
            value = (value[0], True)
        super()._go(value)


class TakesNoWeights(Life):
    def import_state(self, package: dict[str, Any]) -> None:
        super().import_state(package | {"weights": self.weights})


class TakesNoResults(Life):
    def import_state(self, package: dict[str, Any]) -> None:
        super().import_state(package | {"results": {}})


class TakesInPlace(Life):
    """Writes every piece where it belongs as it comes, so half of it stays when the donor dies."""

    def interrupted(self, package: dict[str, Any] | None) -> None:
        if package is not None:
            self.weights = Weights(package["weights"].parameters, self.weights.moments)


class StartsAtTheCallsBegin(Life):
    def import_state(self, package: dict[str, Any]) -> None:
        call, _ = package["anchor"]
        super().import_state(package if self.has_state else package | {"anchor": (call, None)})


class NoAnchorAtTheEnd(Life):
    def at_anchor(self, number: int, place: Any) -> None:
        if place != "end":
            super().at_anchor(number, place)


class BeginsFromTheCheckpoint(Worker):
    """A replacement that does not ask whether somebody has something newer."""

    def _import_state(self, package: Any) -> None:
        if not self.life.has_state and self.cluster.disk.checkpoint is not None:
            self.life.begin(self.cluster.disk.checkpoint)
            self._agree()
        else:
            super()._import_state(package)


class EntersAsIfNew(Worker):
    """As it was once: a process that was given nothing in its view says that it was in none."""

    _stood_in = 0

    def _view_formed(self, formed: ViewFormed) -> None:
        if self.life.has_state:
            self._stood_in = formed.view
        super()._view_formed(formed)

    def _agreed(self, parts: list[None]) -> None:
        self._stood_in = self.view
        super()._agreed(parts)

    def _view_left(self) -> int:
        return self._stood_in


class ComparesWhoIsOnItsWay(Worker):
    """As it was once: a rank that was given state is taken to be where that state is."""

    def _is_settled(self) -> bool:
        return self.life.has_state


class SumsInOrderOfArrival(Group):
    def run(self, worker: Worker, label: object, part: Any, done: Done) -> None:
        def shuffled(parts: list[Any]) -> None:
            arrived = list(self._rounds[-1].parts.values())
            done(arrived if isinstance(label, Label) else parts)

        super().run(worker, label, part, shuffled)


_plant("an anchor forgets the last result (once real)", log=ForgetsAtAnchor)
_plant("a replacement does not hand on what it was given (once real)", log=KeepsItsLegacyToItself)
_plant(
    "a rank that catches up tells what it has finished, not what it knows (once real)",
    life=CountsOnlyFinished,
)
_plant("a rank that was behind updates on top of the weights it was given", worker=UpdatesTwice)
_plant("results are copied without the weights", life=TakesNoWeights)
_plant("weights are copied without the results", life=TakesNoResults)
_plant("state is taken in place, piece by piece", life=TakesInPlace)
_plant("a replacement starts at the call's begin instead of the anchor", life=StartsAtTheCallsBegin)
_plant("the end of a call is no anchor (once real)", life=NoAnchorAtTheEnd)
_plant("a replacement begins from the checkpoint although there is a donor", worker=BeginsFromTheCheckpoint)
_plant("a replacement that was given nothing enters as if it were new (once real)", worker=EntersAsIfNew)
_plant("scripts are said to differ while a rank catches up (once real)", worker=ComparesWhoIsOnItsWay)
_plant("parts are summed in the order of arrival", group_class=SumsInOrderOfArrival)


# ---- views ----------------------------------------------------------------------------------------


class FormsWithoutOne(Views):
    def _is_complete(self) -> bool:
        missing = self._missing()
        return not missing or (bool(self.view) and len(missing) == 1 and len(self._waiting) > 1)

    def _form(self) -> list[views.Action]:
        for rank in range(self._membership.num_workers):
            if rank not in self._waiting:  # as it was in the last view
                one = next(iter(self._waiting.values()))
                incarnation = self._formed.incarnations[rank]
                self._waiting[rank] = replace(one, rank=rank, incarnation=incarnation, finished=-1)
        return super()._form()


class DonorIsBehind(Views):
    def handle(self, event: views.Event) -> list[views.Action]:
        waiting = dict(self._waiting)
        actions = super().handle(event)
        for index, action in enumerate(actions):
            if isinstance(action, views.FormView) and action.donor >= 0 and len(action.ranks) > 1:
                if isinstance(event, views.ViewEntered):
                    waiting[event.rank] = event
                least = min((each.finished, rank) for rank, each in waiting.items() if each.finished >= 0)
                actions[index] = self._formed = replace(action, donor=least[1], finished=least[0])
        return actions


class CountsTheEmptyHanded(Views):
    """As it was once: whoever left the view is a survivor, state or not."""

    def _form(self) -> list[views.Action]:
        left = [each.finished for each in self._waiting.values() if self.view and each.view_left == self.view]
        if left and max(left) - min(left) > views.MAX_APART:
            self._refused = "too far apart"
            waiting = list(self._waiting)
            self._waiting.clear()
            self._move(views.ViewPhase.REFUSED)
            return [views.RefuseEntry(rank, self._refused) for rank in waiting]
        return super()._form()


class HearsTheReplaced(Membership):
    def is_fenced(self, rank: int, incarnation: int) -> bool:
        return False

    def newest(self, rank: int) -> int:
        return 0

    def admit(self, join: Join, at: float) -> str | None:
        present = self.members.get(join.rank)
        if present is not None and join.incarnation < present.incarnation:
            return None
        return super().admit(join, at)


class TellsNobodyAgain(Views):
    """Whoever lost the news of a view waits for the next one."""

    def _enter(self, entered: views.ViewEntered) -> list[views.Action]:
        if self._is_in(entered) and entered.view_left != self.view:
            return []
        return super()._enter(entered)


def _coordination(**parts: Any) -> type[Coordination]:
    """A Coordination whose parts are of other classes; they begin with what the real ones hold."""

    class Planted(Coordination):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            for name, part in parts.items():
                getattr(self, name).__class__ = part

    return Planted


_plant("a view is formed while a rank is missing", coordination_class=_coordination(_views=FormsWithoutOne))
_plant("the donor is one that is behind", coordination_class=_coordination(_views=DonorIsBehind))
_plant(
    "a replacement without state counts as a survivor (once real)",
    coordination_class=_coordination(_views=CountsTheEmptyHanded),
)
_plant("an old incarnation is heard", coordination_class=_coordination(_membership=HearsTheReplaced))
_plant("nobody is told again of a view", coordination_class=_coordination(_views=TellsNobodyAgain))


# ---- calls ----------------------------------------------------------------------------------------


class GrantsEarly(Calls):
    def _ask(self, rank: int, wish: Any, at: float) -> list[calls.Action]:
        actions = super()._ask(rank, wish, at)
        if not actions and len(self._waiting) == self.num_workers - 1:
            return self._grant_all(wish)
        return actions


class GrantsWhatDiffers(Calls):
    def _refuse_all(self) -> list[calls.Action]:
        wishes = [waiter.wish for waiter in self._waiting.values()]
        return self._grant_all(wishes[-1]) if len(wishes) == self.num_workers else []


class RecallsNobody(Calls):
    def handle(self, event: calls.Event) -> list[calls.Action]:
        return [] if isinstance(event, calls.CallsSuspended) else super().handle(event)


class RecallsWithoutForgetting(Calls):
    """A rank that is sent to a view still counts as waiting at the call."""

    def handle(self, event: calls.Event) -> list[calls.Action]:
        waiting, phase = dict(self._waiting), self.phase
        actions = super().handle(event)
        if isinstance(event, calls.CallsSuspended) and waiting:
            self._waiting, self.phase = waiting, phase
        return actions


class HearsTheOvertaken(Coordination):
    """As it was once: the question heard last is the newest."""

    def hear(self, client: int, message: Message, now: float) -> list[Action]:
        if isinstance(message, BeginCall | ScriptEnded):
            self._callers.pop(message.rank, None)
        elif isinstance(message, EnterView):
            self._enterers.pop(message.rank, None)
        return super().hear(client, message, now)


class AdmitsAfterTheEnd(Coordination):
    """As it was once: a replacement that comes too late is told so, the first time."""

    def _join(self, client: int, me: Any, join: Join, now: float) -> list[Action]:
        actions = super()._join(client, me, join, now)
        if any(isinstance(each, Answer) and isinstance(each.message, Leave) for each in actions):
            self._membership.admit(join, now)
        return actions


_plant("a call is granted before all have come", coordination_class=_coordination(_calls=GrantsEarly))
_plant(
    "who waits at a call is never called away to a view",
    coordination_class=_coordination(_calls=RecallsNobody),
)
_plant(
    "who was called away from a call still counts there",
    coordination_class=_coordination(_calls=RecallsWithoutForgetting),
)
_plant("a question that was overtaken is heard (once real)", coordination_class=HearsTheOvertaken)
_plant("a replacement that comes after the end is let in (once real)", coordination_class=AdmitsAfterTheEnd)


# ---- the journal ----------------------------------------------------------------------------------


class AnswersFirst(Coordinator):
    def _carry_out(self, actions: list[Action]) -> None:
        super()._carry_out([each for each in actions if not isinstance(each, Persist)])
        if self.is_alive:
            super()._carry_out([each for each in actions if isinstance(each, Persist)])


class Forgetful(Disk):
    """A journal without some kind of entry."""

    forgets: tuple[type, ...] = ()

    def write(self, entries: Sequence[Entry]) -> None:
        super().write([each for each in entries if not isinstance(each, self.forgets)])


def _forgetting(*kinds: type) -> type[Disk]:
    return type("PlantedDisk", (Forgetful,), {"forgets": kinds})


class LosesTheTail(Disk):
    """What was written last is not on the disk yet when the next coordinator reads it."""

    def read(self) -> JournalState | None:
        del self.entries[-1:]
        return super().read()


class TruncatesCalls(Coordinator):
    """As it was once: granting an old call again is written down again, and cuts the record there."""

    def _carry_out(self, actions: list[Action]) -> None:
        record = self.core._calls.record
        again = [
            Persist(Granted(each.message.number, record[each.message.number - 1]))
            for each in actions
            if isinstance(each, Answer) and isinstance(each.message, CallGranted)
        ]
        super()._carry_out([*again, *actions])


_plant("answers before it writes", coordinator_class=AnswersFirst)
_plant("the journal has no views, so numbers are used again", disk_class=_forgetting(ViewFormed))
_plant("the journal has no calls", disk_class=_forgetting(Granted))
_plant("the journal loses what was written last", disk_class=LosesTheTail)
_plant("granting a call again forgets those after it (once real)", coordinator_class=TruncatesCalls)


# ---- the supervisor -------------------------------------------------------------------------------


class ForksTooSoon(Supervisor):
    """Takes a suspect for dead before it is."""

    def _heard(self, end: Any, message: Message) -> None:
        if isinstance(message, Suspect):
            worker = self.cluster.workers[message.rank]
            if worker.is_alive and worker.incarnation == message.incarnation and not message.lenient:
                self.cluster.fork(message.rank, message.incarnation + 1)
                return
        super()._heard(end, message)


_plant("a suspect is replaced before it is dead", supervisor_class=ForksTooSoon)
