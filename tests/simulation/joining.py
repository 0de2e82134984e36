"""Machines that join a head, lose it or are lost by it, and join again.

The real `Seats` says who has which number, the real `JoinWait` when the job
begins. Modelled are the door with its handshakes, the head's end of agents,
and machines: they lose power and come back as themselves or as another, hang
in a handshake, join twice, join where all seats are taken. Links are cut and
heal, seats are added, hosts are asked to leave, the head is lost and a host
takes over, and in the end all is over while some still join.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shoal.cluster.hosts.joining import HANDSHAKE_S
from shoal.cluster.hosts.seats import (
    ADMITTED_TIMEOUT_S,
    AGENT_TIMEOUT_S,
    REJOIN_S,
    SEAT_TIMEOUT_S,
    JoiningHost,
    JoinWait,
    Seats,
)
from shoal.config.liveness import LivenessConfig
from shoal.errors import HostNotAdmitted, WireError
from simulation.world import Process, Violated, World

DEAD_AFTER_S = LivenessConfig().host_dead_after_s
BEAT_EVERY_S = 1.0
TURN_S = 0.5
JOIN_TIMEOUT_S = 150.0
FAULTS_S = 40.0
"""Nothing goes wrong after so long."""

SETTLED_S = FAULTS_S + JOIN_TIMEOUT_S + ADMITTED_TIMEOUT_S
"""By then every machine is at work, or has found all its seats taken, or the head has given up."""

FAULTS = {
    "power": 3,
    "kill": 1,
    "stop": 2,
    "cut": 3,
    "break": 2,
    "twice": 2,
    "stranger": 2,
    "scale": 2,
    "leave": 2,
    "head": 2,
    "stop head": 1,
}
"""What goes wrong, and what is asked for; how often each, in proportion."""

Seat: TypeAlias = tuple[int, int]
"""Number and incarnation."""


@dataclass(slots=True)
class Grant:
    """What a head has given a machine, as an observer sees it who sees both ends."""

    machine: bytes
    incarnation: int
    at: float  # of its last sign of life before its agent connected
    is_connected: bool = False
    is_over: bool = False

    def is_in_force(self, machine: bytes, now: float) -> bool:
        """Whether it keeps a machine from the number."""
        limit_s = AGENT_TIMEOUT_S if machine == self.machine else ADMITTED_TIMEOUT_S
        return not self.is_over and (self.is_connected or now < self.at + limit_s)


class Joining:
    """Hosts that join a job, from a seed alone."""

    seats_class: type[Seats] = Seats
    wait_class: type[JoinWait] = JoinWait

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        random = self.world.random
        self.counts: Counter[str] = Counter()
        self.num_hosts = random.randint(2, 5)  # with the head
        self.kind = random.choice(("any", "any", "any", "named", "wanted", "services"))
        self.roles = (
            tuple("ws"[number % 2] for number in range(self.num_hosts)) if self.kind == "services" else ()
        )
        self.grants: dict[int, Grant] = {}  # of the present head, the newest of each number
        self.given: set[Seat] = set()
        self.cut_until: dict[bytes, float] = {}
        self.calm_at = 0.0
        """All is well between faults since then."""
        self.is_over = self._is_done = False
        self._num_machines = 0
        self.machines: list[Machine] = []
        self.head = Head(self, 1, self.num_hosts, is_takeover=False)
        num_absent = random.choice((0,) * 7 + (1,))
        for number in range(1, self.num_hosts - num_absent):
            self.add(number)
        for _ in range(random.choice((1, 2, 3, 5, 8))):
            self.world.schedule(0.1 + random.random() * FAULTS_S, self._strike)

    def describe(self) -> str:
        return f"{self.num_hosts} hosts, {self.kind}, of which {len(self.machines)} come"

    def run(self) -> None:
        self.world.run(self._is_settled, until=lambda: SETTLED_S, check=lambda: None)
        random, head = self.world.random, self.head
        head.later(random.random() * SEAT_TIMEOUT_S, head.end, "the job is over")
        for machine in self.machines:
            if random.random() < 0.5:  # others join in the very end
                self.world.schedule(random.random() * 2.0, self.add, machine.number)
                machine.lose_power()
        self.world.run(lambda: self._is_done, until=lambda: SETTLED_S + 60.0, check=lambda: None)

    def add(self, number: int = 0, machine: bytes = b"") -> None:
        """Another machine, for a number where hosts are named, or one that is back."""
        self._num_machines += 1
        self.machines = [each for each in self.machines if each.is_alive]
        self.machines.append(Machine(self, number, machine or b"machine-%d" % self._num_machines))

    def numbers_for(self, joiner: JoiningHost) -> list[int]:
        """What the machine may be, as its user means it."""
        numbers = list(range(1, self.num_hosts))
        if joiner.wants >= 0:
            return [joiner.wants]
        if joiner.role:
            return [number for number in numbers if self.roles[number] == joiner.role]
        return list(joiner.named) or [number for number in numbers if number not in self.head.names]

    def _is_settled(self) -> bool:
        if self.is_over:
            return True
        head = self.head
        if self.world.now < FAULTS_S + SEAT_TIMEOUT_S + 1.0 or not head.is_alive or not head.has_begun:
            return False
        working = {number for number in range(1, self.num_hosts) if head.is_here(number)}
        machines = {head.agents[number].line.machine.id for number in working}
        return all(
            machine.id in machines or working.issuperset(self.numbers_for(machine.joiner))
            for machine in self.machines
            if machine.is_alive
        )

    # ---- what must hold -------------------------------------------------------------------------

    def took(self, joiner: JoiningHost, seat: Seat) -> None:
        """A machine was given a number and an incarnation."""
        (number, incarnation), now, machine = seat, self.world.now, joiner.machine
        before = self.grants.get(number)
        if self.is_over:
            raise Violated(f"{machine!r} is admitted, and the job is over")
        if seat in self.given:
            raise Violated(f"host {number}.{incarnation} is given twice")
        if number not in self.numbers_for(joiner):
            raise Violated(f"{machine!r} is given host {number}, which it cannot be")
        if before is not None and before.is_in_force(machine, now):
            raise Violated(f"host {number} is given to {machine!r}, and is {before.machine!r}")
        for other, grant in self.grants.items():
            if grant.machine == machine and other != number and grant.is_in_force(machine, now):
                raise Violated(f"{machine!r} is host {other} and is given host {number}")
        own = [
            other
            for other, grant in self.grants.items()
            if grant.machine == machine and not grant.is_in_force(machine, now)
        ]
        if own and number not in own:
            raise Violated(f"{machine!r} was host {own}, which is free, and is given host {number}")
        self.counts["joins: seat given again"] += bool(own)
        self.counts["joins: seat of another given"] += before is not None and not own
        self.given.add(seat)
        self.grants[number] = Grant(machine, incarnation, now)

    def gave_back(self, seat: Seat) -> None:
        grant = self.grants[seat[0]]
        if grant.incarnation == seat[1]:
            grant.is_over = True
        else:
            self.counts["joins: gave up late"] += 1

    def believed(self, seat: Seat, *, has_connected: bool) -> None:
        """What a host said counted."""
        grant = self.grants[seat[0]]
        if grant.incarnation != seat[1]:
            raise Violated(f"host {seat[0]}.{seat[1]} is believed, and {grant.incarnation} has joined since")
        if has_connected:
            if grant.is_over or grant.is_connected or self.is_over:
                raise Violated(
                    f"an agent is believed as host {seat[0]}.{seat[1]}, which was given up or is there"
                )
            grant.is_connected = True
        else:
            grant.at = self.world.now

    def refused(self, joiner: JoiningHost, asked_at: float, why: str) -> None:
        now, numbers = self.world.now, self.numbers_for(joiner)
        if not numbers or "no host" in why:
            return
        if now < asked_at + SEAT_TIMEOUT_S:
            raise Violated(
                f"{joiner.machine!r} is refused before the loss of another could be noticed: {why}"
            )
        held = {number for number, grant in self.grants.items() if grant.is_in_force(joiner.machine, now)}
        has_seat = any(self.grants[number].machine == joiner.machine for number in held)
        if not has_seat and not held.issuperset(numbers):
            raise Violated(
                f"{joiner.machine!r} is refused, and of hosts {numbers} only {held} are taken: {why}"
            )
        if has_seat and not any(
            self.grants[number].is_connected or self.grants[number].at > asked_at  # it copies files
            for number in held
            if self.grants[number].machine == joiner.machine
        ):
            raise Violated(
                f"{joiner.machine!r} is refused for a seat that no agent of it has taken yet: {why}"
            )
        self.counts[f"joins: refused, {'joined already' if has_seat else 'all taken'}"] += 1

    def waits(self, head: Head, missing: list[int], is_coming: bool) -> None:
        """The head has decided not to begin."""
        few = missing if not head.wait.is_takeover else missing[1:]
        is_late = head.wait.is_takeover and self.world.now >= head.wait.began_at + REJOIN_S
        if not is_coming and (not few or is_late):
            raise Violated(f"the head waits, and might begin without {missing or 'nobody'}")
        if self.world.now > head.wait.began_at + JOIN_TIMEOUT_S + 2 * TURN_S:
            raise Violated(f"the head waits for {missing} beyond its time-out")

    def begins(self, head: Head, missing: list[int], is_coming: bool) -> None:
        num_allowed = 0
        if head.wait.is_takeover:
            num_allowed = 1 if self.world.now < head.wait.began_at + REJOIN_S else self.num_hosts
            if is_coming:
                raise Violated("the job begins while a host is on its way")
            self.counts["joins: begun after a takeover"] += 1
        if len(missing) > num_allowed:
            raise Violated(f"the job begins without hosts {missing}")

    # ---- faults ---------------------------------------------------------------------------------

    def _strike(self) -> None:
        random, world, head = self.world.random, self.world, self.head
        alive = [machine for machine in self.machines if machine.is_alive]
        if self.is_over or not alive:
            return
        lasts_s = random.choice((0.2, 1.0, 4.0, 9.0, 12.0, 20.0)) * (0.5 + random.random())
        machine = random.choice(alive)
        (kind,) = random.choices(list(FAULTS), list(FAULTS.values()))
        if not head.is_alive and "head" in kind:
            return
        world.tell("fault", f"!! {kind}", machine.name, round(lasts_s, 2))
        self.counts[f"joins: {kind}"] += 1
        self.calm_at = max(self.calm_at, world.now + lasts_s + DEAD_AFTER_S)
        match kind:
            case "power":
                machine.lose_power()
                # A replacement for the machine is another one, and so is each process of a service.
                is_itself = self.kind != "services" and random.random() < 0.7
                if random.random() < 0.8:
                    world.schedule(lasts_s, self.add, machine.number, machine.id if is_itself else b"")
            case "kill":
                machine.end("it was killed")
            case "stop" if not machine.is_stopped:
                machine.stop()
                world.schedule(lasts_s, machine.carry_on)
            case "cut":
                self.cut_until[machine.id] = world.now + lasts_s
            case "break":
                for line in list(machine.lines):
                    line.snap(random.choice((machine, head)), late_s=random.choice((0.0, 0.0, 0.5, 9.0)))
            case "twice":
                self.add(machine.number, machine.id)
            case "stranger":
                self.add(random.randint(1, self.num_hosts - 1) if self.kind != "any" else 0)
            case "scale" if self.kind != "services":
                if random.random() < 0.8:
                    self.add()  # before there is a seat for it, or after
                world.schedule(random.random() * SEAT_TIMEOUT_S, self._scale)
            case "leave" if head.is_alive and head.has_begun and head.agents:
                head.leave(random.choice(sorted(head.agents)))
            case "head" if self.kind != "services" and head.has_begun:
                head.die()
                for line in list(head.lines):
                    line.close(head)
                world.schedule(8.0 + random.random() * 4.0, self._take_over)
                if random.random() < 0.3:
                    world.schedule(lasts_s, self.add)  # the former head's machine, as a host
            case "stop head" if not head.is_stopped:
                head.stop()
                world.schedule(min(lasts_s, 6.0), head.carry_on)

    def _scale(self) -> None:
        if not self.is_over:
            self.num_hosts += 1
            self.head.open(self.num_hosts)

    def may_snap(self, line: Line) -> None:
        """An agent's connection breaks around the moment at which the head takes it in."""
        if self.world.now < FAULTS_S and self.world.random.random() < 0.05:
            self.counts["joins: agent's line broke"] += 1
            self.calm_at = max(self.calm_at, self.world.now + 2 * DEAD_AFTER_S)
            self.world.schedule(self.world.random.random() * TURN_S, line.snap, line.machine, 0.0)

    def _take_over(self) -> None:
        alive = [machine for machine in self.machines if machine.is_alive and not machine.is_stopped]
        if not alive:
            self.finish("nobody is left")
            return
        machine = self.world.random.choice(alive)
        machine.end("it takes over")
        machine.die()
        self.calm_at = max(self.calm_at, self.world.now)
        self.kind = "any"
        self.grants, self.given = {}, set()
        self.head = Head(self, self.head.generation + 1, self.num_hosts, is_takeover=True)

    def finish(self, why: str) -> None:
        self.world.tell("job", "is over", why)
        self.is_over = True
        self.world.schedule(HANDSHAKE_S, self._finished)

    def _finished(self) -> None:
        self._is_done = True


