"""Replication of slots: the records a primary ships, the order per replica, and what each has acknowledged.

Pure bookkeeping: a link per server that holds, or is to hold, slots whose
primary this server is. A slot on a link is followed (its updates are shipped)
or waits to be copied; a copy and what follows it go over the same link in
order, so no replica ever has to catch up.

In a new view whatever was not acknowledged is sent again, under new numbers:
replicas deduplicate by their applied seqs. A slot whose primary this server
has just become is copied anew to its other holders: they may have heard more
from the old primary than this one, or less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import numpy as np

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.ps.server.actions import Frame, Send
from shoal.ps.server.applied_seqs import Slots, no_slots
from shoal.runtime.transport.messages.client_server import (
    CopySlot,
    DeclareDense,
    DeclareMode,
    Replicate,
    Settings,
    TableSpec,
)
from shoal.runtime.transport.messages.message import Count
from shoal.runtime.transport.messages.server_coordinator import ServerView

# ---- records -------------------------------------------------------------------------------------


Notes: TypeAlias = list[tuple[int, int]]
"""(rank, anchored_at); the notes themselves are frames."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class MailboxState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a board: (exchange, is it a commit) of its log, and its notes. Frames: results, then notes."""

    log: list[tuple[int, bool]]
    notes: Notes


class LastStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest step that a server committed, so that it can be told again to who asks again."""

    seq: Count
    vector: list[float]
    ranks: list[int]
    applied: bool
    norm: float


class StepRecord(_Record, frozen=True, tag="step"):
    """A step, or a push, that counts now.

    Frames: keys and values per table; a gradient per chunk; the vectors' sum;
    sums of squares by slot; a note per entry of `notes`.
    """

    slots: bytes  # where it counts, a bit per slot
    stream: Count
    seq: Count
    is_step: bool  # all ranks are in it: `seq` is a version; else a push of one stream
    applies: bool  # else it was left out: nothing changes but the marks
    tables: list[Count]
    chunks: list[tuple[int, list[int]]]  # number, parts without gradient
    factor: float
    step: Count
    settings: list[Settings]
    model: Count
    table_settings: dict[int, dict[str, float]]
    ranks: list[int]  # whose contributions are in it
    seqs: list[int]  # and of which of their steps, where that may differ
    applied_norm: float  # of Commit
    exchange: Count
    notes: Notes
    clocks: list[tuple[int, int, dict[int, int]]]
    updates: Count
    done_below: Count


class RowsRecord(_Record, frozen=True, tag="rows"):
    """Rows were set. Frames: keys, values, state."""

    table: Count
    step: Count


class ChunkRecord(_Record, frozen=True, tag="chunk"):
    """A chunk was set. Frames and `state` as in WriteChunk."""

    chunk: Count
    state: list[tuple[int, str, str, list[int]]]


class ClockRecord(_Record, frozen=True, tag="clock"):
    """So many steps were committed, says a checkpoint."""

    updates: Count


class MarksRecord(_Record, frozen=True, tag="marks"):
    """Marks of a checkpoint. Frame: triples."""


class FollowingRecord(_Record, frozen=True, tag="following"):
    """The receiver has these slots and follows their updates, in this view too."""

    slots: bytes


class PostRecord(_Record, frozen=True, tag="post"):
    """An exchange is over (None: only notes came). Frames: its result; a note per entry."""

    exchange: Count | None
    notes: Notes


class DeclareRecord(_Record, frozen=True, tag="declare"):
    """All declarations: the first record on any connection, and after every new one."""

    tables: list[TableSpec]
    dense: list[DeclareDense]
    mode: DeclareMode | None


class SlotRecord(_Record, frozen=True, tag="slot"):
    """All of one slot.

    Frames: keys, values and state per table; elements and state tensors per
    chunk; then, of slot 0, the board's.
    """

    version: Count
    steps: dict[int, Count]  # by counter
    marks: list[tuple[int, int]]
    done_below: Count
    tables: list[Count]
    chunks: list[tuple[int, list[tuple[int, str, str, list[int]]]]]
    square: float
    last: LastStep | None
    board: MailboxState | None
    clocks: list[tuple[int, int, dict[int, int]]]
    updates: Count


Record: TypeAlias = (
    StepRecord
    | RowsRecord
    | ChunkRecord
    | ClockRecord
    | MarksRecord
    | FollowingRecord
    | PostRecord
    | DeclareRecord
    | SlotRecord
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    """As bytes."""
    return _encoder.encode(record)


def decode(record: bytes) -> Record:
    """Inverse of `encode`; msgspec.MsgspecError where it is no record of this version."""
    return _decoder.decode(record)


def to_bits(slots: Slots) -> bytes:
    """A flag per slot as bits."""
    return np.packbits(slots).tobytes()


def from_bits(bits: bytes) -> Slots:
    """Back again."""
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=NUM_SLOTS).astype(np.bool_)


# ---- links ---------------------------------------------------------------------------------------


Written: TypeAlias = tuple[Record, list[Frame]]


@dataclass(frozen=True, slots=True)
class Change:
    """Something that changed in these slots; `write` says what it was, for some of them."""

    slots: Slots
    write: Callable[[Slots], Written]
    to_all: bool = False
    """Also to servers that follow none of its slots."""


@dataclass(frozen=True, slots=True)
class _Unanswered:
    number: int
    change: Change | None
    slot: int  # of a copy
    send: Send


@dataclass(slots=True)
class _Link:
    server: int
    incarnation: int
    followed: Slots = field(default_factory=no_slots)
    owed: list[int] = field(default_factory=list)
    """Slots that a holder must be given before anything in them is acknowledged."""

    to_fill: list[int] = field(default_factory=list)
    """Slots of which it will be a holder."""

    number: int = 0
    answered: int = 0
    owed_number: int = 0
    unanswered: deque[_Unanswered] = field(default_factory=deque)


class Replication:
    """All links of one server."""

    def __init__(self, me: int) -> None:
        self._me, self._view = me, 0
        self._links: dict[int, _Link] = {}
        self._lost: set[int] = set()

    # ---- shipping -------------------------------------------------------------------------------

    def ship(self, change: Change) -> list[Send]:
        """Tell all who follow."""
        return [
            send
            for link in self._links.values()
            for send in [self._ship_to(link, change)]
            if send is not None
        ]

    def need(self) -> dict[int, int]:
        """Everything said so far, by server: what is applied by now is safe once they have answered."""
        return {link.server: link.number for link in self._links.values()}

    def is_met(self, need: dict[int, int]) -> bool:
        """True once all have acknowledged, and no holder lacks a slot."""
        return all(
            not link.owed and link.answered >= max(need.get(server, 0), link.owed_number)
            for server, link in self._links.items()
        )

    def answered(self, server: int, number: int) -> None:
        """It has all up to this number."""
        link = self._links.get(server)
        if link is None:
            return
        link.answered = max(link.answered, min(number, link.number))
        while link.unanswered and link.unanswered[0].number <= link.answered:
            link.unanswered.popleft()

    def lost(self, server: int) -> None:
        """The connection to it is over: nothing more is sent until all that was not answered is sent again."""
        if server in self._links:
            self._lost.add(server)

    def again(self) -> list[Send]:
        """To all who were lost: what was not answered, as it was. They know by its number what they have."""
        lost, self._lost = self._lost, set()
        return [each.send for server in sorted(lost) for each in self._links[server].unanswered]

    @property
    def num_unanswered(self) -> int:
        """Messages to others without an answer."""
        return sum(len(link.unanswered) for link in self._links.values())

    # ---- copying --------------------------------------------------------------------------------

    @property
    def next_copy(self) -> tuple[int, int] | None:
        """(server, slot) to be copied next; holders come first, acknowledgements wait for them."""
        for link in self._links.values():
            if link.owed:
                return link.server, link.owed[0]
        for link in self._links.values():
            if link.to_fill:
                return link.server, link.to_fill[0]
        return None

    def copy(self, server: int, slot: int, written: Written) -> list[Send]:
        """All of a slot goes to a server, which follows from now on."""
        link = self._links[server]
        record, frames = written
        link.number += 1
        if slot in link.owed:
            link.owed.remove(slot)
            link.owed_number = link.number
        else:
            link.to_fill.remove(slot)
        link.followed[slot] = True
        send = Send(server, CopySlot(self._view, link.number, slot, encode(record)), frames)
        link.unanswered.append(_Unanswered(link.number, None, slot, send))
        return [] if server in self._lost else [send]

    # ---- views ----------------------------------------------------------------------------------

    def view(
        self, view: ServerView, *, was_primary: Slots, is_new: bool, trusted: dict[int, Slots] | None = None
    ) -> list[Send]:
        """Links of a new view. `was_primary`: slots of which this server was primary in the view just before.

        `is_new`: it has held nothing so far, and neither have the others: a job's begin.
        `trusted`: by server, slots of which it is known to have all that this one has.
        """
        self._view = view.view
        self._lost.clear()
        old, self._links = self._links, {}
        sends = []
        for server, holds, joins in _others(view, self._me):
            link = _Link(server, view.incarnations.get(server, 0))
            # Numbers of a later view are larger: an answer that comes late answers nothing of this one.
            link.number = link.answered = first_number(view.view) - 1
            before = old.get(server)
            kept = (trusted or {}).get(server, no_slots()).copy()
            if before is not None and before.incarnation == link.incarnation:
                kept |= before.followed & was_primary
                for each in before.unanswered:
                    if each.change is None:
                        kept[each.slot] = False  # nobody knows whether it has the copy: it gets another
            for slot in holds:
                if kept[slot] or is_new:
                    link.followed[slot] = True
                else:
                    link.owed.append(slot)
            for slot in joins:
                if kept[slot]:
                    link.followed[slot] = True
                else:
                    link.to_fill.append(slot)
            self._links[server] = link
            if before is not None:
                sends += [
                    send
                    for each in before.unanswered
                    if each.change is not None
                    for send in [self._ship_to(link, each.change)]
                    if send is not None
                ]
            filled = [slot for slot in joins if kept[slot]]
            if filled:
                sends.append(self._following(link, filled))
        return sends

    def _following(self, link: _Link, filled: list[int]) -> Send:
        slots = no_slots()
        slots[filled] = True
        send = self._ship_to(link, Change(slots, lambda some: (FollowingRecord(to_bits(some)), [])))
        assert send is not None
        return send

    def _ship_to(self, link: _Link, change: Change) -> Send | None:
        slots = change.slots & link.followed
        if not slots.any() and not change.to_all:
            return None
        record, frames = change.write(slots)
        link.number += 1
        send = Send(link.server, Replicate(self._view, link.number, encode(record)), frames)
        link.unanswered.append(_Unanswered(link.number, change, 0, send))
        return None if link.server in self._lost else send


def first_number(view: int) -> int:
    """Of what one server tells another in this view."""
    return (view << 32) + 1


def _others(view: ServerView, me: int) -> list[tuple[int, list[int], list[int]]]:
    """(server, slots it holds, slots it is to hold) of those whose primary is `me`."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for slot, holders in enumerate(view.holders):
        if not holders or holders[0] != me:
            continue
        for server in holders[1:]:
            found.setdefault(server, ([], []))[0].append(slot)
        for server in view.joining.get(slot, []):
            if server != me and server not in holders:
                found.setdefault(server, ([], []))[1].append(slot)
    return [(server, *found[server]) for server in sorted(found)]
