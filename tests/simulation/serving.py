"""Slots in the simulator: toy servers replicate, die, take over and move slots by the real `slot_map`.

A first part of what the parameter server will be: enough to see that one
server answers for a slot in a view, and that what was acknowledged survives
as long as one holder does. Here single messages are lost, doubled and
overtake each other; everybody says a thing again until it is answered.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

from shoal.cluster.coordinator.slot_map import (
    Holders,
    MoveState,
    SlotMap,
    SlotMove,
    fail_over,
    place,
    plan_moves,
    switch,
)
from simulation.world import Process, Violated, World

NUM_SLOTS = 6
NUM_PUSHES = 5
"""Per slot."""

AGAIN_S = 0.03
"""What is not answered after so long is said again."""


class Serving:
    """Servers, a coordinator and a client, from a seed alone."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        random = self.world.random
        self.num_servers = random.randint(2, 4)
        self.num_copies = random.randint(2, 3)
        self.seed = random.randrange(1000)
        self.counts: Counter[str] = Counter()
        self.acknowledged = [0] * NUM_SLOTS
        self.accepted_by: dict[tuple[int, int], str] = {}
        self.maps: dict[int, SlotMap] = {}
        self.lost: set[int] = set()
        self.servers: dict[str, Server] = {}
        self.last_fault_at = 0.0
        for number in range(self.num_servers):
            self.fork(number, 0)
        self.disk: dict[str, Any] = {"map": None, "servers": list(self.servers), "dead": []}
        self.coordinator = self.make_coordinator()
        self.client = Client(self)
        for _ in range(min(1 + int(random.expovariate(0.4)), 6)):
            self.world.schedule(0.02 + random.random() * 0.6, self._strike)

    server_class: Any = None  # set below: the classes refer to each other
    coordinator_class: Any = None

    def make_coordinator(self) -> SlotCoordinator:
        coordinator: SlotCoordinator = self.coordinator_class(self)
        return coordinator

    def describe(self) -> str:
        return f"{self.num_servers} servers, {self.num_copies} copies"

    def run(self) -> None:
        self.world.run(self.client.is_done, until=lambda: self.last_fault_at + 15.0, check=lambda: None)
        slot_map = self.maps[max(self.maps)]
        for slot in set(range(NUM_SLOTS)) - self.lost:
            primary = slot_map.primary(slot)
            if primary is None or self.servers[primary].values[slot] != chain(NUM_PUSHES):
                raise Violated(f"slot {slot} at {primary} does not hold every push once, in order")

    def fork(self, number: int, incarnation: int) -> None:
        server = self.server_class(self, number, incarnation)
        self.servers[server.name] = server

    def post(self, to: Process, action: Any, *arguments: Any) -> None:
        """One message: lost, doubled, late or as it should be."""
        chance = self.world.random.random()
        for _ in range(0 if chance < 0.03 else 2 if chance < 0.06 else 1):
            delay_s = self.world.between(0.0002, 0.003 if chance < 0.9 else 0.03)
            to.later(delay_s, action, *arguments)

    # ---- what must hold -------------------------------------------------------------------------

    def accepted(self, slot: int, view: int, server: str) -> None:
        if self.accepted_by.setdefault((slot, view), server) != server:
            raise Violated(
                f"slot {slot} has two primaries in view {view}: {server}, {self.accepted_by[slot, view]}"
            )

    def established(self, slot_map: SlotMap) -> None:
        """The coordinator wrote a map down."""
        if self.maps.setdefault(slot_map.view, slot_map) != slot_map:
            raise Violated(f"view {slot_map.view} has two maps")
        self.lost |= set(slot_map.lost)
        for slot in set(range(NUM_SLOTS)) - self.lost:
            primary = slot_map.primary(slot)
            assert primary is not None
            # A server that died a moment ago may be in it; the next view is without it.
            if self.servers[primary].is_alive and self.servers[primary].mark(slot) < self.acknowledged[slot]:
                raise Violated(
                    f"slot {slot}: {self.acknowledged[slot]} pushes were acknowledged, {primary} takes over with "
                    f"{self.servers[primary].mark(slot)}"
                )

    # ---- faults ---------------------------------------------------------------------------------

    def _strike(self) -> None:
        random, world = self.world.random, self.world
        if self.client.is_done():
            return
        self.last_fault_at = world.now
        alive = [server for server in self.servers.values() if server.is_alive]
        match random.choice(("kill", "kill", "kill", "stop", "coordinator")):
            case "kill" if len(alive) > 1:
                server = random.choice(alive)
                server.tell("!! is killed")
                self.counts["server killed"] += 1
                server.is_alive = False
                world.schedule(world.between(0.005, 0.05), self._reap, server)
            case "stop":
                server = random.choice(alive)
                server.tell("!! is stopped")
                self.counts["server stopped"] += 1
                server.stop()
                world.schedule(random.random() * 0.5, server.carry_on)
            case "coordinator":
                self.counts["coordinator killed"] += 1
                self.coordinator.tell("!! is killed")
                self.coordinator.is_alive = False
                world.schedule(world.between(0.02, 0.2), self._restart)

    def _restart(self) -> None:
        if not self.coordinator.is_alive:
            self.coordinator = self.make_coordinator()

    def _reap(self, server: Server) -> None:
        if not self.coordinator.is_alive:
            self.world.schedule(AGAIN_S, self._reap, server)
            return
        self.fork(server.number, server.incarnation + 1)
        newborn = next(reversed(self.servers))
        self.coordinator.changed(dead=server.name, born=newborn)


