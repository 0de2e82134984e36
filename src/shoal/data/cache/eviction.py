"""Eviction policies: the order in which blocks leave a tier when room is needed.

A policy sees keys come, being used and go, and lists them from cold to hot. It
moves nothing and knows no sizes but of freed blocks. One object per tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterator

from shoal.errors import ConfigError

Key = Hashable


class Policy(ABC):
    """The order of eviction in one tier. By default every block is admitted, and a freed one leaves at once."""

    keeps_freed = False
    """A block that nobody needs stays where it is until its memory is wanted."""

    @abstractmethod
    def used(self, key: Key) -> None:
        """The block came into the tier, or was asked for while there."""

    @abstractmethod
    def left(self, key: Key) -> None:
        """The block is not in the tier any more."""

    @abstractmethod
    def coldest_first(self) -> Iterator[Key]:
        """The tier's blocks, those to be evicted first in front."""

    def freed(self, key: Key, num_bytes: int) -> None:  # noqa: B027  most policies note nothing
        """Whoever used the block does not need it any more."""

    def admits(self, key: Key) -> bool:
        """Is the block worth the place of the coldest one there?"""
        return True

    def passed(self, key: Key) -> None:  # noqa: B027
        """The block was asked for and given from elsewhere: it was not admitted, or there was no room."""

    def due(self) -> list[Key]:
        """Blocks that the next request for memory releases, all of them at once."""
        return []


class LeastRecentlyUsed(Policy):
    """What was not used for longest goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def used(self, key: Key) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def left(self, key: Key) -> None:
        self._order.pop(key, None)

    def coldest_first(self) -> Iterator[Key]:
        return iter(self._order)


class LeastFrequentlyUsed(Policy):
    """What was used least often since it came goes first; of equals, what was not used for longest.

    Counts are halved now and then, so that a block that was hot long ago is
    not kept for ever.
    """

    _FORGETS = True

    def __init__(self) -> None:
        self._counts: dict[Key, int] = {}
        self._buckets: dict[int, OrderedDict[Key, None]] = {}
        self._num_uses = 0

    def used(self, key: Key) -> None:
        count = self._counts.get(key, 0)
        self._take_out(key, count)
        self._put(key, count + 1)
        self._num_uses += 1
        if self._FORGETS and self._num_uses > 16 * len(self._counts) + 64:
            self._age()

    def left(self, key: Key) -> None:
        """Its count is forgotten."""
        self._take_out(key, self._counts.pop(key, 0))

    def coldest_first(self) -> Iterator[Key]:
        for count in sorted(self._buckets):
            yield from self._buckets[count]

    def _put(self, key: Key, count: int) -> None:
        self._counts[key] = count
        self._buckets.setdefault(count, OrderedDict())[key] = None

    def _take_out(self, key: Key, count: int) -> None:
        bucket = self._buckets.get(count)
        if bucket is not None and key in bucket:
            del bucket[key]
            if not bucket:
                del self._buckets[count]

    def _age(self) -> None:
        cold_to_hot = list(self.coldest_first())
        counts, self._buckets, self._num_uses = self._counts, {}, 0
        for key in cold_to_hot:
            self._put(key, counts[key] // 2)


class AccessCount(LeastFrequentlyUsed):
    """What was asked for least often in all its life goes first, and a block used less often than that is not let in.

    Counts outlive a stay in the tier and are never halved: for data whose hot
    part stays the same, such as the rows of frequent ids. A scan passes by.
    """

    _FORGETS = False

    def __init__(self) -> None:
        super().__init__()
        self._outside: dict[Key, int] = {}

    def used(self, key: Key) -> None:
        """Counted on top of what it had when it left."""
        if key not in self._counts:
            self._counts[key] = self._outside.pop(key, 0)
        super().used(key)

    def left(self, key: Key) -> None:
        """Its count is kept for when it comes again."""
        if key in self._counts:
            self._outside[key] = self._counts[key]
        super().left(key)

    def admits(self, key: Key) -> bool:
        """Only if it was asked for at least as often as the coldest one there, this time included."""
        coldest = next(self.coldest_first(), None)
        return coldest is None or self._outside.get(key, 0) + 1 >= self._counts[coldest]

    def passed(self, key: Key) -> None:
        """Counted all the same."""
        self._outside[key] = self._outside.get(key, 0) + 1


class DelayedRelease(LeastRecentlyUsed):
    """Freed blocks stay usable. When they pass a threshold the coldest of them are marked, and the next request for
    memory releases the marked.

    So freeing costs nothing, a block that is needed again soon is still
    there, and memory comes back in few large pieces. Where the marked do not
    make room enough, freed blocks go before those in use.
    """

    keeps_freed = True

    def __init__(self, threshold_bytes: int) -> None:
        super().__init__()
        self._threshold_bytes = threshold_bytes
        self._freed: dict[Key, int] = {}
        self._freed_bytes = 0
        self._marked: dict[Key, None] = {}

    def used(self, key: Key) -> None:
        """In use again, if it was freed."""
        super().used(key)
        self._forget(key)

    def left(self, key: Key) -> None:
        super().left(key)
        self._forget(key)

    def freed(self, key: Key, num_bytes: int) -> None:
        """Kept. When too much of it is, a sweep marks the coldest, until half of the threshold is left."""
        if key not in self._order or key in self._marked:
            return
        self._freed_bytes += num_bytes - self._freed.get(key, 0)
        self._freed[key] = num_bytes
        if self._freed_bytes > self._threshold_bytes:
            self._sweep()

    def coldest_first(self) -> Iterator[Key]:
        """Marked, then freed, then the rest; each from old to new."""
        yield from list(self._marked)
        yield from [key for key in self._order if key in self._freed]
        yield from [key for key in self._order if key not in self._freed and key not in self._marked]

    def due(self) -> list[Key]:
        return list(self._marked)

    def _forget(self, key: Key) -> None:
        self._freed_bytes -= self._freed.pop(key, 0)
        self._marked.pop(key, None)

    def _sweep(self) -> None:
        for key in [key for key in self._order if key in self._freed]:
            if self._freed_bytes <= self._threshold_bytes // 2:
                break
            self._forget(key)
            self._marked[key] = None


POLICIES = ("lru", "lfu", "count", "delayed")
"""The names that `BlockStore(policy=)` takes."""


def make_policy(name: str, *, limit_bytes: int | None) -> Policy:
    """The policy of one tier, by its name."""
    if name == "lru":
        return LeastRecentlyUsed()
    if name == "lfu":
        return LeastFrequentlyUsed()
    if name == "count":
        return AccessCount()
    if name == "delayed":
        return DelayedRelease(threshold_bytes=(1 << 62) if limit_bytes is None else limit_bytes // 4)
    raise ConfigError(f"there is no policy '{name}' for memory; there are: {', '.join(POLICIES)}")
