"""Relaxed training in the simulator: workers lease ranges of samples, die with them, and every sample counts once.

The real `Leases` decides; its events go into a journal before anything is
answered, and a new coordinator is fed with them. Servers are taken to be
perfect: they apply a push of (lease, batch) once and never die. Some workers
are slow, for a while or for good: they are drained and readmitted, and others
run their last leases a second time. At the end the ledger must name for every
batch the worker whose push came first, and how much was computed in vain.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from shoal.cluster.coordinator.actions import Tick
from shoal.cluster.coordinator.leases import (
    Action,
    EndEpoch,
    EndLeases,
    Event,
    FinishLeases,
    HandLeases,
    LeaseConfig,
    LeaseHolder,
    LeaseTable,
    WorkerAsked,
    WorkerReplaced,
)
from shoal.cluster.coordinator.stragglers import Drained, Readmitted
from shoal.cluster.ledger.entries import EpochLeased, RangesTrained, TrainingBegan
from shoal.cluster.ledger.ledger import Ledger
from shoal.cluster.ledger.trained_file import PushOutcome, Trained
from shoal.runtime.transport.messages.message import Message
from simulation.network import End, Network
from simulation.world import Process, Violated, World

BATCH = 4
"""Samples of a batch."""


class AskForLeases(Message, frozen=True, tag="simulated-ask"):
    rank: int
    incarnation: int
    finished: list[int]
    busy_s: list[float]


class LeasesHanded(Message, frozen=True, tag="simulated-hand"):
    numbers: list[int]
    is_ending: bool = False


class Leasing:
    """A job of leases, from a seed alone."""

    leases_class = LeaseTable
    workers_write = True  # what they have trained into files, or else whoever finishes a lease has
    answers_first = False
    forgets: tuple[type, ...] = ()

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        random = self.world.random
        self.num_workers = random.randint(1, 4)
        self.config = LeaseConfig(
            num_samples=random.randint(5, 60),
            samples_per_lease=BATCH * random.randint(1, 3),
            num_epochs=random.randint(1, 2),
            num_ahead=random.randint(1, 3),
            num_workers=random.choice((0, self.num_workers)),
            backup=random.random() < 0.5,
            drain_slower_than=random.choice((None, 2.0, 4.0)),
            probe_every_s=random.choice((0.1, 1.0)),
        )
        self.network = Network(
            self.world.schedule, lambda: self.world.now, lambda: self.world.between(0.0001, 0.003)
        )
        self.journal: list[Event] = []
        self.applied: Counter[tuple[int, int]] = Counter()  # (lease, batch) -> how often it was run
        self.first_by: dict[tuple[int, int], int] = {}  # (lease, batch) -> the rank by whose push it counts
        self.done_by: dict[int, int] = {}  # lease -> the rank that finished it
        self.trained: list[Trained] = []
        self.ledger = Ledger(trained=self.trained)
        self.ledger.apply(1, _began(self.config, self.num_workers))
        self.deaths = Random(seed)  # apart: schedules of seeds stay as they were
        self.ended: list[int] = []
        self.counts: Counter[str] = Counter()
        self.workers: dict[int, LeaseWorker] = {}
        self.coordinator = LeaseCoordinator(self)
        self.last_fault_at = 0.0
        for rank in range(self.num_workers):
            self.fork(rank, 0)
        for _ in range(min(1 + int(random.expovariate(0.3)), 10)):
            self.world.schedule(random.random() * 0.8, self._strike)

    def describe(self) -> str:
        return f"{self.num_workers} workers, {self.config}"

    def run(self) -> None:
        self.world.run(self._is_over, until=lambda: self.last_fault_at + 20.0, check=self.coordinator.check)
        for number in range(self.config.num_epochs * self.config.num_leases):
            for batch in range(num_batches(self.config, number)):
                if not self.applied[number, batch]:
                    raise Violated(f"batch {batch} of lease {number} was never run")
        if sorted(self.done_by) != list(range(self.config.num_epochs * self.config.num_leases)):
            raise Violated(f"the ledger has {sorted(self.done_by)}")
        self._check_ledger()
        num_again = sum(count - 1 for count in self.applied.values())
        self.counts["batches run again"] += num_again
        if num_again and not self.counts["worker killed"] and not self.config.backup:
            raise Violated(f"{num_again} batches were run again although nobody died")

    def _check_ledger(self) -> None:
        """Every batch is the worker's whose push came first, and what was computed in vain is counted."""
        self.ledger.close()
        for epoch in self.ledger.epochs.values():
            if not epoch.is_exact:
                raise Violated(f"epoch {epoch.number}: {epoch.missing} is missing, {epoch.doubled} twice")
            first = epoch.number * self.config.num_leases
            for span in epoch.spans:
                (rank,) = span.by_rank
                for start in range(span.start, span.stop, BATCH):
                    lease, within = divmod(start, self.config.samples_per_lease)
                    if self.first_by[first + lease, within // BATCH] != rank:
                        raise Violated(
                            f"sample {start} of epoch {epoch.number} is rank {rank}'s in the ledger"
                        )
        in_vain = sum(
            (count - 1) * self.samples(lease, batch) for (lease, batch), count in self.applied.items()
        )
        found = sum(epoch.num_repeated for epoch in self.ledger.epochs.values())
        if found != in_vain:
            raise Violated(f"{in_vain} samples were computed in vain, and {found} by the ledger")

    def samples(self, number: int, batch: int) -> int:
        lease = self.config.lease(number)
        return min(BATCH, lease.num_samples - batch * BATCH)

    def fork(self, rank: int, incarnation: int) -> None:
        self.workers[rank] = LeaseWorker(self, rank, incarnation)

    def push(self, worker: LeaseWorker, number: int, batch: int) -> None:
        """A server applies a batch, unless its mark says that it has; the worker writes down which."""
        if number // self.config.num_leases != len(self.ended) and not self.applied[number, batch]:
            raise Violated(f"lease {number} is run first in epoch {len(self.ended)}, which is not its own")
        is_new = self.first_by.setdefault((number, batch), worker.rank) == worker.rank
        is_new = is_new and not self.applied[number, batch]
        self.applied[number, batch] += 1
        if self.workers_write:
            epoch, start = number // self.config.num_leases, self.config.lease(number).start + batch * BATCH
            stop = start + self.samples(number, batch)
            outcome = PushOutcome.COUNTED if is_new else PushOutcome.KNOWN
            self.trained.append(Trained(1, worker.rank, worker.incarnation, 1, epoch, start, stop, outcome))
            worker.wrote = (number, len(self.trained) - 1)

    def finish(self, finished: FinishLeases) -> None:
        """Some leases are done, and one worker did them."""
        for lease in finished.leases:
            if lease.number in self.done_by:
                raise Violated(
                    f"lease {lease.number} is rank {self.done_by[lease.number]}'s, and {finished.by}'s"
                )
            self.done_by[lease.number] = finished.by.rank
            ranges = [(lease.start, lease.stop)]
            self.ledger.apply(
                1, RangesTrained(call=1, rank=finished.by.rank, epoch=lease.epoch, ranges=ranges)
            )

    def end_epoch(self, epoch: int) -> None:
        if epoch != len(self.ended):
            raise Violated(f"epoch {epoch} ends after {self.ended}")
        first = epoch * self.config.num_leases
        for number in range(first, first + self.config.num_leases):
            if not all(self.applied[number, batch] for batch in range(num_batches(self.config, number))):
                raise Violated(f"epoch {epoch} ends and lease {number} is not done")
        self.ended.append(epoch)
        self.ledger.apply(1, EpochLeased(call=1, epoch=epoch, num_samples_twice=0))

    def _is_over(self) -> bool:
        return all(worker.is_done for worker in self.workers.values())

    # ---- faults ---------------------------------------------------------------------------------

    def _strike(self) -> None:
        random, world = self.world.random, self.world
        worker = self.workers[random.randrange(self.num_workers)]
        self.last_fault_at = world.now
        kinds = (
            "kill",
            "kill",
            "kill",
            "coordinator",
            "coordinator",
            "stop",
            "cut",
            "strand",
            "slow",
            "slow",
        )
        match random.choice(kinds):
            case "kill" if worker.is_alive:
                worker.tell("!! is killed")
                self.counts["worker killed"] += 1
                if worker.is_in_lease and self.deaths.random() < 0.5:  # it had not heard of its last push
                    at = worker.wrote[1]
                    self.trained[at] = self.trained[at]._replace(outcome=PushOutcome.PUSHED)
                    self.counts["killed before it heard"] += 1
                worker.die()
                world.schedule(world.between(0.001, 0.02), self._reap, worker)
            case "coordinator" if self.coordinator.is_alive:
                self.coordinator.dies_at = random.choice(("before", "after", "now"))
                self.counts[f"coordinator killed {self.coordinator.dies_at}"] += 1
                if self.coordinator.dies_at == "now":
                    self.coordinator.die()
            case "stop" if worker.is_alive and not worker.is_stopped:
                worker.stop()
                world.schedule(random.random(), self._carry_on, worker)
            case "cut" if worker.end is not None:
                self.network.cut(worker.end, notice_s=0.001, far_notice_s=random.choice((0.001, 0.5)))
            case "strand":
                worker.strands_s = random.choice((0.0001, 0.1))
            case "slow":
                worker.times_slower = random.choice((3.0, 10.0))
                world.schedule(random.choice((0.3, 2.0)), worker.recover)

    def _reap(self, worker: LeaseWorker) -> None:
        worker.tell("is reaped")
        self.fork(worker.rank, worker.incarnation + 1)
        if self.world.random.random() < 0.5:  # else its successor's first question says it
            self.coordinator.replaced(worker.rank, worker.incarnation + 1)

    def _carry_on(self, worker: LeaseWorker) -> None:
        if worker.is_alive:
            worker.carry_on()


class LeaseCoordinator(Process):
    """Feeds the real Leases; writes down before it answers."""

    def __init__(self, job: Leasing) -> None:
        super().__init__(job.world, "coordinator")
        self.job = job
        self.dies_at = ""
        self._accepted: list[End] = []
        self._ends: dict[LeaseHolder, End] = {}
        self._start()

    def _start(self) -> None:
        self.is_alive = True
        self.core = self.job.leases_class(self.job.config)
        for event in self.job.journal:
            self.core.handle(event)
        self.job.network.listen(self)

    def die(self) -> None:
        self.tell("!! is killed")
        self.is_alive, self.dies_at = False, ""
        self.job.network.listen(None)
        for end in self._accepted:
            end.close()
        self._accepted.clear()
        self._ends.clear()
        self.world.schedule(self.world.between(0.02, 0.5), self._start)

    def check(self) -> None:
        """After every event: a lease has one holder; at an epoch's end, with backups, two."""
        if not self.is_alive:
            return
        config = self.core.config
        for number in range(self.core.epoch * config.num_leases, (self.core.epoch + 1) * config.num_leases):
            holders = self.core.holders(number)
            if len(holders) > (2 if config.backup else 1) or len(set(holders)) < len(holders):
                raise Violated(f"lease {number} is held by {holders}")

    def accepted(self, end: End) -> None:
        self._accepted.append(end)

    def heard(self, end: End, message: Message) -> None:
        if isinstance(message, AskForLeases) and self.is_alive:
            by = LeaseHolder(message.rank, message.incarnation)
            known = self._ends.get(by)
            if known is None or known.number <= end.number:
                self._ends[by] = end
                self._feed(WorkerAsked(by, tuple(message.finished), self.world.now, tuple(message.busy_s)))

    def lost(self, end: End) -> None:
        for holder in [holder for holder, each in self._ends.items() if each is end]:
            del self._ends[holder]

    def replaced(self, rank: int, incarnation: int) -> None:
        if self.is_alive:
            self._feed(WorkerReplaced(rank, incarnation, self.world.now))

    def _feed(self, event: Event) -> None:
        self.tell("hears", event)
        if self.dies_at == "before":
            self.die()
            return
        if not self.job.answers_first:
            self._write(event)
        actions = self.core.handle(event)
        if self.dies_at == "after" and not self.job.answers_first:
            self.die()
            actions = [
                each for each in actions if isinstance(each, EndEpoch | FinishLeases)
            ]  # the journal has it
        self._carry_out(actions)
        if self.job.answers_first:
            if self.dies_at == "after":
                self.die()
            else:
                self._write(event)
        deadline = self.core.deadline if self.is_alive else None
        if deadline is not None:
            self.later(max(0.0, deadline - self.world.now), self._tick)

    def _tick(self) -> None:
        if self.core.deadline is not None and self.core.deadline <= self.world.now:
            self._feed(Tick(self.world.now))

    def _write(self, event: Event) -> None:
        if not isinstance(event, self.job.forgets):
            self.job.journal.append(event)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case EndEpoch(epoch):
                    self.job.end_epoch(epoch)
                    continue
                case FinishLeases():
                    self.job.finish(action)
                    continue
                case Drained(rank) | Readmitted(rank):
                    self.tell(type(action).__name__, rank)
                    self.job.counts[f"worker {type(action).__name__.lower()}"] += 1
                    continue
            end = self._ends.get(action.to)
            if end is None:
                continue
            self.tell("answers", action)
            if isinstance(action, HandLeases):
                numbers = [lease.number for lease in action.leases]
                end.send(LeasesHanded(numbers, self.core.may_be_overtaken(action.to)))
            elif isinstance(action, EndLeases):
                end.send(LeasesHanded([]))
            elif self.job.workers[action.to.rank].incarnation == action.to.incarnation:
                raise Violated(f"{action.to} is refused: {action.reason}")


class LeaseWorker(Process):
    """Runs what it holds, batch by batch, and asks for more ahead; does not wait for the answer while it has work."""

    def __init__(self, job: Leasing, rank: int, incarnation: int) -> None:
        super().__init__(job.world, f"worker-{rank}.{incarnation}")
        self.job, self.rank, self.incarnation = job, rank, incarnation
        self.is_done = False
        self.end: End | None = None
        self.strands_s = 0.0
        self.wrote = (-1, -1)  # the lease of its last push, and where it wrote that down
        self._held: list[int] = []
        self._running: tuple[int, int] | None = None  # lease and batch
        self._finished: dict[int, float] = {}  # how long each took, and not known to be heard
        self.times_slower = 1.0
        self._began_at = 0.0
        self._asks_with: list[int] | None = None
        self._is_ending = False
        self.later(self.world.between(0.01, 0.1), self._ask)

    def die(self) -> None:
        self.is_alive = False
        if self.end is not None:
            self.end.close()

    @property
    def is_in_lease(self) -> bool:
        """Whether it has pushed some of a lease, and goes on with it."""
        return self._running is not None and self._running[0] == self.wrote[0]

    def recover(self) -> None:
        self.times_slower = 1.0

    def heard(self, end: End, message: Message) -> None:
        self.do(self._heard, end, message)

    def lost(self, end: End) -> None:
        self.do(self._lost, end)

    def _ask(self) -> None:
        if self.end is None:
            self.end = self.job.network.connect(self, self.name)
        self._asks_with = list(self._finished)
        lag_s, self.strands_s = self.strands_s, 0.0
        self.end.lag_s = lag_s
        busy_s = [self._finished[each] for each in self._asks_with]
        self.end.send(AskForLeases(self.rank, self.incarnation, self._asks_with, busy_s))
        if lag_s:
            self.job.network.cut(self.end, notice_s=0.001, far_notice_s=lag_s + 0.05)

    def _heard(self, end: End, message: Any) -> None:
        if end is not self.end or self._asks_with is None:
            return
        self._finished = {each: s for each, s in self._finished.items() if each not in self._asks_with}
        self._asks_with = None
        self.tell("holds", message.numbers)
        if not message.numbers and not self._finished:
            self.is_done = True
            self.die()
            return
        self._held = [number for number in message.numbers if number not in self._finished]
        self._is_ending = message.is_ending
        if self._finished:
            self._ask()
        if self._running is None:
            self._next()
        elif self._running[0] not in self._held:
            self._running = None  # somebody else has done it
            self._next()

    def _lost(self, end: End) -> None:
        if end is self.end:
            self.end = None
            if self._asks_with is not None:
                self.later(0.02, self._ask)

    def _next(self) -> None:
        if self._held:
            self._running = (self._held[0], 0)
            self._began_at = self.world.now
            self._compute(self._running)

    def _compute(self, running: tuple[int, int]) -> None:
        self.later(self.world.between(0.002, 0.05) * self.times_slower, self._run, running)

    def _run(self, running: tuple[int, int]) -> None:
        if running != self._running:
            return
        number, batch = running
        self.job.push(self, number, batch)
        if batch + 1 < num_batches(self.job.config, number):
            self._running = (number, batch + 1)
            self._compute(self._running)
            if self._is_ending and self._asks_with is None:
                self._ask()  # somebody else may have done it
            return
        self.tell("has done", number)
        self._running = None
        self._held.remove(number)
        self._finished[number] = self.world.now - self._began_at
        if self._asks_with is None:
            self._ask()
        self._next()


def num_batches(config: LeaseConfig, number: int) -> int:
    lease = config.lease(number)
    return -(-(lease.stop - lease.start) // BATCH)


def _began(config: LeaseConfig, num_workers: int) -> TrainingBegan:
    return TrainingBegan(
        call=1,
        trainer=0,
        data="",
        epoch=0,
        start=0,
        num_samples=config.num_samples,
        num_workers=num_workers,
        sharding="dynamic",
        batch_size=BATCH,
        is_leased=True,
    )
