"""Who waits for what at a server: pulls for a clock, exchanges for ranks, answers for other servers.

Nothing is answered "it counts" before every other holder has it: such answers
wait in `_pending` for what was told to others by then. Everything else is
answered as soon as it is true here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.ps.server.actions import Action, Frame, Reply, Request
from shoal.ps.server.applied_seqs import Slots, no_slots, some_slots
from shoal.ps.server.contents import Keys, Refusal, chunk_bytes
from shoal.ps.server.mailbox import Result
from shoal.ps.server.replication import Change, PostRecord, Replication, Written
from shoal.ps.server.state import State
from shoal.ps.server.steps import HURRIED, Staging, Steps
from shoal.runtime.transport.messages.client_server import (
    AskNote,
    Note,
    Post,
    Posted,
    PullDense,
    Pulled,
    PullRows,
    ViewOver,
)
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import StepLost


@dataclass(slots=True)
class _Pending:
    """An answer that waits for other servers."""

    need: dict[int, int]
    request: Request
    message: Message
    frames: Sequence[Frame]


class Waiting:
    """What a primary knows, and who waits for it."""

    def __init__(self, number: int) -> None:
        self.number, self.view_number = number, 0
        self.state = State()
        self.staging = Staging()
        self.replication = Replication(number)
        self.mine: Slots = no_slots()
        """Slots whose primary this server is."""
        self._low = self._high = 0  # smallest and largest version of what is mine
        self._ranks: dict[int, int] = {}  # peer -> rank
        self._pulled_at: dict[int, int] = {}  # peer -> updates there were at its last pull
        self._pulls: list[tuple[Request, Keys | None]] = []
        self._ended: list[Request] = []
        self._posts: dict[int, list[Request]] = {}
        self._pending: list[_Pending] = []
        self._commits: list[Request] = []
        """Of a step that is not summed here yet, or never will be."""

        self._lost: StepLost | None = None

    # ---- pulls ----------------------------------------------------------------------------------

    def _pull_rows(self, request: Request, message: PullRows) -> list[Action]:
        expect_frames(request, 1, "keys")
        table = self.state.contents.table(message.table)
        keys = self.state.contents.keys(table, request.frames[0], self.mine)
        expect_into(request, 0, len(keys) * table.spec.dim * table.dtype.itemsize, f"{len(keys)} rows")
        return self._pull(request, keys)

    def _pull_dense(self, request: Request, message: PullDense) -> list[Action]:
        for at, number in enumerate(message.chunks):
            chunk = self.state.contents.chunk(number)
            if not self.mine[chunk.slot]:
                raise Refusal(f"chunk {number} is of slot {chunk.slot}, whose primary is another server")
            expect_into(request, at, chunk_bytes(chunk), f"chunk {number}")
        return self._pull(request, None)

    def _pull(self, request: Request, keys: Keys | None) -> list[Action]:
        rank = self._ranks.get(request.peer)
        if rank is not None:
            assert isinstance(request.message, PullRows | PullDense)
            self.state.clocks.at_least(rank, request.message.clock)
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
            rank = self._ranks.get(request.peer)
            return self.state.clocks.have_reached(message.clock - mode.bound, besides=rank)
        if self._low >= message.clock:
            return True
        # Whoever has nothing under way here may have heard of the step elsewhere, and nobody may ever make it here.
        return mode.kind in HURRIED and self._ranks.get(request.peer) not in self._steps().ended

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
        expect_frames(request, 2, "a contribution and a note")
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
        # A replacement does not run again what it finds there: so nobody else may ever find less.
        return self._when_safe(request, Note(anchored_at, numbers, is_commit, self._low), frames)

    def _require_board(self) -> None:
        if not self.mine[0]:
            raise Refusal(f"exchanges are at the primary of slot 0, which server-{self.number} is not")

    def _missing_for(self, peer: int) -> set[int]:
        """The ranks that the requests of a peer wait for."""
        steps, mode = self.state.steps, self.state.mode
        if steps is None or mode is None:
            return set()
        missing: set[int] = set()
        if any(request.peer == peer for request in (*self._ended, *self._commits)):
            missing.update(steps.missing_ranks())
        for exchange, requests in self._posts.items():
            if any(request.peer == peer for request in requests):
                missing.update(self.state.board.waiting_for(exchange, mode.num_workers))
        for request, _ in self._pulls:
            if request.peer == peer and mode.kind == "ssp":
                assert isinstance(request.message, PullRows | PullDense)
                missing.update(self.state.clocks.behind(request.message.clock - mode.bound))
            elif request.peer == peer:
                missing.update(steps.missing_ranks())
        return missing

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
        actions: list[Action] = []
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
        waiting += [each.request for each in self._pending] + self._commits
        self._pulls, self._ended, self._posts, self._pending, self._commits = [], [], {}, [], []
        self._lost = None
        self.staging.forget_all()
        self.state.board.forget_open()
        if self.state.steps is not None:
            self.state.steps.forget()
            self.state.steps.forget_kept()
        return [Reply(request.peer, request.ticket, message) for request in waiting]

    def _forget(self, peer: int) -> None:
        """A connection is over. What it ended stays; what it only began does not."""
        self.staging.forget(peer)
        self._ranks.pop(peer, None)
        self._pulled_at.pop(peer, None)
        self._pulls = [pull for pull in self._pulls if pull[0].peer != peer]
        self._ended = [request for request in self._ended if request.peer != peer]
        self._commits = [request for request in self._commits if request.peer != peer]
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


def expect_frames(request: Request, number: int, what: str) -> None:
    """Refuse another number of frames."""
    if len(request.frames) != number:
        kind = type(request.message).__name__
        raise Refusal(f"{kind} comes with {number} frames ({what}), got {len(request.frames)}")


def expect_into(request: Request, at: int, num_bytes: int, what: str) -> None:
    """Refuse a buffer that is too small for the answer."""
    found = request.into[at].nbytes if at < len(request.into) else 0
    if found < num_bytes:
        raise Refusal(f"{what} take {num_bytes} bytes, the buffer for them has {found}")
