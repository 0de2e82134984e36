"""Tiering of blocks: a state machine that decides which block lies in which tier.

Pure: no bytes, no thread, no clock. `block_store.py` feeds events in, carries
out the actions that come back, and asks again until it gets an answer.
Invariants: no tier has more bytes promised than its limit, and a content that
cannot be loaded again is in at least one tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from shoal.data.cache.eviction import Key, Policy, make_policy
from shoal.errors import ConfigError


class Tier(IntEnum):
    """Where a block lies; from fast to slow."""

    DEVICE = 0
    RAM = 1
    DISK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many bytes of blocks each tier holds at most."""

    device_bytes: int = 0
    """Of the accelerator's memory. On a machine without one the tier is empty, whatever this says."""

    ram_bytes: int
    """Of RAM. What is handed out stays the caller's and is not counted."""

    disk_bytes: int | None = None
    """Of disk: 0 for none, None for as much as the disk takes."""

    def __post_init__(self) -> None:
        for name, value in (("device_bytes", self.device_bytes), ("ram_bytes", self.ram_bytes)):
            if value < 0:
                raise ConfigError(f"{name} must be 0 or more, got {value}")
        if self.disk_bytes is not None and self.disk_bytes < 0:
            raise ConfigError(f"disk_bytes must be 0 or more, or None for no limit, got {self.disk_bytes}")

    def of(self, tier: Tier) -> int | None:
        """Of one tier; None where there is no limit."""
        return (self.device_bytes, self.ram_bytes, self.disk_bytes)[tier]


# ---- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Want:
    """Somebody wants the block in a tier; `ahead`: will want it, soon; `must_stay`: to change it there."""

    key: Key
    tier: Tier
    ahead: bool = False
    must_stay: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """There is a content to keep: what a `LoadBlock` gave, or, `is_new`, something nobody could load again."""

    key: Key
    num_bytes: int
    tier: Tier
    is_new: bool
    must_stay: bool = False


@dataclass(frozen=True, slots=True)
class Changed:
    """The block was written to where it lies in a tier."""

    key: Key
    tier: Tier


@dataclass(frozen=True, slots=True)
class Flush:
    """The block's newest content must reach the slowest tier."""

    key: Key


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody needs the block at the moment."""

    key: Key


@dataclass(frozen=True, slots=True)
class Discard:
    """The block's content is not wanted any more, in any tier."""

    key: Key


@dataclass(frozen=True, slots=True)
class ActionFinished:
    """A slow action was done."""

    action: Slow


@dataclass(frozen=True, slots=True)
class ActionFailed:
    """A slow action could not be done; `source_is_bad`: because what it reads is damaged or gone."""

    action: Slow
    source_is_bad: bool = False


Request: TypeAlias = Want | Offer | Flush | Release | Discard
Event: TypeAlias = Request | Changed | ActionFinished | ActionFailed

# ---- actions -----------------------------------------------------------------------------------------
# Slow ones are reported with Finished or Failed; then the request is made again, until it is answered.


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """Get the block from where it comes from, and offer it."""

    key: Key


@dataclass(frozen=True, slots=True)
class Store:
    """Write what was offered into a tier."""

    key: Key
    tier: Tier
    version: int
    num_bytes: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the block from one tier to another. It stays in the first."""

    key: Key
    source: Tier
    tier: Tier
    version: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Read:
    """Hand out what a tier has, and keep it in no other: there is no room, or it is not worth one."""

    key: Key
    source: Tier
    tier: Tier  # that was asked for
    version: int


@dataclass(frozen=True, slots=True)
class DropCopy:
    """Forget the copy of a version in a tier. At once, and without a report."""

    key: Key
    tier: Tier
    version: int


Slow: TypeAlias = LoadBlock | Store | Move | Read
Action: TypeAlias = Slow | DropCopy

# ---- answers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settled:
    """The block is in the tier asked for; or whatever else was asked has been done."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Somebody else is at it: ask again when anything has changed."""


@dataclass(frozen=True, slots=True)
class Enough:
    """So much was read ahead and not used yet that there is no room for more."""


@dataclass(frozen=True, slots=True)
class NotKept:
    """What was loaded is kept nowhere; it can be loaded again."""


@dataclass(frozen=True, slots=True)
class Full:
    """No tier can take what was offered without losing something. Nothing was changed."""


Answer: TypeAlias = Settled | Wait | Enough | NotKept | Full
Outcome: TypeAlias = Action | Answer


class Copy(NamedTuple):
    """A block's content in one tier."""

    version: int
    num_bytes: int