class Server(Process):
    """Holds slots. What it accepts as primary it answers for only when all holders have it."""

    def __init__(self, job: Serving, number: int, incarnation: int) -> None:
        super().__init__(job.world, f"server-{number}.{incarnation}")
        self.job, self.number, self.incarnation = job, number, incarnation
        self.map: SlotMap | None = None
        self.promised = 0  # it takes nothing of views below this
        self.values: dict[int, int] = {}  # slot -> the chain of all pushes
        self._marks: dict[int, int] = {}
        self._waits: dict[tuple[int, int], set[str]] = {}  # (slot, seq) -> who does not have it yet
        self._followers: dict[int, set[str]] = {}  # of slots on the move: they get updates, and do not serve
        self.later(AGAIN_S, self._say_again)

    def mark(self, slot: int) -> int:
        return self._marks.get(slot, 0)

    # ---- as primary -----------------------------------------------------------------------------

    def pushed(self, view: int, slot: int, seq: int) -> None:
        if not self._serves(view, slot):
            self.job.post(self.job.client, self.job.client.refused, view)
            return
        self.job.accepted(slot, view, self.name)
        if seq == self.mark(slot) + 1:
            self._apply(slot, seq)
        if seq <= self.mark(slot):
            # Also one that it has: whether the others do is not known after a failover.
            self._waits.setdefault((slot, seq), self._others(slot))
            self._replicate(slot, seq)
            self._acknowledge(slot, seq)

    def has(self, view: int, slot: int, seq: int, server: str) -> None:
        """A holder has everything up to `seq`."""
        if self._serves(view, slot):
            for (each, number), waits in list(self._waits.items()):
                if each == slot and number <= seq:
                    waits.discard(server)
                    self._acknowledge(slot, number)
            if seq >= self.mark(slot) and server in self._followers.get(slot, ()):
                self.job.post(self.job.coordinator, self.job.coordinator.caught_up, view, slot, server)

    def copy(self, view: int, slot: int, to: str) -> None:
        if self._serves(view, slot):
            self._followers.setdefault(slot, set()).add(to)
            for (each, _), waits in self._waits.items():
                if each == slot:
                    waits.add(to)
            self._send(slot, to)

    def _serves(self, view: int, slot: int) -> bool:
        return (
            self.map is not None
            and self.map.view == view >= self.promised
            and self.map.primary(slot) == self.name
        )

    def _others(self, slot: int) -> set[str]:
        assert self.map is not None
        return (set(self.map.holders[slot]) | self._followers.get(slot, set())) - {self.name}

    def _replicate(self, slot: int, seq: int) -> None:
        for name in sorted(self._waits.get((slot, seq), ())):
            self._send(slot, name)

    def _send(self, slot: int, to: str) -> None:
        """All of the slot: a toy's update is as large as its state."""
        assert self.map is not None
        server = self.job.servers[to]
        state = (self.map.view, slot, self.mark(slot), self.values.get(slot, 0), self.name)
        self.job.post(server, server.replicated, *state)

    def _acknowledge(self, slot: int, seq: int) -> None:
        if not self._waits.get((slot, seq)):
            self._waits.pop((slot, seq), None)
            self.job.post(self.job.client, self.job.client.acknowledged, slot, seq)

    def _say_again(self) -> None:
        self.later(AGAIN_S, self._say_again)
        for slot, seq in list(self._waits):
            self._replicate(slot, seq)
        for slot, names in self._followers.items():
            for name in sorted(names):
                self._send(slot, name)

    # ---- as replica -----------------------------------------------------------------------------

    def replicated(self, view: int, slot: int, mark: int, value: int, primary: str) -> None:
        if not self._follows(view):
            return
        if mark > self.mark(slot):
            self._marks[slot], self.values[slot] = mark, value
        server = self.job.servers[primary]
        self.job.post(server, server.has, view, slot, self.mark(slot), self.name)

    def _follows(self, view: int) -> bool:
        # Not before it knows the view's map, which says what to drop: the copy would go again with the old slots.
        return self.map is not None and self.map.view == view >= self.promised

    def _apply(self, slot: int, seq: int) -> None:
        self._marks[slot], self.values[slot] = seq, linked(self.values.get(slot, 0), seq)

    # ---- views ----------------------------------------------------------------------------------

    def prepare(self, view: int) -> None:
        """Take no more of the present view, and say how far every slot is."""
        if self.map is None or self.map.view < view:
            self.promised = max(self.promised, view)
            marks = [self.mark(slot) for slot in range(NUM_SLOTS)]
            self.job.post(self.job.coordinator, self.job.coordinator.stands, view, self.name, marks)

    def follow(self, slot_map: SlotMap) -> None:
        """This is the map now."""
        if slot_map.view < self.promised or (self.map is not None and slot_map.view <= self.map.view):
            return
        self.map, self.promised = slot_map, slot_map.view
        self._waits.clear()
        self._followers.clear()
        for slot in set(self._marks) - set(slot_map.held_by(self.name)):
            del self._marks[slot], self.values[slot]


