"""A simulated worker: the toy script over the real exchange log, in views, with recovery as ADR 0007 has it.

It does what `recovery/elastic_group.py` does with threads and sockets, as a
chain of events: an exchange that breaks drops the group, enters the next
view, takes the donor's state where it is behind, and goes on where it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.worker_coordinator import (
    BeginCall,
    CallGranted,
    CallRefused,
    EnterView,
    Leave,
    Regroup,
    ScriptEnded,
    StoreDone,
    StoreSet,
    StoreWait,
    ViewFormed,
    ViewRefused,
)
from simulation import training
from simulation.groups import Group
from simulation.line import Line
from simulation.training import Begin, Checkpoint, Compute, Exchange, Life, summed
from simulation.world import Process, Violated

if TYPE_CHECKING:
    from simulation.cluster import Cluster


class Worker(Process):
    """One incarnation of a rank."""

    life_class = Life

    def __init__(self, cluster: Cluster, rank: int, incarnation: int, pid: int) -> None:
        super().__init__(cluster.world, f"worker-{rank}.{incarnation}")
        self.cluster, self.rank, self.incarnation, self.pid = cluster, rank, incarnation, pid
        self.life = self.life_class(rank)
        self.view = 0
        self.group: Group | None = None
        self.waits_since: float | None = None  # in a collective of the group
        self.has_watchdog = False
        self.has_left = False
        self._script = training.script(cluster.calls_of(rank), self.life)
        self._calls_begun = 0
        self._pending: Exchange | Message | None = None  # what it was at when it had to enter a view
        self._formed: ViewFormed | None = None
        self._line = Line(self, self._answered)
        self._store: Line | None = None
        self._is_noted = False  # in the store, as one who is here
        self._is_taking = False  # or giving: in the first collective of a group
        self.later(self.world.between(*cluster.settings.boot_s), self._go, None)

    @property
    def lines(self) -> list[Line]:
        """Its connections to the coordinator."""
        return [self._line] if self._store is None else [self._line, self._store]

    @property
    def came_too_late(self) -> bool:
        """All had ended their scripts when it was born, so it was sent away with nothing."""
        return self.has_left and not self.life.has_state

    def die(self) -> None:
        """Killed, or at its end: the kernel closes what it had open."""
        self.is_alive = False
        self.cluster.num_alive -= 1
        if self._formed is not None:
            self.cluster.group(self._formed).leave(self)
        self._line.close()
        if self._store is not None:
            self._store.close()

    def refused(self, reason: str) -> None:
        """The coordinator will not have it: it ends."""
        self.tell("is refused", reason)
        self.cluster.oracle.refused(self, reason)
        self.die()
        self.cluster.supervisor.exited(self, 1)

    # ---- the script -----------------------------------------------------------------------------

    def _go(self, value: Any) -> None:
        """Run the script until it has to wait for something."""
        while True:
            request = self._script.send(value)
            if type(request) is Exchange:
                known, result = self.life.log.recall()
                if not known:
                    self._exchange(request)
                    return
                self.cluster.oracle.recalled(self, request.label, result)
                value = (result, False)
            elif type(request) is Compute:
                delay_s = self.world.between(*self.cluster.settings.compute_s) * request.weight
                self.later(delay_s * self.cluster.slowness(self.rank), self._go, None)
                return
            elif type(request) is Begin:
                number, call = request
                self._ask(BeginCall(self.rank, number, call.kind, call.detail))
                return
            elif type(request) is Checkpoint:
                value = None
                if self.rank == 0:
                    self.cluster.disk.checkpoint = self.life.export_state() | {"anchor": request.anchor}
            else:
                assert isinstance(request, training.End)
                self._ask(ScriptEnded(self.rank, request.num_calls))
                return

    def _exchange(self, request: Exchange) -> None:
        self._pending = request
        if self.group is None:
            self._enter()
            return
        self.cluster.failpoint("exchange begins", self)
        if self.is_alive:
            self.group.run(self, request.label, request.contribution, self._exchanged)

    def _exchanged(self, parts: list[int]) -> None:
        request = self._pending
        assert isinstance(request, Exchange)
        self.cluster.failpoint("exchange finished, not committed", self)
        if not self.is_alive:
            return
        result = summed(parts)
        self._pending = None
        self.life.log.finish(result)
        self.cluster.oracle.exchanged(self, request.label, result)
        self._go((result, True))
        if request.label.what == "step":
            self.cluster.oracle.committed(self, request.label, self.life.weights)

    # ---- calls ----------------------------------------------------------------------------------

    def _ask(self, question: Message) -> None:
        self._pending = question
        if isinstance(question, ScriptEnded):
            self.cluster.failpoint("at the script's end", self)
            if not self.is_alive:
                return
        self.cluster.oracle.asked(self, question)
        self._line.ask(question)
        if isinstance(question, ScriptEnded):
            self.cluster.failpoint("asked to leave", self)

    def _answered(self, message: Message) -> None:
        match message:
            case CallGranted(number):
                self.tell("begins call", number)
                self.cluster.oracle.granted(self, number)
                self._calls_begun = number
                self._pending = None
                if self.view == 0:
                    self._enter()
                else:
                    self._go(None)
            case Regroup():
                self.tell("regroups, was at", self._pending)
                self.cluster.counts[f"regrouped at {type(self._pending).__name__}"] += 1
                self._drop_group()
                self._enter()
            case Leave():
                self.has_left = True
                self.cluster.counts["let go when born too late"] += not self.life.has_state
                self.cluster.oracle.let_go(self)
                self.tell("leaves")
                self.die()
                self.cluster.supervisor.exited(self, 0)
            case ViewFormed():
                self._view_formed(message)
            case CallRefused() | ViewRefused():
                self.refused(str(message))
            case _:
                raise Violated(f"{self.name} is told {message} and cannot make sense of it")

    # ---- views ----------------------------------------------------------------------------------

    def broken(self, group: Group, why: str) -> None:
        """The group gave an error: whatever this was, it did not happen here."""
        if group is not self.group:
            return
        self.tell("finds its group broken:", why)
        waited_s = 0.0 if self.waits_since is None else self.world.now - self.waits_since
        if self._is_taking and self._formed is not None:
            self.cluster.counts["state lost half-way"] += 1
            self.life.interrupted(group.given_by(self._formed.donor))
        self._drop_group()
        self._enter(waited_s)

    def _drop_group(self) -> None:
        self.waits_since = None
        self._is_taking = False
        if self._formed is not None:
            self.cluster.group(self._formed).leave(self)
        self.group = None
        if self._store is not None:
            self._store.close()
            self._store = None

    def _enter(self, waited_s: float = 0.0) -> None:
        """Ask for the next view; `_pending` is what it goes on with."""
        standing = self._knows()
        self._line.ask(
            EnterView(self.rank, self.incarnation, self._view_left(), standing, self._calls_begun, waited_s)
        )
        self.tell("enters, left", self.view, f"knows {standing}")
        self.cluster.failpoint("entered a view", self)

    def _view_left(self) -> int:
        """The view it was told of last, whether or not it ever stood in it."""
        return self.view

    def _knows(self) -> int:
        return self.life.standing

    def _view_formed(self, formed: ViewFormed) -> None:
        self.cluster.oracle.heard_of(self, formed, left=self.view)
        self.tell("is in view", formed.view, f"donor {formed.donor}")
        self.view, self._formed = formed.view, formed
        self._store = Line(self, self._met, broke=self._store_lost)
        self._is_noted = False
        here = f"view-{formed.view}/here/{self.rank}"
        self._store.ask(StoreSet({here: b""}))
        self.cluster.failpoint("view formed, group not", self)

    def _met(self, message: Message) -> None:
        """The store answered: first that we are noted, then that all are here."""
        assert self._store is not None
        assert self._formed is not None
        if not isinstance(message, StoreDone):
            self.tell("cannot meet the others:", message)
            self.cluster.counts["group not formed"] += 1
            self._drop_group()
            self._enter()
        elif not self._is_noted:
            self._is_noted = True
            keys = [f"view-{self.view}/here/{rank}" for rank in range(self.cluster.num_workers)]
            self._store.ask(StoreWait(keys, self.cluster.settings.join_timeout_s))
        else:
            self.group = self.cluster.group(self._formed)
            self.group.enter(self)
            place = (self.rank, self._is_behind(), self._knows(), self._is_exchanging(), self._is_settled())
            self.group.run(self, "standing", place, self._hand_over)

    def _store_lost(self) -> None:
        if self.group is None:
            self.tell("loses the store while it forms its group")
            self._drop_group()
            self._enter()

    # ---- state ----------------------------------------------------------------------------------

    def _hand_over(self, places: list[Any]) -> None:
        """All have told where they stand: the donor gives, who is behind takes."""
        assert self._formed is not None
        assert self.group is not None
        self._refuse_different_scripts(places)
        donor = self._formed.donor
        if donor == self.rank:
            self.cluster.faults.gives(self)
            self.group.export_state(self, self.life.export_state())
        if donor >= 0 and self._is_behind():
            self._is_taking = True
            self.group.import_state(self, donor, self._import_state)
        else:
            self._agree()

    def _import_state(self, package: Any) -> None:
        assert self._formed is not None
        self._is_taking = False
        self.cluster.failpoint("state is there, not taken", self)
        if self.is_alive:
            self.tell("takes the state of", f"worker {self._formed.donor}", f"after {self._formed.finished}")
            self.cluster.oracle.took(self, had=self._knows())
            self.life.import_state(package)
            self._agree()

    def _agree(self) -> None:
        assert self.group is not None
        self.group.run(self, "agreed", None, self._agreed)

    def _agreed(self, parts: list[None]) -> None:
        """Everybody has what it needs."""
        if not self.life.has_state:  # and nobody has any
            self.cluster.oracle.starts(self)
            self.life.begin(self.cluster.disk.checkpoint)
        self._resume()

    def _refuse_different_scripts(self, places: list[tuple[int, bool, int, bool, bool]]) -> None:
        """Who is furthest is in an exchange, or at a call: all of them in one, or none."""
        furthest = max((knows for _, _, knows, _, settled in places if settled), default=-1)
        there = {rank: busy for rank, _, knows, busy, settled in places if settled and knows == furthest}
        if len(set(there.values())) > 1:
            self.refused(f"the ranks' scripts differ: {there}")

    def _is_behind(self) -> bool:
        assert self._formed is not None
        return self._knows() < self._formed.finished

    def _is_exchanging(self) -> bool:
        return isinstance(self._pending, Exchange)

    def _is_settled(self) -> bool:
        """Where it is in its script is where its state is: not so while it runs towards what it was given."""
        return self.life.has_state and self._pending is not None and not self.life.log.is_catching_up

    def _resume(self) -> None:
        """Go on with what it was at."""
        pending = self._pending
        if pending is None:
            self._go(None)
        elif isinstance(pending, Exchange):
            known, result = self.life.log.recall()
            if known:
                self._pending = None
                self.cluster.oracle.recalled(self, pending.label, result)
                self._go((result, False))
            else:
                self._exchange(pending)
        else:
            self._ask(pending)
