"""`ps:drop=K` and `ps:stale-ok` in the simulator: steps that do not wait for the slowest, and the oracle over them.

Every contribution has rows of its own, so that what came of it can be read
from the final rows: nothing where it was left out, once where it counts. How
much a rank counts is chosen so that a row also tells who else was in the step,
and no two of them add up to what a single one gives. Rows that all share tell
how many steps were applied, whoever was in them.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from shoal.ps.layout import slot_of
from shoal.runtime.transport.messages.client_server import (
    AskNote,
    Committed,
    DeclareMode,
    Note,
    StepEnd,
    TableSpec,
)
from shoal.runtime.transport.messages.message import Message
from simulation.ps_jobs import Job
from simulation.ps_workers import Client
from simulation.world import Violated

COUNTS = (3.0, 5.0, 7.0)
"""What each rank's loss is a mean over."""

WHOLE = 840.0
"""Of a batch. Divided by what any of the ranks count together, a whole number."""

SHARED = (1, 2, 3, 4, 5, 6)
NUM_OWN = 12


class Hurried(Job):
    """Whoever is late is left out, and told so."""

    def prepare(self) -> None:
        random = self.world.random
        self.num_workers = random.randint(2, 3)
        self.num_steps = random.randint(2, 7)
        kind = random.choice(("drop", "stale"))
        bound = random.randint(1, self.num_workers - 1) if kind == "drop" else 1
        self.told: dict[int, dict[tuple[int, int], bool]] = {slot: {} for slot in range(256)}
        """By slot: for each (rank, step) that was acknowledged, whether it counts there."""
        spec = TableSpec(0, "rows", 1, "float64", "sgd", {"lr": 1.0})
        self.declare(spec, "float64", "SGD", {"lr": 1.0}, DeclareMode(self.num_workers, kind, bound))

    def make_worker(self, rank: int, incarnation: int) -> Client:
        return HurriedWorker(self, rank, incarnation)

    def own_keys(self, rank: int, step: int) -> Any:
        first = 1000 * (rank + 1) + 20 * step
        return np.arange(first, first + NUM_OWN, dtype=np.int64)

    def keys(self, rank: int, step: int) -> Any:
        return np.concatenate([np.array(SHARED, np.int64), self.own_keys(rank, step)])

    def contribution(self, rank: int, step: int) -> tuple[Any, Any, dict[int, Any], Any]:
        keys, count = self.keys(rank, step), COUNTS[rank]
        grads = np.where(keys > max(SHARED), 1.0, count).reshape(-1, 1)
        losses = np.zeros(self.num_workers)
        losses[rank] = 1.0
        dense = {chunk.number: np.full(3, count) for chunk in self.chunks}
        return keys, grads, dense, np.array([count, 0.0, 0.0, 0.0, *losses])

    def acknowledged(self, worker: Client, step: int, late_at: dict[int, bool]) -> None:
        """A worker was told by every server whether its part of a step counts there."""
        for slot in range(256):
            self.told[slot][worker.rank, step] = not late_at[worker.owner(slot)]
        self.counts["told to be late"] += any(late_at.values())
        steadily = {server for server in late_at if self._was_always_primary(server)}
        for server in steadily:
            self._check_now(worker, step, server, late_at[server])

    def _was_always_primary(self, server: int) -> bool:
        """Of the same slots: then all of them have had the same steps."""
        slots = {
            tuple(slot for slot, holders in enumerate(view.holders) if holders[0] == server)
            for view in self.views.values()
        }
        return len(slots) == 1 and self.servers[server].incarnation == 0

    def _check_now(self, worker: Client, step: int, server: int, is_late: bool) -> None:
        table = self.servers[server].core.state.contents.tables[0]
        keys = self.own_keys(worker.rank, step)
        keys = keys[[worker.owner(slot) == server for slot in slot_of(0, keys).tolist()]]
        rows = np.zeros((len(keys), 1))
        table.pull(keys, rows)
        if (rows != 0).any() if is_late else (rows == 0).any():
            raise Violated(
                f"{worker.name} was told that its part of step {step} "
                f"{'came too late' if is_late else 'counts'} on server {server}, where its rows are {rows.T}"
            )

    def check_end(self) -> None:
        rows = {key: float(np.frombuffer(value)[0]) for key, (value, _) in self.primary_rows().items()}
        for slot, holders in enumerate(self.newest.holders):
            version = self.servers[holders[0]].core.state.applied.version[slot]
            if version != self.num_steps:
                raise Violated(f"slot {slot} is at step {version} of {self.num_steps}, and all are done")
        for key, slot in zip(SHARED, slot_of(0, np.array(SHARED, np.int64)).tolist(), strict=True):
            self._check_total(f"row {key}", slot, rows.get(key, 0.0))
        for chunk in self.chunks:
            for element in self.primary_chunk(chunk).tolist():
                self._check_total(f"chunk {chunk.number}", chunk.slot, element)
        for rank in range(self.num_workers):
            for step in range(1, self.num_steps + 1):
                own = self.own_keys(rank, step)
                for key, slot in zip(own.tolist(), slot_of(0, own).tolist(), strict=True):
                    self._check_own(rank, step, slot, -rows.get(key, 0.0))

    def _check_total(self, what: str, slot: int, value: float) -> None:
        steps = int(self.servers[self.newest.holders[slot][0]].core.state.applied.steps(0)[slot])
        if value != -WHOLE * steps:
            raise Violated(f"{what} of slot {slot} is {value} after {steps} steps of {-WHOLE} each")

    def _check_own(self, rank: int, step: int, slot: int, found: float) -> None:
        was_told = self.told[slot].get((rank, step))
        if was_told is True and found == 0.0:
            raise Violated(f"rank {rank} was told that step {step} counts in slot {slot}, and it does not")
        if found == 0.0:
            return
        once = self._once(rank)
        if self.mode.kind == "drop" and found not in once:
            raise Violated(
                f"step {step} of rank {rank} is {found} in slot {slot}, once is one of {sorted(once)}"
            )
        twice = {first + again for first in once for again in once}
        if self.mode.kind == "stale" and found not in once | twice:
            raise Violated(f"step {step} of rank {rank} is {found} in slot {slot}: no two steps add up to it")

    def _once(self, rank: int) -> set[float]:
        """What a contribution gives in one step, by who may be in it with it."""
        others = [each for each in range(self.num_workers) if each != rank]
        fewest = self.num_workers - self.mode.bound
        return {
            WHOLE / (COUNTS[rank] + sum(COUNTS[each] for each in some))
            for number in range(max(fewest - 1, 0), self.num_workers)
            for some in combinations(others, number)
        }