@dataclass(slots=True)
class BlockState:
    """What is known of one block. All of its copies are its newest content."""

    version: int = 0
    can_load: bool = True
    """Its content is what loading it gives: it was never put, nor changed."""

    copies: dict[Tier, Copy] = field(default_factory=dict)
    busy: Slow | None = None
    """What is being done with it; until that is reported nobody else begins anything."""

    num_holds: int = 0
    """Held blocks stay in the tiers they are in."""

    is_ahead: bool = False
    """Read ahead, and nobody asked for it yet."""


class Tiering:
    """The blocks of a store over its tiers."""

    def __init__(self, limits: Limits, policy: str = "lru") -> None:
        self.blocks: dict[Key, BlockState] = {}
        self.used = dict.fromkeys(Tier, 0)
        """Bytes in each tier, with those under way to it."""
        self._limits = {tier: limits.of(tier) for tier in Tier}
        self._full_at: dict[Tier, int] = {}  # bytes at which a tier took no more, whatever its limit
        self._policies: dict[Tier, Policy] = {
            tier: make_policy(policy, limit_bytes=limits.of(tier)) for tier in Tier
        }

    def handle(self, event: Event) -> list[Outcome]:
        """Apply one event: what must be done, in order. After a Drop or a slow action a request is made again."""
        match event:
            case Want():
                return [self._want(event)]
            case Offer():
                return [self._offer(event)]
            case Flush(key):
                return [self._flush(key)]
            case Release(key):
                return [self._release(key)]
            case Discard(key):
                return self._discard(key)
            case Changed(key, tier):
                return self._changed(key, tier)
            case ActionFinished(action):
                return self._finished(action)
            case ActionFailed(action, source_is_bad):
                return self._failed(action, source_is_bad)

    def hold(self, key: Key) -> None:
        """Keep the block where it is until it is let go."""
        self.blocks[key].num_holds += 1

    def let_go(self, key: Key) -> None:
        """The other end of `hold`."""
        if key in self.blocks:
            self.blocks[key].num_holds -= 1

    def is_dirty(self, key: Key) -> bool:
        """Whether the slowest tier lacks the block's newest content, and nobody could load it again."""
        block = self.blocks[key]
        return not block.can_load and bool(block.copies) and max(block.copies) < self.slowest

    def limit(self, tier: Tier) -> int | None:
        """Bytes that a tier takes; None where only trying can tell."""
        bounds = [bound for bound in (self._limits[tier], self._full_at.get(tier)) if bound is not None]
        return min(bounds, default=None)

    @property
    def fastest(self) -> Tier:
        """Of the tiers that may hold anything."""
        return min((tier for tier in Tier if self._limits[tier] != 0), default=Tier.RAM)

    @property
    def slowest(self) -> Tier:
        """Of the tiers that may hold anything."""
        return max((tier for tier in Tier if self._limits[tier] != 0), default=Tier.RAM)

    # ---- requests ----------------------------------------------------------------------------------

    def _want(self, event: Want) -> Outcome:
        key, tier = event.key, event.tier
        block = self.blocks.get(key)
        if block is None:
            if event.ahead and self._is_enough_ahead(tier, 1):
                return Enough()
            self.blocks[key] = BlockState(busy=LoadBlock(key), is_ahead=event.ahead)
            return LoadBlock(key)
        if tier in block.copies:
            if not event.ahead:
                block.is_ahead = False
                self._policies[tier].used(key)
            return Settled()
        if block.busy is not None:
            return Settled() if event.ahead else Wait()
        source, copy = min(block.copies.items())
        if event.ahead and self._is_enough_ahead(tier, copy.num_bytes):
            return Enough()
        room: Outcome = Full()
        if self._limits[tier] != 0 and (event.must_stay or self._policies[tier].admits(key)):
            room = self._make_room(tier, copy.num_bytes, (key,))
        match room:
            case Settled():
                block.is_ahead = event.ahead
                return self._begin(block, Move(key, source, tier, *copy))
            case Full():
                read = Read(key, source, tier, copy.version)
                return Enough() if event.ahead else self._begin(block, read)
        return room

    def _offer(self, event: Offer) -> Outcome:
        key, num_bytes = event.key, event.num_bytes
        block = self.blocks.get(key)
        if block is not None and block.busy is not None and (event.is_new or block.busy != LoadBlock(key)):
            return Wait()
        if block is not None and block.copies and not event.is_new:
            return Settled()  # somebody put it meanwhile
        for tier in self._tiers_from(event.tier):
            limit = self.limit(tier)
            if limit is not None and num_bytes > limit:
                continue
            if not event.is_new and not event.must_stay and not self._policies[tier].admits(key):
                continue
            room = self._make_room(tier, num_bytes - self._replaced(block, tier), (key,))
            if isinstance(room, Settled):
                block = self.blocks.setdefault(key, BlockState())
                store = Store(key, tier, block.version + 1, num_bytes, event.is_new)
                return self._begin(block, store, replaces=self._replaced(block, tier))
            if not isinstance(room, Full):
                return room
        if event.is_new:
            return Full()
        self._pass_by(key, event.tier)
        self.blocks.pop(key, None)
        return NotKept()

    def _flush(self, key: Key) -> Outcome:
        block = self.blocks.get(key)
        if block is None or not self.is_dirty(key):
            return Settled()
        if block.busy is not None:
            return Wait()
        source, copy = max(block.copies.items())
        room = self._make_room(self.slowest, copy.num_bytes, (key,))
        if isinstance(room, Settled):
            return self._begin(block, Move(key, source, self.slowest, *copy))
        return room

    def _release(self, key: Key) -> Outcome:
        block = self.blocks.get(key)
        if block is None:
            return Settled()
        block.is_ahead = False
        for tier in (Tier.DEVICE, Tier.RAM):
            if tier not in block.copies:
                continue
            if self._policies[tier].keeps_freed:
                self._policies[tier].freed(key, block.copies[tier].num_bytes)
            elif block.busy is not None:
                return Wait()
            elif not block.num_holds:
                step = self._evict(key, tier, ())
                if not isinstance(step, Full):  # else it stays: nothing else has a place for it
                    return step
        return Settled()

    def _discard(self, key: Key) -> list[Outcome]:
        block = self.blocks.get(key)
        if block is None:
            return [Settled()]
        if block.busy is not None:
            return [Wait()]
        drops = self._drop(key, list(block.copies))
        del self.blocks[key]
        return [*drops, Settled()]

    def _changed(self, key: Key, tier: Tier) -> list[Outcome]:
        block = self.blocks[key]
        drops = self._drop(key, [other for other in block.copies if other != tier])
        block.version += 1
        block.copies[tier] = block.copies[tier]._replace(version=block.version)
        block.can_load = False
        return drops

    # ---- room --------------------------------------------------------------------------------------

    def _make_room(self, tier: Tier, num_bytes: int, kept: tuple[Key, ...]) -> Outcome:
        """Ready where there is room for so many bytes more; else the next step towards it, or Full."""
        policy = self._policies[tier]
        # What is marked goes with the next request for memory, all of it, however much that one needs.
        for victim in policy.due():
            if self._may_leave(victim, kept):
                step = self._evict(victim, tier, kept)
                if not isinstance(step, (Full, Wait)):
                    return step
        limit = self.limit(tier)
        if limit is None or self.used[tier] + num_bytes <= limit:
            return Settled()
        if num_bytes > limit:
            return Full()
        # Else blocks that can leave would go for nothing, and come back as soon as others need their place.
        if num_bytes > limit - self._stuck_bytes(tier, kept):
            return Wait() if self._is_changing(tier, kept) else Full()
        for spares_ahead in (
            True,
            False,
        ):  # what will be wanted soon goes last, however long it has been there
            for victim in policy.coldest_first():
                if self._may_leave(victim, kept) and self.blocks[victim].is_ahead != spares_ahead:
                    step = self._evict(victim, tier, kept)
                    if not isinstance(step, Full):
                        return step
        return Wait() if self._is_changing(tier, kept) else Full()

    def _evict(self, key: Key, tier: Tier, kept: tuple[Key, ...]) -> Outcome:
        """The next step on a block's way out of a tier; Full where that would lose its content."""
        block = self.blocks[key]
        if len(block.copies) == 1:
            copy = block.copies[tier]
            for below in self._tiers_from(Tier(tier + 1)) if tier != Tier.DISK else ():
                room = self._make_room(below, copy.num_bytes, (key, *kept))
                if isinstance(room, Settled):
                    return self._begin(block, Move(key, tier, below, *copy))
                if not isinstance(room, Full):
                    return room
            if not block.can_load:
                return Full()
        [drop] = self._drop(key, [tier])
        if not block.copies:
            del self.blocks[key]
        return drop

    def _may_leave(self, victim: Key, kept: tuple[Key, ...]) -> bool:
        block = self.blocks[victim]
        return victim not in kept and block.busy is None and not block.num_holds

    def _stuck_bytes(self, tier: Tier, kept: tuple[Key, ...]) -> int:
        """Bytes of a tier that cannot leave it, at the least: kept, held, or nowhere else and without a place below."""
        below = list(self._tiers_from(Tier(tier + 1))) if tier != Tier.DISK else []
        if any(self.limit(each) is None for each in below):
            return 0  # there is always a place; who is held shows when it is asked to leave
        stuck = only_here = 0
        for key, block in self.blocks.items():
            if tier not in block.copies:
                continue
            if key in kept or block.num_holds:
                stuck += block.copies[tier].num_bytes
            elif block.busy is None and len(block.copies) == 1 and not block.can_load:
                only_here += block.copies[tier].num_bytes
        places = sum((self.limit(each) or 0) - self._stuck_bytes(each, kept) for each in below)
        return stuck + max(0, only_here - max(0, places))

    def _is_changing(self, tier: Tier, kept: tuple[Key, ...]) -> bool:
        """Whether somebody is about to make room here, or to put something in that can then leave."""
        return any(
            block.busy is not None
            and key not in kept
            and (tier in block.copies or getattr(block.busy, "tier", None) == tier)
            for key, block in self.blocks.items()
            if not block.num_holds
        )

    def _is_enough_ahead(self, tier: Tier, num_bytes: int) -> bool:
        limit = self.limit(tier)
        ahead = [
            block.copies[tier].num_bytes
            for block in self.blocks.values()
            if block.is_ahead and tier in block.copies
        ]
        return limit is not None and sum(ahead) + num_bytes > limit // 2

    # ---- what becomes of actions -------------------------------------------------------------------

    def _begin(self, block: BlockState, action: Slow, *, replaces: int = 0) -> Slow:
        block.busy = action
        if isinstance(action, (Move, Store)):
            self.used[action.tier] += action.num_bytes - replaces
        return action

    def _finished(self, action: Slow) -> list[Outcome]:
        if isinstance(action, LoadBlock):
            return []  # it stays busy until what was loaded has been offered
        block = self.blocks[action.key]
        block.busy = None
        if isinstance(action, Read):
            self._policies[action.tier].passed(action.key)
            return []
        key, tier = action.key, action.tier
        drops: list[Outcome] = []
        if isinstance(action, Store):
            if tier != Tier.DISK:
                block.copies.pop(tier, None)  # exchanged, and its bytes counted when that began
            drops = self._drop(key, list(block.copies))
            block.version, block.can_load = action.version, not action.is_new
            self._pass_by(key, min(tier, self.fastest), tier)
        block.copies[tier] = Copy(action.version, action.num_bytes)
        self._policies[tier].used(key)
        if action.version != block.version:
            drops = self._drop(key, [tier])  # written to while it was copied
        return drops

    def _failed(self, action: Slow, source_is_bad: bool) -> list[Outcome]:
        block = self.blocks[action.key]
        block.busy = None
        drops: list[Outcome] = []
        if isinstance(action, (Move, Store)):
            replaced = self._replaced(block, action.tier) if isinstance(action, Store) else 0
            self.used[action.tier] -= action.num_bytes - replaced
            if not source_is_bad:
                self._full_at[action.tier] = self.used[action.tier]
        if source_is_bad and isinstance(action, (Move, Read)):
            drops = self._drop(action.key, [action.source])
        if not block.copies:
            del self.blocks[action.key]
        return drops

    def try_again(self) -> bool:
        """A tier that took no more may do so now; whether there was one."""
        was_full = bool(self._full_at)
        self._full_at.clear()
        return was_full

    def _drop(self, key: Key, tiers: list[Tier]) -> list[Outcome]:
        block, drops = self.blocks[key], []
        for tier in tiers:
            copy = block.copies.pop(tier)
            self.used[tier] -= copy.num_bytes
            self._policies[tier].left(key)
            drops.append(DropCopy(key, tier, copy.version))
        return list(drops)

    def _pass_by(self, key: Key, begin: Tier, end: Tier | None = None) -> None:
        for tier in self._tiers_from(begin):
            if end is None or tier < end:
                self._policies[tier].passed(key)

    def _replaced(self, block: BlockState | None, tier: Tier) -> int:
        """Bytes that a Store takes the place of: in memory at once; on disk the old file stays until the new is whole."""
        if block is None or tier == Tier.DISK or tier not in block.copies:
            return 0
        return block.copies[tier].num_bytes

    def _tiers_from(self, tier: Tier) -> Iterator[Tier]:
        return (each for each in Tier if each >= tier and self._limits[each] != 0)
