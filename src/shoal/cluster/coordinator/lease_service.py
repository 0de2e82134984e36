"""Lease requests: one call's at a time, each answered or expired at its deadline.

Pure. `leases.py` decides which worker runs what; here are the requests that
wait, the journal entries from which a new coordinator decides the same again,
and the entries for the ledger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from shoal.cluster.coordinator import leases as lease_types
from shoal.cluster.coordinator.actions import Answer, NotifySupervisor, Tick
from shoal.cluster.coordinator.journal_entries import (
    LeaseAsked,
    LeaseGaveUp,
    LeaseReturned,
    LeasesStand,
    LeaseTicked,
    Persist,
)
from shoal.cluster.coordinator.leases import LeaseConfig, LeaseHolder, LeaseTable
from shoal.cluster.coordinator.stragglers import Drained, Readmitted
from shoal.cluster.ledger.entries import EpochLeased, RangesTrained, TrainingBegan
from shoal.errors import ConfigError
from shoal.runtime.transport.messages.supervisor import LeaseCounts, WorkerDrained, WorkerReadmitted
from shoal.runtime.transport.messages.worker_coordinator import (
    AskLease,
    LeaseRefused,
    Leases,
    NoMoreLeases,
    WaitExpired,
)

SNAPSHOT_EVERY = 256
"""Requests between two snapshots of all leases: at most this many are replayed after a coordinator's death."""

LeaseAction: TypeAlias = Answer | Persist | NotifySupervisor


@dataclass(slots=True)
class _Question:
    client: int
    asked_at: float
    expires_at: float
    below: int


