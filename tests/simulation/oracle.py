"""Invariants of every schedule, at every moment and at its end.

The oracle hears of everything that is decided, computed or promised, at the
moment it is, and knows the undisturbed run. It has no part in the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.cluster.coordinator.journal_entries import Entry, Granted
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.supervisor import Reaped
from shoal.runtime.transport.messages.worker_coordinator import BeginCall, Join, ScriptEnded, ViewFormed
from simulation.training import Label, Weights, undisturbed
from simulation.world import Violated

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.worker import Worker


class Oracle:
    """Raises `Violated` as soon as a promise is broken."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.expected = undisturbed(cluster.calls, cluster.num_workers)
        self.views: dict[int, ViewFormed] = {}
        self._newest: dict[
            int, int
        ] = {}  # rank -> the incarnation that counts, by what the coordinator wrote down
        self._asked: dict[int, dict[int, str]] = {}  # call -> rank -> what it said
        self._ended: dict[int, int] = {}  # rank -> calls it had made at its script's end
        self._granted: dict[int, tuple[str, str] | None] = {}
        self._counts = cluster.counts

    # ---- after every event ----------------------------------------------------------------------

    def check(self) -> None:
        """One living process per rank: who is dead for the others is dead."""
        if self._cluster.num_alive > self._cluster.num_workers:
            raise Violated("a rank was forked again before its old process was dead")

    # ---- exchanges and steps --------------------------------------------------------------------

    def exchanged(self, worker: Worker, label: Label, result: int) -> None:
        if result != self.expected.results[label]:
            raise Violated(f"{worker.name} gets another result of {label} than the undisturbed run")

    def recalled(self, worker: Worker, label: Label, result: int) -> None:
        self._counts["result recalled"] += 1
        if result != self.expected.results[label]:
            raise Violated(f"{worker.name} remembers another result of {label} than the undisturbed run has")

    def committed(self, worker: Worker, label: Label, weights: Weights) -> None:
        self._counts["step committed"] += 1
        if weights != self.expected.after_step[label]:
            raise Violated(f"{worker.name} commits {label} differently")

    def took(self, worker: Worker, *, had: int) -> None:
        self._counts["state taken by a replacement" if had < 0 else "state taken by who was behind"] += 1

    def starts(self, worker: Worker) -> None:
        """It begins from the checkpoint: only right where nobody has anything newer."""
        if self._cluster.disk.checkpoint is not None:
            self._counts["begun from a checkpoint"] += 1
        others = [
            each for each in self._cluster.workers.values() if each.is_alive and each.life.log.num_known
        ]
        if others:
            raise Violated(f"{worker.name} begins again although {others[0].name} has what it needs")

    # ---- views ----------------------------------------------------------------------------------

    def heard_of(self, worker: Worker, formed: ViewFormed, *, left: int) -> None:
        self._counts["view heard of"] += 1
        if formed != self.views.get(formed.view):
            raise Violated(f"{worker.name} is told {formed}, written down was {self.views.get(formed.view)}")
        if formed.view <= left:
            raise Violated(f"{worker.name} left view {left} and is sent to view {formed.view}")
        if formed.incarnations[worker.rank] != worker.incarnation:
            raise Violated(f"{worker.name} is told of view {formed.view}, in which it is not")

    def suspected(self, worker: Worker) -> None:
        """Only who does not answer is killed: it is stopped, or was, or cannot be heard."""
        if not worker.is_stopped and worker.name not in self._cluster.faults.excused:
            raise Violated(f"{worker.name} is killed although nothing is wrong with it")

    # ---- calls ----------------------------------------------------------------------------------

    def asked(self, worker: Worker, question: Message) -> None:
        if isinstance(question, BeginCall):
            said = f"{question.kind}({question.detail})"
            self._asked.setdefault(question.number, {})[worker.rank] = said
        elif isinstance(question, ScriptEnded):
            self._ended[worker.rank] = question.num_calls

    def granted(self, worker: Worker, number: int) -> None:
        said = self._asked.get(number, {})
        if len(said) < self._cluster.num_workers or len(set(said.values())) > 1:
            raise Violated(f"{worker.name} may make call {number}, and the ranks say {said}")
        if number == self._cluster.stray_call and self._cluster.stray >= 0:
            raise Violated(f"{worker.name} may make call {number}, which is not the same on all ranks")
        if number not in self._granted:
            raise Violated(f"{worker.name} may make call {number}, and it was not written down")

    def let_go(self, worker: Worker) -> None:
        if len(self._ended) < self._cluster.num_workers:
            raise Violated(f"{worker.name} may leave, and only {sorted(self._ended)} are at the end")

    def refused(self, worker: Worker, reason: str) -> None:
        if self._cluster.stray < 0:
            raise Violated(f"{worker.name} is refused: {reason}")

    # ---- what the coordinator writes down -------------------------------------------------------

    def remembered(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            match entry:
                case Join(rank, incarnation):
                    if incarnation < self._newest.get(rank, 0):
                        raise Violated(
                            f"incarnation {incarnation} of rank {rank} joins, {self._newest[rank]} is in"
                        )
                    self._newest[rank] = incarnation
                case Reaped(rank, incarnation):
                    self._newest[rank] = max(incarnation + 1, self._newest.get(rank, 0))
                case ViewFormed(view):
                    self._form(view, entry)
                case Granted(number, call):
                    if self._granted.setdefault(number, call) != call:
                        raise Violated(f"call {number} is granted as {call}, and was {self._granted[number]}")

    def _form(self, view: int, formed: ViewFormed) -> None:
        if view in self.views:
            raise Violated(f"view {view} is formed a second time: {formed}, and was {self.views[view]}")
        if view != len(self.views) + 1:
            raise Violated(f"view {view} follows view {len(self.views)}")
        for rank, incarnation in enumerate(formed.incarnations):
            if incarnation != self._newest.get(rank):
                raise Violated(
                    f"view {view} has incarnation {incarnation} of rank {rank}, the newest is {self._newest.get(rank)}"
                )
        self.views[view] = formed

    # ---- at the end -----------------------------------------------------------------------------

    def finish(self) -> None:
        """The job is done: everybody has what the undisturbed run has; or its scripts differ, and it was refused."""
        if self._cluster.has_failed or self._cluster.stray >= 0:
            if not (self._cluster.has_failed and self._cluster.stray >= 0):
                raise Violated("scripts differ, and the job was done")
            return
        for worker in self._cluster.workers.values():
            if worker.life.weights != self.expected.weights and not worker.came_too_late:
                raise Violated(f"{worker.name} ends with other weights than the undisturbed run")
            if tuple(worker.life.finished_calls) != self.expected.finished_calls and not worker.came_too_late:
                raise Violated(f"{worker.name} ends with other results than the undisturbed run")
