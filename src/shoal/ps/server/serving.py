"""Pushes and steps: what clients contribute, when it counts, and what they are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shoal.ps.layout import counter_of_update
from shoal.ps.server.actions import Action, Request, Tell
from shoal.ps.server.applied_seqs import Slots
from shoal.ps.server.apply_filters import Filter, Push, bend
from shoal.ps.server.contents import Refusal, Update, Vector, restrict
from shoal.ps.server.mailbox import Result
from shoal.ps.server.replication import Change
from shoal.ps.server.state import Counted, answer_whole
from shoal.ps.server.steps import HURRIED, LOSSES, Contribution, Steps, Sum, read_vector
from shoal.ps.server.waiting import Waiting, expect_frames
from shoal.runtime.transport.messages.client_server import (
    Commit,
    Committed,
    PushDense,
    PushRows,
    StepEnd,
    Summed,
)
from shoal.runtime.transport.messages.server_coordinator import StepLost


class Serving(Waiting):
    """What a primary does with what its clients push."""

    def __init__(self, number: int, filters: Sequence[Filter] = ()) -> None:
        super().__init__(number)
        self._filters = tuple(filters)
        self._step_need: dict[int, int] = {}

    def _settle(self) -> list[Action]:
        """Go on with whatever can go on now."""
        return self._advance() + super()._settle()

    # ---- pushes and steps -----------------------------------------------------------------------

    def _push_rows(self, request: Request, message: PushRows) -> list[Action]:
        expect_frames(request, 2, "keys and values")
        contents = self.state.contents
        table = contents.table(message.table)
        keys = contents.keys(table, request.frames[0], self.mine)
        self.staging.rows(request.peer, message, keys, contents.values(table, request.frames[1], len(keys)))
        return []

    def _push_dense(self, request: Request, message: PushDense) -> list[Action]:
        expect_frames(request, 1, "a chunk's elements")
        chunk = self.state.contents.chunk(message.chunk)
        if not self.mine[chunk.slot]:
            raise Refusal(
                f"chunk {chunk.number} is of slot {chunk.slot}, whose primary is another server in view {message.view}"
            )
        if any(part >= len(chunk.parts) for part in message.unused):
            raise Refusal(f"chunk {chunk.number} has {len(chunk.parts)} parts, unused are {message.unused}")
        self.staging.dense(request.peer, message, self.state.contents.gradient(chunk, request.frames[0]))
        return []

    def _step_end(self, request: Request, message: StepEnd, name: str) -> list[Action]:
        steps = self._steps()
        expect_frames(request, 2, "a vector and a note")
        if steps.mode.kind in ("ssp", "async"):
            return self._end_push(request, message)
        if message.rank >= steps.mode.num_workers or message.stream != message.rank:
            raise Refusal(
                f"in {steps.mode.kind} steps the stream is the rank, one of 0..{steps.mode.num_workers - 1}; got stream "
                f"{message.stream} of rank {message.rank}"
            )
        if name.startswith("worker-") and name != f"worker-{message.rank}":
            raise Refusal(f"{name} has sent the step of rank {message.rank}")
        vector = read_vector(request.frames[0], at_least=LOSSES + steps.mode.num_workers)
        if message.seq <= self._low:
            self.staging.forget_name(request.peer, message.stream, message.seq)
            return self._end_again(request, message, steps)
        if message.seq > self._low + 1 and steps.mode.kind == "exact":
            raise Refusal(f"the next step here is {self._low + 1}, got the end of step {message.seq}")
        if message.rank not in steps.ended:
            for rank, other in steps.ended.items():
                if len(other.vector) != len(vector):
                    raise Refusal(
                        f"the vector of rank {message.rank} has {len(vector)} numbers, that of rank {rank} has "
                        f"{len(other.vector)}"
                    )
            if message.is_spoilt and steps.mode.kind == "exact":
                self.staging.forget_name(request.peer, message.stream, message.seq)
                return self._lose_step(request, message.rank)
            self.state.contents.check_settings(message.model, message.settings, message.table_settings)
            staged = self.staging.take(request.peer, message)
            steps.ended[message.rank] = Contribution(message, vector, bytes(request.frames[1]), staged)
        else:
            # Of a replacement, or a repeat. The first counts: somebody may have been told of it.
            self.staging.forget_name(request.peer, message.stream, message.seq)
        self._ended.append(request)
        return self._advance()

    def _end_again(self, request: Request, message: StepEnd, steps: Steps) -> list[Action]:
        """The step is over here; tell once more what came of it."""
        if steps.mode.kind in HURRIED:
            return self._when_safe(request, self._hurried(message), [self.state.last_frame()])
        if steps.last is None or steps.last.seq != message.seq:
            raise Refusal(f"step {message.seq} is over and forgotten: step {self._low} is the last one here")
        if steps.mode.two_phase:
            return [self._reply(request, Summed(message.seq), self._summed_frames(steps.last.vector))]
        return self._when_safe(request, self._committed(message.seq), [self.state.last_frame()])

    def _advance(self) -> list[Action]:
        """Sum the step once all are in; in one phase let it count at once."""
        steps, actions = self.state.steps, list[Action]()
        # Not before the last one is safe: no two holders of a slot are ever more than one step apart.
        if steps is not None and steps.is_full and self.replication.is_met(self._step_need):
            if steps.mode.kind in HURRIED:
                return self._count_hurried(steps)
            slots = self.mine & (
                self.state.applied.version < max(end.end.seq for end in steps.ended.values())
            )
            step = self._step_of(slots, next(iter(steps.ended.values())))
            steps.summed = steps.sum(self.state.contents, slots, mine=self.mine, step=step)
        if steps is None or steps.summed is None:
            return actions
        if steps.mode.two_phase:
            frames = self._summed_frames(steps.summed.vector.tolist(), steps.summed.squares)
            ended, self._ended = self._ended, []
            actions += [self._reply(request, Summed(steps.summed.seq), frames) for request in ended]
            commits, self._commits = self._commits, []
            for request in commits:
                assert isinstance(
                    request.message, Commit
                )  # where a StepEnd is among them, no step is ever full
                actions += self._commit(request, request.message)
            return actions
        factor, applies = steps.summed.decide(steps.mode.num_workers)
        return self._count_step(steps, factor, applies, 0.0)

    def _commit(self, request: Request, message: Commit) -> list[Action]:
        steps = self._steps()
        if not steps.mode.two_phase:
            raise Refusal("steps were declared to have one phase: there is nothing to commit")
        actions: list[Action] = []
        if steps.summed is not None and steps.summed.seq == message.seq:
            actions = self._count_step(steps, message.factor, message.apply, message.norm)
        rank = self._ranks.get(request.peer)
        if message.seq == self._low + 1 and rank in steps.ended:
            self._commits.append(request)  # of a replacement: the others will end it again
            return []
        if message.seq == self._low + 1 and rank is not None:
            return self._lose_step(request, rank)
        if message.seq > self._low:
            raise Refusal(
                f"step {message.seq} is not summed here: the last one is {self._low}, and ranks "
                f"{steps.missing_ranks()} have not ended the next one"
            )
        is_last = steps.last is not None and steps.last.seq == message.seq
        frames = (
            [self.state.last_frame()] if is_last else []
        )  # of older ones it is only known that they count
        return actions + self._when_safe(request, self._committed(message.seq), frames)

    def _lose_step(self, request: Request, rank: int) -> list[Action]:
        """Another server lets this step count, and nobody has any more what the rank contributed to it here.

        Its worker was replaced by one that will not, or cannot, run the step again. Nothing is answered in this view.
        """
        self._commits.append(request)
        self._lost = StepLost(self.view_number, rank)
        return [Tell(self._lost)]

    def _count_step(self, steps: Steps, factor: float, applies: bool, norm: float) -> list[Action]:
        assert steps.summed is not None
        counted = _counted(steps.summed, factor, applies, norm)
        actions = self._count(counted)
        ended = self._end_step(steps)
        for request in ended:
            actions += self._when_safe(request, self._committed(counted.seq), [self.state.last_frame()])
        return actions

    def _count_hurried(self, steps: Steps) -> list[Action]:
        """Let what is here count in every slot that does not have it.

        After a failover slots may be at different steps, and ranks too, each in its own order: so the slots of one
        version at a time, those that have the most of it first.
        """
        actions, reused, state = list[Action](), steps.reused(), self.state
        versions = state.applied.version
        groups = [
            (int(version), self.mine & (versions == version)) for version in np.unique(versions[self.mine])
        ]
        for version, slots in reversed(groups):
            parts = {rank: part for rank, part in steps.ended.items() if part.end.seq > version}
            if parts:
                step = self._step_of(slots, next(iter(parts.values())))
                summed = steps.sum(state.contents, slots, mine=self.mine, step=step, parts=parts | reused)
                seqs = tuple(parts[rank].end.seq for rank in sorted(parts))
                factor, applies = summed.decide(steps.mode.num_workers)
                actions += self._count(replace(_counted(summed, factor, applies, 0.0), seqs=seqs))
        for request in self._end_step(steps):
            assert isinstance(request.message, StepEnd)
            actions += self._when_safe(request, self._hurried(request.message), [state.last_frame()])
        return actions

    def _step_of(self, slots: Slots, part: Contribution) -> int:
        """How many updates of the model there were in these slots."""
        counter = counter_of_update(part.staged.rows, part.end.model)
        return int(self.state.applied.steps(counter)[slots].max(initial=0))

    def _hurried(self, message: StepEnd) -> Committed:
        """Where not all ranks need be in a step: whether this contribution is in it, in every slot."""
        late = bool((self.state.applied.missing(message.stream, message.seq) & self.mine).any())
        self._steps().num_late += late
        return self._committed(self._high if late else message.seq, late=late)

    def _end_step(self, steps: Steps) -> list[Request]:
        """It counts; who waits to hear that."""
        steps.forget()
        self._step_need = self.replication.need()
        ended, self._ended = self._ended, []
        return ended

    def _end_push(self, request: Request, message: StepEnd) -> list[Action]:
        """A push of one worker alone: it counts at once, in slots that do not have it."""
        state = self.state
        vector = read_vector(request.frames[0], at_least=0)
        self.state.contents.check_settings(message.model, message.settings, message.table_settings)
        staged = self.staging.take(request.peer, message)
        if message.rank < state.num_workers:
            state.clocks.finished(message.rank, message.stream, message.seq)
            call = message.stream >> 32 & 0x3FFF_FFFF  # streams of low-level clients have a bit above it
            state.clocks.wish(message.rank, vector, call=call)
        new = state.applied.missing(message.stream, message.seq) & self.mine
        note = bytes(request.frames[1])
        actions: list[Action] = []
        notes = {message.rank: (message.anchored_at, note)} if note and self.mine[0] else {}
        if new.any():
            staleness = max(state.updates - self._pulled_at.get(request.peer, state.updates), 0)
            push = Push(message.rank, message.stream, message.seq, staleness, staged, state.contents)
            update = Update(
                self.mine,
                staged.rows,
                staged.dense,
                message.factor,
                bend(self._filters, push, new),
                int(state.applied.steps(counter_of_update(staged.rows, message.model))[new].max(initial=0)),
                message.settings,
                message.table_settings,
                message.model,
            )
            state.updates += 1
            counted = Counted(
                restrict(update, new, state.contents.chunks),
                message.stream,
                message.seq,
                False,
                bool(np.isfinite(vector).all()),
                vector,
                notes=notes if new[0] else {},
                clocks=state.clocks.state(message.rank) if message.rank < state.num_workers else [],
                updates=state.updates,
                done_below=message.done_below,
            )
            actions = self._count(counted)
        else:
            state.applied.forget_below(message.done_below)
        if notes and not new[0]:
            actions += self._finish(None, Result(False, b""), notes)
        committed = Committed(
            message.seq,
            state.updates,
            state.clocks.slowest(),
            wishes=state.clocks.wishes,
            is_new=bool(new[0]),
        )
        return actions + self._when_safe(request, committed)

    def _count(self, counted: Counted) -> list[Action]:
        self.state.count(counted)
        self._after_count()
        change = Change(counted.update.slots, lambda slots: self.state.write_counted(counted, slots))
        return [*self.replication.ship(change)]

    def _after_count(self) -> None:
        versions = self.state.applied.version[self.mine]
        self._low, self._high = (int(versions.min()), int(versions.max())) if len(versions) else (0, 0)

    def _summed_frames(self, vector: list[float], squares: Vector | None = None) -> list[bytes]:
        steps = self._steps()
        frames = [np.array(vector).tobytes()]
        if steps.mode.wants_norm:
            known = steps.squares if squares is None else squares
            frames.append(np.where(self.mine, known, 0.0).tobytes())
        return frames

    def _committed(self, seq: int, *, late: bool = False) -> Committed:
        return Committed(seq, self._low, self._low, late)

    # ---- state as a whole -----------------------------------------------------------------------

    def _whole(self, request: Request) -> list[Action]:
        message, frames, change = answer_whole(self.state, self.mine, request)
        if change is None:
            return [self._reply(request, message, frames)]
        self._after_count()
        actions: list[Action] = [*self.replication.ship(change)]
        return actions + self._when_safe(request, message)


def _counted(summed: Sum, factor: float, applies: bool, norm: float) -> Counted:
    summed.update.factor = factor
    parts = summed.contributions
    newest = max(parts.values(), key=lambda part: part.end.seq).end
    return Counted(
        summed.update,
        0,
        summed.seq,
        True,
        applies,
        summed.vector,
        norm,
        summed.squares,
        tuple(sorted(parts)),
        exchange=newest.exchange,
        notes={rank: (part.end.anchored_at, part.note) for rank, part in parts.items() if part.note},
    )
