"""Real server cores, tables and slot map under every fault, from a seed: who is there, and what goes wrong.

Real: `ServerCore` with its tables and optimizer, `ServerGroup`. Toy: workers
(ps_workers.py), the coordinator's journal (a list), the supervisor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from shoal.cluster.coordinator import server_group
from shoal.cluster.coordinator.journal_entries import ServerFilled, ServerLostStep
from shoal.cluster.coordinator.server_group import (
    Event,
    ServerGroup,
)
from shoal.ps.server.actions import Action, DropPeer, Reply, Request, Send, Tell
from shoal.ps.server.core import ServerCore
from shoal.runtime.transport.messages.client_server import Hello
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import JoinServer, ServerView, SlotsFilled, StepLost
from shoal.runtime.transport.messages.supervisor import ReapedServer, ScaleServers
from simulation.ps_net import Connection
from simulation.world import Process, Violated, World
from slot_digests import slot_digests

TICK_S = 0.03
SETTLE_S = 12.0
"""Once the faults stop, all is done after at most so long."""


class SimServer(Process):
    """The shell around a core."""

    def __init__(self, job: Simulated, number: int, incarnation: int) -> None:
        super().__init__(job.world, f"server-{number}.{incarnation}")
        self.job, self.number, self.incarnation, self.process = job, number, incarnation, self
        self.core: ServerCore = job.core_class(number, incarnation)
        self.core.ships_at_once = job.ships_at_once  # else later, with more of them together
        self.peers: dict[int, Connection] = {}
        self.links: dict[int, Connection] = {}
        self.newest_of: dict[str, int] = {}
        self._is_working = self._is_shipping = False
        self.later(TICK_S, self._tick)

    def hear(self, request: Request) -> None:
        self.job.heard(self, request)
        self.carry_out(self.core.hear(request))
        connection = self.peers.get(request.peer)
        if connection is not None:
            self._check_fence(connection, request)

    def _check_fence(self, connection: Connection, request: Request) -> None:
        name, _, incarnation = connection.asker.process.name.partition(".")
        if isinstance(request.message, Hello):
            self.newest_of[name] = max(int(incarnation), self.newest_of.get(name, 0))
        elif int(incarnation) < self.newest_of.get(name, 0):
            raise Violated(f"{self.name} hears {name}.{incarnation} after its replacement: {request.message}")

    def core_view(self) -> int:
        return self.core.view_number

    def gone(self, peer: int) -> None:
        self.carry_out(self.core.gone(peer))

    def view(self, view: ServerView) -> None:
        self.tell("learns of view", view.view)
        for number, link in list(self.links.items()):
            if view.incarnations.get(number) != link.server.incarnation:
                del self.links[number]
                link.close()
        self.carry_out(self.core.view(view))

    def answered(self, connection: Connection, ticket: int, message: Message, frames: list[bytes]) -> None:
        if ticket > 1:  # not the Hello
            self.carry_out(self.core.answered(connection.server.number, message))

    def lost(self, connection: Connection) -> None:
        if self.links.get(connection.server.number) is connection:
            del self.links[connection.server.number]
            self.carry_out(self.core.lost(connection.server.number))

    def carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Reply(peer, ticket, message, frames):
                    self.job.said(self, message)
                    if peer in self.peers:
                        self.peers[peer].reply(ticket, message, [bytes(frame) for frame in frames])
                case Send(server, message, frames):
                    self._send(server, message, [bytes(frame) for frame in frames])
                case Tell(SlotsFilled(view, slots)):
                    self.tell("is filled in view", view)
                    event = ServerFilled(self.number, self.incarnation, view, tuple(slots))
                    self.job.tell_coordinator(self, event)
                case Tell(StepLost(view, rank)):
                    self.tell("has lost a step in view", view, "with rank", rank)
                    lost = ServerLostStep(self.number, self.incarnation, view, rank)
                    self.job.tell_coordinator(self, lost)
                case DropPeer(peer):
                    if peer in self.peers:
                        self.peers[peer].close()
        if not self._is_shipping and self.core.has_pushes:
            self._is_shipping = True
            self.later(self.world.between(0.0, 0.004), self._ship)
        if not self._is_working and self.core.replication.next_copy is not None:
            self._is_working = True
            self.later(self.world.between(0.0002, 0.004), self._work)

    def die(self) -> None:
        super().die()
        for connection in [*self.peers.values(), *self.links.values()]:
            connection.close()

    def _send(self, number: int, message: Message, frames: list[bytes]) -> None:
        link = self.links.get(number)
        if link is None:
            other = self.job.servers.get(number)
            if other is None or not other.is_alive:
                self.later(0.001, self._lost_again, number)
                return
            link = self.links[number] = Connection(self.job, self, other)
            link.ask(Hello(f"server-{self.number}", self.incarnation))
        link.ask(message, frames)

    def _lost_again(self, number: int) -> None:
        if number not in self.links:
            self.carry_out(self.core.lost(number))

    def _ship(self) -> None:
        self._is_shipping = False
        self.carry_out(self.core.ship())

    def _work(self) -> None:
        self._is_working = False
        for _ in range(self.world.random.choice((1, 20, 100))):
            actions, has_more = self.core.work()
            self.carry_out(actions)
            if not has_more:
                break

    def _tick(self) -> None:
        self.later(TICK_S, self._tick)
        self.carry_out(self.core.tick())


class SimCoordinator(Process):
    """Decides about slots by the real `ServerGroup`; what it decided from is on disk before anybody hears of it."""

    def __init__(self, job: Simulated) -> None:
        super().__init__(job.world, "coordinator")
        self.job = job
        self.group = ServerGroup(num_servers=job.num_servers, num_copies=job.num_copies, max_servers=8)
        self.group.__dict__["_seed"] = (
            job.slot_seed
        )  # finding the evenest one takes longer than the rest of a schedule
        for event in job.journal:
            self.group.handle(event)
        if self.group.newest is not None:
            job.publish(self.group.newest)

    def handle(self, event: Event) -> None:
        self.job.journal.append(event)
        for action in self.group.handle(event):
            match action:
                case server_group.AnnounceView(view):
                    self.tell("view", view.view, dict(view.incarnations), len(view.joining), "joining")
                    self.job.publish(view)
                case server_group.LoseSlots(rank=None):
                    self.job.lose()
                case server_group.LoseSlots(rank=rank):
                    self.job.lose_step(rank)


class Simulated:
    """Servers, workers and a coordinator; a subclass says what the workers do and what must come of it."""

    core_class: type[ServerCore] = ServerCore
    coordinator_class: type[SimCoordinator] = SimCoordinator
    fault_kinds = ("server", "server", "worker", "worker", "coordinator", "cut", "cut", "stop", "scale")

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.ships_at_once = seed % 4 == 3
        random = self.world.random
        self.counts: Counter[str] = Counter()
        self.num_workers = random.randint(1, 3)
        self.num_servers = random.choice((1, 2, 2, 3))
        self.num_copies = min(self.num_servers, random.choice((1, 2, 2, 2, 3)))
        self.slot_seed = random.randrange(2)
        self.num_connections = 0
        self.connections: list[Connection] = []
        self.journal: list[Event] = []
        self.views: dict[int, ServerView] = {}
        self.servers: dict[int, SimServer] = {}
        self.workers: dict[int, Any] = {}
        self.is_lost = False
        self.viewed_at = 0.0
        self.last_fault_at = 0.0
        self.prepare()
        self.coordinator = self.coordinator_class(self)
        for number in range(self.num_servers):
            self.fork_server(number, 0)
        for rank in range(self.num_workers):
            self.workers[rank] = self.make_worker(rank, 0)
        at = 0.04
        for _ in range(min(int(random.expovariate(0.3)), 8)):
            at = at + random.expovariate(60.0) if random.random() < 0.6 else 0.02 + random.random() * 0.2
            self.world.schedule(at, self._strike)

    # ---- for subclasses -------------------------------------------------------------------------

    def prepare(self) -> None: ...

    def make_worker(self, rank: int, incarnation: int) -> Any:
        raise NotImplementedError

    def worker_died(self, rank: int) -> None: ...

    def check_end(self) -> None: ...

    def heard(self, server: SimServer, request: Request) -> None: ...

    def said(self, server: SimServer, message: Message) -> None: ...

    # ---- running --------------------------------------------------------------------------------

    def describe(self) -> str:
        return f"{type(self).__name__}: {self.num_workers} workers, {self.num_servers} servers, {self.num_copies} copies"

    def run(self) -> None:
        self.world.run(
            self.is_done, until=lambda: max(self.last_fault_at, 0.6) + SETTLE_S, check=lambda: None
        )
        if not self.is_lost:
            self._let_settle()
        if self.is_lost:
            self.counts["back to a checkpoint"] += 1
            return
        self.check_replicas()
        self.check_end()
        self.counts["done"] += 1

    def is_done(self) -> bool:
        return self.is_lost or all(worker.is_done for worker in self.workers.values())

    def _let_settle(self) -> None:
        """Until every replica has answered; then all holders must be equal."""

        def is_quiet() -> bool:
            newest = self.newest
            return self.is_lost or (
                self.coordinator.is_alive
                and all(not process.is_stopped for process in [*self.servers.values(), self.coordinator])
                and all(
                    server.is_alive
                    and server.core.view_number == newest.view
                    and not any(link.unanswered for link in server.core.replication._links.values())
                    and server.core.replication.next_copy is None
                    and not server.core.has_pushes
                    for server in self.servers.values()
                )
            )

        deadline = max(self.world.now, self.last_fault_at) + SETTLE_S
        self.world.run(is_quiet, until=lambda: deadline, check=lambda: None)

    @property
    def newest(self) -> ServerView:
        return self.views[max(self.views)]

    def check_replicas(self) -> None:
        by_server = {number: slot_digests(server.core.state) for number, server in self.servers.items()}
        for slot, holders in enumerate(self.newest.holders):
            digests = {number: by_server[number][slot] for number in holders}
            if len(set(digests.values())) > 1:
                raise Violated(f"the holders of slot {slot} differ: {digests}")

    # ---- who is there ---------------------------------------------------------------------------

    def fork_server(self, number: int, incarnation: int) -> None:
        server = self.servers[number] = SimServer(self, number, incarnation)
        self.world.schedule(
            self.world.between(0.001, 0.05), self.tell_coordinator, server, JoinServer(number, incarnation, 1)
        )

    def tell_coordinator(self, by: Process | None, event: Event) -> None:
        """Said again until somebody hears it."""
        if by is not None and not by.is_alive:
            return
        if not self.coordinator.is_alive or self.coordinator.is_stopped:
            self.world.schedule(0.02, self.tell_coordinator, by, event)
        else:
            self.coordinator.handle(event)

    def publish(self, view: ServerView) -> None:
        known = self.views.setdefault(view.view, view)
        self.viewed_at = self.world.now
        if known != view:
            raise Violated(f"view {view.view} was told twice, in two ways")
        for process in [*self.servers.values(), *self.workers.values()]:
            self.send_view(process, view)

    def send_view(self, process: Any, view: ServerView) -> None:
        process.later(self.world.between(0.0005, 0.01), self._learn, process, view.view)

    def _learn(self, process: Any, number: int) -> None:
        """In order, and all of them: the connection to the coordinator is one."""
        for view in sorted(self.views):
            is_meant = not isinstance(process, SimServer) or (
                self.views[view].incarnations.get(process.number) == process.incarnation
            )
            if process.core_view() < view <= number and is_meant:
                process.view(self.views[view])

    def lose(self) -> None:
        newest = self.newest
        alive = {number for number, server in self.servers.items() if server.is_alive}
        same = {n for n in alive if newest.incarnations.get(n) == self.servers[n].incarnation}
        if all(any(number in same for number in holders) for holders in newest.holders):
            raise Violated("the job goes back to a checkpoint, though every slot has a holder that lives")
        self.is_lost = True

    def lose_step(self, rank: int) -> None:
        raise Violated("only an exact step is lost where every slot has a holder")

    # ---- faults ---------------------------------------------------------------------------------

    def _strike(self) -> None:
        if self.is_done():
            return
        random, world = self.world.random, self.world
        self.last_fault_at = world.now
        match random.choice(self.fault_kinds):
            case "server":
                alive = [server for server in self.servers.values() if server.is_alive]
                if alive and (self.num_copies > 1 or random.random() < 0.2):
                    self.kill_server(random.choice(alive))
            case "worker":
                worker = self.workers[random.randrange(self.num_workers)]
                if worker.is_alive and not worker.is_done:
                    self.kill_worker(worker)
            case "coordinator" if self.coordinator.is_alive:
                self._note("coordinator killed", self.coordinator)
                self.coordinator.die()
                world.schedule(world.between(0.02, 0.3), self._restart)
            case "cut" if self.connections:
                connection = random.choice(self.connections)
                self._note("connection cut", connection.asker.process)
                connection.close()
            case "stop":
                process: Process = random.choice(
                    [*self.servers.values(), *self.workers.values(), self.coordinator]
                )
                if process.is_alive and not process.is_stopped:
                    self._note("process stopped", process)
                    process.stop()
                    world.schedule(random.random() * 0.4, self._carry_on, process)
            case "scale":
                wanted = random.randint(max(self.num_copies, 1), 4)
                self._note(f"scale to {wanted}", self.coordinator)
                for number in range(wanted):
                    if number not in self.servers:
                        self.fork_server(number, 0)
                self.tell_coordinator(None, ScaleServers(wanted))

    def kill_server(self, server: SimServer) -> None:
        self._note("server killed", server)
        server.die()
        self.world.schedule(self.world.between(0.002, 0.03), self._reap_server, server)

    def kill_worker(self, worker: Any) -> None:
        self._note("worker killed", worker)
        worker.die()
        self.worker_died(worker.rank)
        self.world.schedule(self.world.between(0.001, 0.06), self._replace_worker, worker)

    def _reap_server(self, server: SimServer) -> None:
        self.tell_coordinator(None, ReapedServer(server.number, server.incarnation, -9))
        if server.number < 8:
            self.fork_server(server.number, server.incarnation + 1)

    def _replace_worker(self, worker: Any) -> None:
        replacement = self.workers[worker.rank] = self.make_worker(worker.rank, worker.incarnation + 1)
        if self.views:
            self.send_view(replacement, self.newest)

    def _restart(self) -> None:
        self.coordinator = self.coordinator_class(self)

    def _carry_on(self, process: Process) -> None:
        if process.is_alive and process.is_stopped:
            self.last_fault_at = self.world.now
            process.carry_on()

    def _note(self, what: str, process: Process) -> None:
        process.tell(f"!! {what}")
        self.counts[what] += 1
