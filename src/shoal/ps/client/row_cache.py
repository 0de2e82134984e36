"""Row cache of a worker: rows that it has pulled, for as many steps as the staleness allows.

Only relaxed strategies have one. A row is kept with the clock at which it was pulled and that of
the slowest worker by then, so its reader knows its staleness; a row that is too old is a miss. A
worker's own updates appear in it only after the next pull: they are as stale there as any other's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.ps.client.server_group import Group
from shoal.ps.client.step import RowsPull
from shoal.runtime import row_kernels
from shoal.runtime.kernel_cache import INT, kernel, mixed, types, vector

WAYS = 8
"""Places in which a row may be: a full set gives up its least recently used one."""


class RowCache:
    """At most so many rows of one table, by sets of WAYS places."""

    def __init__(
        self, num_rows: int, dim: int, dtype: np.dtype[Any], *, max_age: int | None, bound: int | None
    ) -> None:
        """`max_age` in steps since the pull; `bound` of steps ahead of the slowest worker. None: any."""
        num_sets = 1 << max(0, (num_rows // WAYS).bit_length() - 1)
        self._max_age, self._bound = max_age, bound
        self._keys = np.zeros(num_sets * WAYS, np.int64)
        # By place: clocks of this worker when the row was last used and when it was pulled, and the slowest's by then.
        self._used = np.full(num_sets * WAYS, -1, np.int64)
        self._pulled_at, self._slowest = np.zeros_like(self._keys), np.zeros_like(self._keys)
        self._rows = np.zeros((num_sets * WAYS, dim), dtype)

    @property
    def num_places(self) -> int:
        return len(self._keys)

    def look_up(self, keys: NDArray[np.int64], clock: int) -> tuple[NDArray[np.bool_], NDArray[Any], int]:
        """Look keys up: which are here and fresh enough at `clock`, copies of their rows, and the slowest clock among them."""
        places = np.empty(len(keys), np.int32)
        youngest = np.iinfo(np.int64).min
        since = youngest if self._max_age is None else clock - self._max_age + 1
        slowest = youngest if self._bound is None else clock - self._bound
        num_hits = _find(
            keys, self._keys, self._used, self._pulled_at, self._slowest, clock, since, slowest, places
        )
        is_hit = places >= 0
        found = places[is_hit]
        rows = np.empty((num_hits, self._rows.shape[1]), self._rows.dtype)
        row_kernels.take(self._rows, found, rows)
        return is_hit, rows, int(self._slowest[found].min(initial=clock))

    def put(self, keys: NDArray[np.int64], rows: NDArray[Any], *, pulled_at: int, slowest: int) -> None:
        places = np.empty(len(keys), np.int32)
        _place(keys, self._keys, self._used, self._pulled_at, self._slowest, pulled_at, slowest, places)
        row_kernels.put(rows, places, self._rows)

    def clear(self) -> None:
        self._used[:] = -1


class CachedRowsPull(RowsPull):
    """A pull that asks for the rows that are not in the cache."""

    def __init__(
        self,
        cache: RowCache,
        table: int,
        keys: NDArray[np.int64],
        dim: int,
        dtype: np.dtype[Any],
        *,
        clock: int,
        codec: str = "",
        unpushed: int = 0,
    ) -> None:
        super().__init__(table, keys, dim, dtype, clock=clock, codec=codec, unpushed=unpushed)
        self._cache = cache
        self._is_hit, self._found, self._slowest_found = cache.look_up(keys, clock)
        self._wanted = keys[~self._is_hit]
        self.num_hits = len(self._found)

    def send(self, group: Group) -> None:
        if len(self._wanted):
            super().send(group)

    def receive(self, group: Group) -> None:
        whole = np.empty((len(self.keys), self._dim), self._dtype)
        if len(self._wanted):
            super().receive(group)
            row_kernels.put(self.rows, np.flatnonzero(~self._is_hit).astype(np.int32), whole)
            self._cache.put(
                self._wanted, self.rows, pulled_at=self.clock, slowest=self.clock - self.staleness
            )
            self.release()
        row_kernels.put(self._found, np.flatnonzero(self._is_hit).astype(np.int32), whole)
        self.staleness = max(self.staleness, self.clock - self._slowest_found)
        self._rows = whole


_KEYS, _PLACES = vector(types.int64), vector(types.int32, written=True)
_STATE = vector(types.int64, written=True)


@kernel((_KEYS, _KEYS, _STATE, _KEYS, _KEYS, INT, INT, INT, _PLACES))
def _find(
    keys: Any, held: Any, used: Any, pulled: Any, slowest: Any, now: int, since: int, least: int, places: Any
) -> int:
    mask, num_hits = np.uint64(len(held) // 8 - 1), 0
    for i in range(len(keys)):
        first = np.int64(mixed(np.uint64(keys[i])) & mask) * 8
        places[i] = -1
        for at in range(first, first + 8):
            if held[at] == keys[i] and used[at] >= 0:
                if pulled[at] >= since and slowest[at] >= least:
                    used[at] = now
                    places[i] = at
                    num_hits += 1
                break
    return num_hits


@kernel((_KEYS, _STATE, _STATE, _STATE, _STATE, INT, INT, _PLACES))
def _place(
    keys: Any, held: Any, used: Any, pulled: Any, slowest: Any, now: int, slowest_now: int, places: Any
) -> None:
    mask = np.uint64(len(held) // 8 - 1)
    for i in range(len(keys)):
        first = np.int64(mixed(np.uint64(keys[i])) & mask) * 8
        best: Any = first
        for at in range(first, first + 8):
            if held[at] == keys[i] and used[at] >= 0:
                best = at
                break
            if used[at] < used[best]:
                best = at
        held[best], used[best], pulled[best], slowest[best] = keys[i], now, now, slowest_now
        places[i] = best
