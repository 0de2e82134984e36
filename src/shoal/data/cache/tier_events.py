"""What a store is asked for and what it then has to do: the words between `tiering.py` and `block_store.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from shoal.data.cache.policies import Key
from shoal.data.cache.tier import Tier

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
    """There is a content to keep: what a `Load` gave, or, `is_new`, something nobody could load again."""

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
class Finished:
    """A slow action was done."""

    action: Slow


@dataclass(frozen=True, slots=True)
class Failed:
    """A slow action could not be done; `source_is_bad`: because what it reads is damaged or gone."""

    action: Slow
    source_is_bad: bool = False


Request: TypeAlias = Want | Offer | Flush | Release | Discard
Event: TypeAlias = Request | Changed | Finished | Failed

# ---- actions -----------------------------------------------------------------------------------------
# Slow ones are reported with Finished or Failed; then the request is made again, until it is answered.


@dataclass(frozen=True, slots=True)
class Load:
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
class Drop:
    """Forget the copy of a version in a tier. At once, and without a report."""

    key: Key
    tier: Tier
    version: int


Slow: TypeAlias = Load | Store | Move | Read
Action: TypeAlias = Slow | Drop

# ---- answers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
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


Answer: TypeAlias = Ready | Wait | Enough | NotKept | Full
Outcome: TypeAlias = Action | Answer
