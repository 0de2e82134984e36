"""Training over several hosts: power losses, partitions that heal or not, agents that end late, and workers that live on fenced.

What is new against one host: the head counts processes as dead that it cannot
reach. They may live on, cut off or not, until their agent ends them, and
nothing tells their peers that they are gone. The head never fails here, nor
its link: with it the job ends.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.cluster.hosts.placement import place
from shoal.runtime.transport.messages.supervisor import Reaped
from simulation.cluster import SPAN_S, Cluster
from simulation.groups import Group, _Round
from simulation.supervisor import Supervisor
from simulation.worker import Worker
from simulation.world import Violated

if TYPE_CHECKING:
    from simulation.faults import Fault
    from simulation.settings import Settings

DEAD_AFTER_S = 0.5
"""Silence after which the head gives a host up, and an agent its head."""

ASK_EVERY_S = 0.1
"""How often a rank that waits asks whether its view is over."""

NOTICED_AFTER_S = 1.0
"""Within so long of its end a view is left by all who wait in it."""


class HostFault(NamedTuple):
    """A host loses power or its link; `agent_late_s` is how much later than it should its agent ends its children."""

    kind: str
    host: int
    at: float
    lasts_s: float
    agent_late_s: float


def draw_host_faults(random: Random, num_hosts: int) -> list[HostFault]:
    return [
        HostFault(
            random.choice(("power", "cut", "cut", "cut")),
            random.randrange(1, num_hosts),
            SPAN_S * (0.1 + random.random()) + (0.6 * number),
            random.choice((0.1, 0.4, 0.6, 1.0, 3.0)) * (0.5 + random.random()),
            random.choice((-0.1, 0.0, 0.1, 1.0)) * random.random(),
        )
        for number in range(random.choice((1, 1, 2, 3)))
    ]


class HostedWorker(Worker):
    """A worker of one host."""

    cluster: HostedCluster

    def __init__(self, cluster: HostedCluster, rank: int, incarnation: int, pid: int) -> None:
        self.host = cluster.placing
        self.is_given_up = False  # by the head: whatever it does now counts for nothing
        super().__init__(cluster, rank, incarnation, pid)

    @property
    def is_cut(self) -> bool:
        return self.world.now < self.cluster.cut_until.get(self.host, 0.0)

    def die(self) -> None:
        self.cluster.num_alive += self.is_given_up  # it was counted as dead before
        super().die()

    def lose_power(self) -> None:
        """Nobody is told: not the coordinator, not its peers."""
        self.is_alive = False
        self.cluster.num_alive -= not self.is_given_up
        if self._formed is not None:
            self.cluster.group(self._formed).vanish(self)

    def refused(self, reason: str) -> None:
        if not self.is_given_up:
            super().refused(reason)
            return
        self.tell("is refused, and was given up", reason)
        self.cluster.counts["hosts: given up and refused"] += 1
        self.die()
        self.cluster.supervisor.exited(self, 1)


class HostedGroup(Group):
    """Connections between hosts: a cut or a loss of power closes none of them."""

    _cluster: HostedCluster
    _members: dict[int, HostedWorker]  # type: ignore[assignment]

    def vanish(self, worker: HostedWorker) -> None:
        self._gone.add(worker.rank)
        self._takers.pop(worker.rank, None)
        for this in self._rounds[-2:]:
            this.dones.pop(worker.rank, None)

    def leave(self, worker: Worker) -> None:
        assert isinstance(worker, HostedWorker)
        if worker.is_cut:
            if worker.rank not in self._gone:
                self.vanish(worker)
        else:
            super().leave(worker)

    def _alarm(self, rank: int) -> None:
        member = self._members.get(rank)
        if member is None or not member.is_cut:
            super()._alarm(rank)

    def _finish(self, this: _Round, rank: int) -> None:
        apart = {member.host for other, member in self._members.items() if member.is_cut}
        is_apart = bool(apart) and len({member.host for member in self._members.values()}) > 1
        if rank not in self._gone and is_apart and self._world.random.random() < 0.7:
            self._members[rank].later(0.05, self._finish, this, rank)
        else:
            super()._finish(this, rank)

    def _wait(self, worker: Worker) -> None:
        super()._wait(worker)
        worker.later(ASK_EVERY_S, self._ask, worker, worker.waits_since)

    def _ask(self, worker: HostedWorker, since: float) -> None:
        """It waits still: is its view over?"""
        if worker.group is not self or worker.waits_since != since:
            return
        if self._cluster.is_over(self.view) and not worker.is_cut:
            self._cluster.counts["hosts: a wait ended by asking"] += 1
            worker.broken(self, "the view is over")
        else:
            worker.later(ASK_EVERY_S, self._ask, worker, since)

    def _watch(self, member: Worker) -> None:
        assert isinstance(member, HostedWorker)
        over_at = self._cluster.over_since(self.view)
        is_reachable = not member.is_cut and not member.is_given_up and not self._cluster.faults.plan
        if (
            member.group is self
            and member.waits_since is not None
            and is_reachable
            and self._world.now > max(over_at, member.waits_since) + NOTICED_AFTER_S
        ):
            raise Violated(f"{member.name} waits in view {self.view}, which is over")
        super()._watch(member)


class HostedSupervisor(Supervisor):
    """The head's supervisor: of processes on other hosts it knows what their agents say."""

    cluster: HostedCluster

    def exited(self, worker: Worker, code: int) -> None:
        assert isinstance(worker, HostedWorker)
        late_s = max(0.0, self.cluster.cut_until.get(worker.host, 0.0) - self.world.now)
        self.later(late_s + self.world.between(*self.cluster.settings.reap_s), self._hear_of, worker, code)

    def _hear_of(self, worker: HostedWorker, code: int) -> None:
        if not worker.is_given_up:  # else its agent's word counts for nothing
            self._reap(worker, code)

    def lose(self, host: int) -> None:
        """Nothing was heard of a host for too long, or its agent said that it ends."""
        self.tell("gives up host", host)
        self.cluster.counts["hosts: given up"] += 1
        for worker in list(self.cluster.workers.values()):
            assert isinstance(worker, HostedWorker)
            is_known = (
                worker.rank in self._deaths and self._deaths[worker.rank].incarnation == worker.incarnation
            )
            if worker.host == host and not worker.has_left and not is_known:
                self._give_up(worker)

    def _give_up(self, worker: HostedWorker) -> None:
        worker.is_given_up = True
        self.cluster.counts["hosts: given up alive"] += worker.is_alive
        self.cluster.num_alive -= worker.is_alive
        self.cluster.faults.excused.add(worker.name)
        self._deaths[worker.rank] = death = Reaped(worker.rank, worker.incarnation, -9)
        if self._end is not None:
            self._end.send(death)
        self.cluster.fork(worker.rank, worker.incarnation + 1)


