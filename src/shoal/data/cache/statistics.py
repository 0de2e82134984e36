"""Statistics of caches: hit rates by tier and bytes moved."""

from __future__ import annotations

import threading
import weakref
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from shoal.data.cache.tiering import Tier
from shoal.runtime import events


@dataclass(slots=True)
class TierStats:
    """Of one tier since the store was made."""

    num_bytes: int = 0
    """There now."""

    limit_bytes: int | None = None
    num_hits: int = 0
    """Requests that were answered from here, without waiting for a slower place."""

    num_misses: int = 0
    """Requests that a slower tier, or the source, had to answer."""

    bytes_in: int = 0
    bytes_out: int = 0
    """Copied to another tier; what is dropped because it is elsewhere too costs nothing and is not counted."""

    @property
    def hit_rate(self) -> float:
        """Of the requests; 1 where there was none."""
        total = self.num_hits + self.num_misses
        return self.num_hits / total if total else 1.0


@dataclass(slots=True)
class Stats:
    """Of one store."""

    tiers: dict[Tier, TierStats] = field(default_factory=dict)
    num_blocks: int = 0
    num_dirty: int = 0
    num_loads: int = 0
    """How often the source itself was asked."""

    bytes_loaded: int = 0
    num_ahead: int = 0
    """Blocks that were there because they had been read ahead."""

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        listed = {key: value for key, value in asdict(self).items() if key != "tiers"}
        for tier, figures in self.tiers.items():
            listed[tier.name.lower()] = {**asdict(figures), "hit_rate": round(figures.hit_rate, 4)}
        return listed


class _Store(Protocol):
    name: str

    def figures(self) -> dict[str, Any]: ...


_stores: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()


def watch(store: _Store) -> None:
    """Count a store in for as long as it lives."""
    with _lock:
        _stores.add(store)


def tell_figures(**about: Any) -> None:
    """Write the figures of stores and caches down, where there are any: hit rates and bytes moved so far."""
    stores = stats()
    if stores:
        events.emit("memory figures", stores=stores, **about)


def stats() -> list[dict[str, Any]]:
    """Hit rates and bytes moved of every store and cache of this process.

    for store in shoal.memory.stats():
        print(store["name"], store["ram"]["hit_rate"])
    """
    with _lock:
        living = list(_stores)
    return [{"name": store.name, **store.figures()} for store in sorted(living, key=lambda store: store.name)]
