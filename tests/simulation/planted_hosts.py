"""Bugs on purpose where hosts are lost."""

from __future__ import annotations

from typing import Any

from simulation.hosts import HostedCluster, HostedGroup, HostedSupervisor, HostedWorker

PLANTED_HOSTS: dict[str, type[HostedCluster]] = {}
"""What is wrong: the cluster in which it is."""


def _plant(name: str, **parts: Any) -> None:
    PLANTED_HOSTS[name] = type("PlantedHosts", (HostedCluster,), parts)


class NobodyAsks(HostedGroup):
    def _ask(self, worker: HostedWorker, since: float) -> None:
        pass


class BelievesTheGivenUp(HostedSupervisor):
    def _hear_of(self, worker: HostedWorker, code: int) -> None:
        self._reap(worker, code)


class SameIncarnation(HostedSupervisor):
    def _give_up(self, worker: HostedWorker) -> None:
        super()._give_up(worker)
        replacement = self.cluster.workers[worker.rank]
        replacement.incarnation = worker.incarnation


_plant("a rank waits out its time-out in a view that is over (once real)", group_class=NobodyAsks)
_plant("an agent that was given up is believed", supervisor_class=BelievesTheGivenUp)
_plant("a worker of a lost host is replaced under its own incarnation", supervisor_class=SameIncarnation)
