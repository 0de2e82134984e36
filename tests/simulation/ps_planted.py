"""Bugs on purpose in the parameter server: each must be found by the oracle of ps_jobs.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from shoal.ps.server import replication as replication_module
from shoal.ps.server.actions import Action, Frame, Request
from shoal.ps.server.core import ServerCore
from shoal.ps.server.progress import AppliedSeqs, Slots, no_slots
from shoal.ps.server.replication import Replication, Written
from shoal.ps.server.state import Counted, ServerState
from shoal.ps.server.steps import Mailbox, Steps, Sum
from shoal.runtime.transport.messages.client_server import Commit, CopySlot, Replicate, StepEnd, ViewOver
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import ServerView
from simulation.ps_jobs import Exact, Job, Relaxed
from simulation.ps_merged import Merged

PLANTED_PS: dict[str, type[Job]] = {}


def plant(name: str, scenario: type[Job]) -> Callable[[type[ServerCore]], type[ServerCore]]:
    """A scenario in which a server is like this."""

    def planted(core: type[ServerCore]) -> type[ServerCore]:
        PLANTED_PS[name] = type("Planted" + scenario.__name__, (scenario,), {"core_class": core})
        return core

    return planted


def altered(
    *,
    state: type[ServerState] = ServerState,
    replication: type[Replication] = Replication,
    steps: type[Steps] = Steps,
    marks: type[AppliedSeqs] = AppliedSeqs,
    mailbox: type[Mailbox] = Mailbox,
) -> type[ServerCore]:
    """A server some part of which is not what it should be."""

    class Other(ServerCore):
        def __init__(self, number: int, incarnation: int = 0) -> None:
            super().__init__(number, incarnation)
            self.state, self.replication = state(), replication(number)
            self.state.applied, self.state.mailbox = marks(), mailbox()
            self.state.steps_class = steps  # type: ignore[misc]

    return Other


# ---- acknowledging ------------------------------------------------------------------------------


@plant("acknowledged before it is replicated", Relaxed)
@plant("committed before it is replicated", Exact)
class AcknowledgesFirst(ServerCore):
    def _when_safe(self, request: Request, message: Message, frames: Sequence[Frame] = ()) -> list[Action]:
        return [self._reply(request, message, frames)]


class WaitsForHoldersOnly(Replication):
    def is_met(self, need: dict[int, int]) -> bool:
        return all(
            not link.owed and link.answered >= max(need.get(server, 0), link.owed_number)
            for server, link in self._links.items()
            if server not in self.joining
        )

    joining: frozenset[int] = frozenset()

    def view(self, view: ServerView, **others: Any) -> Any:
        self.joining = frozenset(server for servers in view.joining.values() for server in servers)
        return super().view(view, **others)


plant("acknowledged without the copy under way", Relaxed)(altered(replication=WaitsForHoldersOnly))


# ---- marks --------------------------------------------------------------------------------------


class NoMarks(AppliedSeqs):
    def missing(self, stream: int, seq: int) -> Slots:
        return np.ones(256, np.bool_)


plant("a push that comes again counts again", Relaxed)(altered(marks=NoMarks))


@plant("marks are lost at a failover", Relaxed)
class LosesMarks(ServerCore):
    def view(self, view: ServerView) -> list[Action]:
        mine = np.array([bool(holders) and holders[0] == self.number for holders in view.holders])
        for slot in np.flatnonzero(mine & ~self.mine).tolist():
            self.state.applied.set_slot(slot, [])
        return super().view(view)


@plant("versions are lost at a failover", Exact)
class LosesVersions(ServerCore):
    def view(self, view: ServerView) -> list[Action]:
        mine = np.array([bool(holders) and holders[0] == self.number for holders in view.holders])
        version = self.state.applied.version
        version[mine & ~self.mine] = np.maximum(version[mine & ~self.mine] - 1, 0)
        return super().view(view)


class MarksOneSlotForAll(AppliedSeqs):
    """As if a server's slots were always equally far."""

    def missing(self, stream: int, seq: int) -> Slots:
        missing = super().missing(stream, seq)
        return missing if missing.all() else no_slots()


plant("one mark for all slots", Relaxed)(altered(marks=MarksOneSlotForAll))


class CountsTwiceOnReplicas(ServerState):
    def follow(self, record: Any, frames: Sequence[Frame], slots: Slots) -> None:
        self.is_following = True
        super().follow(record, frames, slots)
        self.is_following = False

    is_following = False

    def missing(self, counted: Counted) -> Slots:
        return np.ones(256, np.bool_) if self.is_following else super().missing(counted)


plant("a replica lets an update count twice", Exact)(altered(state=CountsTwiceOnReplicas))


# ---- views --------------------------------------------------------------------------------------


@plant("an old view is accepted", Relaxed)
@plant("an old view is accepted in exact steps", Exact)
class AcceptsOldViews(ServerCore):
    def hear(self, request: Request) -> list[Action]:
        view = getattr(request.message, "view", None)
        is_between_servers = isinstance(request.message, Replicate | CopySlot)
        if view is not None and view < self.view_number and not is_between_servers:
            message = msgspec.structs.replace(request.message, view=self.view_number)
            request = request._replace(message=message)
        return super().hear(request)


