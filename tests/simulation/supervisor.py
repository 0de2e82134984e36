"""The simulated supervisor: reaps the dead, forks their replacements, kills whom the coordinator names. It never fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.supervisor import Reaped, Suspect, Watch, Watching
from simulation.network import End
from simulation.world import Process

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.worker import Worker


class Supervisor(Process):
    """One per host. A process is dead for the others when it is reaped, and replaced only then."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.world, "supervisor")
        self.cluster = cluster
        self._deaths: dict[int, Reaped] = {}
        self._end: End | None = None
        self._num_coordinators = 0

    def start(self) -> None:
        self._start_coordinator()
        self._connect()
        for rank in range(self.cluster.num_workers):
            self.cluster.fork(rank, 0)

    # ---- children -------------------------------------------------------------------------------

    def exited(self, worker: Worker, code: int) -> None:
        """A child is dead; it is known a little later."""
        self.later(self.world.between(*self.cluster.settings.reap_s), self._reap, worker, code)

    def coordinator_died(self) -> None:
        self.later(self.world.between(*self.cluster.settings.coordinator_restart_s), self._start_coordinator)

    def _start_coordinator(self) -> None:
        self.tell("starts the coordinator")
        self.cluster.coordinator = self.cluster.coordinator_class(self.cluster, self._num_coordinators)
        self._num_coordinators += 1

    def _reap(self, worker: Worker, code: int) -> None:
        self.tell("reaps", worker.name, code)
        if code == 0:
            return
        if code > 0:
            self.cluster.failed(worker)
            return
        death = Reaped(worker.rank, worker.incarnation, code)
        self._deaths[worker.rank] = death
        if self._end is not None:
            self._end.send(death)
        self.cluster.fork(worker.rank, worker.incarnation + 1)

    # ---- the coordinator ------------------------------------------------------------------------

    def _connect(self) -> None:
        self._end = self.cluster.network.connect(self, "supervisor")
        self._end.send(Watch())

    def heard(self, end: End, message: Message) -> None:
        self.do(self._heard, end, message)

    def lost(self, end: End) -> None:
        self.do(self._lost, end)

    def _heard(self, end: End, message: Message) -> None:
        if end is not self._end:
            return
        if isinstance(message, Watching):
            for death in self._deaths.values():
                end.send(death)
        elif isinstance(message, Suspect):
            worker = self.cluster.workers[message.rank]
            is_meant = worker.is_alive and worker.incarnation == message.incarnation
            if is_meant and (worker.is_stopped or not message.lenient):
                self.tell("kills", worker.name, message.why)
                self.cluster.oracle.suspected(worker)
                self.cluster.counts["suspect killed"] += 1
                self.cluster.kill(worker)

    def _lost(self, end: End) -> None:
        if end is self._end:
            self._end = None
            self.later(self.cluster.settings.reconnect_s, self._connect)
