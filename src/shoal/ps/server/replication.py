"""Replication of slots: the records a primary ships, what each replica has acknowledged, and the receiving side.

Pure bookkeeping: a link per server that holds, or is to hold, slots whose primary this server is. A
slot on a link is followed (its updates are shipped) or waits to be copied; a copy and the updates
after it go over the same link in order, so no replica ever has to catch up.

In a new view everything unacknowledged is sent again, under new numbers: replicas deduplicate by
their applied seqs. A slot whose primary this server has just become is copied anew to its other
holders: they may have received more from the old primary than this one, or less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.ps.layout import slot_of
from shoal.ps.server.actions import Action, Frame, Send, Tell
from shoal.ps.server.contents import Keys, Refusal
from shoal.ps.server.progress import Slots, no_slots, some_slots
from shoal.runtime import row_kernels
from shoal.runtime.transport.messages import client_server as msg
from shoal.runtime.transport.messages.message import Count
from shoal.runtime.transport.messages.server_coordinator import ServerView, SlotsFilled

if TYPE_CHECKING:
    from shoal.ps.server.state import ServerState

# ---- records -------------------------------------------------------------------------------------


Notes: TypeAlias = list[tuple[int, int]]  # (rank, anchored_at); the notes themselves are frames


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class MailboxState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of a mailbox: its log as (exchange, whether it is a commit), and its notes. Frames: results, then notes."""

    log: list[tuple[int, bool]]
    notes: Notes


class LastStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Newest step that a server committed, kept to answer a repeated request."""

    seq: Count
    vector: list[float]
    ranks: list[int]
    applied: bool
    norm: float


class StepRecord(_Record, frozen=True, tag="step"):
    """A step that counts now.

    Frames: keys and values per table; a gradient per chunk; the vectors' sum;
    sums of squares by slot; a note per entry of `notes`.
    """

    slots: bytes  # where it counts, a bit per slot
    seq: Count
    applies: bool  # else it was left out: nothing changes but the applied seqs
    tables: list[Count]
    chunks: list[tuple[int, list[int]]]  # number, parts without gradient
    factor: float
    step: Count
    settings: list[msg.Settings]
    model: Count
    table_settings: dict[int, dict[str, float]]
    ranks: tuple[int, ...]  # whose contributions are in it
    seqs: tuple[int, ...]  # and of which of their steps, where that may differ
    norm: float  # of Commit
    exchange: Count
    notes: Notes
    whole: list[Count] = []  # tables of whole rows, by piece: keys and rows, behind the chunks' gradients
    whole_after: Count | None = None


class PushesRecord(_Record, frozen=True, tag="pushes"):
    """All that pushes of relaxed strategies changed since the last one of these, as it is now.

    Frames: keys and whole rows per table; elements and state tensors per chunk;
    updates by slot per counter; a note per entry of `notes`.
    """

    slots: bytes  # where they count, a bit per slot
    seqs: list[tuple[int, int, bytes]]  # stream, its last seq, and in which slots
    tables: list[Count]
    chunks: list[tuple[int, list[tuple[int, str, str, list[int]]]]]
    counters: list[Count]
    notes: Notes
    clocks: list[tuple[int, int, dict[int, int]]]
    updates: Count
    done_below: Count


class RowsRecord(_Record, frozen=True, tag="rows"):
    """Rows were set. Frames: keys, values, state."""

    table: Count
    step: Count
    num_evicted: Count = 0


class ChunkRecord(_Record, frozen=True, tag="chunk"):
    """A chunk was set. Frames and `state` as in WriteChunk."""

    chunk: Count
    state: list[tuple[int, str, str, list[int]]]


class AppliedSeqsRecord(_Record, frozen=True, tag="marks"):
    """Applied seqs of a checkpoint. Frame: triples."""


class FollowingRecord(_Record, frozen=True, tag="following"):
    """The receiver has all that this primary has of these slots, and follows their updates, in this view too."""

    slots: bytes


class PostRecord(_Record, frozen=True, tag="post"):
    """An exchange is over (None: only notes came). Frames: its result; a note per entry."""

    exchange: Count | None
    notes: Notes


class DeclareRecord(_Record, frozen=True, tag="declare"):
    """All declarations: the first record on any connection, and after every new one."""

    tables: list[msg.TableSpec]
    dense: list[msg.DeclareDense]
    mode: msg.DeclareMode | None


class SlotRecord(_Record, frozen=True, tag="slot"):
    """All of one slot.

    Frames: keys, values and state per table; elements and state tensors per
    chunk; then, for slot 0, those of the mailbox.
    """

    version: Count
    steps: dict[int, Count]  # by counter
    marks: list[tuple[int, int]]
    done_below: Count
    tables: list[Count]
    chunks: list[tuple[int, list[tuple[int, str, str, list[int]]]]]
    square: float
    last: LastStep | None
    mailbox: MailboxState | None = msgspec.field(name="board")
    clocks: list[tuple[int, int, dict[int, int]]]
    updates: Count
    evicted: dict[int, Count]  # rows that policies dropped, by table


Record: TypeAlias = (
    StepRecord
    | PushesRecord
    | RowsRecord
    | ChunkRecord
    | AppliedSeqsRecord
    | FollowingRecord
    | PostRecord
    | DeclareRecord
    | SlotRecord
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Record).decode


def to_bits(slots: Slots) -> bytes:
    return np.packbits(slots).tobytes()


def from_bits(bits: bytes) -> Slots:
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=NUM_SLOTS).astype(np.bool_)


# ---- links ---------------------------------------------------------------------------------------


Written: TypeAlias = tuple[Record, list[Frame]]
WritePushes: TypeAlias = "Callable[[Pushes, Slots], Written]"


@dataclass(frozen=True, slots=True)
class Change:
    """Something that changed in these slots; `write` says what it was, for some of them."""

    slots: Slots
    write: Callable[[Slots], Written]
    to_all: bool = False  # also to servers that follow none of its slots


@dataclass(slots=True)
class Pushes:
    """Names of pushes that count here, and of what they changed: shipped together, with the values at that time."""

    slots: Slots = field(default_factory=no_slots)
    seqs: dict[tuple[int, bytes], int] = field(default_factory=dict)  # by stream and slots
    keys: dict[int, list[Keys]] = field(default_factory=dict)  # by table
    chunks: set[int] = field(default_factory=set)
    counters: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    notes: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    _merged: dict[int, tuple[Keys, NDArray[np.integer]]] = field(default_factory=dict)

    def merged(self, table: int) -> tuple[Keys, NDArray[np.integer]]:
        """Every key of a table once, in increasing order, and their slots."""
        if table not in self._merged:
            given = self.keys[table]
            keys = given[0] if len(given) == 1 else row_kernels.unique(np.concatenate(given))[0]
            self._merged[table] = keys, slot_of(table, keys)
        return self._merged[table]


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
    # Slots that a holder must receive before anything in them is acknowledged.
    owed: list[int] = field(default_factory=list)
    to_fill: list[int] = field(default_factory=list)  # slots of which it will be a holder
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
        # Pushes that were not shipped yet, and by server the number under which those before them were.
        self._pushes: tuple[Pushes, WritePushes] | None = None
        self._pushes_sent: dict[int, int] = {}

    # ---- shipping -------------------------------------------------------------------------------

    def ship(self, change: Change) -> list[Send]:
        sends = self.ship_pushes()
        return sends + [send for link in self._links.values() for send in self._ship_to(link, change)]

    def pushes(self, write: WritePushes) -> Pushes | None:
        """Pushes to be shipped next, to add one more; None if no server follows."""
        if not self._links:
            return None
        if self._pushes is None:
            self._pushes = Pushes(), write
        return self._pushes[0]

    @property
    def has_pushes(self) -> bool:
        """True if pushes wait to be shipped, and the previous shipment was acknowledged: under load more are batched."""
        return self._pushes is not None and all(
            link.answered >= self._pushes_sent.get(server, 0) for server, link in self._links.items()
        )

    def ship_pushes(self) -> list[Send]:
        change, self._pushes = self._change_of_pushes(), None
        if change is None:
            return []
        sends = [send for link in self._links.values() for send in self._ship_to(link, change)]
        self._pushes_sent = {send.server: self._links[send.server].number for send in sends}
        return sends

    def _change_of_pushes(self) -> Change | None:
        if self._pushes is None:
            return None
        pushes, write = self._pushes
        return Change(pushes.slots, lambda slots: write(pushes, slots))

    def need(self) -> dict[int, int]:
        """Everything shipped so far, by server: present state is safe once they have acknowledged it."""
        waiting = self._pushes[0].slots if self._pushes is not None else no_slots()
        return {
            link.server: link.number + bool((waiting & link.followed).any()) for link in self._links.values()
        }

    def is_met(self, need: dict[int, int]) -> bool:
        """True once all have acknowledged, and no holder lacks a slot."""
        return all(
            not link.owed and link.answered >= max(need.get(server, 0), link.owed_number)
            for server, link in self._links.items()
        )

    def answered(self, server: int, number: int) -> None:
        link = self._links.get(server)
        if link is None:
            return
        link.answered = max(link.answered, min(number, link.number))
        while link.unanswered and link.unanswered[0].number <= link.answered:
            link.unanswered.popleft()

    def lost(self, server: int) -> None:
        """The connection is over: nothing more is sent until everything unacknowledged is sent again."""
        if server in self._links:
            self._lost.add(server)

    def again(self) -> list[Send]:
        """Send unacknowledged records again, unchanged. Receivers deduplicate by number."""
        lost, self._lost = self._lost, set()
        return [each.send for server in sorted(lost) for each in self._links[server].unanswered]

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
        sends = self.ship_pushes()
        link = self._links[server]
        record, frames = written
        link.number += 1
        if slot in link.owed:
            link.owed.remove(slot)
            link.owed_number = link.number
        else:
            link.to_fill.remove(slot)
        link.followed[slot] = True
        send = Send(server, msg.CopySlot(self._view, link.number, slot, encode(record)), frames)
        link.unanswered.append(_Unanswered(link.number, None, slot, send))
        return sends if server in self._lost else [*sends, send]

    # ---- views ----------------------------------------------------------------------------------

    def view(
        self, view: ServerView, *, was_primary: Slots, is_new: bool, trusted: dict[int, Slots] | None = None
    ) -> list[Send]:
        """Links of a new view. `was_primary`: slots of which this server was primary in the view just before.

        `is_new`: neither it nor the others have held anything so far: the beginning of a job.
        `trusted`: by server, slots of which it is known to have everything this one has.
        """
        self._view = view.view
        self._lost.clear()
        old, self._links = self._links, {}
        sends: list[Send] = []
        pushes = self._change_of_pushes()
        for server, holds, joins in _others(view, self._me):
            link = _Link(server, view.incarnations.get(server, 0))
            # Numbers of a later view are larger: a late answer acknowledges nothing of this one.
            link.number = link.answered = first_number(view.view) - 1
            before = old.get(server)
            kept = (trusted or {}).get(server, no_slots()).copy()
            if before is not None and before.incarnation == link.incarnation:
                kept |= before.followed & was_primary
                for each in before.unanswered:
                    if each.change is None:
                        kept[each.slot] = False  # whether it has the copy is unknown: it gets another
            filled = [slot for slot in joins if kept[slot]]
            link.owed = [slot for slot in holds if not kept[slot] and not is_new]
            link.to_fill = [slot for slot in joins if not kept[slot]]
            link.followed = some_slots([*holds, *filled])
            link.followed[link.owed] = False
            self._links[server] = link
            for each in before.unanswered if before is not None else ():
                if each.change is not None:
                    sends += self._ship_to(link, each.change)
            if pushes is not None:
                sends += self._ship_to(link, pushes)
            if link.followed.any():
                following = Change(link.followed.copy(), lambda some: (FollowingRecord(to_bits(some)), []))
                sends += self._ship_to(link, following)
        self._pushes, self._pushes_sent = None, {}
        return sends

    def _ship_to(self, link: _Link, change: Change) -> list[Send]:
        slots = change.slots & link.followed
        if not slots.any() and not change.to_all:
            return []
        record, frames = change.write(slots)
        link.number += 1
        send = Send(link.server, msg.Replicate(self._view, link.number, encode(record)), frames)
        link.unanswered.append(_Unanswered(link.number, change, 0, send))
        return [] if link.server in self._lost else [send]


def first_number(view: int) -> int:
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


# ---- the receiving side --------------------------------------------------------------------------


class Replica:
    """Slots whose primary is another server, and those that are being filled."""

    def __init__(self, number: int) -> None:
        self._number, self._view = number, 0
        self._last: dict[int, int] = {}  # server -> last number applied of it in this view
        self._joining: Slots = no_slots()
        self._filled: Slots = no_slots()
        self._has_told = False
        self.primary_of: list[int] = [-1] * NUM_SLOTS
        self.held: Slots = no_slots()  # slots of which it is a replica
        # Slots with everything their primary had when it said so, and all since.
        self._followed: Slots = no_slots()

    def view(self, view: ServerView, state: ServerState) -> None:
        self._view = view.view
        self._last.clear()
        self.primary_of = [holders[0] if holders else -1 for holders in view.holders]
        holds = np.array([self._number in holders for holders in view.holders], dtype=np.bool_)
        self._joining = no_slots()
        for slot, servers in view.joining.items():
            if self._number in servers and not holds[slot]:
                self._joining[slot] = True
        # It may already have the slots it is to receive; only the primary knows whether they are current.
        self._filled, self._has_told = no_slots(), False
        self.held = holds & (np.array(self.primary_of) != self._number)
        self._followed = no_slots()
        kept = holds | self._joining
        state.drop(state.contents.held & ~kept)
        state.contents.hold(kept)

    def apply(
        self, source: int, number: int, record: bytes, frames: Sequence[Frame], state: ServerState
    ) -> int:
        """Apply one record of a primary; the number up to which all of it is here."""
        if self._is_next(source, number):
            match found := decode(record):
                case FollowingRecord(slots):
                    self._followed |= from_bits(slots) & (np.array(self.primary_of) == source)
                    self._filled |= self._followed & self._joining
                case _:
                    state.follow(found, frames, np.array(self.primary_of) == source)
            self._last[source] = number
        return self._last.get(source, first_number(self._view) - 1)

    def take_slot(
        self, source: int, number: int, slot: int, record: bytes, frames: Sequence[Frame], state: ServerState
    ) -> int:
        """Take all of a slot from its primary; the number up to which all of it is here."""
        if self._is_next(source, number):
            found = decode(record)
            if not isinstance(found, SlotRecord) or self.primary_of[slot] != source:
                raise Refusal(
                    f"slot {slot} is copied by its primary {self.primary_of[slot]}, not by {source}"
                )
            state.take_slot(slot, found, frames)
            self._followed[slot] = True
            self._filled[slot] |= self._joining[slot]
            self._last[source] = number
        return self._last.get(source, first_number(self._view) - 1)

    def has_followed(self, state: ServerState, clock: int) -> bool:
        """True if it has step `clock` in every slot that it is a replica of."""
        return bool((self._followed & (state.applied.version >= clock))[self.held].all())

    def tell_filled(self) -> list[Action]:
        """Tell the coordinator, once per view, when all joining slots are here."""
        if self._has_told or not self._joining.any() or (self._joining & ~self._filled).any():
            return []
        self._has_told = True
        return [Tell(SlotsFilled(self._view, np.flatnonzero(self._joining).tolist()))]

    def _is_next(self, source: int, number: int) -> bool:
        last = self._last.get(source, first_number(self._view) - 1)
        if number > last + 1:
            raise Refusal(f"server-{source} is at {number}, but {last + 1} never came")
        return number == last + 1