@plant("what is staged survives its view", Exact)
class KeepsStaged(ServerCore):
    def _end_waits(self, message: ViewOver) -> list[Action]:
        steps = self.state.steps
        ended = dict(steps.ended) if steps is not None else {}
        actions = super()._end_waits(message)
        if steps is not None:
            steps.ended = ended
        return actions


class ForgetsUnanswered(Replication):
    def view(self, view: ServerView, **others: Any) -> Any:
        for link in self._links.values():
            link.unanswered.clear()
        return super().view(view, **others)


class ForgetsWaitingPushes(Replication):
    def view(self, view: ServerView, **others: Any) -> Any:
        self._pushes = None
        return super().view(view, **others)


plant("pushes that wait to be shipped are forgotten in a new view", Relaxed)(
    altered(replication=ForgetsWaitingPushes)
)


class CountsWaitingPushesAsShipped(Replication):
    def need(self) -> dict[int, int]:
        return {link.server: link.number for link in self._links.values()}


plant("a push is acknowledged before it is shipped", Relaxed)(
    altered(replication=CountsWaitingPushesAsShipped)
)


class ShipsWithout(ServerState):
    without: dict[str, Any]

    def write_pushes(self, pushes: Any, slots: Slots) -> Written:
        record, frames = super().write_pushes(pushes, slots)
        return msgspec.structs.replace(record, **self.without), frames


plant("pushes are shipped without their seqs", Relaxed)(
    altered(state=type("ShipsWithoutSeqs", (ShipsWithout,), {"without": {"seqs": []}}))
)


@plant("the names in a merged push are not read", Merged)
class ReadsFirstName(ServerCore):
    def _end_push(self, request: Request, message: StepEnd) -> list[Action]:
        return super()._end_push(request, msgspec.structs.replace(message, merged=[]))


@plant("a merged push is applied though some of it counts", Merged)
class AppliesTwice(ServerCore):
    def _end_push(self, request: Request, message: StepEnd) -> list[Action]:
        for part in message.merged:
            marks = self.state.applied._streams.get(part.stream)
            if marks is not None:
                np.minimum(marks, part.seq - part.num_batches, out=marks)
        return super()._end_push(request, message)


plant("what was not answered is forgotten in a new view", Exact)(altered(replication=ForgetsUnanswered))
plant("what was not answered is forgotten in a new view (relaxed)", Relaxed)(
    altered(replication=ForgetsUnanswered)
)


@plant("nothing lost on a connection is sent again", Exact)
class NeverAgain(ServerCore):
    def tick(self) -> list[Action]:
        return []


# ---- copies -------------------------------------------------------------------------------------


class CopiesAndForgets(Replication):
    def copy(self, server: int, slot: int, written: Written) -> Any:
        sends = super().copy(server, slot, written)
        self._links[server].followed[slot] = False
        return sends


plant("a copy misses the updates after it", Relaxed)(altered(replication=CopiesAndForgets))
plant("a copy misses the updates after it (exact)", Exact)(altered(replication=CopiesAndForgets))


class CopiesWithout(ServerState):
    without = ""

    def write_slot(self, slot: int) -> Written:
        record, frames = super().write_slot(slot)
        changes: dict[str, Any] = {
            "marks": {"marks": []},
            "version": {"version": max(record.version - 1, 0)},  # type: ignore[union-attr]
            "mailbox": {"mailbox": None},
            "steps": {"steps": {}},
        }
        if self.without == "mailbox" and slot == 0:
            number = len(self.mailbox.state()[1])
            frames = frames[: len(frames) - number]
        return msgspec.structs.replace(record, **changes[self.without]), frames


for _part, _scenario in (("marks", Relaxed), ("version", Exact), ("mailbox", Exact), ("steps", Exact)):
    _state = type("CopiesWithout", (CopiesWithout,), {"without": _part})
    plant(f"a slot is copied without its {_part}", _scenario)(altered(state=_state))


class CopiesNoState(ServerState):
    """Weights without the optimizer's state."""

    def write_slot(self, slot: int) -> Written:
        record, frames = super().write_slot(slot)
        at = 2
        for _ in record.tables:  # type: ignore[union-attr]
            frames[at] = b""
            at += 3
        return record, frames


plant("rows are copied without their state", Exact)(altered(state=CopiesNoState))


# ---- sums and steps -----------------------------------------------------------------------------


class InOrderOfArrival(Steps):
    @staticmethod
    def order(parts: dict[int, Any]) -> list[int]:
        return list(parts)


plant("summed in the order of arrival", Exact)(altered(steps=InOrderOfArrival))


class SumsTooSoon(Steps):
    @property
    def waits_for(self) -> int:
        return max(self.mode.num_workers - 1, 1)


plant("summed before all are in", Exact)(altered(steps=SumsTooSoon))


@plant("a StepEnd is lost", Exact)
class LosesStepEnd(ServerCore):
    """Now and then, without a word."""

    def _step_end(self, request: Request, message: StepEnd, name: str) -> list[Action]:
        if (request.peer * 7 + request.ticket) % 13 == 0:
            return []
        return super()._step_end(request, message, name)