class Line:
    """One connection: in order, repeated after a cut, and silent for ever where an end has lost power."""

    def __init__(self, machine: Machine, head: Head) -> None:
        self.machine, self._world = machine, machine.world
        self._ends: dict[Process, Process] = {machine: head, head: machine}
        self._arrives_at = dict.fromkeys(self._ends, 0.0)
        for end in (machine, head):
            end.lines.append(self)

    def send(self, sender: Process, action: Any, *arguments: Any) -> None:
        if sender in self._ends:
            self._under_way(self._ends[sender], action, *arguments)

    def close(self, by: Machine | Head) -> None:
        """The other end notices, if it can be told."""
        if by in self._ends:
            self.vanish(by)
            other = next(iter(self._ends), None)
            if other is not None:
                self._under_way(other, self._hang_up, other)

    def snap(self, late: Process, late_s: float) -> None:
        """It breaks in the middle, and one end notices later than the other."""
        for end in list(self._ends):
            self._world.schedule(late_s if end is late else 0.0, self._under_way, end, self._hang_up, end)

    def vanish(self, end: Machine | Head) -> None:
        """Without a word to the other one."""
        end.lines.remove(self)
        del self._ends[end]

    def _under_way(self, to: Process, action: Any, *arguments: Any) -> None:
        now, random = self._world.now, self._world.random
        begins = max(now, self._arrives_at[to], self.machine.job.cut_until.get(self.machine.id, 0.0))
        self._arrives_at[to] = begins + 0.0005 + 0.05 * random.random() ** 4
        self._world.schedule(self._arrives_at[to] - now, self._arrive, to, action, arguments)

    def _arrive(self, to: Process, action: Any, arguments: tuple[Any, ...]) -> None:
        def heard() -> None:
            if to in self._ends:
                action(self, *arguments)

        to.do(heard)

    def _hang_up(self, line: Line, end: Machine | Head) -> None:
        self.vanish(end)
        end.lost(self)