class SlotCoordinator(Process):
    """Brings the map from view to view: without the dead by failover, to the newly born by moves."""

    fail_over = staticmethod(fail_over)

    def __init__(self, job: Serving) -> None:
        super().__init__(job.world, "coordinator")
        self.job = job
        self._standing: dict[str, list[int]] = {}
        self._moves: list[SlotMove] = []
        self._preparing = 0  # the view that is coming; 0: none
        if job.disk["map"] is None:
            self._write(SlotMap(1, self._target()))
        else:
            self._go_on()
        self._say_again()

    def _go_on(self) -> None:
        """After a restart always by a new view: its predecessor may have asked some to stop serving this one."""
        self._prepare()

    @property
    def map(self) -> SlotMap:
        slot_map: SlotMap = self.job.disk["map"]
        return slot_map

    def changed(self, *, dead: str, born: str) -> None:
        """A server was reaped, and another forked in its place."""
        disk = self.job.disk
        disk["servers"] = [name for name in disk["servers"] if name != dead] + [born]
        disk["dead"].append(dead)
        self._moves = [move.lost(dead) for move in self._moves]
        self._prepare()

    def stands(self, view: int, server: str, marks: list[int]) -> None:
        if view == self._preparing:
            self._standing[server] = marks
            self._change()

    def caught_up(self, view: int, slot: int, server: str) -> None:
        if view == self.map.view and not self._preparing:
            self._moves = [move.caught_up(server) if move.slot == slot else move for move in self._moves]
            if self._moves and all(move.state is MoveState.READY for move in self._moves):
                self._prepare()

    def asked(self) -> None:
        """The client wants to know the map."""
        self.job.post(self.job.client, self.job.client.follow, self.map)

    def _target(self) -> tuple[Holders, ...]:
        weights = dict.fromkeys(self.job.disk["servers"], 1.0)
        return place(weights, num_copies=self.job.num_copies, num_slots=NUM_SLOTS, seed=self.job.seed)

    def _prepare(self) -> None:
        self._preparing = self.map.view + 1
        self._standing.clear()
        self._ask_standing()

    def _change(self) -> None:
        """Once every living server has stopped serving: the next map."""
        if not self._standing.keys() >= set(self.job.disk["servers"]):
            return
        living = self.fail_over(
            self.map, dead=self.job.disk["dead"], marks=self._standing, view=self._preparing
        )
        ready = [move for move in self._moves if move.state is MoveState.READY]
        after = switch(replace(living, view=self.map.view), ready, view=self._preparing)
        self.job.counts["slots moved"] += len(ready)
        self._preparing = 0
        self._write(after)

    def _write(self, slot_map: SlotMap) -> None:
        self.tell("establishes", slot_map)
        self.job.established(slot_map)
        self.job.disk["map"], self.job.disk["dead"] = slot_map, []
        self.job.counts["views"] += 1
        self._plan()
        self._spread()

    def _plan(self) -> None:
        self._moves = plan_moves(self.map, self._target())
        if self._moves and all(move.state is MoveState.READY for move in self._moves):
            self._prepare()

    def _spread(self) -> None:
        for name in self.job.disk["servers"]:
            self.job.post(self.job.servers[name], self.job.servers[name].follow, self.map)

    def _ask_standing(self) -> None:
        for name in self.job.disk["servers"]:
            if name not in self._standing:
                self.job.post(self.job.servers[name], self.job.servers[name].prepare, self._preparing)

    def _say_again(self) -> None:
        self.later(AGAIN_S, self._say_again)
        if self._preparing:
            self._ask_standing()
            return
        self._spread()
        for move in self._moves:
            primary = self.map.primary(move.slot)
            if move.state is MoveState.COPYING and primary is not None:
                for to in sorted(move.missing):
                    self.job.post(
                        self.job.servers[primary],
                        self.job.servers[primary].copy,
                        self.map.view,
                        move.slot,
                        to,
                    )