@plant("a push is lost", Exact)
class LosesPush(ServerCore):
    def _push_rows(self, request: Request, message: Any) -> list[Action]:
        if (request.peer * 7 + request.ticket) % 13 == 0:
            return []
        return super()._push_rows(request, message)


@plant("a server commits before the others have summed", Exact)
class CommitsAlone(ServerCore):
    def _advance(self) -> list[Action]:
        actions = super()._advance()
        steps = self.state.steps
        if steps is not None and steps.summed is not None and steps.mode.two_phase:
            factor, applies = steps.summed.decide(steps.mode.num_workers)
            actions += self._count_step(steps, factor, applies, 0.0)
        return actions


@plant("a step is applied again where it counts already", Exact)
class AppliesEverywhere(ServerCore):
    def _count_step(self, steps: Steps, factor: float, applies: bool, norm: float) -> list[Action]:
        actions = super()._count_step(steps, factor, applies, norm)
        return actions

    def _commit(self, request: Request, message: Commit) -> list[Action]:
        steps = self._steps()
        if steps.summed is None and self._kept is not None and self._kept.seq == message.seq == self._low:
            self.state.contents.apply(self._kept.update)
        if steps.summed is not None:
            self._kept: Sum | None = steps.summed
        return super()._commit(request, message)

    _kept = None


class AppliesWhatIsLeftOut(ServerState):
    def count(self, counted: Counted) -> None:
        super().count(replace(counted, applies=True))


plant("a step that is left out is applied", Exact)(altered(state=AppliesWhatIsLeftOut))


class ForgetsTheLastStep(ServerState):
    def count(self, counted: Counted) -> None:
        super().count(counted)
        if self.steps is not None and counted.is_step and self.is_replica:
            self.steps.last = None

    is_replica = False

    def follow(self, record: Any, frames: Sequence[Frame], slots: Slots) -> None:
        self.is_replica = True
        super().follow(record, frames, slots)
        self.is_replica = False


plant("a replica does not keep what came of the last step", Exact)(altered(state=ForgetsTheLastStep))


class ForgetsTheFactor(ServerState):
    def write_counted(self, counted: Counted, slots: Slots) -> Written:
        record, frames = super().write_counted(counted, slots)
        return msgspec.structs.replace(record, factor=1.0), frames


plant("the factor is not replicated", Exact)(altered(state=ForgetsTheFactor))


class HearsOfChangesOnly(ServerState):
    """Settings are remembered, and other servers told of them where they changed: one that came in between has not heard."""

    def __init__(self) -> None:
        super().__init__()
        self.newest: tuple[Any, Any] = ([], {})
        self.has_changed = False

    def count(self, counted: Counted) -> None:
        update = counted.update
        said = (update.settings or self.newest[0], update.table_settings or self.newest[1])
        self.has_changed, self.newest = said != self.newest, said
        super().count(replace(counted, update=replace(update, settings=said[0], table_settings=said[1])))

    def write_counted(self, counted: Counted, slots: Slots) -> Written:
        record, frames = super().write_counted(counted, slots)
        if not self.has_changed:
            record = msgspec.structs.replace(record, settings=[], table_settings={})
        return record, frames


plant("settings are told only where they change", Exact)(altered(state=HearsOfChangesOnly))


class CountsEveryStepItself(ServerState):
    """A rule's step counter that counts calls, as a table would by itself."""

    def count(self, counted: Counted) -> None:
        table = self.contents.tables.get(0)
        super().count(replace(counted, update=replace(counted.update, step=table.step if table else 0)))


plant("a rule counts its calls, not the steps", Exact)(altered(state=CountsEveryStepItself))


@plant("a pull does not wait for its step", Exact)
class NeverWaits(ServerCore):
    def _is_visible(self, request: Request) -> bool:
        return True


# ---- who is heard, and the mailbox ----------------------------------------------------------------


@plant("a replaced incarnation is still heard", Exact)
class NeverFences(ServerCore):
    def _fence(self, name: str, incarnation: int) -> list[Action]:
        newest = self.clients._newest
        newest[name] = max(incarnation, newest.get(name, 0))
        return []


class ClosesTooSoon(Mailbox):
    def post(self, *arguments: Any, num_workers: int) -> bool:
        return super().post(*arguments, num_workers=max(num_workers - 1, 1))


plant("an exchange is over before all have posted", Exact)(altered(mailbox=ClosesTooSoon))


class KeepsNotesToItself(ServerState):
    def write_counted(self, counted: Counted, slots: Slots) -> Written:
        return super().write_counted(replace(counted, notes={}), slots)


plant("notes are not replicated", Exact)(altered(state=KeepsNotesToItself))


@plant("answers of an earlier view count in this one", Relaxed)
class NumbersBeginAnew(ServerCore):
    def answered(self, server: int, message: Message) -> list[Action]:
        if hasattr(message, "number"):
            number = message.number & 0xFFFFFFFF
            base = replication_module.first_number(self.view_number) - 1
            message = msgspec.structs.replace(message, number=base + number)
        return super().answered(server, message)
