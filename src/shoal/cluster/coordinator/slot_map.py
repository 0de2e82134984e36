"""Slot map: the servers that hold each slot, as functions of the servers that are present.

Pure: no clock, no socket. Nothing here knows the contents of a slot; servers
copy slots and report progress, `server_group.py` asks here what follows.

Placement is weighted rendezvous hashing: every server draws a score for every
slot from (seed, slot, server) alone, and the highest scores hold it. So a
server that leaves moves only what it held, and a server that joins takes only
what it will hold; no other slot moves.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from shoal.errors import ConfigError

NUM_SLOTS = 256
"""Slots of a job. Fixed: checkpoints, streams and marks are kept by slot."""

Holders: TypeAlias = tuple[str, ...]
"""The servers that hold a slot, the primary first."""


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Holders of every slot in one view. Immutable: any change is a new map of a later view.

    One tuple per slot, so a slot has one primary by construction; a slot that
    has lost every holder has an empty one.
    """

    view: int
    holders: tuple[Holders, ...]

    def primary(self, slot: int) -> str | None:
        """Server that answers for the slot; None where all holders are lost."""
        return self.holders[slot][0] if self.holders[slot] else None

    def held_by(self, server: str) -> list[int]:
        return [slot for slot, holders in enumerate(self.holders) if server in holders]

    @property
    def lost(self) -> list[int]:
        """Slots without any holder: only a checkpoint brings them back."""
        return [slot for slot, holders in enumerate(self.holders) if not holders]


def place(
    weights: Mapping[str, float],
    *,
    num_copies: int,
    num_slots: int = NUM_SLOTS,
    seed: int = 0,
    hosts: Mapping[str, int | str] | None = None,
) -> tuple[Holders, ...]:
    """Holders of every slot for these servers (name: bytes they can take).

    With fewer servers than copies every server holds everything. Copies of a
    slot are on different `hosts` (of servers, by name) as far as there are enough.
    """
    if num_copies < 1 or num_slots < 1:
        raise ConfigError(f"num_copies and num_slots must be at least 1, got {num_copies} and {num_slots}")
    wrong = {name: weight for name, weight in weights.items() if not 0 < weight < math.inf}
    if wrong:
        raise ConfigError(f"the weight of a server is a positive number of bytes, got {wrong}")

    def holders(slot: int) -> Holders:
        ranked = sorted(weights, key=lambda name: (-_score(seed, slot, name, weights[name]), name))
        if hosts is None:
            return tuple(ranked[:num_copies])
        first_of_host = list({hosts[name]: name for name in reversed(ranked)}.values())
        apart = [name for name in ranked if name in first_of_host]
        return tuple([*apart, *(name for name in ranked if name not in apart)][:num_copies])

    return tuple(holders(slot) for slot in range(num_slots))


def evenest_seed(
    weights: Mapping[str, float],
    slot_bytes: Sequence[float],
    *,
    num_copies: int,
    seed: int = 0,
    num_tried: int = 32,
    hosts: Mapping[str, int | str] | None = None,
) -> int:
    """The seed from `seed` on whose placement loads the first servers of a job most evenly.

    Hashing alone leaves some servers 10 % above their share. Trying a few seeds once, at launch,
    recovers most of that at no later cost: the seed belongs to the job, so later changes still move
    as little as before.
    """

    def unevenness(candidate: int) -> float:
        placed = place(weights, num_copies=num_copies, num_slots=len(slot_bytes), seed=candidate, hosts=hosts)
        as_primary, in_all = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)
        for holders, num_bytes in zip(placed, slot_bytes, strict=True):
            as_primary[holders[0]] += num_bytes
            for name in holders:
                in_all[name] += num_bytes
        worst = (max(load[name] / weights[name] for name in weights) for load in (as_primary, in_all))
        return sum(worst)

    if not weights:
        return seed
    return min(range(seed, seed + num_tried), key=lambda candidate: (unevenness(candidate), candidate))


