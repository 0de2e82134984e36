"""A server's decisions: requests, views and answers of other servers go in, what must be done comes out.

Pure: no socket, no thread, no clock. `server_loop.py` feeds it; the simulator
runs the same class. What is held and how it changes is in `state.py`; who
must hear of it in `replication.py`; the requests of clients that wait for
others (steps, pulls, exchanges) in `serving.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.errors import ShoalError
from shoal.ps.server.actions import Action, Drop, Reply, Request, Tell
from shoal.ps.server.applied_seqs import Slots, no_slots
from shoal.ps.server.apply_filters import Filter
from shoal.ps.server.contents import Refusal
from shoal.ps.server.replication import Change, FollowingRecord, SlotRecord, decode, first_number, from_bits
from shoal.ps.server.serving import Serving
from shoal.runtime.transport.messages.client_server import (
    AskDense,
    AskMissing,
    AskNote,
    Commit,
    CopySlot,
    Declared,
    DeclareDense,
    DeclareMode,
    DeclareTable,
    DenseAt,
    Hello,
    Hold,
    Missing,
    Post,
    PsRefused,
    PullDense,
    PullRows,
    PushDense,
    PushRows,
    ReadChunk,
    ReadMarks,
    ReadRows,
    Replicate,
    Replicated,
    Rest,
    SetClock,
    StepEnd,
    ViewOver,
    Welcome,
    WriteChunk,
    WriteMarks,
    WriteRows,
)
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import ServerView, SlotsFilled

MAX_EARLY = 4096
"""Requests of views to come that are kept until the view is here; beyond it they are answered ViewOver."""


class ServerCore(Serving):
    """One server. Everything it says about a step is true on every other holder of its slots, or not said yet."""

    def __init__(self, number: int, incarnation: int = 0, *, filters: Sequence[Filter] = ()) -> None:
        super().__init__(number, filters)
        self.incarnation = incarnation
        self._names: dict[int, tuple[str, int]] = {}  # peer -> who it is
        self._newest: dict[str, int] = {}  # name -> its newest incarnation
        self._early: list[Request] = []
        self._holder: int | None = None  # a peer for whose sake no push counts
        self._waiting_for_holder: list[Request] = []
        self._sources: dict[int, int] = {}  # server -> last number heard of it in this view
        self._joining: Slots = no_slots()
        self._filled: Slots = no_slots()
        self._has_told = False
        self._primary_of: list[int] = [-1] * NUM_SLOTS

    # ---- what happens ---------------------------------------------------------------------------

    def hear(self, request: Request, now: float = 0.0) -> list[Action]:
        """A request of a client or another server."""
        if request.peer not in self._names and not isinstance(request.message, Hello):
            problem = f"its first sentence was {type(request.message).__name__}, not Hello"
            return [Reply(request.peer, request.ticket, PsRefused(problem)), Drop(request.peer, problem)]
        view = getattr(request.message, "view", None)
        if view is not None and view != self.view_number:
            if view > self.view_number and len(self._early) < MAX_EARLY:
                self._early.append(request)
                return []
            return [Reply(request.peer, request.ticket, ViewOver(self.view_number))]
        if self._is_held(request):
            self._waiting_for_holder.append(request)
            return []
        try:
            actions = self._handle(request)
        except (Refusal, ShoalError, msgspec.MsgspecError) as error:
            actions = [Reply(request.peer, request.ticket, PsRefused(str(error)))]
        return actions + self._settle()

    def answered(self, server: int, message: Message) -> list[Action]:
        """Another server answered something that was sent to it."""
        match message:
            case Replicated(number):
                self.replication.answered(server, number)
                return self._settle()
            case PsRefused():
                self.replication.lost(server)  # something before it did not arrive; all is sent again
        return []

    def lost(self, server: int) -> list[Action]:
        """The connection to another server is over; what it did not answer may not have arrived."""
        self.replication.lost(server)
        return []

    def gone(self, peer: int) -> list[Action]:
        """A connection that others made to this server is over."""
        name, incarnation = self._names.pop(peer, ("", 0))
        self._forget(peer)
        let_go = self._let_go(peer)
        rank = _rank(name)
        is_newest = self._newest.get(name) == incarnation
        if rank is not None and is_newest and (name, incarnation) not in self._names.values():
            self.state.clocks.left(rank)
        return let_go + self._settle()

    def rank_dead(self, rank: int, incarnation: int = 0) -> list[Action]:
        """This incarnation of a rank is dead: nobody waits for it, and nothing of it counts any more."""
        if incarnation >= self._newest.get(f"worker-{rank}", 0):
            self.state.clocks.left(rank)
        return self._fence(f"worker-{rank}", incarnation + 1) + self._settle()

    def rank_joined(self, rank: int, incarnation: int = 0) -> list[Action]:
        """This incarnation of a rank is in."""
        return self._meet(f"worker-{rank}", incarnation) + self._settle()

    def tick(self, now: float = 0.0) -> list[Action]:
        """Time has passed."""
        # The coordinator may have been gone when it was told.
        lost: list[Action] = [Tell(self._lost)] if self._lost is not None else []
        return [*self.replication.again(), *lost]

    def work(self) -> tuple[list[Action], bool]:
        """Give one slot to a server that needs it; and whether there is more."""
        due = self.replication.next_copy
        if due is None:
            return [], False
        sends = self.replication.copy(*due, self.state.write_slot(due[1]))
        return [*sends], self.replication.next_copy is not None

    def digests(self) -> list[int]:
        """By slot: equal on all its holders once they have answered."""
        return self.state.digests()

    # ---- views ----------------------------------------------------------------------------------

    def view(self, view: ServerView) -> list[Action]:
        """Who holds what from now on. Whatever waits is over: clients ask again."""
        if view.view <= self.view_number:
            return []
        if view.incarnations.get(self.number, self.incarnation) != self.incarnation:
            return []  # of its predecessor, whose slots it does not have
        actions = self._end_waits(ViewOver(view.view))
        held, self._waiting_for_holder, self._holder = self._waiting_for_holder, [], None
        actions += [Reply(each.peer, each.ticket, ViewOver(view.view)) for each in held]
        is_new = self.view_number == 0
        is_next = view.view == self.view_number + 1
        was_primary = self.mine if is_next else no_slots()
        trusted = self._trusted() if is_next else {}
        self.view_number = view.view
        self._sources.clear()
        self._accept(view)
        self.mine = _slots_of(view, lambda holders: holders[0] == self.number)
        self._primary_of = [holders[0] if holders else -1 for holders in view.holders]
        if (self.mine & ~was_primary).any() and not is_new:
            self.state.take_over()
        actions += self.replication.view(view, was_primary=was_primary, is_new=is_new, trusted=trusted)
        actions += self._ship_declarations()
        self._after_count()
        self._step_need = self.replication.need()
        early, self._early = self._early, []
        for request in early:
            if request.peer in self._names:
                actions += self.hear(request)
        return actions + self._tell_filled() + self._settle()

    def _trusted(self) -> dict[int, Slots]:
        """By server, the slots whose primary it was until now: it has all that this one has of them.

        In exact steps what it may have beyond that will come out here with the same bits, and its marks
        know it. Relaxed ones may come in another order: then the slots are copied to it.
        """
        if self.state.mode is None or self.state.mode.kind != "exact":
            return {}
        primary_of = np.array(self._primary_of)
        return {server: primary_of == server for server in set(self._primary_of) - {self.number, -1}}

    def _accept(self, view: ServerView) -> None:
        holds = _slots_of(view, lambda holders: self.number in holders)
        self._joining = no_slots()
        for slot, servers in view.joining.items():
            if self.number in servers and not holds[slot]:
                self._joining[slot] = True
        # What it is to be given it may have already; whether that is still right only the primary knows.
        self._filled, self._has_told = no_slots(), False
        kept = holds | self._joining
        self.state.drop(self.state.contents.held & ~kept)
        self.state.contents.hold(kept)

    def _tell_filled(self) -> list[Action]:
        if self._has_told or not self._joining.any() or (self._joining & ~self._filled).any():
            return []
        self._has_told = True
        return [Tell(SlotsFilled(self.view_number, np.flatnonzero(self._joining).tolist()))]

    # ---- requests -------------------------------------------------------------------------------

    def _handle(self, request: Request) -> list[Action]:
        match request.message:
            case PullRows() as message:
                return self._pull_rows(request, message)
            case PullDense() as message:
                return self._pull_dense(request, message)
            case PushRows() as message:
                return self._push_rows(request, message)
            case PushDense() as message:
                return self._push_dense(request, message)
            case StepEnd() as message:
                return self._step_end(request, message, self._names[request.peer][0])
            case Commit() as message:
                return self._commit(request, message)
            case Replicate(_, number, record):
                return self._replicate(request, number, record)
            case CopySlot(_, number, slot, record):
                return self._copy_slot(request, number, slot, record)
            case Rest(_, rank):
                self.state.clocks.left(rank)
                return [Reply(request.peer, request.ticket, Declared(False))]
            case Hold(_, is_on):
                actions: list[Action] = [Reply(request.peer, request.ticket, Declared(False))]
                if is_on:
                    self._holder = request.peer
                    return actions
                return actions + self._let_go(request.peer)
            case Post() as message:
                return self._post(request, message)
            case AskNote() as message:
                return self._ask_note(request, message)
            case AskMissing():
                return [Reply(request.peer, request.ticket, Missing(self._missing(request.peer)))]
            case AskDense():
                return [self._dense_at(request)]
            case Hello(name, incarnation):
                return self._hello(request, name, incarnation)
            case DeclareTable(table):
                return self._declared(request, self.state.contents.declare_table(table))
            case DeclareDense() as message:
                return self._declared(request, self.state.contents.declare_dense(message))
            case DeclareMode() as message:
                return self._declared(request, self.state.declare_mode(message))
            case (
                ReadRows()
                | WriteRows()
                | ReadChunk()
                | WriteChunk()
                | SetClock()
                | ReadMarks()
                | WriteMarks()
            ):
                return self._whole(request)
        raise Refusal(f"a server is not asked {type(request.message).__name__}")

    def _missing(self, peer: int) -> list[int]:
        missing = self._missing_for(peer)
        if self._holder is not None and any(each.peer == peer for each in self._waiting_for_holder):
            missing |= {self._ranks[self._holder]} if self._holder in self._ranks else set()
        return sorted(missing - {self._ranks.get(peer, -1)})

    def _dense_at(self, request: Request) -> Reply:
        dense = self.state.contents.dense
        places = [(number, *dense.place(number)) for number in self.state.contents.chunks_of(self.mine)]
        message = DenseAt(places, dense.memory.sizes)
        return Reply(request.peer, request.ticket, message, (), dense.memory.descriptors)

    def _is_held(self, request: Request) -> bool:
        held = self._holder is not None and self._holder != request.peer
        mode = self.state.mode
        return (
            held
            and isinstance(request.message, StepEnd)
            and mode is not None
            and mode.kind in ("ssp", "async")
        )

    def _let_go(self, peer: int) -> list[Action]:
        """Whoever held others' pushes back does so no more."""
        if self._holder != peer:
            return []
        self._holder = None
        waiting, self._waiting_for_holder = self._waiting_for_holder, []
        return [action for request in waiting if request.peer in self._names for action in self.hear(request)]

    def _hello(self, request: Request, name: str, incarnation: int) -> list[Action]:
        newest = self._newest.get(name, -1)
        if incarnation < newest:
            problem = f"{name} is in incarnation {newest} by now, incarnation {incarnation} is not heard"
            return [Reply(request.peer, request.ticket, PsRefused(problem)), Drop(request.peer, problem)]
        actions = self._meet(name, incarnation)
        self._names[request.peer] = (name, incarnation)
        rank = _rank(name)
        if rank is not None:
            self.state.clocks.returned(rank)
            self._ranks[request.peer] = rank
        welcome = Welcome(f"server-{self.number}", self.incarnation, self.view_number)
        return [*actions, Reply(request.peer, request.ticket, welcome)]

    def _meet(self, name: str, incarnation: int) -> list[Action]:
        """Somebody is there in this incarnation: those before it are not heard any more."""
        newest = self._newest.get(name, -1)
        if incarnation <= newest:
            return []
        rank = _rank(name)
        if rank is not None and newest >= 0:
            self.state.clocks.entered(rank)
        return self._fence(name, incarnation)

    def _fence(self, name: str, incarnation: int) -> list[Action]:
        self._newest[name] = max(incarnation, self._newest.get(name, 0))
        old = [
            peer for peer, (who, which) in self._names.items() if who == name and which < self._newest[name]
        ]
        for peer in old:
            del self._names[peer]
            self._forget(peer)
        return [Drop(peer, f"{name} was replaced by incarnation {incarnation}") for peer in old]

    def _forget(self, peer: int) -> None:
        super()._forget(peer)
        self._early = [request for request in self._early if request.peer != peer]

    def _declared(self, request: Request, is_new: bool) -> list[Action]:
        actions: list[Action] = [Reply(request.peer, request.ticket, Declared(is_new))]
        return actions + (self._ship_declarations() if is_new else [])

    def _ship_declarations(self) -> list[Action]:
        record = self.state.declarations()
        return [*self.replication.ship(Change(no_slots(), lambda _: (record, []), to_all=True))]

    # ---- as a replica ---------------------------------------------------------------------------

    def _replicate(self, request: Request, number: int, record: bytes) -> list[Action]:
        source = self._source(request)
        num_declared = self.state.num_declared
        if self._is_next(source, number):
            primary_of = np.array(self._primary_of) == source
            match found := decode(record):
                case FollowingRecord(slots):
                    self._filled |= from_bits(slots) & self._joining
                case _:
                    self.state.follow(found, request.frames, primary_of)
            self._sources[source] = number
        actions = self._replicated(request, source)
        if self.state.num_declared > num_declared:
            # Its own followers may hear of it from nobody else: to clients it is no news here any more.
            actions += self._ship_declarations()
        return actions

    def _copy_slot(self, request: Request, number: int, slot: int, record: bytes) -> list[Action]:
        source = self._source(request)
        if self._is_next(source, number):
            found = decode(record)
            if not isinstance(found, SlotRecord) or self._primary_of[slot] != source:
                raise Refusal(
                    f"slot {slot} is copied by its primary {self._primary_of[slot]}, not by {source}"
                )
            self.state.take_slot(slot, found, request.frames)
            self._filled[slot] |= self._joining[slot]
            self._sources[source] = number
        return self._replicated(request, source)

    def _is_next(self, source: int, number: int) -> bool:
        last = self._sources.get(source, first_number(self.view_number) - 1)
        if number > last + 1:
            raise Refusal(f"server-{source} is at {number}, but {last + 1} never came")
        return number == last + 1

    def _replicated(self, request: Request, source: int) -> list[Action]:
        reply = Reply(request.peer, request.ticket, Replicated(self._sources[source]))
        return [reply, *self._tell_filled()]

    def _source(self, request: Request) -> int:
        name, _ = self._names[request.peer]
        number = name.removeprefix("server-")
        if number == name or not number.isdigit():
            raise Refusal(f"{name} is no server, and only servers replicate")
        return int(number)


def _rank(name: str) -> int | None:
    number = name.removeprefix("worker-")
    return int(number) if number != name and number.isdigit() else None


def _slots_of(view: ServerView, is_held: Callable[[list[int]], bool]) -> Slots:
    return np.array([bool(holders) and is_held(holders) for holders in view.holders], dtype=np.bool_)
