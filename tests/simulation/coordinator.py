"""The simulated coordinator: the real `Coordination`, its journal on a simulated disk, and crashes where they hurt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.cluster.coordinator.actions import Answer, DropClient
from shoal.cluster.coordinator.journal_entries import Entry, Persist
from shoal.cluster.coordinator.state import Action, Coordination
from shoal.runtime.transport.messages.message import Message
from simulation.network import End
from simulation.world import Process

if TYPE_CHECKING:
    from simulation.cluster import Cluster

TURN_S = 0.0005
"""One round of its select: what comes within it is written down and answered together."""


class Coordinator(Process):
    """One life of the coordinator; the next one begins with what this one wrote down."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        super().__init__(cluster.world, f"coordinator.{number}")
        self.cluster = cluster
        self._ends: dict[int, End] = {}
        self._numbers: dict[End, int] = {}
        self._wakes_at = float("inf")
        self._due: list[Action] = []
        self._ends_turn = False
        self.core: Coordination = cluster.coordination_class(
            cluster.coordination, cluster.disk.read(), now=cluster.clock()
        )
        cluster.network.listen(self)
        self._sleep()

    def die(self) -> None:
        """Killed: what it was told and did not write down is gone."""
        self.is_alive = False
        self.cluster.network.listen(None)
        for end in self._ends.values():
            end.close()
        self.cluster.supervisor.coordinator_died()

    def stop(self) -> None:
        """Stopped: who connects meanwhile waits in the backlog, which is the kernel's."""
        super().stop()
        self.cluster.network.listen(None)

    def carry_on(self) -> None:
        self.cluster.network.listen(self)
        super().carry_on()

    # ---- what happens to it ---------------------------------------------------------------------

    def accepted(self, end: End) -> None:
        self.do(self._accepted, end)

    def heard(self, end: End, message: Message) -> None:
        self.do(self._heard, end, message)

    def lost(self, end: End) -> None:
        self.do(self._lost, end)

    def _accepted(self, end: End) -> None:
        number = len(self._numbers) + 1
        self._numbers[end], self._ends[number] = number, end
        self.core.connected(number, is_supervisor=end.where == "supervisor")

    def _heard(self, end: End, message: Message) -> None:
        number = self._numbers[end]
        if number in self._ends:
            self.tell("hears", f"{end.where} #{number}:", message)
            self._decided(self.core.hear(number, message, self.cluster.clock()))

    def _lost(self, end: End) -> None:
        number = self._numbers[end]
        if self._ends.pop(number, None) is not None:
            self._decided(self.core.gone(number))

    def _wake(self) -> None:
        self._wakes_at = float("inf")
        self._decided([])

    # ---- what it does ---------------------------------------------------------------------------

    def _decided(self, actions: list[Action]) -> None:
        """Acted upon at the end of the turn, together with what else comes until then."""
        self._due += actions
        if not self._ends_turn:
            self._ends_turn = True
            self.later(self.world.random.random() * TURN_S, self._end_turn)

    def _end_turn(self) -> None:
        self._ends_turn = False
        self._due += self.core.tick(self.cluster.clock())
        while self._due and self.is_alive:
            actions, self._due = self._due, []
            self._carry_out(actions)
        if self.is_alive:
            self._sleep()

    def _carry_out(self, actions: list[Action]) -> None:
        """Write down, then answer."""
        self._write([action.entry for action in actions if type(action) is Persist])
        for action in actions:
            if not self.is_alive:
                return
            if type(action) is Answer:
                end = self._ends.get(action.client)
                if end is not None:
                    self.tell("answers", f"{end.where} #{action.client}:", action.message)
                    end.send(action.message)
                    self.cluster.failpoint("coordinator answered", self)
            elif type(action) is DropClient:
                end = self._ends.pop(action.client, None)
                if end is not None:
                    self.tell("drops", f"{end.where} #{action.client}:", action.problem)
                    end.close()
                    self._due += self.core.gone(action.client)

    def _write(self, entries: list[Entry]) -> None:
        if not entries:
            return
        self.cluster.failpoint("coordinator writes", self)  # dies in the midst of it: a torn journal
        if not self.is_alive:
            return
        self.cluster.oracle.remembered(entries)
        self.cluster.disk.write(entries)
        self.cluster.failpoint("coordinator wrote, not answered", self)

    def _sleep(self) -> None:
        """Wake up at the next deadline, if nothing happens before."""
        deadline = self.core.deadline
        if deadline is not None and deadline < self._wakes_at:
            self._wakes_at = deadline
            self.later(max(0.0, deadline - self.cluster.clock()), self._wake)
