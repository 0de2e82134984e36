"""Pushes of workers that were replaced: under way when they died, or from one that still lives and was given up.

The real `Membership` says who counts. Toy servers take pushes of the present
view alone; a view changes in two turns, first every server promises to take
nothing of the old one, then it is formed and the replacement may read. So
nothing that an older incarnation pushed can count once the newer has read
what is there. Single messages are lost, doubled, late and overtake each other.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from shoal.cluster.coordinator.membership import Membership
from shoal.runtime.transport.messages.supervisor import Reaped
from shoal.runtime.transport.messages.worker_coordinator import Join
from simulation.world import Process, Violated, World

NUM_PUSHES = 6
"""Per rank."""

AGAIN_S = 0.03
"""What is not answered after so long is said again."""


class Fencing:
    """Workers that push, servers that never die, and a coordinator that does, from a seed alone."""

    worker_class: Any = None  # set below: the classes refer to each other
    server_class: Any = None
    coordinator_class: Any = None

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        random = self.world.random
        self.num_workers, num_servers = random.randint(1, 3), random.randint(1, 2)
        self.counts: Counter[str] = Counter()
        self.has_read: dict[int, int] = {}  # rank -> the newest incarnation that has read what servers hold
        self.views: dict[int, list[int]] = {}
        self.disk: list[Join | Reaped | tuple[int, list[int]]] = []
        self.last_fault_at = 0.0
        self.servers = [self.server_class(self, number) for number in range(num_servers)]
        self.coordinator = self.coordinator_class(self)
        self.workers: dict[int, Worker] = {}
        for rank in range(self.num_workers):
            self.fork(rank, 0)
        for _ in range(min(1 + int(random.expovariate(0.3)), 8)):
            self.world.schedule(0.02 + random.random() * 0.6, self._strike)

    def describe(self) -> str:
        return f"{self.num_workers} workers, {len(self.servers)} servers"

    def run(self) -> None:
        self.world.run(self._is_done, until=lambda: self.last_fault_at + 15.0, check=lambda: None)
        for server in self.servers:
            if any(server.marks.get(rank) != NUM_PUSHES for rank in range(self.num_workers)):
                raise Violated(f"{server.name} does not have every push: {server.marks}")

    def fork(self, rank: int, incarnation: int) -> None:
        self.workers[rank] = self.worker_class(self, rank, incarnation)

    def post(self, to: Process, action: Any, *arguments: Any) -> None:
        """One message: lost, doubled, late, very late or as it should be. It may outlive its sender."""
        chance = self.world.random.random()
        for _ in range(0 if chance < 0.03 else 2 if chance < 0.06 else 1):
            latest_s = 0.003 if chance < 0.8 else 0.03 if chance < 0.95 else 0.4
            to.later(self.world.between(0.0002, latest_s), action, *arguments)

    def _is_done(self) -> bool:
        return all(worker.is_done for worker in self.workers.values())

    # ---- what must hold -------------------------------------------------------------------------

    def applied(self, server: Server, rank: int, incarnation: int, seq: int) -> None:
        self.counts["push applied"] += 1
        if incarnation < self.has_read.get(rank, 0):
            raise Violated(
                f"{server.name} applies push {seq} of worker-{rank}.{incarnation}, and worker-{rank}."
                f"{self.has_read[rank]} has read what was there without it"
            )
        if seq != server.marks.get(rank, 0) + 1:
            raise Violated(
                f"{server.name} applies push {seq} of rank {rank} after {server.marks.get(rank, 0)}"
            )

    def formed(self, view: int, incarnations: list[int]) -> None:
        if self.views.setdefault(view, incarnations) != incarnations:
            raise Violated(f"view {view} is formed twice: {incarnations} and {self.views[view]}")
        self.counts["views"] += 1

    # ---- faults ---------------------------------------------------------------------------------

    def _strike(self) -> None:
        random, world = self.world.random, self.world
        if self._is_done():
            return
        self.last_fault_at = world.now
        worker = self.workers[random.randrange(self.num_workers)]
        match random.choice(("kill", "kill", "give up", "give up", "stop", "stop server", "coordinator")):
            case "kill" if worker.is_alive:
                worker.tell("!! is killed")
                self.counts["fenced: worker killed"] += 1
                worker.die()
                world.schedule(world.between(0.005, 0.05), self._reap, worker)
            case "give up" if worker.is_alive and not worker.is_done:
                # As between hosts: nobody can tell a dead process from one that cannot be heard.
                worker.tell("!! is given up, and lives")
                self.counts["fenced: worker given up"] += 1
                self._reap(worker)
            case "stop" if not worker.is_stopped:
                worker.tell("!! is stopped")
                worker.stop()
                world.schedule(random.random() * 0.5, worker.carry_on)
            case "stop server":
                server = random.choice(self.servers)
                if not server.is_stopped:
                    server.tell("!! is stopped")
                    server.stop()
                    world.schedule(random.random() * 0.5, server.carry_on)
            case "coordinator" if self.coordinator.is_alive:
                self.coordinator.tell("!! is killed")
                self.coordinator.die()
                world.schedule(world.between(0.02, 0.2), self._restart)

    def _reap(self, worker: Worker) -> None:
        if self.workers[worker.rank] is not worker:
            return  # it was given up before
        if not self.coordinator.is_alive:
            self.world.schedule(AGAIN_S, self._reap, worker)
            return
        self.coordinator.hear_of_death(Reaped(worker.rank, worker.incarnation, -9))
        self.fork(worker.rank, worker.incarnation + 1)

    def _restart(self) -> None:
        self.coordinator = self.coordinator_class(self)


class Coordinator(Process):
    """Forms a view when every rank's newest incarnation has come and every server has promised."""

    membership_class = Membership

    def __init__(self, job: Fencing) -> None:
        super().__init__(job.world, "coordinator")
        self.job = job
        self.membership = self.membership_class(num_workers=job.num_workers)
        self.view, self._preparing = 0, 0
        self._promised: set[str] = set()
        for entry in job.disk:
            self._take(entry)
        # A restarted one begins with a new view: some have promised not to serve the old one.
        self._prepare()
        self._say_again()

    def _take(self, entry: Join | Reaped | tuple[int, list[int]]) -> None:
        match entry:
            case Join():
                self.membership.admit(entry, self.world.now)
            case Reaped(rank, incarnation, code):
                self.membership.reaped(rank, incarnation, code, self.world.now)
            case (view, incarnations):
                self.view = view
                self.membership.form(view, incarnations)

    def _write(self, entry: Join | Reaped | tuple[int, list[int]]) -> None:
        self.job.disk.append(entry)
        self._take(entry)

    def hear_of_death(self, reaped: Reaped) -> None:
        self._write(reaped)
        self._prepare()

    def joins(self, worker: Worker) -> None:
        """Also "which view is it?": what is said again is answered again."""
        if self.membership.is_fenced(worker.rank, worker.incarnation):
            self.job.post(worker, worker.refused)
            return
        member = self.membership.members.get(worker.rank)
        if member is None or member.incarnation != worker.incarnation:
            self._write(Join(worker.rank, worker.incarnation, 1, self.job.num_workers))
            self._prepare()
        elif not self._preparing and self.membership.seated.get(worker.rank) == worker.incarnation:
            self.job.post(worker, worker.enters, self.view)
        self._change()

    def promised(self, view: int, server: str) -> None:
        if view == self._preparing:
            self._promised.add(server)
            self._change()

    def _prepare(self) -> None:
        if not self._preparing:
            self._preparing = self.view + 1
            self._promised.clear()
            self._ask()

    def _may_form(self) -> bool:
        return len(self._promised) == len(self.job.servers)

    def _change(self) -> None:
        newest = [self.membership.newest(rank) for rank in range(self.job.num_workers)]
        here = [self.membership.members.get(rank) for rank in range(self.job.num_workers)]
        has_come = all(
            each is not None and each.incarnation == incarnation
            for each, incarnation in zip(here, newest, strict=True)
        )
        if self._preparing and has_come and self._may_form():
            view, self._preparing = self._preparing, 0
            self._write((view, newest))
            self.tell("forms", view, newest)
            self.job.formed(view, newest)
            self._spread()

    def _spread(self) -> None:
        for server in self.job.servers:
            self.job.post(server, server.follow, self.view)

    def _ask(self) -> None:
        for server in self.job.servers:
            self.job.post(server, server.prepare, self._preparing)

    def _say_again(self) -> None:
        self.later(AGAIN_S, self._say_again)
        if self._preparing:
            self._ask()
        else:
            self._spread()


