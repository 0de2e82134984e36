"""Faults of a schedule, drawn from its seed: at a time, or at a named point of a process."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, NamedTuple

from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.worker_coordinator import Join

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.worker import Worker
    from simulation.world import Process

IN_STEPS = ("exchange begins", "exchange finished, not committed")
IN_VIEWS = ("entered a view", "view formed, group not", "state is there, not taken")
AT_THE_END = ("at the script's end", "asked to leave")
IN_THE_COORDINATOR = ("coordinator writes", "coordinator wrote, not answered", "coordinator answered")

THEMES: dict[str, dict[str | tuple[str, ...], int]] = {
    "everything": {
        "kill": 6,
        IN_STEPS: 6,
        IN_VIEWS: 6,
        AT_THE_END: 1,
        "kill donor": 3,
        "kill all": 1,
        "stop": 4,
        "slow": 1,
        "coordinator kill": 3,
        IN_THE_COORDINATOR: 4,
        "coordinator stop": 1,
        "clock jump": 1,
        "cut": 3,
        "strand": 3,
        "partition": 2,
    },
    "kills": {"kill": 4, IN_STEPS: 4, IN_VIEWS: 2, "kill donor": 4},
    "donors": {IN_STEPS[1:]: 4, IN_VIEWS[2:]: 1, "kill donor": 6, "kill": 1},
    "lines": {"strand": 6, "cut": 3, "partition": 2, "kill": 4, IN_VIEWS: 4, "coordinator kill": 2},
    "ends": {AT_THE_END: 6, "strand": 2, "strand join": 4, "cut": 1, IN_THE_COORDINATOR: 2, "kill": 1},
}
"""What a schedule is about: its faults (a tuple: a kill at one of these points), and how often each, in proportion."""

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
    theme = THEMES[random.choice(("everything", "donors", *THEMES))]
    num_faults = min(1 + int(random.expovariate(0.22)), 12)
    faults = []
    near = span_s * (0.2 + 0.8 * random.random())
    for _ in range(num_faults):
        if random.random() < 0.3:
            near = span_s * (0.2 + 0.8 * random.random())
        else:
            near += random.expovariate(20.0)
        (drawn,) = random.choices(list(theme), list(theme.values()))
        kind, point = ("kill at", random.choice(drawn)) if isinstance(drawn, tuple) else (drawn, "")
        faults.append(
            Fault(
                kind,
                near,
                random.randrange(num_workers),
                random.choice((0.01, 0.1, 0.5, 1.0, LONGEST_S)) * (0.5 + random.random() / 2),
                point,
                1 + int(random.expovariate(0.7)),
            )
        )
    return faults


class Faults:
    """Carries a plan out upon a cluster."""

    def __init__(self, cluster: Cluster, plan: list[Fault]) -> None:
        self._cluster, self.plan = cluster, plan
        self._armed: dict[str, list[int]] = {}  # point -> how often it is still to be passed
        self._num_donors_to_kill = 0
        self._strands_joins: set[int] = set()  # of replacements
        self._strands: dict[int, tuple[int, float]] = {}  # rank -> at its nth message from now, for how long
        self.excused: set[str] = set()
        """Whom others may have good reason to give up, though it lives."""
        self.last_at = max((fault.at for fault in plan), default=0.0)
        """Nothing goes wrong of which we know after this."""
        for fault in plan:
            cluster.world.schedule(fault.at, self._strike, fault)

    def passes(self, point: str, process: Process) -> None:
        """Somebody is at a named point; perhaps it goes no further."""
        armed = self._armed.get(point)
        if not armed:
            return
        passed = [left - 1 for left in armed]
        armed[:] = [left for left in passed if left]
        if len(armed) < len(passed):
            self._note(f"dies at: {point}", process)
            self._cluster.kill(process)

    def gives(self, donor: Worker) -> None:
        """A donor begins to give its state to who is behind."""
        if self._num_donors_to_kill:
            self._num_donors_to_kill -= 1
            donor.later(self._cluster.world.between(0.0, 0.03), self._kill, donor)

    def strands(self, worker: Worker, message: Message) -> float:
        """A worker says something: for so long it is under way, and the line breaks at once; 0.0: all is well."""
        rank = worker.rank
        if worker.incarnation and rank in self._strands_joins and isinstance(message, Join):
            self._strands_joins.remove(rank)
            return 0.0001
        if rank not in self._strands:
            return 0.0
        nth, lag_s = self._strands.pop(rank)
        if nth > 1:
            self._strands[rank] = (nth - 1, lag_s)
            return 0.0
        return lag_s

    def _kill(self, worker: Worker) -> None:
        self._note("is killed as a donor", worker)
        self._cluster.kill(worker)

    def _strike(self, fault: Fault) -> None:
        cluster = self._cluster
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
                self.excused.add(worker.name)
                worker.stop()
                cluster.world.schedule(fault.lasts_s * 2, self._carry_on, worker)
            case "coordinator kill" if cluster.coordinator.is_alive:
                self._note("is killed", cluster.coordinator)
                cluster.kill(cluster.coordinator)
            case "coordinator stop" if not cluster.coordinator.is_stopped:
                self._note("is stopped", cluster.coordinator, fault.lasts_s)
                cluster.coordinator.stop()
                cluster.world.schedule(fault.lasts_s, self._carry_on, cluster.coordinator)
            case "kill at":
                self._armed.setdefault(fault.point, []).append(fault.nth)
            case "cut":
                for line in worker.lines:
                    if line.end is not None:
                        self._note("loses a connection", worker)
                        self.excused.add(worker.name)  # it may notice late
                        late_s = fault.lasts_s if fault.nth > 1 else 0.001
                        notices = (0.001, late_s) if fault.nth % 2 else (late_s, 0.001)
                        cluster.network.cut(line.end, notice_s=notices[0], far_notice_s=notices[1])
            case "strand":
                lag_s = 0.0001 if fault.lasts_s < 0.1 else min(fault.lasts_s, 0.3)
                self._strands[fault.rank] = (fault.nth, lag_s)
            case "strand join":
                self._strands_joins |= set(range(cluster.num_workers))
            case "kill donor":
                self._num_donors_to_kill += 1
            case "partition":
                self._note("hears nothing", worker, fault.lasts_s)
                self.excused.add(worker.name)
                cluster.network.silence(worker.name, cluster.world.now + fault.lasts_s)
                self._extend(fault.lasts_s)
            case "clock jump":
                self._note("'s clock jumps", cluster.coordinator, fault.lasts_s)
                cluster.clock_ahead_s += fault.lasts_s
                self.excused |= {each.name for each in cluster.workers.values()}
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