@dataclass(slots=True)
class LeaseService:
    """The newest call's leases, and the requests that wait for some."""

    call: int = 0
    _asked: AskLease | None = None  # first request of the call: it defines how epochs are divided
    _table: LeaseTable | None = None
    _questions: dict[LeaseHolder, _Question] = field(default_factory=dict)
    _num_since_snapshot: int = 0

    @property
    def deadline(self) -> float | None:
        times = [each.expires_at for each in self._questions.values()]
        if self._table is not None and self._table.deadline is not None:
            times.append(self._table.deadline)
        return min(times, default=None)

    @property
    def counts(self) -> LeaseCounts | None:
        """Leases and samples that each rank has finished."""
        return LeaseCounts(dict(self._table.counts)) if self._table else None

    @property
    def drained(self) -> list[WorkerDrained]:
        if self._table is None:
            return []
        return [self._drained(self._table.draining.figures(rank)) for rank in self._table.draining.drained]

    @property
    def holdings(self) -> tuple[LeaseConfig, dict[int, list[int]], int] | None:
        """LeaseConfig, leases held by each rank, and number of leases still to be handed out; None before the first request."""
        if self._table is None:
            return None
        held: dict[int, list[int]] = defaultdict(list)
        for number, rank, _ in self._table.snapshot().held:
            held[rank].append(number)
        return self._table.config, dict(held), self._table.num_todo

    def ask(self, client: int, ask: AskLease, now: float) -> list[LeaseAction]:
        """Handle a worker's request. Client 0 is a replayed request: nobody is answered."""
        if ask.call < self.call:
            return [Answer(client, NoMoreLeases(0))]
        began: list[LeaseAction] = []
        if self._table is None or ask.call > self.call:
            try:
                table = LeaseTable(_config(ask), epoch=ask.first_epoch, done=ask.done)
            except ConfigError as error:
                return [Answer(client, LeaseRefused(str(error)))]
            self.call, self._asked, self._table = ask.call, ask, table
            began = [Persist(_began(ask, table))]
        elif self._asked is not None and _config(ask) != _config(self._asked):
            return [
                Answer(
                    client,
                    LeaseRefused(f"it cuts epochs as {_config(ask)}, others as {_config(self._asked)}"),
                )
            ]
        by = LeaseHolder(ask.rank, ask.incarnation)
        if ask.is_last or (self._asked is not None and self._asked.is_last):
            return self._end(client, ask, now)
        self._questions[by] = _Question(client, now, now + ask.timeout_s, ask.below)
        held = self._table.held_by(by)
        event = lease_types.WorkerAsked(by, tuple(ask.finished), now, tuple(ask.busy_s), tuple(ask.near))
        acted = self._table.handle(event)
        answers = self._answers(acted)
        if not ask.finished and held and held == self._table.held_by(by):
            # A check whether it still holds them: nothing to journal.
            return [*began, *answers]
        self._num_since_snapshot += 1
        persist: list[LeaseAction] = [*began, Persist(LeaseAsked(now, ask)), *self._ledger(acted)]
        has_epoch_ended = any(isinstance(each, lease_types.EndEpoch) for each in acted)
        if self._num_since_snapshot >= SNAPSHOT_EVERY or has_epoch_ended:
            self._num_since_snapshot = 0
            assert self._asked is not None
            persist.append(Persist(LeasesStand(self._asked, self._table.snapshot())))
        notices: list[LeaseAction] = [*self._notices(acted)]
        if ask.finished and self.counts is not None:
            notices.append(NotifySupervisor(self.counts))
        return [*persist, *answers, *self._notify_of_the_epoch(), *notices]

    def _notify_of_the_epoch(self) -> list[Answer]:
        """Answer requests from an epoch that is over, though others hold all leases of the next one."""
        assert self._table is not None
        below, num_leases = self._table.done_below, self._table.config.num_leases
        behind = [
            by for by, each in self._questions.items() if each.below // num_leases < below // num_leases
        ]
        for by in behind:
            self._table.handle(lease_types.WorkerGaveUp(by))
        answers = [self._answer(by, Leases([], below)) for by in behind]
        return [each for each in answers if each.client]

    def _end(self, client: int, ask: AskLease, now: float) -> list[LeaseAction]:
        """End the call early, as all ranks have agreed: every waiting request is answered with no more leases."""
        assert self._asked is not None
        assert self._table is not None
        self._asked = msgspec.structs.replace(self._asked, is_last=True)
        by = LeaseHolder(ask.rank, ask.incarnation)
        acted = self._table.handle(
            lease_types.WorkerAsked(by, tuple(ask.finished), now, tuple(ask.busy_s), tuple(ask.near))
        )
        waiting, self._questions = self._questions, {}
        no_more = NoMoreLeases(self._table.done_below)
        clients = [*(question.client for question in waiting.values()), client]
        persist: list[LeaseAction] = [Persist(LeaseAsked(now, ask)), *self._ledger(acted)]
        return [*persist, *(Answer(each, no_more) for each in clients if each)]

    def replaced(self, rank: int, incarnation: int, now: float) -> list[Answer | Persist]:
        """Take back the leases of this rank's incarnations below `incarnation`."""
        for by in [by for by in self._questions if by.rank == rank and by.incarnation < incarnation]:
            del self._questions[by]
        if self._table is None:
            return []
        acted = self._table.handle(lease_types.WorkerReplaced(rank, incarnation, now))
        return [Persist(LeaseReturned(rank, incarnation, now)), *self._answers(acted)]

    def gave_up(self, rank: int, incarnation: int) -> None:
        by = LeaseHolder(rank, incarnation)
        self._questions.pop(by, None)
        if self._table is not None:
            self._table.handle(lease_types.WorkerGaveUp(by))

    def gone(self, client: int) -> list[Persist]:
        return [
            self._give_up(by)
            for by, each in list(self._questions.items())
            if client and each.client == client
        ]

    def tick(self, now: float) -> list[Answer | Persist]:
        """Hand out leases that are due by the clock, and expire requests that have waited too long."""
        actions: list[Answer | Persist] = []
        if self._table is not None and self._table.deadline is not None and now >= self._table.deadline:
            actions += self.hand_out(now)
        for by, question in list(self._questions.items()):
            if now >= question.expires_at:
                actions.append(self._give_up(by))
                waited_s = now - question.asked_at
                expired = WaitExpired(f"rank {by.rank}'s next lease", waited_s, self._whom_for(by))
                actions.append(Answer(question.client, expired))
        return actions

    def hand_out(self, now: float) -> list[Answer | Persist]:
        acted = self._table.handle(Tick(now)) if self._table is not None else []
        return [Persist(LeaseTicked(now)), *self._answers(acted)] if acted else []

    def restore(self, stand: LeasesStand) -> None:
        self.call, self._asked = stand.asked.call, stand.asked
        self._table = LeaseTable.restore(_config(stand.asked), stand.snapshot)
        self._num_since_snapshot = 0

    def clear(self) -> None:
        """Forget all leases: the job restarts from a checkpoint, whose position comes with the first request."""
        self._asked, self._table, self.call = None, None, 0
        self._questions.clear()

    def _give_up(self, by: LeaseHolder) -> Persist:
        self.gave_up(*by)
        return Persist(LeaseGaveUp(by.rank, by.incarnation))

    def _whom_for(self, by: LeaseHolder) -> list[str]:
        held = self._table.snapshot().held if self._table else []
        return [f"rank {rank} (holds lease {number})" for number, rank, _ in held if rank != by.rank]

    def _answers(self, acted: Sequence[lease_types.Action]) -> list[Answer]:
        assert self._table is not None
        below, answers = self._table.done_below, list[Answer]()
        for each in acted:
            match each:
                case lease_types.HandLeases(to, held):
                    told = [(*lease,) for lease in held]
                    overtaken = self._table.may_be_overtaken(to)
                    answers.append(self._answer(to, Leases(told, below, overtaken)))
                case lease_types.EndLeases(to):
                    answers.append(self._answer(to, NoMoreLeases(below)))
                case lease_types.RefuseLease(to, reason):
                    answers.append(self._answer(to, LeaseRefused(reason)))
        return [each for each in answers if each.client]

    def _answer(self, to: LeaseHolder, message: Leases | NoMoreLeases | LeaseRefused) -> Answer:
        question = self._questions.pop(to, None)
        return Answer(question.client if question else 0, message)

    def _ledger(self, acted: Sequence[lease_types.Action]) -> list[Persist]:
        """Entries for the ledger: finished ranges and epochs."""
        assert self._asked is not None
        first, written = self._asked.from_epoch, list[Persist]()
        for each in acted:
            match each:
                case lease_types.FinishLeases(by, leases):
                    for epoch in sorted({lease.epoch for lease in leases}):
                        ranges = [(lease.start, lease.stop) for lease in leases if lease.epoch == epoch]
                        fact = RangesTrained(call=self.call, rank=by.rank, epoch=first + epoch, ranges=ranges)
                        written.append(Persist(fact))
                case lease_types.EndEpoch(epoch, num_twice):
                    ended = EpochLeased(call=self.call, epoch=first + epoch, num_samples_twice=num_twice)
                    written.append(Persist(ended))
        return written

    def _notices(self, acted: Sequence[lease_types.Action]) -> list[NotifySupervisor]:
        notices: list[NotifySupervisor] = []
        for each in acted:
            match each:
                case Drained():
                    notices.append(NotifySupervisor(self._drained(each)))
                case Readmitted(rank, samples_per_s, others):
                    notices.append(NotifySupervisor(WorkerReadmitted(rank, samples_per_s, others)))
        return notices

    def _drained(self, figures: Drained) -> WorkerDrained:
        assert self._table is not None
        limit = self._table.config.drain_slower_than or 0.0
        incarnation = self._table.incarnations.get(figures.rank, 0)
        return WorkerDrained(
            figures.rank, incarnation, figures.samples_per_s, figures.others_samples_per_s, limit
        )