class Server(Process):
    """Takes pushes of the present view, each once."""

    def __init__(self, job: Fencing, number: int) -> None:
        super().__init__(job.world, f"server-{number}")
        self.job = job
        self.view = self._least = 0
        self.marks: dict[int, int] = {}

    def prepare(self, view: int) -> None:
        if view > self.view:
            self._least = max(self._least, view)
            self.job.post(self.job.coordinator, self.job.coordinator.promised, view, self.name)

    def follow(self, view: int) -> None:
        if view > self.view and view >= self._least:
            self.view = self._least = view

    def takes(self, view: int) -> bool:
        return view == self.view >= self._least

    def read(self, view: int, worker: Worker) -> None:
        if self.takes(view):
            self.job.post(worker, worker.has_read, view, self.name, self.marks.get(worker.rank, 0))
        else:
            self.job.post(worker, worker.view_is_over, view)

    def pushed(self, view: int, worker: Worker, seq: int) -> None:
        if not self.takes(view):
            self.job.post(worker, worker.view_is_over, view)
            return
        if seq == self.marks.get(worker.rank, 0) + 1:
            self.job.applied(self, worker.rank, worker.incarnation, seq)
            self.marks[worker.rank] = seq
        self.job.post(worker, worker.acknowledged, self.name, self.marks.get(worker.rank, 0))