@dataclass(eq=False, slots=True)
class Handshake:
    """A machine at the head's door."""

    line: Line
    joiner: JoiningHost
    asked_at: float
    seat: Seat | None = None


@dataclass(eq=False, slots=True)
class Agent:
    """A host's agent, at the head."""

    number: int
    incarnation: int
    line: Line
    heard_at: float
    is_ready: bool = False
    is_leaving: bool = False
    lost: str = ""


class Head(Process):
    """The door and the hosts of one supervisor."""

    def __init__(self, job: Joining, generation: int, num_hosts: int, *, is_takeover: bool) -> None:
        super().__init__(job.world, f"head-{generation}")
        self.job, self.generation = job, generation
        self.names = {
            number: f"name-{number}" for number in range(1, num_hosts) if job.kind in ("named", "wanted")
        }
        self.seats = job.seats_class(range(1, num_hosts), "job", self.names, job.roles)
        self.wait = job.wait_class(job.world.now, is_takeover)
        self.agents: dict[int, Agent] = {}
        self.lines: list[Line] = []
        self.has_begun = False
        self._handshakes: list[Handshake] = []
        self.later(TURN_S, self._turn)

    # ---- the door -------------------------------------------------------------------------------

    def asked(self, line: Line, joiner: JoiningHost) -> None:
        handshake = Handshake(line, joiner, self.world.now)
        self._handshakes.append(handshake)
        self.later(HANDSHAKE_S, self._give_up, handshake)
        self._try(handshake)

    def _try(self, handshake: Handshake) -> None:
        if handshake not in self._handshakes or handshake.seat is not None:
            return
        line, joiner, asked_at, now = handshake.line, handshake.joiner, handshake.asked_at, self.world.now
        try:
            handshake.seat = self.seats.take(joiner, asked_at, now)
        except HostNotAdmitted as error:
            self.job.refused(joiner, asked_at, error.reason)
            line.send(self, line.machine.refused, error.reason)
            self._give_up(handshake)
        except WireError:
            self._give_up(handshake)
        else:
            if handshake.seat is None:
                self.job.counts["joins: waits for a seat"] += 1
                decides_at = self.seats.decides_at(joiner, asked_at)
                self.later(max(decides_at - now, 0.001), self._try, handshake)
            else:
                self.tell("gives", joiner.machine, handshake.seat)
                self.job.took(joiner, handshake.seat)
                line.send(self, line.machine.proven)

    def found(self, line: Line, is_same_script: bool) -> None:
        """The machine has compared script and run directory."""
        for handshake in [each for each in self._handshakes if each.line is line]:
            assert handshake.seat is not None
            try:
                if not is_same_script:
                    raise HostNotAdmitted("its script is another one")
                self.seats.admit(*handshake.seat, sees_run_dir=True)
            except (HostNotAdmitted, WireError) as error:
                line.send(self, line.machine.refused, str(error))
                self._give_up(handshake)
            else:
                self._handshakes.remove(handshake)
                line.send(self, line.machine.admitted, handshake.seat)

    def _give_up(self, handshake: Handshake) -> None:
        if handshake in self._handshakes:
            self._handshakes.remove(handshake)
            handshake.line.close(self)
            if handshake.seat is not None:
                self._release(handshake.seat)

    def _release(self, seat: Seat) -> None:
        self.job.gave_back(seat)
        self.seats.release(*seat)
        self._try_all()

    def _try_all(self) -> None:
        for handshake in list(self._handshakes):
            self._try(handshake)

    def open(self, num_hosts: int) -> None:
        if self.is_alive:
            self.seats.open(num_hosts)
            self._try_all()

    def asks_for_files(self, line: Line, seat: Seat) -> None:
        try:
            self.seats.heard(*seat, self.world.now)
        except HostNotAdmitted as error:
            line.send(self, line.machine.refused, error.reason)
        else:
            self.job.believed(seat, has_connected=False)

    def agent_is_there(self, line: Line, seat: Seat) -> None:
        try:
            self.seats.connect(*seat)
        except (HostNotAdmitted, WireError) as error:
            self.job.counts["joins: agent refused"] += 1
            line.send(self, line.machine.refused, str(error))
        else:
            self.job.believed(seat, has_connected=True)
            self.later(self.world.between(0.0, TURN_S), self._take_in, line, seat)

    # ---- the hosts ------------------------------------------------------------------------------

    def _take_in(self, line: Line, seat: Seat) -> None:
        if (before := self.agents.get(seat[0])) is not None:
            raise Violated(f"host {seat[0]}.{seat[1]} is taken in beside {before.incarnation}")
        self.agents[seat[0]] = Agent(*seat, line, self.world.now)
        line.send(self, line.machine.starts)
        if line not in self.lines:
            self.agents[seat[0]].lost = "it hung up before it was taken in"

    def listens(self, line: Line) -> None:
        for agent in self._agents_at(line):
            agent.is_ready = True
            seat = self.seats.taken.get(agent.number)
            if seat is None or seat.incarnation != agent.incarnation:
                raise Violated(f"host {agent.number}.{agent.incarnation} works without its seat")

    def beats(self, line: Line) -> None:
        for agent in self._agents_at(line):
            agent.heard_at = self.world.now

    def lost(self, line: Line) -> None:
        for handshake in [each for each in self._handshakes if each.line is line]:
            self._give_up(handshake)
        for agent in self._agents_at(line):
            agent.lost = "it hung up"

    def _agents_at(self, line: Line) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.line is line]

    def leave(self, number: int) -> None:
        self.agents[number].is_leaving = True
        line = self.agents[number].line
        line.send(self, line.machine.is_ended, "it has left")

    def is_here(self, number: int) -> bool:
        agent = self.agents.get(number)
        return agent is not None and agent.is_ready and not agent.lost and not agent.is_leaving

    def _turn(self) -> None:
        self.later(TURN_S, self._turn)
        now = self.world.now
        for agent in list(self.agents.values()):
            if not agent.lost and now >= agent.heard_at + DEAD_AFTER_S:
                agent.lost = "silence"
                agent.line.close(self)
            if agent.lost:
                self.tell("loses", agent.number, agent.incarnation, agent.lost)
                del self.agents[agent.number]
                self._release((agent.number, agent.incarnation))
            else:
                agent.line.send(self, agent.line.machine.hears)
        if self.has_begun or self.job.is_over:
            return
        missing = [number for number in range(1, self.job.num_hosts) if not self.is_here(number)]
        is_coming = any(not agent.is_ready for agent in self.agents.values())
        if self.wait.is_over(missing, is_coming=is_coming, now=now):
            self.job.begins(self, missing, is_coming)
            self.has_begun = True
        elif self.wait.left_s(JOIN_TIMEOUT_S, now) <= 0:
            self.job.counts["joins: timed out"] += 1
            if not missing:
                raise Violated("the head gives up and cannot say who is missing")
            self.end(f"hosts {missing} did not join")
        else:
            self.job.waits(self, missing, is_coming)

    def end(self, why: str) -> None:
        if self.job.is_over:
            return
        self.seats.close()
        self.job.finish(why)
        for agent in self.agents.values():
            agent.line.send(self, agent.line.machine.is_ended, why)
        self._try_all()


