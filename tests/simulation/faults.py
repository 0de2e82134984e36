"""What goes wrong in a schedule, drawn from its seed: at a time, or at a named point in somebody's work."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.world import Process

WORKER_POINTS = (
    "exchange begins",
    "exchange finished, not committed",
    "entered a view",
    "view formed, group not",
    "state is there, not taken",
)
COORDINATOR_POINTS = ("coordinator writes", "coordinator wrote, not answered", "coordinator answered")

KINDS = {
    "kill": 6,
    "kill at": 10,
    "stop": 3,
    "coordinator kill": 3,
    "coordinator kill at": 4,
    "coordinator stop": 1,
    "cut": 3,
    "strand": 3,
    "partition": 2,
    "clock jump": 1,
    "slow": 1,
    "kill all": 1,
}
"""Kind: how often, in proportion."""

LONGEST_S = 3.0
"""No partition or stop of the coordinator lasts longer; a worker may be stopped for ever."""


class Fault(NamedTuple):
    """Something that goes wrong. With a `point` it strikes the `nth` time somebody is there, after `at`."""

    kind: str
    at: float
    rank: int = 0
    lasts_s: float = 0.0
    point: str = ""
    nth: int = 1


def draw(random: Random, *, num_workers: int, span_s: float) -> list[Fault]:
    """Mostly a few, sometimes many, often close to each other: what breaks recovery is a second fault during it."""
    num_faults = min(1 + int(random.expovariate(0.25)), 12)
    faults = []
    near = (0.1 + 0.9 * random.random()) * span_s
    for _ in range(num_faults):
        if random.random() < 0.3:
            near = (0.1 + 0.9 * random.random()) * span_s
        else:
            near += random.expovariate(10.0)
        (kind,) = random.choices(list(KINDS), list(KINDS.values()))
        points = COORDINATOR_POINTS if kind.startswith("coordinator") else WORKER_POINTS
        faults.append(
            Fault(
                kind,
                near,
                random.randrange(num_workers),
                random.choice((0.01, 0.1, 0.5, 1.0, LONGEST_S)) * (0.5 + random.random() / 2),
                random.choice(points) if kind.endswith("at") else "",
                1 + int(random.expovariate(0.7)),
            )
        )
    return faults


class Faults:
    """Carries a plan out upon a cluster."""

    def __init__(self, cluster: Cluster, plan: list[Fault]) -> None:
        self._cluster, self.plan = cluster, plan
        self._armed: dict[str, list[list[int]]] = {}  # point -> [how often still to pass, rank or -1]
        self.last_at = 0.0
        for fault in plan:
            cluster.world.schedule(fault.at, self._strike, fault)
        self.num_pending = len(plan)

    def passes(self, point: str, process: Process) -> None:
        """Somebody is at a named point; perhaps it goes no further."""
        armed = self._armed.get(point)
        if not armed:
            return
        for each in armed:
            each[0] -= 1
        if any(each[0] <= 0 for each in armed):
            armed[:] = [each for each in armed if each[0] > 0]
            self._note(f"dies at: {point}", process)
            self._cluster.kill(process)

    def _strike(self, fault: Fault) -> None:
        cluster = self._cluster
        self.num_pending -= 1
        if cluster.is_done:
            return
        worker = cluster.workers[fault.rank]
        match fault.kind:
            case "kill" if worker.is_alive:
                self._note("is killed", worker)
                cluster.kill(worker)
            case "kill all":
                for each in list(cluster.workers.values()):
                    if each.is_alive:
                        self._note("is killed, with all", each)
                        cluster.kill(each)
            case "stop" if worker.is_alive and not worker.is_stopped:
                self._note("is stopped", worker, fault.lasts_s)
                worker.stop()
                cluster.world.schedule(fault.lasts_s * 2, self._carry_on, worker)
            case "coordinator kill" if cluster.coordinator.is_alive:
                self._note("is killed", cluster.coordinator)
                cluster.kill(cluster.coordinator)
            case "coordinator stop" if not cluster.coordinator.is_stopped:
                self._note("is stopped", cluster.coordinator, fault.lasts_s)
                cluster.coordinator.stop()
                cluster.world.schedule(fault.lasts_s, self._carry_on, cluster.coordinator)
            case "kill at" | "coordinator kill at":
                self._armed.setdefault(fault.point, []).append([fault.nth, fault.rank])
            case "cut":
                for line in worker.lines:
                    if line.end is not None:
                        self._note("loses a connection", worker)
                        late_s = fault.lasts_s if fault.nth > 1 else 0.001
                        notices = (0.001, late_s) if fault.nth % 2 else (late_s, 0.001)
                        cluster.network.cut(line.end, notice_s=notices[0], far_notice_s=notices[1])
            case "strand":
                worker.strands_next_s = fault.lasts_s
            case "partition":
                self._note("hears nothing", worker, fault.lasts_s)
                cluster.network.silence(worker.name, cluster.world.now + fault.lasts_s)
                self._extend(fault.lasts_s)
            case "clock jump":
                self._note("'s clock jumps", cluster.coordinator, fault.lasts_s)
                cluster.clock_ahead_s += fault.lasts_s
            case "slow":
                self._note("is slow", worker)
                cluster.slow.add(fault.rank)

    def _carry_on(self, process: Process) -> None:
        if process.is_alive and process.is_stopped:
            self._note("goes on", process)
            process.carry_on()

    def _note(self, what: str, process: Process, *about: object) -> None:
        process.tell(f"!! {what}", *about)
        self._cluster.counts[
            f"fault: {'coordinator' if process is self._cluster.coordinator else 'worker'} {what}"
        ] += 1
        self._extend(0.0)

    def _extend(self, lasts_s: float) -> None:
        self.last_at = max(self.last_at, self._cluster.world.now + lasts_s)
