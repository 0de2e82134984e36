"""A whole job: coordinator, supervisor and workers, a network between them, faults upon them, an oracle above them."""

from __future__ import annotations

from collections import Counter
from random import Random

from shoal.cluster.coordinator.state import Coordination, CoordinationConfig
from shoal.config.liveness import LivenessConfig
from shoal.runtime.transport.messages.worker_coordinator import ViewFormed
from simulation.coordinator import Coordinator
from simulation.disk import Disk
from simulation.faults import Fault, Faults, draw
from simulation.groups import Group
from simulation.network import Network
from simulation.oracle import Oracle
from simulation.settings import Settings
from simulation.supervisor import Supervisor
from simulation.training import Call
from simulation.worker import Worker
from simulation.world import Process, World

SPAN_S = 0.4
"""An undisturbed run takes little longer: faults begin within it."""


class Cluster:
    """Built from a seed alone. Subclasses with other parts are how bugs are planted."""

    worker_class = Worker
    coordinator_class = Coordinator
    coordination_class = Coordination
    supervisor_class = Supervisor
    group_class = Group
    disk_class = Disk

    def __init__(
        self, seed: int, *, settings: Settings | None = None, plan: list[Fault] | None = None
    ) -> None:
        self.settings = settings or Settings()
        self.world = World(seed)
        random = self.world.random
        self.num_workers = random.choice((1, 2, 2, 3, 3, 3, 4, 4, 5))
        self.calls = draw_calls(random)
        # Now and then a script is not the same on all ranks: then it must not be run.
        self.stray = (
            random.randrange(self.num_workers) if self.num_workers > 1 and random.random() < 0.02 else -1
        )
        self.stray_call = random.randint(1, len(self.calls))
        self.has_failed = False
        self.slow: set[int] = set()
        self.clock_ahead_s = 0.0
        self.disk = self.disk_class()
        self.network = Network(
            self.world.schedule, lambda: self.world.now, self._network_s, as_bytes=random.random() < 0.1
        )
        self.coordination = CoordinationConfig(
            num_workers=self.num_workers,
            liveness=LivenessConfig(
                join_timeout_s=self.settings.join_timeout_s,
                step_timeout_s=self.settings.step_timeout_s,
                coordinator_grace_s=self.settings.dead_after_s,
            ),
            can_recover=True,
        )
        self.workers: dict[int, Worker] = {}
        self.num_alive = 0
        self.num_forks = 0
        self.counts: Counter[str] = Counter()
        """What happened in this schedule: how one sees that the faults reach where it hurts."""
        self._groups: dict[int, Group] = {}
        self.oracle = Oracle(self)
        self.coordinator: Coordinator
        self.supervisor = self.supervisor_class(self)
        self.faults = Faults(
            self, draw(random, num_workers=self.num_workers, span_s=SPAN_S) if plan is None else plan
        )

    def run(self) -> None:
        """Until all workers have left; raises Violated where a promise is broken on the way."""
        self.supervisor.start()
        self.world.run(self._is_over, until=self._deadline, check=self.oracle.check)
        self.oracle.finish()
        self.counts["replacements"] += self.num_forks - self.num_workers

    def describe(self) -> str:
        plan = "\n".join(f"    {fault}" for fault in self.faults.plan)
        return f"{self.num_workers} workers, calls {[call.kind for call in self.calls]}, faults\n{plan}"

    # ---- what its parts ask ---------------------------------------------------------------------

    def clock(self) -> float:
        """The coordinator's clock."""
        return self.world.now + self.clock_ahead_s

    def calls_of(self, rank: int) -> tuple[Call, ...]:
        if rank != self.stray:
            return self.calls
        calls = list(self.calls)
        calls[self.stray_call - 1] = calls[self.stray_call - 1]._replace(num_steps=99)
        return tuple(calls)

    def failed(self, worker: Worker) -> None:
        """A worker ended with an error: so does the job."""
        self.counts["job refused"] += 1
        self.has_failed = True

    def slowness(self, rank: int) -> float:
        return 10.0 if rank in self.slow else 1.0

    def fork(self, rank: int, incarnation: int) -> None:
        self.num_forks += 1
        self.num_alive += 1
        self.workers[rank] = self.worker_class(self, rank, incarnation, 1000 + self.num_forks)

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        if not process.is_alive:
            return
        process.die()
        if isinstance(process, Worker):
            self.supervisor.exited(process, -9)

    def failpoint(self, point: str, process: Process) -> None:
        self.faults.passes(point, process)

    def group(self, formed: ViewFormed) -> Group:
        """The group that the members of a view form."""
        if formed.view not in self._groups:
            self._groups[formed.view] = self.group_class(self, formed.view, formed.incarnations)
        return self._groups[formed.view]

    @property
    def is_done(self) -> bool:
        return all(worker.has_left for worker in self.workers.values())

    def _is_over(self) -> bool:
        return self.has_failed or (self.num_alive == 0 and self.is_done)

    def _deadline(self) -> float:
        return self.faults.last_at + self.settings.settle_s

    def _network_s(self) -> float:
        return self.world.between(*self.settings.network_s)


def draw_calls(random: Random) -> tuple[Call, ...]:
    """A script: one or two trainings, and what else a script does."""
    calls = [Call("fit", random.randint(1, 2), random.randint(2, 5))]
    if random.random() < 0.3:
        calls.insert(0, Call("save"))
    if random.random() < 0.6:
        calls.append(Call("evaluate", 0, random.randint(1, 2)))
    if random.random() < 0.3:
        calls.append(Call("loop", 0, random.randint(1, 4)))
    if random.random() < 0.3:
        calls.append(Call("save"))
    return tuple(calls)
