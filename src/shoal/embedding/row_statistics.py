"""Statistics of rows, ids that are counted before they get one, and the selection of rows to evict.

Kept in memory beside the index, also if rows are on disk: a sweep reads no row. On the wire and in
checkpoints they are columns behind a row's optimizer state: sightings, and the last one's step (and
second) in two digits each, so that float32 holds them exactly. A row with 0 sightings is deleted.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from shoal.config.row_policy import MOST_SIGHTINGS, RowPolicy
from shoal.embedding.growing_array import GrowingArray
from shoal.embedding.kernels import NUM_SLOTS, slot_of

Array: TypeAlias = np.ndarray[Any, Any]

_DIGIT = 1 << 24


def num_columns(policy: RowPolicy | None) -> int:
    return 0 if policy is None else 3 if policy.ttl_s is None else 5


def columns_of(policy: RowPolicy | None) -> dict[str, slice]:
    """Columns behind the rule's state, by their names in checkpoints."""
    named = {"sightings": slice(0, 1), "last_step": slice(1, 3), "last_s": slice(3, 5)}
    return {name: span for name, span in named.items() if span.stop <= num_columns(policy)}


def as_admitted(policy: RowPolicy, num_rows: int, step: int, now_s: float, dtype: Any) -> Array:
    """Columns of rows about which nothing else is known."""
    sightings = np.full(num_rows, policy.admit_after, np.int64)
    return _columns(policy, sightings, np.full(num_rows, step), np.full(num_rows, int(now_s)), dtype)


def _columns(policy: RowPolicy, sightings: Array, last_step: Array, last_s: Array, dtype: Any) -> Array:
    out = np.empty((len(sightings), num_columns(policy)), dtype)
    out[:, 0] = sightings
    for at, numbers in ((1, last_step), (3, last_s)):
        if at < out.shape[1]:
            out[:, at], out[:, at + 1] = numbers % _DIGIT, numbers // _DIGIT
    return out


class RowStatistics:
    """Sightings, last step, last second and slot of the rows of one table, by number."""

    def __init__(self, policy: RowPolicy, table: int, num_rows: int | None = None) -> None:
        self.policy, self._table = policy, table
        self._sightings = GrowingArray((), np.int64, num_rows)
        self._last_step = GrowingArray((), np.int64, num_rows)
        self._last_s = GrowingArray((), np.int64, num_rows if policy.ttl_s is not None else 1)
        self._slots = GrowingArray((), np.uint8, num_rows)
        self._arrays = [self._sightings, self._last_step, self._slots]
        if policy.ttl_s is not None:
            self._arrays.append(self._last_s)

    def reserve(self, num_rows: int) -> None:
        for each in self._arrays:
            each.reserve(num_rows)

    def move(self, holes: Array, moved: Array, num_left: int) -> None:
        """Rows `moved` become those of the numbers `holes`; what is from `num_left` on is gone."""
        for each in self._arrays:
            each.array[holes] = each.array[moved]
            each.shrink(num_left)

    def slots(self, num_rows: int) -> Array:
        return self._slots.array[:num_rows]

    def sightings(self, rows: Array) -> Array:
        return self._sightings.array[rows]

    def forget(self, rows: Array) -> None:
        self._sightings.array[rows] = 0

    def sighted(self, rows: Array, keys: Array, sightings: Array, step: int, now_s: float) -> None:
        self._sightings.array[rows] = np.minimum(sightings, MOST_SIGHTINGS)
        self._last_step.array[rows] = step
        self._slots.array[rows] = slot_of(self._table, keys)
        if self.policy.ttl_s is not None:
            self._last_s.array[rows] = int(now_s)

    def columns(self, rows: Array, dtype: Any) -> Array:
        seconds = self._last_s.array[rows] if self.policy.ttl_s is not None else rows
        return _columns(self.policy, self._sightings.array[rows], self._last_step.array[rows], seconds, dtype)

    def set(self, rows: Array, keys: Array, columns: Array) -> None:
        """Restore the statistics that `columns` gave."""
        whole = columns.astype(np.int64)
        self._sightings.array[rows] = whole[:, 0]
        self._last_step.array[rows] = whole[:, 1] + whole[:, 2] * _DIGIT
        self._slots.array[rows] = slot_of(self._table, keys)
        if self.policy.ttl_s is not None:
            self._last_s.array[rows] = whole[:, 3] + whole[:, 4] * _DIGIT

    def to_drop(self, keys: Array, slots: Array | None, *, step: int, now_s: float) -> Array:
        """A bool per row: expired, or in a slot beyond its share with a lower score than others.

        `slots`: a bool per slot to check; None: all.
        """
        policy, num_rows = self.policy, len(keys)
        age = step - self._last_step.array[:num_rows]
        slot_of_row = self._slots.array[:num_rows]
        is_looked_at = np.ones(num_rows, np.bool_) if slots is None else slots[slot_of_row]
        is_over = np.zeros(num_rows, np.bool_)
        if policy.ttl_steps is not None:
            is_over |= age > policy.ttl_steps
        if policy.ttl_s is not None:
            is_over |= now_s - self._last_s.array[:num_rows] > policy.ttl_s
        is_over &= is_looked_at
        if policy.max_rows is not None:
            share = -(-policy.max_rows // NUM_SLOTS)
            is_left = is_looked_at & ~is_over
            num_left = np.bincount(slot_of_row[is_left], minlength=NUM_SLOTS)
            of_full_slots = np.flatnonzero(is_left & (num_left > share)[slot_of_row])
            if len(of_full_slots):
                score = np.zeros(len(of_full_slots))
                statistics = {"sightings": self._sightings.array[of_full_slots], "age": age[of_full_slots]}
                for name, weight in sorted(policy.weights.items()):
                    score += weight * statistics[name]
                in_slot = slot_of_row[of_full_slots]
                order = np.lexsort((keys[of_full_slots], score, in_slot))
                in_order = in_slot[order]
                place = np.arange(len(order)) - np.searchsorted(in_order, in_order)
                is_over[of_full_slots[order[place < num_left[in_order] - share]]] = True
        return is_over
