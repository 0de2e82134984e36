"""Gradients added up over batches, and pushes of several workers merged: the same batches, exactly once.

Real: `Combiner` and `merge`. Toy: the connection to the aggregator, which is
with worker 0 and dies with it. A worker that waits too long for it, or is told
that its push did not count, pushes by itself, while the merged push may still
be on its way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal.ps.client.aggregator import Combiner, Forward, PushAnswer, WorkerPush, merge
from shoal.ps.server.steps import Staged
from shoal.runtime.transport.messages.client_server import Committed, DeclareMode, Hello, StepEnd
from shoal.runtime.transport.messages.message import Message
from simulation.ps_jobs import Relaxed
from simulation.ps_net import Connection
from simulation.ps_workers import Client, RelaxedWorker
from simulation.world import Violated

VECTOR = np.array([1.0, 0.0, 0.0, 0.0, 1.0])


class Aggregating(Client):
    """Merges what workers offer, one merged push at a time."""

    job: Merged

    def __init__(self, job: Merged, incarnation: int) -> None:
        super().__init__(job, 0, incarnation)
        self.name = f"aggregator.{incarnation}"
        self.memory = []
        self.combiner = Combiner(job.fan_in)
        self.members: dict[int, MergedWorker] = {}

    def begin(self) -> None:
        """Wait for offers."""

    def _connect(self, server: int) -> Connection:
        connection = self.links[server] = Connection(self.job, self, self.job.servers[server])
        connection.ask(Hello("kv-aggregator-0", self.incarnation))
        for message in self.job.declarations:
            connection.ask(message)
        return connection

    def offer(self, worker: MergedWorker, push: WorkerPush) -> None:
        self.members[worker.rank] = worker
        self._carry_out(self.combiner.offer(worker.rank, push))

    def gone(self, worker: MergedWorker) -> None:
        if self.members.get(worker.rank) is worker:
            self.combiner.lost(worker.rank)

    def _carry_out(self, actions: list[Forward | PushAnswer]) -> None:
        for action in actions:
            if isinstance(action, PushAnswer):
                worker = self.members[action.member]
                worker.later(self.world.between(0.0001, 0.01), worker.told, action.push, action.counts)
                continue
            found = merge(action.pushes)
            self.job.counts["pushes merged"] += len(action.pushes) > 1
            keys, grads = found.rows[0]
            chunks = {number: total.numpy() for number, (total, _) in found.dense.items()}
            end = found.end

            def send(end: StepEnd = end, keys: Any = keys, grads: Any = grads, chunks: Any = chunks) -> None:
                self.push(end, keys, grads, chunks, VECTOR, b"")

            self.operate(send, self._ended)

    def _ended(self, answers: dict[Any, tuple[Message, list[bytes]]]) -> None:
        self.release()
        late = any(message.late for message, _ in answers.values() if isinstance(message, Committed))
        self.job.counts["merged push left out"] += late
        self._carry_out(self.combiner.answered(counts=not late))


class MergedWorker(RelaxedWorker):
    """Adds up the gradients of some batches of a lease, then offers them, or pushes them itself."""

    job: Merged

    def __init__(self, job: Merged, rank: int, incarnation: int) -> None:
        super().__init__(job, rank, incarnation)
        self.held: list[int] = []
        self.offered: WorkerPush | None = None

    def view(self, view: Any) -> None:
        if self.rank == 0:
            self.job.aggregator.view(view)
        super().view(view)

    def die(self) -> None:
        super().die()
        aggregator = self.job.aggregator
        aggregator.later(self.world.between(0.0001, 0.02), aggregator.gone, self)

    def _take(self) -> None:
        self.held, self.unpushed = [], 0
        super()._take()

    def _computed(self) -> None:
        job = self.job
        self.held.append(self.seq)
        if self.seq % job.push_every and self.seq != job.num_batches:
            self.clock += 1
            self.unpushed = len(self.held)
            self.seq += 1
            self.later(self.world.between(0.0005, 0.005), self._batch)
            return
        self.unpushed = 0
        parts = [job.gradient(self.lease, seq) for seq in self.held]
        end = StepEnd(
            0,
            self.lease,
            self.seq,
            self.rank,
            0,
            0,
            0,
            done_below=job.done_below,
            num_batches=len(self.held),
        )
        pushes = [
            WorkerPush(
                end,
                Staged({0: (keys, grads)}, {n: (torch.from_numpy(c.copy()), ()) for n, c in chunks.items()}),
            )
            for keys, grads, chunks in parts
        ]
        summed = merge(pushes)
        staged = Staged(summed.rows, {n: (total, ()) for n, (total, _) in summed.dense.items()})
        self.offered = push = WorkerPush(end, staged)
        if self.world.random.random() < 0.8:
            aggregator = job.aggregator
            aggregator.later(self.world.between(0.0001, 0.005), aggregator.offer, self, push)
            self.later(self.world.between(0.004, 0.06), self.told, push, False)
        else:
            self.told(push, False)

    def told(self, push: WorkerPush, counts: bool) -> None:
        """The aggregator's word, or none in time."""
        if push is not self.offered:
            return
        self.offered = None
        if counts:
            self._acknowledged()
            return
        self.job.counts["pushed past the aggregator"] += 1
        (keys, grads), dense = push.staged.rows[0], push.staged.dense
        chunks = {number: total.numpy() for number, (total, _) in dense.items()}
        self.operate(lambda: self.push(push.end, keys, grads, chunks, VECTOR, b""), self._pushed)

    def _pushed(self, answers: dict[Any, tuple[Message, list[bytes]]]) -> None:
        for message, _ in answers.values():
            if not isinstance(message, Committed) or message.late:
                raise Violated(f"{self.name} pushed {self.lease}/{self.held} itself and heard {message}")
        self.release()
        self._acknowledged()

    def _acknowledged(self) -> None:
        self.clock += 1
        for seq in self.held:
            self.job.acknowledged(self, self.lease, seq)
        self.pull(self.job.keys(self.lease, self.seq), 0, self._checked)

    def _checked(self, rows: Any, dense: dict[int, Any], updates: int, slowest: int) -> None:
        self.held = []
        super()._checked(rows, dense, updates, slowest)


class Merged(Relaxed):
    """`--push-every` and `--fan-in`: every batch of every lease exactly once in every slot."""

    def prepare(self) -> None:
        random = self.world.random
        self.num_workers = random.randint(2, 4)
        super().prepare()
        self.num_batches, self.num_leases = random.randint(1, 5), random.randint(4, 8)
        self.leases = list(range(1, self.num_leases + 1))
        self.push_every, self.fan_in = random.randint(1, 3), random.randint(2, 3)
        if self.mode.kind == "ssp":
            bound = max(self.mode.bound, self.push_every - 1)
            mode = DeclareMode(self.num_workers, "ssp", bound=bound)
            self.declare(self.spec, "float64", "SGD", {"lr": 1.0}, mode)
        self.aggregator: Aggregating

    def make_worker(self, rank: int, incarnation: int) -> Client:
        if rank == 0:
            self.aggregator = Aggregating(self, incarnation)
        return MergedWorker(self, rank, incarnation)

    def worker_died(self, rank: int) -> None:
        if rank == 0:
            self.aggregator.die()
        super().worker_died(rank)
