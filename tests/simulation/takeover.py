"""Takeover of the head: hosts with a copy of the run each, a perfect etcd, and faults of everything between them.

The real `HeadLease` says until when a head may train, and the real `Campaign`
what a host does that lost it. A host is killed, stopped for a while, cut off
from etcd or from the other hosts; one that was killed comes back with its disk.
Requests and answers are lost, late, and overtake each other.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from shoal.cluster.hosts.takeover import (
    Campaign,
    ClaimHead,
    GiveUp,
    Head,
    HeadLease,
    JobRecord,
    JoinHead,
    Seen,
)
from simulation.world import Process, Violated, World

NUM_STEPS = 40
SAVE_EVERY = 4
STEP_S = 0.05
LEASE_S = 1.0
DEAD_AFTER_S = 0.3
RENEW_EVERY_S = 0.12
LOOK_EVERY_S = 0.1


class Takeover:
    """A job over hosts, from a seed alone."""

    host_class: Any = None  # set below: the classes refer to each other
    etcd_class: Any = None

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        random = self.world.random
        self.counts: Counter[str] = Counter()
        self.is_done = False
        self.last_fault_at = 0.0
        self.etcd = self.etcd_class(self)
        self.hosts = [self.host_class(self, number) for number in range(random.randint(2, 4))]
        self.cut: dict[str, float] = {}  # host, or host and "etcd", until when nothing passes
        self.have_trained: list[float] = []  # launches
        self.etcd.record, self.etcd.revision = JobRecord(0, [0.0]), 1
        for host in self.hosts:
            host.launches = [0.0]
            host.seek()
        for _ in range(random.choice((1, 1, 2, 3, 4))):
            self.world.schedule(0.2 + random.random() * 3.0, self._strike)

    def describe(self) -> str:
        return f"{len(self.hosts)} hosts"

    def run(self) -> None:
        self.world.run(lambda: self.is_done, until=lambda: self.last_fault_at + 40.0, check=lambda: None)

    def post(self, sender: str, to: Process, action: Any, *arguments: Any) -> None:
        """One message: mostly soon, sometimes late, sometimes never."""
        name = to.name
        for link in (sender, name, f"{sender}/{name}", f"{name}/{sender}"):
            if self.world.now < self.cut.get(link, 0.0):
                return
        chance = self.world.random.random()
        if chance > 0.03:
            latest_s = 0.004 if chance < 0.85 else 0.1 if chance < 0.97 else 1.5
            to.later(self.world.between(0.0005, latest_s), action, *arguments)

    # ---- what must hold -------------------------------------------------------------------------

    def trained(self, host: Host, step: int) -> None:
        if host.token < self.etcd.newest_token:
            raise Violated(f"{host.name} trains step {step}, and another head was made since")
        if host.launches[-1] not in self.have_trained:
            self.have_trained.append(host.launches[-1])
        if step == NUM_STEPS:
            self.is_done = True

    def recorded(self, before: JobRecord, now: JobRecord) -> None:
        if now.launches[: len(before.launches)] != before.launches:
            raise Violated(f"the run goes on from {now.launches}, and had come to {before.launches}")
        if left_out := [launch for launch in self.have_trained if launch not in now.launches]:
            raise Violated(f"launches {left_out} have trained, and the run goes on without them")
        if now.generation < before.generation:
            raise Violated(f"head {now.generation} writes, and {before.generation} is the newest")

    # ---- faults ---------------------------------------------------------------------------------

    def _strike(self) -> None:
        random, world = self.world.random, self.world
        if self.is_done:
            return
        heads = [host for host in self.hosts if host.lease is not None and host.is_alive]
        host = random.choice(heads) if heads and random.random() < 0.7 else random.choice(self.hosts)
        lasts_s = random.choice((0.2, 0.9, 1.5, 3.0)) * (0.5 + random.random())
        kind = random.choice(("kill", "kill", "stop", "stop", "cut", "cut etcd"))
        self.last_fault_at = world.now + lasts_s
        if not host.is_alive or host.is_stopped:
            return
        host.tell(f"!! {kind}", round(lasts_s, 2))
        self.counts[f"takeover: {kind}{' head' if host in heads else ''}"] += 1
        match kind:
            case "kill":
                host.die()
                world.schedule(lasts_s, self._boot, host)
            case "stop":
                host.stop()
                world.schedule(lasts_s, host.carry_on)
            case "cut":
                self.cut[host.name] = world.now + lasts_s
            case "cut etcd":
                self.cut[f"{host.name}/etcd"] = world.now + lasts_s

    def _boot(self, host: Host) -> None:
        """The user joins it again: it has its disk, and nothing else."""
        again = self.hosts[host.number] = self.host_class(self, host.number)
        again.launches, again.step = host.launches, host.step
        again.seek()


class EtcdStore(Process):
    """Never fails, and does one thing after the other."""

    def __init__(self, job: Takeover) -> None:
        super().__init__(job.world, "etcd")
        self.job = job
        self.head: Head | None = None
        self.record = JobRecord(0, [])
        self.revision = self.token = self.newest_token = 0
        self._expires_at = 0.0

    def _expire(self) -> None:
        if self.head is not None and self.world.now >= self._expires_at:
            self.tell("the lease ends", self.head.host)
            self.head = None

    def read(self, host: Host) -> None:
        self._expire()
        self.job.post(self.name, host, host.saw, Seen(self.head, self.record, self.revision))

    def may_claim(self, revision: int) -> bool:
        return self.head is None and revision == self.revision

    def may_write(self, token: int) -> bool:
        return self.head is not None and token == self.token

    def claim(self, host: Host, head: Head, record: JobRecord, revision: int, lease: HeadLease) -> None:
        self._expire()
        if self.may_claim(revision):
            self.tell("has a new head", head.host, head.generation)
            self.head, self._expires_at = head, self.world.now + LEASE_S
            self._put(record)
            self.token = self.newest_token = self.revision
            self.job.counts["takeover: claimed"] += head.generation > 1
            self.job.post(self.name, host, host.won, head, record, self.token, lease)

    def renew(self, host: Host, token: int, sent_at: float) -> None:
        self._expire()
        if self.head is not None and token == self.token:
            self._expires_at = self.world.now + LEASE_S
            self.job.post(self.name, host, host.renewed, token, sent_at)
        else:
            self.job.post(self.name, host, host.refused, token, "its lease has ended")

    def write(self, host: Host, token: int, head: Head, record: JobRecord) -> None:
        self._expire()
        if self.may_write(token):
            self.head = head
            self._put(record)
            self.job.post(self.name, host, host.written, token, record)
        else:
            self.job.counts["takeover: write refused"] += 1
            self.job.post(self.name, host, host.refused, token, "etcd has another head")

    def _put(self, record: JobRecord) -> None:
        self.job.recorded(self.record, record)
        if record != self.record:
            self.record, self.revision = record, self.revision + 1


class Host(Process):
    """A host: the head while it has a lease, else one that follows a head or seeks one."""

    lease_class = HeadLease
    campaign_class = Campaign

    def __init__(self, job: Takeover, number: int) -> None:
        super().__init__(job.world, f"host-{number}")
        self.job, self.number = job, number
        self.launches: list[float] = []
        self.step = 0  # of its newest checkpoint
        self.lease: HeadLease | None = None
        self.token = 0
        self._campaign: Campaign | None = None
        self._claiming_until = 0.0
        self._heard_at, self._following = 0.0, 0  # the head, by its generation
        self._head: Head
        self._record: JobRecord
        self._trained = 0
        self._is_recorded = False

    # ---- the head -------------------------------------------------------------------------------

    def claim(self, seen: Seen) -> None:
        assert seen.record is not None
        generation = seen.record.generation + 1
        head = Head("job", self.name, "", generation)
        record = JobRecord(generation, list(self.launches), seen.record.step)
        self._claiming_until = self.world.now + 2 * DEAD_AFTER_S
        lease = self.lease_class(LEASE_S, sent_at=self.world.now)
        self.job.post(self.name, self.job.etcd, self.job.etcd.claim, self, head, record, seen.revision, lease)

    def won(self, head: Head, record: JobRecord, token: int, lease: HeadLease) -> None:
        if lease.fenced(self.world.now) or self.lease is not None:
            return  # the answer came too late: the lease runs out by itself
        self._campaign, self.lease, self.token = None, lease, token
        self.launches = [*self.launches, round(self.world.now, 4)]
        self._head = Head("job", self.name, "here", head.generation)
        self._record = JobRecord(head.generation, list(self.launches), record.step)
        self._trained, self._is_recorded = self.step, False
        self.tell("is the head", head.generation, self.launches)
        self._renew(token)
        self._train(token)

    def _is_head(self, token: int) -> bool:
        """Also: end, where another may be the head."""
        if self.lease is None or token != self.token:
            return False
        if why := self.lease.fenced(self.world.now):
            self.tell("is fenced", why)
            self.job.counts["takeover: fenced"] += 1
            self.lease = None
            self.seek()
            return False
        return True

    def _renew(self, token: int) -> None:
        if self._is_head(token):
            self.later(RENEW_EVERY_S, self._renew, token)
            etcd = self.job.etcd
            self.job.post(self.name, etcd, etcd.renew, self, token, self.world.now)
            self.job.post(self.name, etcd, etcd.write, self, token, self._head, self._record)

    def renewed(self, token: int, sent_at: float) -> None:
        if self.lease is not None and token == self.token:
            self.lease.renewed(sent_at)

    def refused(self, token: int, why: str) -> None:
        if self.lease is not None and token == self.token:
            self.lease.refused(why)

    def written(self, token: int, record: JobRecord) -> None:
        self._is_recorded |= token == self.token and record.launches == self.launches

    def may_train(self) -> bool:
        return self._is_recorded

    def _train(self, token: int) -> None:
        if not self._is_head(token):
            return
        self.later(STEP_S, self._train, token)
        if self.may_train():
            self._trained += 1
            self.job.trained(self, self._trained)
            if self._trained % SAVE_EVERY == 0:
                self.step = self._trained
                self._record = JobRecord(self._head.generation, list(self.launches), self.step)
        for other in self.job.hosts:
            if other is not self:
                self.job.post(self.name, other, other.hear, self._head, list(self.launches), self.step)

    # ---- the others -----------------------------------------------------------------------------

    def seek(self) -> None:
        self._campaign = self.campaign_class(
            launches=self.launches, step=self.step, began_at=self.world.now, yield_s=0.3, timeout_s=60.0
        )
        self._look(self._campaign)

    def _look(self, campaign: Campaign) -> None:
        if self._campaign is campaign and self.lease is None:
            self.later(LOOK_EVERY_S, self._look, campaign)
            if self.world.now >= self._claiming_until:
                self.job.post(self.name, self.job.etcd, self.job.etcd.read, self)

    def saw(self, seen: Seen) -> None:
        if self._campaign is None or self.lease is not None or self.world.now < self._claiming_until:
            return
        match self._campaign.decide(seen, self.world.now):
            case ClaimHead():
                self.claim(seen)
            case JoinHead(head):
                there = next(host for host in self.job.hosts if host.name == head.host)
                self.job.post(self.name, there, there.joined_by, self, head.generation)
            case GiveUp(why):
                raise Violated(f"{self.name} gives up: {why}")

    def joined_by(self, other: Host, generation: int) -> None:
        if self.lease is None or self._head.generation != generation:
            return
        if other.launches != self.launches[: len(other.launches)]:
            self.job.counts["takeover: refused, went on by itself"] += 1
            return
        self.job.post(self.name, other, other.joined, self._head)

    def joined(self, head: Head) -> None:
        if self._campaign is not None and self.lease is None:
            self.tell("joins", head.host)
            self._campaign, self._heard_at = None, self.world.now
            self._following = head.generation
            self.later(DEAD_AFTER_S, self._miss, head.generation)

    def hear(self, head: Head, launches: list[float], step: int) -> None:
        """Heartbeat of the head, and what it has saved."""
        if self._campaign is None and self.lease is None and head.generation == self._following:
            self._heard_at = self.world.now
            self.launches, self.step = launches, max(step, self.step)

    def _miss(self, generation: int) -> None:
        if self._campaign is not None or self.lease is not None or generation != self._following:
            return
        if self.world.now >= self._heard_at + DEAD_AFTER_S:
            self.tell("misses the head", generation)
            self.job.counts["takeover: head missed"] += 1
            self.seek()
        else:
            self.later(self._heard_at + DEAD_AFTER_S - self.world.now + 0.001, self._miss, generation)


Takeover.host_class, Takeover.etcd_class = Host, EtcdStore