class HurriedWorker(Client):
    """Runs steps in common, and passes by those that are over; a replacement goes on after the last it can recall."""

    job: Hurried

    def __init__(self, job: Hurried, rank: int, incarnation: int) -> None:
        super().__init__(job, rank, incarnation)
        self.memory = []
        self.updates = self.passed = 0

    def begin(self) -> None:
        if self.incarnation:
            self.operate(
                lambda: self.ask("note", self.owner(0), AskNote(self.core_view(), self.rank)), self._take_note
            )
        else:
            self._next()

    def _take_note(self, answers: dict[Any, tuple[Message, list[bytes]]]) -> None:
        note, frames = answers["note"]
        assert isinstance(note, Note)
        self.updates = int(frames[0] or b"0")
        while self.updates + 1 in note.log:
            self.job.counts["result recalled"] += 1
            self.updates += 1
        self.tell("goes on after step", self.updates)
        self._next()

    def _next(self) -> None:
        while self.updates < min(self.passed, self.job.num_steps):
            self.updates += 1
            self.job.counts["step passed by"] += 1
        if self.updates == self.job.num_steps:
            self.is_done = True
            return
        self.pull(self.job.keys(self.rank, self.updates + 1), self.updates, self._pulled)

    def _pulled(self, rows: Any, dense: dict[int, Any], updates: int, slowest: int) -> None:
        # Now and then much slower than the others, so that it is left out, and passed by.
        longest = self.world.random.choice((0.01, 0.01, 0.1))
        self.later(self.world.between(0.0005, longest), self._computed, updates > self.updates)

    def _computed(self, is_spoilt: bool) -> None:
        step = self.updates + 1
        keys, grads, dense, vector = self.job.contribution(self.rank, step)
        end = StepEnd(0, self.rank, step, self.rank, 0, step, step, factor=WHOLE, is_spoilt=is_spoilt)
        note = str(self.updates).encode()
        self.operate(lambda: self.push(end, keys, grads, dense, vector, note), self._ended)

    def _ended(self, answers: dict[Any, tuple[Message, list[bytes]]]) -> None:
        step, late_at = self.updates + 1, dict[int, bool]()
        for (_, server), (message, _) in answers.items():
            if not isinstance(message, Committed):
                raise Violated(f"{self.name} ended step {step} and heard {message}")
            late_at[server] = message.late
        self.job.acknowledged(self, step, late_at)
        self.passed = min(
            message.updates for message, _ in answers.values() if isinstance(message, Committed)
        )
        self.release()
        self.updates = step
        self.later(self.world.between(0.0005, 0.01), self._next)
