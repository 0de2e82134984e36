"""The requests of clients: pushes, steps, pulls, exchanges, and state as a whole; who waits for what.

Nothing is answered "it counts" before every other holder has it: such answers
wait in `_pending` for what was told to others by then. Everything else is
answered as soon as it is true here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.ps.actions import Action, Frame, Reply, Request
from shoal.ps.board import Result
from shoal.ps.contents import Keys, Refusal, Update, Vector, chunk_bytes, restrict
from shoal.ps.filters import Filter, Push, bend
from shoal.ps.marks import Slots, no_slots, some_slots
from shoal.ps.records import PostRecord
from shoal.ps.replication import Change, Replication, Written
from shoal.ps.staging import Contribution, Staging, read_vector
from shoal.ps.state import Counted, State
from shoal.ps.summing import LOSSES, Steps
from shoal.ps.whole import answer_whole
from shoal.wire.message import Message
from shoal.wire.ps_messages import (
    AskNote,
    Commit,
    Committed,
    Note,
    Post,
    Posted,
    PullDense,
    Pulled,
    PullRows,
    PushDense,
    PushRows,
    StepEnd,
    Summed,
    ViewOver,
)


@dataclass(slots=True)
class _Pending:
    """An answer that waits for other servers."""

    need: dict[int, int]
    request: Request
    message: Message
    frames: Sequence[Frame]


class Serving:
    """What a primary does for its clients."""

    def __init__(self, number: int, filters: Sequence[Filter] = ()) -> None:
        self.number, self.view_number = number, 0
        self.state = State()
        self.staging = Staging()
        self.replication = Replication(number)
        self.mine: Slots = no_slots()
        """Slots whose primary this server is."""
        self._filters = tuple(filters)
        self._low = self._high = 0  # smallest and largest version of what is mine
        self._step_need: dict[int, int] = {}
        self._ranks: dict[int, int] = {}  # peer -> rank
        self._pulled_at: dict[int, int] = {}  # peer -> updates there were at its last pull
        self._pulls: list[tuple[Request, Keys | None]] = []
        self._ended: list[Request] = []
        self._posts: dict[int, list[Request]] = {}
        self._pending: list[_Pending] = []

    # ---- pushes and steps -----------------------------------------------------------------------

    def _push_rows(self, request: Request, message: PushRows) -> list[Action]:
        _expect_frames(request, 2, "keys and values")
        contents = self.state.contents
        table = contents.table(message.table)
        keys = contents.keys(table, request.frames[0], self.mine)
        self.staging.rows(request.peer, message, keys, contents.values(table, request.frames[1], len(keys)))
        return []

    def _push_dense(self, request: Request, message: PushDense) -> list[Action]:
        _expect_frames(request, 1, "a chunk's elements")
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
        _expect_frames(request, 2, "a vector and a note")
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
            self._check_settings(message)
            staged = self.staging.take(request.peer, message)
            steps.ended[message.rank] = Contribution(message, vector, bytes(request.frames[1]), staged)
        else:
            # Of a replacement, or a repeat. The first counts: somebody may have been told of it.
            self.staging.forget_name(request.peer, message.stream, message.seq)
        self._ended.append(request)
        return self._advance()

    def _end_again(self, request: Request, message: StepEnd, steps: Steps) -> list[Action]:
        """The step is over here; tell once more what came of it."""
        last, is_strict = steps.last, steps.mode.kind == "exact"
        if last is not None and last.seq == message.seq and (is_strict or message.rank in last.ranks):
            if steps.mode.two_phase:
                return [self._reply(request, Summed(message.seq), self._summed_frames(last.vector))]
            return self._when_safe(request, self._committed(message.seq), [self.state.last_frame()])
        if is_strict:
            raise Refusal(f"step {message.seq} is over and forgotten: step {self._low} is the last one here")
        steps.num_late += 1
        return self._when_safe(request, self._committed(self._high, late=True), [self.state.last_frame()])

    def _advance(self) -> list[Action]:
        """Sum the step once all are in; in one phase let it count at once."""
        steps, actions = self.state.steps, list[Action]()
        # Not before the last one is safe: no two holders of a slot are ever more than one step apart.
        if steps is not None and steps.is_full and self.replication.is_met(self._step_need):
            slots = self.mine & (self.state.marks.version < max(end.end.seq for end in steps.ended.values()))
            step = int(self.state.marks.steps[slots].max(initial=0))
            steps.summed = steps.sum(self.state.contents, slots, mine=self.mine, step=step)
        if steps is None or steps.summed is None:
            return actions
        if steps.mode.two_phase:
            frames = self._summed_frames(steps.summed.vector.tolist(), steps.summed.squares)
            ended, self._ended = self._ended, []
            return [self._reply(request, Summed(steps.summed.seq), frames) for request in ended]
        factor, applies = steps.summed.decide(steps.mode.num_workers)
        return self._count_step(steps, factor, applies, 0.0)

    def _commit(self, request: Request, message: Commit) -> list[Action]:
        steps = self._steps()
        if not steps.mode.two_phase:
            raise Refusal("steps were declared to have one phase: there is nothing to commit")
        actions: list[Action] = []
        if steps.summed is not None and steps.summed.seq == message.seq:
            actions = self._count_step(steps, message.factor, message.apply, message.norm)
        if steps.last is None or not message.seq == self._low == steps.last.seq:
            raise Refusal(
                f"step {message.seq} is not summed here: the last one is {self._low}, and ranks "
                f"{steps.missing_ranks()} have not ended the next one"
            )
        return actions + self._when_safe(request, self._committed(message.seq), [self.state.last_frame()])

    def _count_step(self, steps: Steps, factor: float, applies: bool, norm: float) -> list[Action]:
        summed = steps.summed
        assert summed is not None
        summed.update.factor = factor
        parts = summed.contributions
        first = parts[min(parts)].end
        counted = Counted(
            summed.update,
            0,
            summed.seq,
            True,
            applies,
            summed.vector,
            norm,
            summed.squares,
            tuple(sorted(parts)),
            first.exchange,
            {rank: (part.end.anchored_at, part.note) for rank, part in parts.items()},
        )
        actions = self._count(counted)
        steps.forget()
        self._step_need = self.replication.need()
        ended, self._ended = self._ended, []
        for request in ended:
            actions += self._when_safe(request, self._committed(counted.seq), [self.state.last_frame()])
        return actions

    def _end_push(self, request: Request, message: StepEnd) -> list[Action]:
        """A push of one worker alone: it counts at once, in slots that do not have it."""
        state = self.state
        vector = read_vector(request.frames[0], at_least=0)
        self._check_settings(message)
        staged = self.staging.take(request.peer, message)
        if message.rank < state.num_workers:
            state.clocks.finished(message.rank, message.stream, message.seq)
            state.clocks.wish(message.rank, vector)
        new = state.marks.missing(message.stream, message.seq) & self.mine
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
                int(state.marks.steps[new].max(initial=0)),
                message.settings,
                message.table_settings,
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
            state.marks.forget_below(message.done_below)
        if notes and not new[0]:
            actions += self._finish(None, Result(False, b""), notes)
        committed = Committed(message.seq, state.updates, state.clocks.slowest(), wishes=state.clocks.wishes)
        return actions + self._when_safe(request, committed)

    def _count(self, counted: Counted) -> list[Action]:
        self.state.count(counted)
        self._after_count()
        change = Change(counted.update.slots, lambda slots: self.state.write_counted(counted, slots))
        return [*self.replication.ship(change)]

    def _after_count(self) -> None:
        versions = self.state.marks.version[self.mine]
        self._low, self._high = (int(versions.min()), int(versions.max())) if len(versions) else (0, 0)

    def _check_settings(self, message: StepEnd) -> None:
        contents = self.state.contents
        if message.settings and len(message.settings) != len(contents.settings):
            raise Refusal(
                f"the optimizer has {len(contents.settings)} groups here, got settings of {len(message.settings)}"
            )
        for table in message.table_settings:
            contents.table(table)

    def _summed_frames(self, vector: list[float], squares: Vector | None = None) -> list[bytes]:
        steps = self._steps()
        frames = [np.array(vector).tobytes()]
        if steps.mode.wants_norm:
            known = steps.squares if squares is None else squares
            frames.append(np.where(self.mine, known, 0.0).tobytes())
        return frames

    def _committed(self, seq: int, *, late: bool = False) -> Committed:
        return Committed(seq, self._low, self._low, late)

    # ---- pulls ----------------------------------------------------------------------------------

    def _pull_rows(self, request: Request, message: PullRows) -> list[Action]:
        _expect_frames(request, 1, "keys")
        table = self.state.contents.table(message.table)
        keys = self.state.contents.keys(table, request.frames[0], self.mine)
        _expect_into(request, 0, len(keys) * table.spec.dim * table.dtype.itemsize, f"{len(keys)} rows")
        return self._pull(request, keys)

    def _pull_dense(self, request: Request, message: PullDense) -> list[Action]:
        for at, number in enumerate(message.chunks):
            chunk = self.state.contents.chunk(number)
            if not self.mine[chunk.slot]:
                raise Refusal(f"chunk {number} is of slot {chunk.slot}, whose primary is another server")
            _expect_into(request, at, chunk_bytes(chunk), f"chunk {number}")
        return self._pull(request, None)

    def _pull(self, request: Request, keys: Keys | None) -> list[Action]:
        if self._is_visible(request):
            return [self._pulled(request, keys)]
        self._pulls.append((request, keys))
        return []

    def _is_visible(self, request: Request) -> bool:
        message, mode = request.message, self.state.mode
        assert isinstance(message, PullRows | PullDense)
        if mode is None or mode.kind == "async":
            return True
        if mode.kind == "ssp":
            slowest = self.state.clocks.slowest(besides=self._ranks.get(request.peer))
            return slowest >= message.clock - mode.bound
        return self._low >= message.clock

    def _pulled(self, request: Request, keys: Keys | None) -> Reply:
        message, state = request.message, self.state
        if isinstance(message, PullRows):
            assert keys is not None
            table = state.contents.table(message.table)
            out = np.frombuffer(request.into[0], table.dtype, len(keys) * table.spec.dim)
            table.pull(keys, out.reshape(len(keys), table.spec.dim), create=message.create)
        else:
            assert isinstance(message, PullDense)
            for number, into in zip(message.chunks, request.into, strict=False):
                state.contents.dense.pull(number, into[: chunk_bytes(state.contents.chunk(number))])
        mode = state.mode
        if mode is None or mode.kind in ("ssp", "async"):
            self._pulled_at[request.peer] = state.updates
            return Reply(request.peer, request.ticket, Pulled(state.updates, state.clocks.slowest()))
        return Reply(request.peer, request.ticket, Pulled(self._high, self._low))

    # ---- exchanges ------------------------------------------------------------------------------

    def _post(self, request: Request, message: Post) -> list[Action]:
        self._require_board()
        _expect_frames(request, 2, "a contribution and a note")
        board, num_workers = self.state.board, self._steps().mode.num_workers
        if message.rank >= num_workers:
            raise Refusal(f"ranks are 0..{num_workers - 1}, got {message.rank}")
        if message.exchange in board.log:
            return self._when_safe(request, Posted(message.exchange), board.contributions(message.exchange))
        contribution, note = request.frames
        is_over = board.post(
            message.exchange, message.rank, message.anchored_at, contribution, note, num_workers=num_workers
        )
        self._posts.setdefault(message.exchange, []).append(request)
        if not is_over:
            return []
        actions = self._finish(message.exchange, *board.close(message.exchange))
        for waiter in self._posts.pop(message.exchange):
            actions += self._when_safe(
                waiter, Posted(message.exchange), board.contributions(message.exchange)
            )
        return actions

    def _finish(
        self, exchange: int | None, result: Result, notes: dict[int, tuple[int, bytes]]
    ) -> list[Action]:
        self.state.board.finish(exchange, result, notes, self.state.num_workers)
        kept = sorted(notes.items())

        def write(_: Slots) -> Written:
            record = PostRecord(exchange, [(rank, anchored_at) for rank, (anchored_at, _) in kept])
            return record, [result.frame, *(note for _, (_, note) in kept)]

        return [*self.replication.ship(Change(some_slots([0]), write))]

    def _ask_note(self, request: Request, message: AskNote) -> list[Action]:
        self._require_board()
        board = self.state.board
        anchored_at, note, numbers = board.since(message.rank)
        is_commit = [board.log[number].is_commit for number in numbers]
        frames = [note, *(board.log[number].frame for number in numbers)]
        return [self._reply(request, Note(anchored_at, numbers, is_commit, self._low), frames)]

    def _require_board(self) -> None:
        if not self.mine[0]:
            raise Refusal(f"exchanges are at the primary of slot 0, which server-{self.number} is not")

    # ---- state as a whole -----------------------------------------------------------------------

    def _whole(self, request: Request) -> list[Action]:
        message, frames, change = answer_whole(self.state, self.mine, request)
        if change is None:
            return [self._reply(request, message, frames)]
        self._after_count()
        actions: list[Action] = [*self.replication.ship(change)]
        return actions + self._when_safe(request, message)

    # ---- waiting --------------------------------------------------------------------------------

    def _steps(self) -> Steps:
        if self.state.steps is None:
            raise Refusal("nobody has declared how contributions count here; DeclareMode comes first")
        return self.state.steps

    def _when_safe(self, request: Request, message: Message, frames: Sequence[Frame] = ()) -> list[Action]:
        """Answer once all other holders have everything that was told to them so far."""
        need = self.replication.need()
        if self.replication.is_met(need):
            return [self._reply(request, message, frames)]
        self._pending.append(_Pending(need, request, message, frames))
        return []

    def _settle(self) -> list[Action]:
        """Answer whoever can be answered now."""
        actions = self._advance()
        if self._pending:
            met = [each for each in self._pending if self.replication.is_met(each.need)]
            if met:
                self._pending = [each for each in self._pending if each not in met]
                actions += [self._reply(each.request, each.message, each.frames) for each in met]
        if self._pulls:
            visible = [pull for pull in self._pulls if self._is_visible(pull[0])]
            if visible:
                self._pulls = [pull for pull in self._pulls if not self._is_visible(pull[0])]
                actions += [self._pulled(*pull) for pull in visible]
        return actions

    def _end_waits(self, message: ViewOver) -> list[Action]:
        """The view is over: forget what is staged, and tell everybody who waits."""
        waiting = [request for request, _ in self._pulls] + self._ended
        waiting += [request for posts in self._posts.values() for request in posts]
        waiting += [each.request for each in self._pending]
        self._pulls, self._ended, self._posts, self._pending = [], [], {}, []
        self.staging.forget_all()
        self.state.board.forget_open()
        if self.state.steps is not None:
            self.state.steps.forget()
        return [Reply(request.peer, request.ticket, message) for request in waiting]

    def _forget(self, peer: int) -> None:
        """A connection is over. What it ended stays; what it only began does not."""
        self.staging.forget(peer)
        self._ranks.pop(peer, None)
        self._pulled_at.pop(peer, None)
        self._pulls = [pull for pull in self._pulls if pull[0].peer != peer]
        self._ended = [request for request in self._ended if request.peer != peer]
        self._pending = [each for each in self._pending if each.request.peer != peer]
        for requests in self._posts.values():
            requests[:] = [request for request in requests if request.peer != peer]

    def _reply(self, request: Request, message: Message, frames: Sequence[Frame] = ()) -> Reply:
        """Frames go where the asker wants them, as far as it has said so."""
        for into, frame in zip(request.into, frames, strict=False):
            num_bytes = memoryview(frame).nbytes
            if num_bytes > into.nbytes:
                return Reply(request.peer, request.ticket, message, frames)
            into[:num_bytes] = memoryview(frame).cast("B") if num_bytes else b""
        return Reply(request.peer, request.ticket, message, frames[len(request.into) :])


def _expect_frames(request: Request, number: int, what: str) -> None:
    if len(request.frames) != number:
        kind = type(request.message).__name__
        raise Refusal(f"{kind} comes with {number} frames ({what}), got {len(request.frames)}")


def _expect_into(request: Request, at: int, num_bytes: int, what: str) -> None:
    found = request.into[at].nbytes if at < len(request.into) else 0
    if found < num_bytes:
        raise Refusal(f"{what} take {num_bytes} bytes, the buffer for them has {found}")
