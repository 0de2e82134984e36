"""Server group: a state machine over joins, deaths and fills, from which the slots of each server follow.

Pure: no clock, no socket. `server_registry.py` feeds events in and carries out
the actions that come back. Replaying the same events gives the same group: a
restarted coordinator goes on from the events in its journal.

    empty ──all have joined──▶ a view ──a server died, joined, was filled, or the number changed──▶ the next view
      ▲                          │
      └──a slot lost all holders─┘     everything restarts from a checkpoint; so where a step is lost

The placement of slots is a function of the servers there should be
(`slot_map.place`). A dead server's slots fail over to the next holder at once;
its successor joins empty, is filled while it follows updates, and takes its
place back by one further view when it has everything. Scaling up or down works
the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from shoal.cluster.coordinator.journal_entries import ServerFilled, ServerLostStep
from shoal.cluster.coordinator.slot_map import (
    NUM_SLOTS,
    Holders,
    MoveState,
    SlotMap,
    SlotMove,
    evenest_seed,
    fail_over,
    place,
    plan_moves,
    switch,
)
from shoal.runtime.transport.messages.server_coordinator import JoinServer, ServerView
from shoal.runtime.transport.messages.supervisor import ReapedServer, ScaleServers

Event: TypeAlias = JoinServer | ReapedServer | ServerFilled | ServerLostStep | ScaleServers
"""Journal of servers: messages and entries, in order of arrival."""

# ---- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnnounceView:
    """Send the new view to all."""

    view: ServerView


@dataclass(frozen=True, slots=True)
class LoseSlots:
    """No server holds these slots any more, as of one step; `servers` did last. The job restarts."""

    number: int
    view: int
    slots: tuple[int, ...]
    servers: tuple[int, ...]
    rank: int | None = None
    """With servers inside workers: the rank whose part in a step is lost."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Every slot is in its place; servers beyond `num_servers` hold nothing and may leave."""

    view: int
    num_servers: int


@dataclass(frozen=True, slots=True)
class RefuseChange:
    """The event was refused; nothing changed."""

    reason: str


Action: TypeAlias = AnnounceView | LoseSlots | Settle | RefuseChange


MAX_AHEAD = 100
"""Incarnations of a server that may have died before the coordinator received word of any."""