class HostedCluster(Cluster):
    """Ranks fill one host after the other; those of a lost host start where there is room, or when it is back."""

    worker_class: type[Worker] = HostedWorker
    supervisor_class: type[Supervisor] = HostedSupervisor
    group_class: type[Group] = HostedGroup
    supervisor: HostedSupervisor

    def __init__(
        self, seed: int, *, settings: Settings | None = None, plan: list[Fault] | None = None
    ) -> None:
        random = Random(seed + 7)
        # Half of the schedules have nothing but lost hosts: there every wait must end soon.
        super().__init__(seed, settings=settings, plan=[] if random.random() < 0.5 else plan)
        self.num_workers_per_host = random.choice((1, 1, 2))
        self.num_hosts = max(2, -(-self.num_workers // self.num_workers_per_host))
        self.homes = [
            min(rank // self.num_workers_per_host, self.num_hosts - 1) for rank in range(self.num_workers)
        ]
        self.rooms = random.choice((0, 1, 4))  # beside those whose home it is
        self.cut_until: dict[int, float] = {}
        self.away_until: dict[int, float] = {}
        self.placing = 0
        self._over: dict[int, float] = {}
        self.host_faults = draw_host_faults(random, self.num_hosts)
        for fault in self.host_faults:
            self.world.schedule(fault.at, self._strike, fault)
        self.faults.last_at = max(
            [self.faults.last_at, *(fault.at + fault.lasts_s + 2.0 for fault in self.host_faults)]
        )

    def describe(self) -> str:
        lost = "\n".join(f"    {fault}" for fault in self.host_faults)
        return f"{super().describe()}\nhomes {self.homes}, room for {self.rooms}, host faults\n{lost}"

    def fork(self, rank: int, incarnation: int) -> None:
        now = self.world.now
        here = [host for host in range(self.num_hosts) if self.away_until.get(host, 0.0) <= now]
        taken = [each.host for each in self.workers.values() if each.rank != rank]  # type: ignore[attr-defined]
        rooms = {host: self.homes.count(host) + self.rooms - taken.count(host) for host in here}
        host = place(rank, self.homes, rooms)
        waits = host is None
        self.placing = self.homes[rank] if host is None else host
        super().fork(rank, incarnation)
        if waits:
            worker = self.workers[rank]
            self.counts["hosts: waits for a host"] += 1
            self.faults.excused.add(worker.name)
            worker.stop()
            self.world.schedule(self.away_until[self.placing] - now + 0.05, self._born, worker)

    def is_over(self, view: int) -> bool:
        core = self.coordinator.core
        return self.coordinator.is_alive and (core._views.view > view or core._views.is_gathering)

    def over_since(self, view: int) -> float:
        """When somebody was first seen to have left this view for the next one."""
        if view in self._over or self.is_over(view):
            return self._over.setdefault(view, self.world.now)
        return float("inf")

    def _born(self, worker: Worker) -> None:
        if worker.is_alive:
            worker.carry_on()

    def _strike(self, fault: HostFault) -> None:
        if self.is_done or self.away_until.get(fault.host, 0.0) > self.world.now:
            return
        now = self.world.now
        there = [each for each in self.workers.values() if each.host == fault.host and each.is_alive]  # type: ignore[attr-defined]
        self.counts[f"hosts: {fault.kind}"] += 1
        self.world.tell(f"host-{fault.host}", f"!! {fault.kind}", fault.lasts_s)
        self.cut_until[fault.host] = now + fault.lasts_s
        for worker in there:
            self.faults.excused.add(worker.name)
            self.network.silence(worker.name, now + fault.lasts_s)
            if fault.kind == "power":
                assert isinstance(worker, HostedWorker)
                worker.lose_power()
        agent_ends_s = DEAD_AFTER_S + fault.agent_late_s
        if fault.kind == "cut" and fault.lasts_s < min(DEAD_AFTER_S, agent_ends_s):
            self.counts["hosts: healed in time"] += 1
            return
        # An agent that has ended before the link was back is noticed then at the latest.
        lost_s = DEAD_AFTER_S if fault.kind == "power" or fault.lasts_s >= DEAD_AFTER_S else fault.lasts_s
        back_s = max(lost_s, fault.lasts_s, agent_ends_s) + 0.2
        self.away_until[fault.host] = now + back_s
        self.world.schedule(lost_s, self.supervisor.lose, fault.host)
        for worker in there:
            self.world.schedule(agent_ends_s, self._end_by_agent, worker)

    def _end_by_agent(self, worker: Any) -> None:
        if worker.is_alive:
            worker.tell("is ended by its agent")
            worker.die()
            self.supervisor.exited(worker, -9)
