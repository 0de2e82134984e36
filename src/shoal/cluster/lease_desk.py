"""Leases as workers ask for them: one call's at a time, each question answered or ended at its deadline.

Pure. `leases.py` decides who runs what; here are the questions that wait, and
what has to be remembered so that a new coordinator decides the same again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from shoal.cluster import leases
from shoal.cluster.coordinator_actions import Remember, TellWatchers
from shoal.cluster.leases import Holder, LeaseConfig
from shoal.cluster.leases import Leases as Table
from shoal.cluster.memory import LeaseGaveUp, LeasesStand
from shoal.cluster.store_table import Answer
from shoal.core.errors import ConfigError
from shoal.wire.group_messages import AskLease, LeaseCounts, LeaseRefused, Leases, NoMoreLeases
from shoal.wire.messages import WaitExpired

SNAPSHOT_EVERY = 256
"""Questions between two notes of how everything stands: so many are told again after a coordinator's death."""


@dataclass(slots=True)
class _Question:
    client: int
    asked_at: float
    expires_at: float
    below: int


@dataclass(slots=True)
class LeaseDesk:
    """The newest call's leases, and who waits for some."""

    call: int = 0
    _asked: AskLease | None = None  # the first question of the call: it says how the epochs are cut
    _table: Table | None = None
    _questions: dict[Holder, _Question] = field(default_factory=dict)
    _num_since_snapshot: int = 0

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        return min((each.expires_at for each in self._questions.values()), default=None)

    @property
    def counts(self) -> LeaseCounts | None:
        """What each rank has done."""
        return LeaseCounts(dict(self._table.counts)) if self._table else None

    def ask(self, client: int, ask: AskLease, now: float) -> list[Answer | Remember | TellWatchers]:
        """A worker asks. Client 0 is nobody: it is being remembered."""
        if ask.call < self.call:
            return [Answer(client, NoMoreLeases(0))]
        if self._table is None or ask.call > self.call:
            try:
                table = Table(_config(ask), epoch=ask.first_epoch, done=ask.done)
            except ConfigError as error:
                return [Answer(client, LeaseRefused(str(error)))]
            self.call, self._asked, self._table = ask.call, ask, table
        elif self._asked is not None and _config(ask) != _config(self._asked):
            return [
                Answer(
                    client,
                    LeaseRefused(f"it cuts epochs as {_config(ask)}, others as {_config(self._asked)}"),
                )
            ]
        by = Holder(ask.rank, ask.incarnation)
        if ask.is_last or (self._asked is not None and self._asked.is_last):
            return self._end(client, ask)
        self._questions[by] = _Question(client, now, now + ask.timeout_s, ask.below)
        acted = self._table.handle(leases.Asked(by, tuple(ask.finished), now))
        self._num_since_snapshot += 1
        remember: list[Answer | Remember | TellWatchers] = [Remember(ask)]
        has_epoch_ended = any(isinstance(each, leases.EndEpoch) for each in acted)
        if self._num_since_snapshot >= SNAPSHOT_EVERY or has_epoch_ended:
            self._num_since_snapshot = 0
            assert self._asked is not None
            remember.append(Remember(LeasesStand(self._asked, self._table.snapshot())))
        told: list[Answer | Remember | TellWatchers] = []
        if ask.finished and self.counts is not None:
            told = [TellWatchers(self.counts)]
        return [*remember, *self._answers(acted), *self._tell_of_the_epoch(), *told]

    def _tell_of_the_epoch(self) -> list[Answer]:
        """Who waits in an epoch that is over has to hear of it, though others hold all of the next one."""
        assert self._table is not None
        below, num_leases = self._table.done_below, self._table.config.num_leases
        behind = [
            by for by, each in self._questions.items() if each.below // num_leases < below // num_leases
        ]
        for by in behind:
            self._table.handle(leases.GaveUp(by))
        answers = [self._answer(by, Leases([], below)) for by in behind]
        return [each for each in answers if each.client]

    def _end(self, client: int, ask: AskLease) -> list[Answer | Remember | TellWatchers]:
        """The call ends early, by a wish that all have agreed on: whoever waits, waits for nothing."""
        assert self._asked is not None
        assert self._table is not None
        self._asked = msgspec.structs.replace(self._asked, is_last=True)
        waiting, self._questions = self._questions, {}
        no_more = NoMoreLeases(self._table.done_below)
        clients = [*(question.client for question in waiting.values()), client]
        return [Remember(ask), *(Answer(each, no_more) for each in clients if each)]

    def replaced(self, rank: int, incarnation: int, now: float) -> list[Answer]:
        """Incarnations of this rank below `incarnation` are gone: what they held goes back."""
        for by in [by for by in self._questions if by.rank == rank and by.incarnation < incarnation]:
            del self._questions[by]
        if self._table is None:
            return []
        return self._answers(self._table.handle(leases.Replaced(rank, incarnation, now)))

    def gave_up(self, rank: int, incarnation: int) -> None:
        """Nobody waits for an answer any more."""
        by = Holder(rank, incarnation)
        self._questions.pop(by, None)
        if self._table is not None:
            self._table.handle(leases.GaveUp(by))

    def gone(self, client: int) -> list[Remember]:
        """A connection is closed."""
        return [
            self._give_up(by)
            for by, each in list(self._questions.items())
            if client and each.client == client
        ]

    def tick(self, now: float) -> list[Answer | Remember]:
        """End the waits that have lasted long enough."""
        actions: list[Answer | Remember] = []
        for by, question in list(self._questions.items()):
            if now >= question.expires_at:
                actions.append(self._give_up(by))
                actions.append(
                    Answer(
                        question.client,
                        WaitExpired(
                            f"rank {by.rank}'s next lease", now - question.asked_at, self._whom_for(by)
                        ),
                    )
                )
        return actions

    def restore(self, stand: LeasesStand) -> None:
        """Begin where a coordinator before stood."""
        self.call, self._asked = stand.asked.call, stand.asked
        self._table = Table.restore(_config(stand.asked), stand.snapshot)
        self._num_since_snapshot = 0

    def clear(self) -> None:
        """The job begins anew from a checkpoint: whoever asks first says where."""
        self._asked, self._table, self.call = None, None, 0
        self._questions.clear()

    def _give_up(self, by: Holder) -> Remember:
        self.gave_up(*by)
        return Remember(LeaseGaveUp(by.rank, by.incarnation))

    def _whom_for(self, by: Holder) -> list[str]:
        held = self._table.snapshot().held if self._table else []
        return [f"rank {rank} (holds lease {number})" for number, rank, _ in held if rank != by.rank]

    def _answers(self, acted: list[leases.Action]) -> list[Answer]:
        assert self._table is not None
        below, answers = self._table.done_below, []
        for each in acted:
            match each:
                case leases.Hand(to, held):
                    answers.append(self._answer(to, Leases([(*lease,) for lease in held], below)))
                case leases.NoMore(to):
                    answers.append(self._answer(to, NoMoreLeases(below)))
                case leases.Refuse(to, reason):
                    answers.append(self._answer(to, LeaseRefused(reason)))
        return [each for each in answers if each.client]

    def _answer(self, to: Holder, message: Leases | NoMoreLeases | LeaseRefused) -> Answer:
        question = self._questions.pop(to, None)
        return Answer(question.client if question else 0, message)


def _config(ask: AskLease) -> LeaseConfig:
    return LeaseConfig(
        num_samples=ask.num_samples,
        samples_per_lease=ask.samples_per_lease,
        num_epochs=ask.num_epochs,
        num_ahead=ask.num_ahead,
    )