class Client(Process):
    """Pushes to every slot, one after the other, each until it is acknowledged."""

    def __init__(self, job: Serving) -> None:
        super().__init__(job.world, "client")
        self.job = job
        self._map: SlotMap | None = None
        self._next = [1] * NUM_SLOTS
        self._push_all()

    def is_done(self) -> bool:
        return all(seq > NUM_PUSHES or slot in self.job.lost for slot, seq in enumerate(self._next))

    def follow(self, slot_map: SlotMap) -> None:
        if self._map is None or slot_map.view > self._map.view:
            self._map = slot_map

    def refused(self, view: int) -> None:
        self.job.post(self.job.coordinator, self.job.coordinator.asked)

    def acknowledged(self, slot: int, seq: int) -> None:
        if seq == self._next[slot]:
            self.job.acknowledged[slot] = seq
            self._next[slot] += 1
            self.later(self.world.between(0.01, 0.1), self._push, slot)

    def _push(self, slot: int) -> None:
        if self._map is None or self._next[slot] > NUM_PUSHES:
            return
        primary = self._map.primary(slot)
        if primary is not None:
            server = self.job.servers[primary]
            self.job.post(server, server.pushed, self._map.view, slot, self._next[slot])

    def _push_all(self) -> None:
        self.later(AGAIN_S * 2, self._push_all)
        self.job.post(self.job.coordinator, self.job.coordinator.asked)
        for slot in range(NUM_SLOTS):
            self._push(slot)


Serving.server_class = Server
Serving.coordinator_class = SlotCoordinator


def linked(value: int, seq: int) -> int:
    """The next link: any push left out, doubled or out of order gives another chain."""
    return (value * 1_000_003 + seq) % ((1 << 61) - 1)


@lru_cache
def chain(num_pushes: int) -> int:
    value = 0
    for seq in range(1, num_pushes + 1):
        value = linked(value, seq)
    return value