class Worker(Process):
    """Reads what is there, then pushes one step after the other to all servers."""

    def __init__(self, job: Fencing, rank: int, incarnation: int) -> None:
        super().__init__(job.world, f"worker-{rank}.{incarnation}")
        self.job, self.rank, self.incarnation = job, rank, incarnation
        self.is_done = False
        self._view = 0  # 0: asks the coordinator for it
        self._marks: dict[str, int] = {}  # what each server has of this rank; not all: it reads
        self._next = 0
        self.later(self.world.between(0.005, 0.05), self._go_on)

    def refused(self) -> None:
        self.tell("is told that it was replaced")
        self.job.counts["fenced: told so"] += 1
        self.die()

    def enters(self, view: int) -> None:
        if view > self._view:
            self._view = view
            self._say()

    def view_is_over(self, view: int) -> None:
        if view == self._view:
            self._view = 0
            self._say()

    def has_read(self, view: int, server: str, mark: int) -> None:
        if self._next or view != self._view or server in self._marks:
            return
        self._marks[server] = mark
        # From the first answer on it has something that an older push would change behind its back.
        self.job.has_read[self.rank] = max(self.incarnation, self.job.has_read.get(self.rank, 0))
        if len(self._marks) == len(self.job.servers):
            self._advance()
            self._say()

    def acknowledged(self, server: str, mark: int) -> None:
        if not self._next:
            return
        self._marks[server] = max(self._marks[server], mark)
        if min(self._marks.values()) >= self._next:
            self._advance()
            self.later(self.world.between(0.005, 0.08), self._say)

    def _advance(self) -> None:
        self._next = min(self._marks.values()) + 1
        self.is_done = self._next > NUM_PUSHES

    def _go_on(self) -> None:
        self.later(AGAIN_S, self._go_on)
        self._say()

    def _say(self) -> None:
        """Whatever is due, again or for the first time."""
        if self.is_done:
            return
        if not self._view:
            if not self._next:
                self._marks.clear()  # what it read in part belongs to a view that is over
            self.job.post(self.job.coordinator, self.job.coordinator.joins, self)
            return
        for server in self.job.servers:
            if not self._next:
                self.job.post(server, server.read, self._view, self)
            elif self._marks[server.name] < self._next:
                self.job.post(server, server.pushed, self._view, self, self._next)


Fencing.worker_class, Fencing.server_class, Fencing.coordinator_class = Worker, Server, Coordinator
