"""What other servers must still hear from this one, in which order, and what they have answered.

Pure bookkeeping: a link per server that holds, or is to hold, slots whose
primary this server is. A slot on a link is followed (its updates are shipped)
or waits to be copied; a copy and what follows it go over the same link in
order, so nobody ever has to catch up.

In a new view whatever was not answered is said again, under new numbers:
replicas know by their marks what they have. A slot whose primary this server
has just become is copied anew to its other holders: they may have heard more
from the old primary than this one, or less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.ps.server.actions import Frame, Send
from shoal.ps.server.applied_seqs import Slots, no_slots
from shoal.ps.server.records import FollowingRecord, Record, encode, to_bits
from shoal.runtime.transport.messages.client_server import CopySlot, Replicate
from shoal.runtime.transport.messages.server_coordinator import ServerView

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
        """Whether all have answered, and no holder lacks a slot."""
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
        """Who follows in a new view. `was_primary`: slots of which this server was primary in the view just before.

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
