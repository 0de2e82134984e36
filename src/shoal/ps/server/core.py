"""The core of a parameter server: requests, views and other servers' answers in, actions out.

Pure: no socket, no thread, no clock. `process.py` feeds it; the simulator runs the same class. Its
collaborators: `clients` fences connections, `state` holds and changes the parameters, `staging`
keeps pushes without a StepEnd, `waits` the requests without an answer, `replication` ships changes
to other holders, `replica` applies theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from shoal.errors import ShoalError, TablesFull
from shoal.ps.key_lists import KeyLists
from shoal.ps.layout import counter_of_update
from shoal.ps.server.actions import Action, DropPeer, Frame, Reply, Request, Tell
from shoal.ps.server.clients import (
    Clients,
    PendingReply,
    WaitingRequests,
    check_reply_buffer,
    expect_frames,
    rank_of,
)
from shoal.ps.server.contents import (
    Keys,
    Refusal,
    Update,
    as_array,
    chunk_bytes,
    codec_of,
    encode_into,
    pulled_bytes,
    restrict,
)
from shoal.ps.server.progress import Slots, Vector, no_slots, some_slots
from shoal.ps.server.replication import Change, PostRecord, Replica, Replication, Written
from shoal.ps.server.state import Counted, ServerState, answer_whole
from shoal.ps.server.steps import (
    LOSSES,
    PARTIAL_MODES,
    Contribution,
    PushFilters,
    Result,
    Staged,
    Staging,
    Steps,
    Sum,
    read_vector,
)
from shoal.runtime.transport.messages import client_server as msg
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import ServerView, StepLost

MAX_EARLY = 4096
"""Requests of views to come that are kept until the view is here; beyond it they are answered ViewOver."""


class ServerCore:
    """One server. Its answers about a step are true on every other holder of its slots, or withheld until they are."""

    def __init__(self, number: int, incarnation: int = 0, *, filters: PushFilters | None = None) -> None:
        self.number, self.incarnation, self.view_number = number, incarnation, 0
        self.clients = Clients()
        self.state = ServerState()
        self.staging = Staging()
        self.waits = WaitingRequests()
        self.replication = Replication(number)
        self.replica = Replica(number)
        self.mine: Slots = no_slots()  # slots whose primary this server is
        self.ships_at_once = True  # else `ship` is called for pushes that wait
        self._filters = filters or PushFilters()
        self._low = self._high = 0  # smallest and largest version of what is mine
        self._step_need: dict[int, int] = {}  # acknowledgements after which the last step is safe
        self._pulled_at: dict[int, int] = {}  # peer -> updates there were at its last pull
        self.staleness: Counter[int] = Counter()  # pulls, by how far they were ahead of the slowest worker
        self._key_lists: dict[int, KeyLists] = {}  # by peer
        self._early: list[Request] = []
        self._has_counted = True  # a step, since the waiting pulls were last checked
        self._holder: int | None = None  # peer that reads a checkpoint: no push counts meanwhile
        self._lost: StepLost | None = None

    # ---- events ---------------------------------------------------------------------------------

    def hear(self, request: Request) -> list[Action]:
        if request.peer not in self.clients and not isinstance(request.message, msg.Hello):
            return _refuse(request, f"its first sentence was {type(request.message).__name__}, not Hello")
        view = getattr(request.message, "view", None)
        if view is not None and view != self.view_number:
            if view > self.view_number and len(self._early) < MAX_EARLY:
                self._early.append(request)
                return []
            return [Reply(request.peer, request.ticket, msg.ViewOver(self.view_number))]
        problem = self._refusal_reason(request)
        if problem is not None:
            return [Reply(request.peer, request.ticket, msg.PsRefused(problem))]
        if self._is_held(request):
            self.waits.held.append(request)
            return []
        try:
            actions = self._handle(request)
        except TablesFull as error:
            if isinstance(request.message, msg.Replicate | msg.CopySlot):
                raise  # a holder that cannot hold its slots must fail: its primary would wait for it
            actions = [Reply(request.peer, request.ticket, msg.PsRefused(str(error)))]
        except (Refusal, ShoalError, msgspec.MsgspecError) as error:
            actions = [Reply(request.peer, request.ticket, msg.PsRefused(str(error)))]
        if isinstance(request.message, msg.PushRows | msg.PushDense):
            return actions  # nothing counts before its StepEnd
        return actions + self._settle()

    def answered(self, server: int, message: Message) -> list[Action]:
        match message:
            case msg.Replicated(number):
                self.replication.answered(server, number)
                return self._settle()
            case msg.PsRefused():
                self.replication.lost(server)  # something before it did not arrive; everything is sent again
        return []

    def lost(self, server: int) -> list[Action]:
        """The connection to another server is over; unanswered messages may not have arrived."""
        self.replication.lost(server)
        return []

    def gone(self, peer: int) -> list[Action]:
        rank = self.clients.remove(peer)
        self._forget(peer)
        actions = self._release_hold(peer)
        if rank is not None:
            self.state.clocks.left(rank)
        return actions + self._settle()

    def rank_dead(self, rank: int, incarnation: int = 0) -> list[Action]:
        """This incarnation of a rank is dead: nothing waits for it, and its messages no longer count."""
        if incarnation >= max(self.clients.newest(f"worker-{rank}"), 0):
            self.state.clocks.left(rank)
        return self._fence(f"worker-{rank}", incarnation + 1) + self._settle()

    def rank_joined(self, rank: int, incarnation: int = 0) -> list[Action]:
        return self._admit(f"worker-{rank}", incarnation) + self._settle()

    def tick(self) -> list[Action]:
        """Retry lost messages: records to other servers, and the report of a lost step to the coordinator."""
        lost: list[Action] = [Tell(self._lost)] if self._lost is not None else []
        return [*self.replication.again(), *lost]

    def work(self) -> tuple[list[Action], bool]:
        """Copy one slot to a server that needs it; and whether there is more."""
        due = self.replication.next_copy
        if due is None:
            return [], False
        sends = self.replication.copy(*due, self.state.write_slot(due[1]))
        return [*sends], self.replication.next_copy is not None

    @property
    def has_pushes(self) -> bool:
        """True where pushes can be shipped to other holders."""
        return self.replication.has_pushes

    def ship(self) -> list[Action]:
        """Ship them, all in one message for each holder."""
        return [*self.replication.ship_pushes()] if self.has_pushes else []

    @property
    def shared_bytes(self) -> int:
        """Memory of tables that clients read in place."""
        return self.state.contents.shared_bytes

    def figures(self) -> dict[str, Any]:
        """Sizes of what it holds, for the record of its activity."""
        held = self.state.contents.held
        return {
            "slots": int(self.mine.sum()),
            "replicas": int((held & ~self.mine).sum()),
            "rows": {table.spec.name: table.num_rows for table in list(self.state.contents.tables.values())},
        }

    def view(self, view: ServerView) -> list[Action]:
        """Adopt a new view. All waits are over: clients ask again."""
        if view.view <= self.view_number:
            return []
        if view.incarnations.get(self.number, self.incarnation) != self.incarnation:
            return []  # for its predecessor, whose slots it does not have
        actions = self._end_waits(msg.ViewOver(view.view))
        self._holder = None
        is_new = self.view_number == 0
        is_next = view.view == self.view_number + 1
        was_primary = self.mine if is_next else no_slots()
        trusted = self._trusted() if is_next else {}
        self.view_number = view.view
        self.replica.view(view, self.state)
        self.mine = np.array(self.replica.primary_of) == self.number
        if (self.mine & ~was_primary).any() and not is_new:
            self.state.take_over()
        actions += self.replication.view(view, was_primary=was_primary, is_new=is_new, trusted=trusted)
        actions += self._ship_declarations()
        self._after_count()
        self._step_need = self.replication.need()
        early, self._early = self._early, []
        for request in early:
            if request.peer in self.clients:
                actions += self.hear(request)
        return actions + self.replica.tell_filled() + self._settle()

    def _trusted(self) -> dict[int, Slots]:
        """Slots of each server of which it was primary until now: it has everything this one has of them.

        In exact steps, updates beyond that will be computed here with the same bits, and its
        applied seqs include them. Relaxed ones may come in another order: then the slots are copied
        to it.
        """
        if self.state.mode is None or self.state.mode.kind != "exact":
            return {}
        primary_of = np.array(self.replica.primary_of)
        return {server: primary_of == server for server in {*primary_of.tolist()} - {self.number, -1}}

    # ---- requests -------------------------------------------------------------------------------

    def _handle(self, request: Request) -> list[Action]:
        match request.message:
            case msg.PullRows() as message:
                return self._pull_rows(request, message)
            case msg.PullDense() as message:
                return self._pull_dense(request, message)
            case msg.PushRows() as message:
                return self._push_rows(request, message)
            case msg.PushDense() as message:
                return self._push_dense(request, message)
            case msg.StepEnd() as message:
                return self._step_end(request, message, self.clients.name(request.peer))
            case msg.Commit() as message:
                return self._commit(request, message)
            case msg.Replicate() | msg.CopySlot():
                return self._replicate(request, request.message)
            case msg.Rest(_, rank):
                self.state.clocks.left(rank)
                return [Reply(request.peer, request.ticket, msg.Declared(False))]
            case msg.Hold(_, is_on):
                actions: list[Action] = [Reply(request.peer, request.ticket, msg.Declared(False))]
                if is_on:
                    self._holder = request.peer
                    return actions
                return actions + self._release_hold(request.peer)
            case msg.Post() as message:
                return self._post(request, message)
            case msg.AskNote() as message:
                return self._ask_note(request, message)
            case msg.AskMissing():
                return [Reply(request.peer, request.ticket, msg.Missing(self._missing_ranks(request.peer)))]
            case msg.AskTables():
                return [Reply(request.peer, request.ticket, self.state.contents.tiers())]
            case msg.AskDense():
                return [self._dense_at(request)]
            case msg.AskRows(_, number):
                return [self._rows_at(request, number)]
            case msg.Hello(name, incarnation):
                return self._hello(request, name, incarnation)
            case msg.DeclareTable(table):
                return self._declared(request, self.state.contents.declare_table(table))
            case msg.DeclareDense() as message:
                return self._declared(request, self.state.contents.declare_dense(message))
            case msg.DeclareMode() as message:
                return self._declared(request, self.state.declare_mode(message))
        return self._whole(request)

    def _refusal_reason(self, request: Request) -> str | None:
        """Reason why this peer may not send this: a worker acts for its own rank, a server only replicates."""
        message = request.message
        if isinstance(message, msg.Hello):
            return None
        name, own = self.clients.name(request.peer), self.clients.rank(request.peer)
        if name.startswith("server-") != isinstance(message, msg.Replicate | msg.CopySlot):
            return f"{name} says {type(message).__name__}, which is not for it to say"
        if isinstance(message, msg.Post | msg.AskNote | msg.Rest | msg.StepEnd) and own not in (
            None,
            message.rank,
        ):
            return f"{name} speaks for rank {message.rank}"
        return None

    def _missing_ranks(self, peer: int) -> list[int]:
        """Ranks that a peer waits for, including the holder of a checkpoint."""
        missing = self.waits.missing_ranks(peer, self.state)
        if self._holder is not None and any(each.peer == peer for each in self.waits.held):
            holder = self.clients.rank(self._holder)
            missing |= {holder} if holder is not None else set()
        own = self.clients.rank(peer)
        return sorted(missing - {-1 if own is None else own})

    def _dense_at(self, request: Request) -> Reply:
        dense = self.state.contents.dense
        places = [(number, *dense.place(number)) for number in self.state.contents.chunks_of(self.mine)]
        message = msg.DenseAt(places, dense.memory.sizes)
        return Reply(request.peer, request.ticket, message, (), dense.memory.descriptors)

    def _rows_at(self, request: Request, number: int) -> Reply:
        shared = self.state.contents.table(number).shared
        if shared is None:
            return Reply(request.peer, request.ticket, msg.RowsAt(0, 0))
        message = msg.RowsAt(shared.num_bytes, shared.edition)
        return Reply(request.peer, request.ticket, message, (), [shared.descriptor])

    def _declared(self, request: Request, is_new: bool) -> list[Action]:
        actions: list[Action] = [Reply(request.peer, request.ticket, msg.Declared(is_new))]
        return actions + (self._ship_declarations() if is_new else [])

    def _ship_declarations(self) -> list[Action]:
        record = self.state.declarations()
        return [*self.replication.ship(Change(no_slots(), lambda _: (record, []), to_all=True))]

    def _replicate(self, request: Request, message: msg.Replicate | msg.CopySlot) -> list[Action]:
        name = self.clients.name(request.peer)
        source = name.removeprefix("server-")
        if source == name or not (source.isascii() and source.isdigit()):
            raise Refusal(f"{name} is no server, and only servers replicate")
        num_declared = self.state.num_declared
        self._has_counted = True
        try:
            match message:
                case msg.Replicate(_, number, record):
                    last = self.replica.apply(int(source), number, record, request.frames, self.state)
                case msg.CopySlot(_, number, slot, record):
                    last = self.replica.take_slot(
                        int(source), number, slot, record, request.frames, self.state
                    )
        except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise Refusal(f"the record of {name} does not fit its frames ({error!r})") from None
        actions: list[Action] = [Reply(request.peer, request.ticket, msg.Replicated(last))]
        actions += self.replica.tell_filled()
        if self.state.num_declared > num_declared:
            # Its own followers may get it from no other source: for clients it is already applied here.
            actions += self._ship_declarations()
        return actions

    def _whole(self, request: Request) -> list[Action]:
        """Read or write state for a checkpoint."""
        message, frames, change = answer_whole(self.state, self.mine, request)
        if isinstance(message, msg.AppliedSeqsRead):
            # A reader of these applied seqs does not repeat a push: so no other holder may ever lack it.
            return self._when_safe(request, message, frames)
        if change is None:
            return [self._reply(request, message, frames)]
        self._after_count()
        actions: list[Action] = [*self.replication.ship(change)]
        return actions + self._when_safe(request, message)

    # ---- connections ----------------------------------------------------------------------------

    def _hello(self, request: Request, name: str, incarnation: int) -> list[Action]:
        newest = self.clients.newest(name)
        if incarnation < newest:
            problem = f"{name} is in incarnation {newest} by now, incarnation {incarnation} is not heard"
            return _refuse(request, problem)
        actions = self._admit(name, incarnation)
        self.clients.add(request.peer, name, incarnation)
        rank = self.clients.rank(request.peer)
        if rank is not None:
            self.state.clocks.returned(rank)
        welcome = msg.Welcome(f"server-{self.number}", self.incarnation, self.view_number)
        return [*actions, Reply(request.peer, request.ticket, welcome)]

    def _admit(self, name: str, incarnation: int) -> list[Action]:
        """A newer incarnation has connected: older ones are fenced."""
        newest = self.clients.newest(name)
        if incarnation <= newest:
            return []
        rank = rank_of(name)
        if rank is not None and newest >= 0:
            self.state.clocks.entered(rank)
        return self._fence(name, incarnation)

    def _fence(self, name: str, incarnation: int) -> list[Action]:
        old = self.clients.fence(name, incarnation)
        for peer in old:
            self._forget(peer)
        return [DropPeer(peer, f"{name} was replaced by incarnation {incarnation}") for peer in old]

    def _forget(self, peer: int) -> None:
        """A connection is over. Ended pushes stay; unfinished ones are dropped."""
        self.staging.forget(peer)
        self.waits.forget(peer)
        self._pulled_at.pop(peer, None)
        self._key_lists.pop(peer, None)
        self._early = [request for request in self._early if request.peer != peer]

    def _is_held(self, request: Request) -> bool:
        mode = self.state.mode
        return (
            self._holder is not None
            and self._holder != request.peer
            and isinstance(request.message, msg.StepEnd)
            and mode is not None
            and mode.kind in ("ssp", "async")
        )

    def _release_hold(self, peer: int) -> list[Action]:
        """Pushes held back by this peer count now."""
        if self._holder != peer:
            return []
        self._holder = None
        held, self.waits.held = self.waits.held, []
        return [action for request in held if request.peer in self.clients for action in self.hear(request)]

    # ---- pulls ----------------------------------------------------------------------------------

    def _pull_rows(self, request: Request, message: msg.PullRows) -> list[Action]:
        expect_frames(request, 1, "keys")
        table = self.state.contents.table(message.table)
        frame = self._key_frame(request, message.keys)
        keys = self.state.contents.keys(table, frame, self._readable(message))
        codec, dim = codec_of(message.codec), table.spec.dim
        if message.is_whole:
            if codec is not None or table.policy is not None:
                raise Refusal("whole rows are pulled as they are, of tables without a policy")
            dim += table.state_dim
        num_bytes = codec.num_bytes(len(keys), dim) if codec else len(keys) * dim * table.dtype.itemsize
        check_reply_buffer(request, 0, num_bytes, f"{len(keys)} rows")
        return self._pull(request, keys)

    def _key_frame(self, request: Request, name: int) -> Frame:
        """Keys of a request: from its frame, or the list sent under this name before."""
        frame = request.frames[0]
        if not name:
            return frame
        lists = self._key_lists.setdefault(request.peer, KeyLists())
        if memoryview(frame).nbytes:
            lists.keep(name, as_array(frame, np.int64, "keys"))
            return frame
        known = lists.find(name)
        if known is None:
            raise Refusal(f"no key list {name} was sent on this connection in view {self.view_number}")
        return known.data.cast("B")

    def _pull_dense(self, request: Request, message: msg.PullDense) -> list[Action]:
        readable = self._readable(message)
        for at, number in enumerate(message.chunks):
            chunk = self.state.contents.chunk(number)
            if not readable[chunk.slot]:
                raise Refusal(f"chunk {number} is of slot {chunk.slot}, whose primary is another server")
            check_reply_buffer(request, at, pulled_bytes(chunk, message.codec), f"chunk {number}")
        return self._pull(request, None)

    def _readable(self, message: msg.PullRows | msg.PullDense) -> Slots:
        """Slots that a pull may request from this server.

        In exact steps no rank has step c + 1 before the asker of step c has ended it, so a replica
        that has followed to c has the primary's weights, to the bit. In relaxed ones it lags by
        pushes that wait to be shipped.
        """
        mode = self.state.mode
        is_replica = message.is_nearby and mode is not None and mode.kind == "exact"
        return self.mine | self.replica.held if is_replica else self.mine

    def _pull(self, request: Request, keys: Keys | None) -> list[Action]:
        rank = self.clients.rank(request.peer)
        if rank is not None:
            assert isinstance(request.message, msg.PullRows | msg.PullDense)
            self.state.clocks.at_least(rank, max(0, request.message.clock - request.message.unpushed))
        if self._is_visible(request):
            return [self._pulled(request, keys)]
        self.waits.pulls.append((request, keys))
        return []

    def _is_visible(self, request: Request) -> bool:
        message, mode = request.message, self.state.mode
        assert isinstance(message, msg.PullRows | msg.PullDense)
        if mode is None or mode.kind == "async":
            return True
        if mode.kind == "ssp":
            rank = self.clients.rank(request.peer)
            return self.state.clocks.have_reached(message.clock - mode.bound, besides=rank)
        if message.is_nearby:  # it may be primary of nothing
            is_there = self._low >= message.clock or not self.mine.any()
            return is_there and self.replica.has_followed(self.state, message.clock)
        if self._low >= message.clock:
            return True
        # A worker with nothing in flight here may know the step from another server, and it may never be
        # completed here.
        return mode.kind in PARTIAL_MODES and self.clients.rank(request.peer) not in self._steps().ended

    def _pulled(self, request: Request, keys: Keys | None) -> Reply:
        message, state = request.message, self.state
        if isinstance(message, msg.PullRows):
            assert keys is not None
            table = state.contents.table(message.table)
            shape = (len(keys), table.spec.dim)
            if message.is_whole:
                shape = (len(keys), table.spec.dim + table.state_dim)
                out = np.frombuffer(request.into[0], table.dtype, shape[0] * shape[1])
                table.pull_whole(keys, out.reshape(shape))
            elif message.codec:
                rows = np.empty(shape, table.dtype)
                table.pull(keys, rows)
                encode_into(message.codec, rows, request.into[0])
            else:
                out = np.frombuffer(request.into[0], table.dtype, len(keys) * table.spec.dim)
                table.pull(keys, out.reshape(shape))
        else:
            assert isinstance(message, msg.PullDense)
            for number, into in zip(message.chunks, request.into, strict=False):
                chunk = state.contents.chunk(number)
                if message.codec:
                    whole = np.empty(chunk_bytes(chunk), np.uint8)
                    state.contents.dense.pull(number, whole.data)
                    encode_into(message.codec, whole.view(chunk.dtype).reshape(1, -1), into)
                else:
                    state.contents.dense.pull(number, into[: chunk_bytes(chunk)])
        mode = state.mode
        if mode is None or mode.kind in ("ssp", "async"):
            self._pulled_at[request.peer] = state.updates
            slowest = state.clocks.slowest()
            self.staleness[max(0, message.clock - slowest)] += 1
            return Reply(request.peer, request.ticket, msg.Pulled(state.updates, slowest))
        if message.is_nearby:
            versions = state.applied.version[self._readable(message)]
            return Reply(request.peer, request.ticket, msg.Pulled(int(versions.max()), int(versions.min())))
        return Reply(request.peer, request.ticket, msg.Pulled(self._high, self._low))

    # ---- exchanges ------------------------------------------------------------------------------

    def _post(self, request: Request, message: msg.Post) -> list[Action]:
        self._require_mailbox()
        expect_frames(request, 2, "a contribution and a note")
        mailbox, num_workers = self.state.mailbox, self._steps().mode.num_workers
        if message.rank >= num_workers:
            raise Refusal(f"ranks are 0..{num_workers - 1}, got {message.rank}")
        if message.exchange in mailbox.log:
            return self._posted(request, message.exchange)
        is_over = mailbox.post(message, *request.frames, num_workers=num_workers)
        self.waits.posts.setdefault(message.exchange, []).append(request)
        if not is_over:
            return []
        actions = self._finish_exchange(message.exchange, *mailbox.close(message.exchange))
        for waiter in self.waits.posts.pop(message.exchange):
            actions += self._posted(waiter, message.exchange)
        return actions

    def _posted(self, request: Request, exchange: int) -> list[Action]:
        return self._when_safe(request, msg.Posted(exchange), self.state.mailbox.contributions(exchange))

    def _finish_exchange(
        self, exchange: int | None, result: Result, notes: dict[int, tuple[int, bytes]]
    ) -> list[Action]:
        self.state.mailbox.finish(exchange, result, notes, self.state.num_workers)
        kept = sorted(notes.items())

        def write(_: Slots) -> Written:
            record = PostRecord(exchange, [(rank, anchored_at) for rank, (anchored_at, _) in kept])
            return record, [result.frame, *(note for _, (_, note) in kept)]

        return [*self.replication.ship(Change(some_slots([0]), write))]

    def _ask_note(self, request: Request, message: msg.AskNote) -> list[Action]:
        self._require_mailbox()
        mailbox = self.state.mailbox
        anchored_at, note, numbers = mailbox.since(message.rank)
        is_commit = [mailbox.log[number].is_commit for number in numbers]
        frames = [note, *(mailbox.log[number].frame for number in numbers)]
        # A replacement does not repeat what it finds there: so no other reader may ever find less.
        return self._when_safe(request, msg.Note(anchored_at, numbers, is_commit, self._low), frames)

    def _require_mailbox(self) -> None:
        if not self.mine[0]:
            raise Refusal(f"exchanges are at the primary of slot 0, which server-{self.number} is not")

    # ---- pushes and steps -----------------------------------------------------------------------

    def _push_rows(self, request: Request, message: msg.PushRows) -> list[Action]:
        expect_frames(request, 2, "keys and values")
        contents = self.state.contents
        table = contents.table(message.table)
        keys = contents.keys(table, self._key_frame(request, message.keys), self.mine)
        # A full disk is reported before anything is staged: other workers' pushes of this step may bring as
        # many new rows.
        table.expect(keys, max(1, self.state.num_workers))
        self.staging.rows(
            request.peer,
            message,
            keys,
            contents.values(table, request.frames[1], len(keys), message.codec, is_whole=message.is_whole),
        )
        return []

    def _push_dense(self, request: Request, message: msg.PushDense) -> list[Action]:
        expect_frames(request, 1, "a chunk's elements")
        chunk = self.state.contents.chunk(message.chunk)
        if not self.mine[chunk.slot]:
            raise Refusal(
                f"chunk {chunk.number} is of slot {chunk.slot}, whose primary is another server in view {message.view}"
            )
        if any(part >= len(chunk.parts) for part in message.unused):
            raise Refusal(f"chunk {chunk.number} has {len(chunk.parts)} parts, unused are {message.unused}")
        self.staging.dense(
            request.peer, message, self.state.contents.gradient(chunk, request.frames[0], message.codec)
        )
        return []

    def _step_end(self, request: Request, message: msg.StepEnd, name: str) -> list[Action]:
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
        if message.whole_after is not None:
            steps.forget()  # of the only worker's predecessor: what it had not told all servers to commit never will be
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
            # From a replacement, or a repeat. The first counts: its effect may have been reported.
            self.staging.forget_name(request.peer, message.stream, message.seq)
        self.waits.step_ends.append(request)
        return self._advance()

    def _end_again(self, request: Request, message: msg.StepEnd, steps: Steps) -> list[Action]:
        """The step is over here; repeat its result."""
        if steps.mode.kind in PARTIAL_MODES:
            return self._when_safe(request, self._partial(message), [self.state.last_frame()])
        if steps.last is None or steps.last.seq != message.seq:
            raise Refusal(f"step {message.seq} is over and forgotten: step {self._low} is the last one here")
        if steps.mode.two_phase:
            return [self._reply(request, msg.Summed(message.seq), self._summed_frames(steps.last.vector))]
        return self._when_safe(request, self._committed(message.seq), [self.state.last_frame()])

    def _advance(self) -> list[Action]:
        """Sum the step once all contributions are in; in one phase commit it at once."""
        steps, actions = self.state.steps, list[Action]()
        # Not before the last one is safe: no two holders of a slot are ever more than one step apart.
        if steps is not None and steps.is_full and self.replication.is_met(self._step_need):
            if steps.mode.kind in PARTIAL_MODES:
                return self._count_partial(steps)
            newest = max(part.end.seq for part in steps.ended.values())
            slots = self.mine & (self.state.applied.version < newest)
            first = next(iter(steps.ended.values()))
            step = self._step_of(slots, first.staged, first.end.model)
            steps.summed = steps.sum(self.state.contents, slots, mine=self.mine, step=step)
        if steps is None or steps.summed is None:
            return actions
        if steps.mode.two_phase:
            frames = self._summed_frames(steps.summed.vector.tolist(), steps.summed.squares)
            ended, self.waits.step_ends = self.waits.step_ends, []
            actions += [self._reply(request, msg.Summed(steps.summed.seq), frames) for request in ended]
            commits, self.waits.commits = self.waits.commits, []
            for request in commits:
                # With a StepEnd among them, no step is ever full.
                assert isinstance(request.message, msg.Commit)
                actions += self._commit(request, request.message)
            return actions
        factor, applies = steps.summed.decide(steps.mode.num_workers)
        return self._count_step(steps, factor, applies, 0.0)

    def _commit(self, request: Request, message: msg.Commit) -> list[Action]:
        steps = self._steps()
        if not steps.mode.two_phase:
            raise Refusal("steps were declared to have one phase: there is nothing to commit")
        actions: list[Action] = []
        if steps.summed is not None and steps.summed.seq == message.seq:
            actions = self._count_step(steps, message.factor, message.apply, message.norm)
        rank = self.clients.rank(request.peer)
        if message.seq == self._low + 1 and rank in steps.ended:
            self.waits.commits.append(request)  # from a replacement: the others will end it again
            return []
        if message.seq == self._low + 1 and rank is not None:
            return self._lose_step(request, rank)
        if message.seq > self._low:
            raise Refusal(
                f"step {message.seq} is not summed here: the last one is {self._low}, and ranks "
                f"{steps.missing_ranks()} have not ended the next one"
            )
        is_last = steps.last is not None and steps.last.seq == message.seq
        frames = [self.state.last_frame()] if is_last else []  # of older ones only that they count is known
        return actions + self._when_safe(request, self._committed(message.seq), frames)

    def _lose_step(self, request: Request, rank: int) -> list[Action]:
        """Another server commits this step, but the rank's contribution to it is lost here.

        Its worker was replaced by one that will not, or cannot, run the step again. Nothing is
        answered in this view.
        """
        self.waits.commits.append(request)
        self._lost = StepLost(self.view_number, rank)
        return [Tell(self._lost)]

    def _count_step(self, steps: Steps, factor: float, applies: bool, norm: float) -> list[Action]:
        assert steps.summed is not None
        counted = _counted(steps.summed, factor, applies, norm)
        actions = self._count(counted)
        for request in self._end_step(steps):
            actions += self._when_safe(request, self._committed(counted.seq), [self.state.last_frame()])
        return actions

    def _count_partial(self, steps: Steps) -> list[Action]:
        """Commit the present contributions in every slot that lacks them.

        After a failover slots may be at different steps, and ranks too, each in its own order: so
        slots are grouped by version, the most advanced first.
        """
        actions, reused, state = list[Action](), steps.reused(), self.state
        versions = state.applied.version.copy()
        for version in np.unique(versions[self.mine])[::-1].tolist():
            slots = self.mine & (versions == version)
            parts = {rank: part for rank, part in steps.ended.items() if part.end.seq > version}
            if parts:
                first = next(iter(parts.values()))
                step = self._step_of(slots, first.staged, first.end.model)
                summed = steps.sum(state.contents, slots, mine=self.mine, step=step, parts=parts | reused)
                seqs = tuple(parts[rank].end.seq for rank in sorted(parts))
                factor, applies = summed.decide(steps.mode.num_workers)
                actions += self._count(replace(_counted(summed, factor, applies, 0.0), seqs=seqs))
        for request in self._end_step(steps):
            assert isinstance(request.message, msg.StepEnd)
            actions += self._when_safe(request, self._partial(request.message), [state.last_frame()])
        return actions

    def _step_of(self, slots: Slots, staged: Staged, model: int) -> int:
        counter = counter_of_update(staged.rows, model)
        return int(self.state.applied.steps(counter)[slots].max(initial=0))

    def _partial(self, message: msg.StepEnd) -> msg.Committed:
        """The answer to a StepEnd in a partial mode: late where the contribution is missing in some slot."""
        late = bool((self.state.applied.missing(message.stream, message.seq) & self.mine).any())
        self._steps().num_late += late
        return self._committed(self._high if late else message.seq, late=late)

    def _end_step(self, steps: Steps) -> list[Request]:
        """Mark the step as committed; returns the answers that waited for it."""
        steps.forget()
        self._step_need = self.replication.need()
        ended, self.waits.step_ends = self.waits.step_ends, []
        return ended

    def _end_push(self, request: Request, message: msg.StepEnd) -> list[Action]:
        """Apply a single worker's push at once, in slots that do not have it."""
        state = self.state
        vector = read_vector(request.frames[0], at_least=0)
        self.state.contents.check_settings(message.model, message.settings, message.table_settings)
        staged = self.staging.take(request.peer, message)
        call = message.stream >> 32 & 0x3FFF_FFFF  # streams of low-level clients have a bit above it
        if self.clients.rank(request.peer) is None and message.rank < state.num_workers:
            # From an aggregator, which has no control flags.
            state.clocks.finished_by_another(message.rank, *message_parts(message)[0])
            state.clocks.begin_call(call)
        elif message.rank < state.num_workers:
            state.clocks.finished(message.rank, message.stream, message.seq, message.num_batches)
            state.clocks.set_control_flags(message.rank, vector, call=call)
        for part in message.merged:
            state.clocks.finished_by_another(part.rank, part.stream, part.seq, part.num_batches)
        # Applied where nothing of it counts: no part of a sum can be left out. The pusher is told
        # otherwise.
        new, late = self.mine.copy(), no_slots()
        for stream, seq, num_batches in (own := message_parts(message)):
            new &= state.applied.missing(stream, seq, num_batches)
        for stream, seq, _ in own:
            late |= state.applied.missing(stream, seq) & self.mine & ~new
        note = bytes(request.frames[1])
        actions: list[Action] = []
        notes = {message.rank: (message.anchored_at, note)} if note and self.mine[0] else {}
        if new.any():
            staleness = max(state.updates - self._pulled_at.get(request.peer, state.updates), 0)
            factor = self._filters.factor(staged, state.contents, factor=message.factor, staleness=staleness)
            update = Update(
                self.mine,
                staged.rows,
                staged.dense,
                factor=factor,
                step=self._step_of(new, staged, message.model),
                settings=message.settings,
                table_settings=message.table_settings,
                model=message.model,
            )
            state.updates += sum(num_batches for _, _, num_batches in own)
            counted = Counted(
                restrict(update, new, state.contents.chunks),
                message.stream,
                message.seq,
                False,
                bool(np.isfinite(vector).all()) and (factor != 0.0 or message.factor == 0.0),
                vector,
                notes=notes if new[0] else {},
                done_below=message.done_below,
                merged=tuple(message.merged),
            )
            state.count(counted)
            pushes = self.replication.pushes(state.write_pushes)
            if pushes is not None:
                state.note_push(counted, message.rank, pushes)
        else:
            state.applied.forget_below(message.done_below)
        if notes and not new[0]:
            actions += self._finish_exchange(None, Result(False, b""), notes)
        clocks, is_new = state.clocks, bool(new[0])
        committed = msg.Committed(
            message.seq,
            state.updates,
            clocks.slowest(),
            late=bool(late.any()),
            control_flags=clocks.control_flags,
            is_new=is_new,
        )
        return actions + self._when_safe(request, committed)

    def _count(self, counted: Counted) -> list[Action]:
        self.state.count(counted)
        self._after_count()
        change = Change(counted.update.slots, lambda slots: self.state.write_counted(counted, slots))
        return [*self.replication.ship(change)]

    def _after_count(self) -> None:
        self._has_counted = True
        versions = self.state.applied.version[self.mine]
        self._low, self._high = (int(versions.min()), int(versions.max())) if len(versions) else (0, 0)

    def _summed_frames(self, vector: list[float], squares: Vector | None = None) -> list[bytes]:
        steps = self._steps()
        frames = [np.array(vector).tobytes()]
        if steps.mode.wants_norm:
            known = steps.squares if squares is None else squares
            frames.append(np.where(self.mine, known, 0.0).tobytes())
        return frames

    def _committed(self, seq: int, *, late: bool = False) -> msg.Committed:
        return msg.Committed(seq, self._low, self._low, late)

    # ---- replies --------------------------------------------------------------------------------

    def _steps(self) -> Steps:
        if self.state.steps is None:
            raise Refusal("nobody has declared how contributions count here; DeclareMode comes first")
        return self.state.steps

    def _when_safe(self, request: Request, message: Message, frames: Sequence[Frame] = ()) -> list[Action]:
        """Answer once all other holders have acknowledged everything shipped so far."""
        need = self.replication.need()
        if self.replication.is_met(need):
            return [self._reply(request, message, frames)]
        self.waits.replies.append(PendingReply(need, request, message, frames))
        return []

    def _settle(self) -> list[Action]:
        """Advance whatever can advance now: the step, safe replies, pulls whose clock is reached."""
        actions: list[Action] = [*self.ship()] if self.ships_at_once else []
        actions += self._advance()
        # Requirements only grow within a view: if the first has to wait, so do those behind it.
        waiting, num_safe = self.waits.replies, 0
        while num_safe < len(waiting) and self.replication.is_met(waiting[num_safe].need):
            num_safe += 1
        if num_safe:
            self.waits.replies = waiting[num_safe:]
            actions += [self._reply(each.request, each.message, each.frames) for each in waiting[:num_safe]]
        return actions + self._answer_visible_pulls()

    def _answer_visible_pulls(self) -> list[Action]:
        waiting, mode = self.waits.pulls, self.state.mode
        # Exact steps: only after one was committed, not after each of its messages.
        is_due = self._has_counted or mode is None or mode.kind != "exact"
        self._has_counted = False
        if not waiting or not is_due:
            return []
        is_visible = [self._is_visible(request) for request, _ in waiting]
        visible = [pull for pull, is_it in zip(waiting, is_visible, strict=True) if is_it]
        self.waits.pulls = [pull for pull, is_it in zip(waiting, is_visible, strict=True) if not is_it]
        return [self._pulled(*pull) for pull in visible]

    def _end_waits(self, message: msg.ViewOver) -> list[Action]:
        """The view is over: drop staged pushes, and answer all waiting requests."""
        waiting = self.waits.end_all()
        self._lost = None
        self._key_lists.clear()
        self.staging.forget_all()
        self.state.mailbox.forget_open()
        if self.state.steps is not None:
            self.state.steps.forget()
            self.state.steps.forget_kept()
        return [Reply(request.peer, request.ticket, message) for request in waiting]

    def _reply(self, request: Request, message: Message, frames: Sequence[Frame] = ()) -> Reply:
        """Put frames into the asker's buffers, as far as it gave any."""
        for into, frame in zip(request.into, frames, strict=False):
            num_bytes = memoryview(frame).nbytes
            if num_bytes > into.nbytes:
                return Reply(request.peer, request.ticket, message, frames)
            into[:num_bytes] = memoryview(frame).cast("B") if num_bytes else b""
        return Reply(request.peer, request.ticket, message, frames[len(request.into) :])


def message_parts(end: msg.StepEnd) -> list[tuple[int, int, int]]:
    """(stream, last seq, number of batches) of everything in a push."""
    return [
        (end.stream, end.seq, end.num_batches),
        *((part.stream, part.seq, part.num_batches) for part in end.merged),
    ]


def _refuse(request: Request, problem: str) -> list[Action]:
    return [Reply(request.peer, request.ticket, msg.PsRefused(problem)), DropPeer(request.peer, problem)]


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