def _score(seed: int, slot: int, name: str, weight: float) -> float:
    # Weighted rendezvous: -w / ln(u) makes each server first with a chance in proportion to its weight.
    digest = hashlib.blake2b(f"{seed}/{slot}/{name}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) / 2.0**64
    return -weight / math.log(uniform)


# ---- failover -----------------------------------------------------------------------------------


def fail_over(
    slot_map: SlotMap, *, dead: Iterable[str], marks: Mapping[str, Sequence[int]], view: int
) -> SlotMap:
    """Map of `view` without the dead servers: the replica with the highest mark replaces a lost primary.

    `marks[server][slot]` is the progress of each surviving copy. A living primary stays primary:
    its acknowledged updates are the reference.
    """
    gone = frozenset(dead)

    def survivors(slot: int, holders: Holders) -> Holders:
        if gone.isdisjoint(holders):
            return holders
        left = [name for name in holders if name not in gone]
        if holders[0] in gone and left:
            # Ties go to the earlier holder, so that every coordinator decides the same.
            left.sort(key=lambda name: (-marks[name][slot], holders.index(name)))
        return tuple(left)

    _require_later(slot_map, view)
    return SlotMap(view, tuple(survivors(slot, holders) for slot, holders in enumerate(slot_map.holders)))


# ---- moving a slot ------------------------------------------------------------------------------


class MoveState(StrEnum):
    """Progress of a slot's move to another set of holders."""

    COPYING = "copying"  # new holders copy the slot and follow its updates; none serves from it yet
    READY = "ready"  # all that are new have caught up; the next view may switch
    ABANDONED = "abandoned"  # a holder died on the way; the map never changed


MOVE_EDGES = {
    MoveState.COPYING: {MoveState.READY, MoveState.ABANDONED},
    MoveState.READY: {MoveState.ABANDONED},
    MoveState.ABANDONED: set(),
}


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Move of one slot to another set of holders, in two phases: copy, then switch by a view."""

    slot: int
    before: Holders
    after: Holders
    missing: frozenset[str]
    """New holders that have not caught up yet."""

    state: MoveState

    def caught_up(self, server: str) -> SlotMove:
        if self.state is not MoveState.COPYING or server not in self.missing:
            return self
        missing = self.missing - {server}
        return self._to(self.state if missing else MoveState.READY, missing)

    def lost(self, server: str) -> SlotMove:
        """Record that `server` died. A move that involved it is abandoned; a later plan starts it anew."""
        is_open = self.state in (MoveState.COPYING, MoveState.READY)
        return self._to(MoveState.ABANDONED) if is_open and server in self.before + self.after else self

    def _to(self, state: MoveState, missing: frozenset[str] | None = None) -> SlotMove:
        assert state is self.state or state in MOVE_EDGES[self.state], f"{self.state} to {state}"
        return replace(self, state=state, missing=self.missing if missing is None else missing)


def plan_moves(slot_map: SlotMap, target: Sequence[Holders]) -> list[SlotMove]:
    """Moves that bring the map to `target`, a placement; none for slots that are lost or already there."""
    moves = []
    for slot, (before, after) in enumerate(zip(slot_map.holders, target, strict=True)):
        if before and after and before != after:
            missing = frozenset(after) - frozenset(before)
            moves.append(
                SlotMove(slot, before, after, missing, MoveState.COPYING if missing else MoveState.READY)
            )
    return moves


def switch(slot_map: SlotMap, moves: Iterable[SlotMove], *, view: int) -> SlotMap:
    """The map of `view` with every ready move carried out; moves planned from another map are skipped."""
    _require_later(slot_map, view)
    holders = list(slot_map.holders)
    for move in moves:
        if move.state is MoveState.READY and holders[move.slot] == move.before:
            holders[move.slot] = move.after
    return SlotMap(view, tuple(holders))


def _require_later(slot_map: SlotMap, view: int) -> None:
    assert view > slot_map.view, f"a map of view {view} cannot follow one of view {slot_map.view}"