class ServerGroup:
    """Servers of one job.

    `num_copies` counts every copy of a slot, the primary included. With fewer servers present a
    slot has fewer copies, and is refilled later.
    """

    def __init__(
        self, *, num_servers: int, num_copies: int, max_servers: int, hosts: tuple[int, ...] = ()
    ) -> None:
        """`hosts` are the homes of the servers by number, where there are several hosts: copies of a
        slot go to different ones.
        """
        self._hosts = hosts
        self._addresses: dict[int, str] = {}  # of servers reachable from other hosts
        self.num_servers, self.num_copies, self.max_servers = num_servers, num_copies, max_servers
        self.members: dict[int, int] = {}  # number -> incarnation, of servers that live and have joined
        self.view = 0
        self.num_losses = 0
        self.newest: ServerView | None = None  # None before the first, and after a loss
        self._fenced_below: dict[int, int] = {}  # number -> incarnation
        self._map = SlotMap(0, ())
        self._moves: dict[int, SlotMove] = {}  # by slot: moves under way in this view
        self.is_settled = False  # every slot is where it belongs

    @property
    def missing(self) -> list[int]:
        """Servers that should be in the group and are not."""
        return [number for number in range(self.num_servers) if number not in self.members]

    @property
    def num_moving(self) -> int:
        return len(self._moves)

    def is_fenced(self, number: int, incarnation: int) -> bool:
        return incarnation < self._fenced_below.get(number, 0)

    def expected(self, number: int) -> int:
        """Incarnation that is present, or that will join next."""
        return max(self.members.get(number, 0), self._fenced_below.get(number, 0))

    def handle(self, event: Event) -> list[Action]:
        """Apply one event; return what must now be done, in order."""
        match event:
            case JoinServer(number, incarnation, _, address):
                if address and not self.is_fenced(number, incarnation):
                    self._addresses[number] = address
                return self._join(number, incarnation)
            case ReapedServer(number, incarnation):
                return self._die(number, incarnation)
            case ServerFilled():
                return self._fill(event)
            case ServerLostStep():
                return self._lose_step(event)
            case ScaleServers(num_servers):
                return self._scale(num_servers)

    # ---- membership -----------------------------------------------------------------------------

    def _join(self, number: int, incarnation: int) -> list[Action]:
        if number >= self.max_servers:
            return [RefuseChange(f"there is no server {number} among at most {self.max_servers}")]
        if self.is_fenced(number, incarnation) or incarnation < self.members.get(number, 0):
            return [
                RefuseChange(
                    f"server {number} was replaced: incarnation {self.expected(number)} is expected, this is {incarnation}"
                )
            ]
        if incarnation > self.expected(number) + MAX_AHEAD:
            return [
                RefuseChange(
                    f"server {number} says it is incarnation {incarnation}, where {self.expected(number)} is expected"
                )
            ]
        if self.members.get(number) == incarnation:
            # On a new connection. Its fill reports on the old one may be lost, so it is asked again.
            if any(_name(number) in move.missing for move in self._moves.values()):
                return self._new_view(self._map.holders, always=True)
            return []
        # It may join before its predecessor's death is reported.
        lost = self._die(number, incarnation - 1) if number in self.members else []
        self.members[number] = incarnation
        if self.newest is None:
            return lost if self.missing else [*lost, *self._form()]
        return [*lost, *self._go_on(self._map)]

    def _die(self, number: int, incarnation: int) -> list[Action]:
        if self.is_fenced(number, incarnation):
            return []
        self._fenced_below[number] = incarnation + 1
        if self.members.get(number, incarnation + 1) > incarnation:
            return []
        del self.members[number]
        if self.newest is None:
            return []
        name = _name(number)
        survivors = fail_over(
            self._map,
            dead=[name],
            marks={_name(each): _NO_MARKS for each in self.members},
            view=self.view + 1,
        )
        if survivors.lost:
            return [self._lose(survivors.lost)]
        # The first replica in holder order takes over. All have every acknowledged update, but another may
        # have more unacknowledged ones: it is refilled from the new primary.
        holders = (
            left[:1] if before[0] == name else left
            for before, left in zip(self._map.holders, survivors.holders, strict=True)
        )
        return self._go_on(SlotMap(survivors.view, tuple(holders)))

    def _lose_step(self, lost: ServerLostStep) -> list[Action]:
        is_in = self.members.get(lost.number) == lost.incarnation
        if self.newest is None or not is_in or lost.view != self.view:
            return []  # the request is repeated in the next view, which may contain it
        return [self._lose(range(NUM_SLOTS), lost.rank)]

    def _lose(self, slots: Iterable[int], rank: int | None = None) -> LoseSlots:
        holders = {number for slot in slots for number in map(_number, self._map.holders[slot])}
        self.num_losses += 1
        # Slots that survive are useless without these: they are newer than any checkpoint.
        for number, incarnation in self.members.items():
            self._fenced_below[number] = incarnation + 1
        self.members.clear()
        self._moves.clear()
        self.newest = None
        return LoseSlots(self.num_losses, self.view, tuple(slots), tuple(sorted(holders)), rank)

    # ---- placement of slots ---------------------------------------------------------------------

    def _form(self) -> list[Action]:
        wanted = tuple(range(self.num_servers))
        self._map = SlotMap(self.view, _placed(wanted, self.num_copies, self._seed, self._hosts_now))
        self._moves.clear()
        return [*self._new_view(self._map.holders), *self._settle()]

    @functools.cached_property
    def _seed(self) -> int:
        # Seed of the group as launched, so that later changes move as few slots as possible.
        return _evenest_seed(self.num_servers, self.num_copies, self._hosts)

    @property
    def _hosts_now(self) -> tuple[int | str, ...]:
        """Host of each server: that of its address, which may differ from its home; its home until it has joined."""
        return tuple(
            self._addresses[number].rpartition(":")[0] if number in self._addresses else home
            for number, home in enumerate(self._hosts)
        )

    def _go_on(self, there: SlotMap) -> list[Action]:
        """Plan missing moves, carry out those that are ready, and announce the view if anything changed."""
        self._plan(there)
        # All ready moves in one view: every view costs each worker a request.
        if self._is_ready:
            there = switch(SlotMap(self.view, there.holders), self._moves.values(), view=self.view + 1)
            self._plan(there)
        return [*self._new_view(there.holders), *self._settle()]

    def _plan(self, there: SlotMap) -> None:
        """Plan the moves to the placement. Moves under way that are still right keep their progress."""
        placed = _placed(tuple(range(self.num_servers)), self.num_copies, self._seed, self._hosts_now)
        target = [self._belongs(*each) for each in zip(placed, there.holders, strict=True)]
        planned = {move.slot: move for move in plan_moves(there, target)}
        for slot, move in planned.items():
            before = self._moves.get(slot)
            if before is not None and (before.before, before.after) == (move.before, move.after):
                planned[slot] = before
        self._moves = planned

    @property
    def _is_ready(self) -> bool:
        return bool(self._moves) and all(move.state is MoveState.READY for move in self._moves.values())

    def _belongs(self, placed: Holders, before: Holders) -> Holders:
        """Holders of a slot among the present servers; a server that is expected back keeps its place."""
        after = [name for name in placed if _number(name) in self.members]
        # The old holders keep their copies until all new holders have theirs.
        after += [name for name in before if name not in after][: max(0, self._num_wanted - len(after))]
        return tuple(after)

    @property
    def _num_wanted(self) -> int:
        return min(self.num_copies, self.num_servers)

    def _fill(self, filled: ServerFilled) -> list[Action]:
        if self.newest is None or self.members.get(filled.number) != filled.incarnation:
            return []
        if filled.view != self.view:
            return []  # updates may have bypassed it since: it is refilled, and reports again
        name = _name(filled.number)
        for slot in filled.slots:
            if slot in self._moves:
                self._moves[slot] = self._moves[slot].caught_up(name)
        return self._go_on(self._map) if self._is_ready else []

    def _scale(self, num_servers: int) -> list[Action]:
        if num_servers == self.num_servers:
            return [RefuseChange(f"the group has {num_servers} servers already")]
        if not max(1, self.num_copies) <= num_servers <= self.max_servers:
            return [
                RefuseChange(
                    f"{num_servers} servers cannot be: with {self.num_copies} copies of every slot (--replicas) this job "
                    f"can have {self.num_copies} to {self.max_servers}"
                )
            ]
        if self.newest is None:
            return [RefuseChange("the servers have not all joined yet; try again in a moment")]
        _ = self._seed  # compute it for the group as launched, before the number changes
        self.num_servers, self.is_settled = num_servers, False
        return self._go_on(self._map)

    # ---- announcements --------------------------------------------------------------------------

    def _new_view(self, holders: tuple[Holders, ...], *, always: bool = False) -> list[Action]:
        said = [[_number(name) for name in names] for names in holders]
        joining = {
            slot: [_number(name) for name in move.after if name not in move.before]
            for slot, move in sorted(self._moves.items())
            if set(move.after) - set(move.before)
        }
        incarnations = dict(sorted(self.members.items()))
        addresses = {number: self._addresses[number] for number in incarnations if number in self._addresses}
        now = ServerView(self.view, said, incarnations, joining, addresses)
        if now == self.newest and not always:
            return []
        self.view += 1
        self._map = SlotMap(self.view, holders)
        # A replica that is being filled starts again in every view: only the primary knows which rows are
        # current.
        self._moves = {}
        self._plan(self._map)
        self.newest = ServerView(self.view, said, incarnations, joining, addresses)
        return [AnnounceView(self.newest)]

    def _settle(self) -> list[Action]:
        was_settled, self.is_settled = self.is_settled, not self._moves and not self.missing
        if self.is_settled and not was_settled:
            return [Settle(self.view, self.num_servers)]
        return []


_NO_MARKS = (0,) * NUM_SLOTS


@functools.lru_cache(maxsize=64)
def _evenest_seed(num_servers: int, num_copies: int, hosts: tuple[int, ...]) -> int:
    if num_servers == 1:
        return 0
    weights = {_name(number): 1.0 for number in range(num_servers)}
    return evenest_seed(weights, [1.0] * NUM_SLOTS, num_copies=num_copies, hosts=_by_name(hosts))


@functools.lru_cache(maxsize=64)
def _placed(
    numbers: tuple[int, ...], num_copies: int, seed: int, hosts: tuple[int | str, ...]
) -> tuple[Holders, ...]:
    weights = {_name(number): 1.0 for number in numbers}
    return place(weights, num_copies=num_copies, seed=seed, hosts=_by_name(hosts))


def _by_name(hosts: tuple[int | str, ...]) -> dict[str, int | str] | None:
    return {_name(number): host for number, host in enumerate(hosts)} or None


def _name(number: int) -> str:
    return f"server-{number}"


def _number(name: str) -> int:
    return int(name.removeprefix("server-"))