@dataclass(slots=True)
class Attempt:
    """One `shoal join`: its connections end with it."""

    seat: Seat | None = None
    agent_line: Line | None = None
    head: Head | None = None
    has_answer: bool = False
    copies_until: float = 0.0
    heard_at: float = field(default=0.0)


class Machine(Process):
    """A machine whose user runs `shoal join` until the job is over."""

    def __init__(self, job: Joining, number: int, machine: bytes) -> None:
        super().__init__(job.world, f"{machine.decode()} ({number})")
        self.job, self.number, self.id = job, number, machine
        self.lines: list[Line] = []
        self._attempt: Attempt | None = None
        self.later(self.world.between(0.05, 1.5), self._join)

    @property
    def joiner(self) -> JoiningHost:
        names = self.job.head.names
        return JoiningHost(
            self.name,
            "10.0.0.9",
            1,
            self.id,
            wants=self.number if self.job.kind == "wanted" and self.number in names else -1,
            role=self.job.roles[self.number] if self.job.kind == "services" else "",
            named=(self.number,) if self.number in names else (),
        )

    def lose_power(self) -> None:
        self.die()
        for line in list(self.lines):
            line.vanish(self)

    def end(self, why: str) -> None:
        """Its process ends, and its user starts another one."""
        self.tell("ends", why)
        self._attempt = None
        for line in list(self.lines):
            line.close(self)
        self.later(self.world.random.choice((0.3, 1.0, 6.0)) * (0.5 + self.world.random.random()), self._join)

    def _join(self) -> None:
        if self._attempt is not None or self.job.is_over:
            return
        head = self.job.head
        if not head.is_alive:
            self.later(0.5, self._join)
            return
        self._attempt = attempt = Attempt(head=head)
        line = Line(self, head)
        line.send(self, head.asked, self.joiner)
        self.later(HANDSHAKE_S, self._miss_answer, attempt)
        self.later(AGENT_TIMEOUT_S + 1.0, self._expect_answer, attempt, self.world.now)

    def _expect_answer(self, attempt: Attempt, asked_at: float) -> None:
        if attempt is self._attempt and not attempt.has_answer and asked_at > self.job.calm_at:
            raise Violated(
                f"{self.name} has asked to join, and had no answer in {self.world.now - asked_at:.1f} s"
            )

    def _miss_answer(self, attempt: Attempt) -> None:
        if attempt is self._attempt and attempt.seat is None:
            self.end("the head does not answer")

    def lost(self, line: Line) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        if attempt.seat is None or (line is attempt.agent_line and attempt.heard_at):
            self.end("the head hung up")
        elif line is attempt.agent_line:
            self.later(0.3, self._copy, attempt)  # until it has missed the start

    def refused(self, line: Line, why: str) -> None:
        self.end(f"refused: {why}")

    def is_ended(self, line: Line, why: str) -> None:
        self.later(self.world.between(0.0, 1.0), self.end, f"told to end: {why}")

    def proven(self, line: Line) -> None:
        """The head has the key too: script and run directory are compared, and a file system may hang."""
        if self._attempt is not None:
            self._attempt.has_answer = True
            (delay_s,) = self.world.random.choices((0.01, 0.5, 5.0, 14.0), (8, 2, 1, 1))
            is_same = self.world.random.random() > 0.03
            self.later(delay_s, self._find, self._attempt, line, is_same)

    def _find(self, attempt: Attempt, line: Line, is_same_script: bool) -> None:
        if attempt is self._attempt:
            assert attempt.head is not None
            line.send(self, attempt.head.found, is_same_script)

    def admitted(self, line: Line, seat: Seat) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.seat is None:
            attempt.seat = seat
            (copies_s,) = self.world.random.choices((0.0, 0.2, 8.0, 70.0), (6, 6, 2, 1))
            attempt.copies_until = self.world.now + copies_s
            line.close(self)
            self._copy(attempt)

    def _copy(self, attempt: Attempt) -> None:
        """The script's folder and what the run has saved, then the agent."""
        if attempt is not self._attempt or attempt.head is None:
            return
        line = Line(self, attempt.head)
        if self.world.now >= attempt.copies_until:
            attempt.agent_line = line
            line.send(self, attempt.head.agent_is_there, attempt.seat)
            self.job.may_snap(line)
            self.later(AGENT_TIMEOUT_S, self._miss_start, attempt)
        else:
            line.send(self, attempt.head.asks_for_files, attempt.seat)
            self.later(min(4.0, attempt.copies_until - self.world.now + 0.001), self._copy, attempt)

    def _miss_start(self, attempt: Attempt) -> None:
        if attempt is self._attempt and not attempt.heard_at:
            self.end("the head does not say what to do")

    def starts(self, line: Line) -> None:
        attempt = self._attempt
        if attempt is not None and line is attempt.agent_line:
            attempt.heard_at = self.world.now
            self._beat(attempt)
            self.later(self.world.between(0.5, 3.0), self._listen, attempt)

    def _listen(self, attempt: Attempt) -> None:
        if attempt is self._attempt:
            assert attempt.head is not None
            assert attempt.agent_line is not None
            attempt.agent_line.send(self, attempt.head.listens)

    def hears(self, line: Line) -> None:
        if self._attempt is not None and line is self._attempt.agent_line:
            self._attempt.heard_at = self.world.now

    def _beat(self, attempt: Attempt) -> None:
        if attempt is not self._attempt:
            return
        assert attempt.head is not None
        assert attempt.agent_line is not None
        if self.world.now >= attempt.heard_at + DEAD_AFTER_S:
            self.end("the head is silent")
            return
        attempt.agent_line.send(self, attempt.head.beats)
        self.later(BEAT_EVERY_S, self._beat, attempt)