def _config(ask: AskLease) -> LeaseConfig:
    return LeaseConfig(
        num_samples=ask.num_samples,
        samples_per_lease=ask.samples_per_lease,
        num_epochs=ask.num_epochs,
        num_ahead=ask.num_ahead,
        num_workers=ask.num_workers,
        backup=ask.backup,
        drain_slower_than=ask.drain_slower_than or None,
        probe_every_s=ask.probe_every_s,
        shares=tuple(ask.shares),
    )


def _began(ask: AskLease, table: LeaseTable) -> TrainingBegan:
    """Ledger entry for a call whose leases begin at a checkpoint or from the start."""
    config, epoch = table.config, table.epoch
    within = table.done_below - epoch * config.num_leases
    return TrainingBegan(
        call=ask.call,
        trainer=ask.trainer,
        data=ask.data,
        epoch=ask.from_epoch + epoch,
        start=min(within * config.samples_per_lease, config.num_samples),
        num_samples=config.num_samples,
        num_workers=ask.num_workers,
        sharding="fixed shares" if config.shares else "dynamic",
        batch_size=ask.batch_size,
        num_left_out=ask.num_left_out,
        is_leased=True,
        kept=[
            (ask.from_epoch + lease.epoch, lease.start, min(lease.start + num * ask.batch_size, lease.stop))
            for number, num in ask.counted
            for lease in [config.lease(number)]
        ],
    )
