"""The rows of one table on one server, of all its slots together: sums over ranks, reading and dropping by slot.

Single-threaded, no clock, no socket. Which slots are whose is not known here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.embedding.row_table import RowTable
from shoal.errors import ConfigError
from shoal.ps.kernels import add_digests, add_rows, add_squares, first_wrong_key
from shoal.ps.slots import slot_of
from shoal.runtime.transport.messages.client_server import TableSpec

_INT64 = np.iinfo(np.int64)


class Table(RowTable):
    """A table as a server has it.

    One sum may be under way: `accumulate` once per rank, in rank order, then
    `take_sum`. The first contribution is kept by reference until a second
    comes: its memory must stay as it is until `take_sum` or `drop_sum`, and
    with a single rank until what `take_sum` gave is done with.
    """

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        self._sum: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None

    def check_keys(self, keys: np.ndarray[Any, Any]) -> None:
        """Refuse keys that are not strictly increasing, or out of range; nothing else may be called with such."""
        limit = self.spec.num_rows
        low, high = (0, limit - 1) if limit is not None else (int(_INT64.min), int(_INT64.max))
        wrong = first_wrong_key(keys, low, high)
        if wrong >= 0:
            before = f"{keys[wrong - 1]}, " if wrong else ""
            expected = "strictly increasing" + (f" and in 0..{high}" if limit is not None else "")
            raise ConfigError(
                f"the keys for table '{self.spec.name}' must be {expected}, but at place {wrong} of {len(keys)} they are "
                f"{before}{keys[wrong]}. Nothing was changed; send each key once, sorted."
            )

    # ---- the sum of a step ----

    def accumulate(self, keys: np.ndarray[Any, Any], grads: np.ndarray[Any, Any]) -> None:
        """Add one rank's contribution to the sum under way."""
        if self._sum is None:
            self._sum = keys, grads
            return
        before_keys, before = self._sum
        size = len(before_keys) + len(keys)
        all_keys, rows = np.empty(size, np.int64), np.empty((size, self.dim), self.dtype)
        num_keys = add_rows(before_keys, before, keys, grads, all_keys, rows)
        self._sum = all_keys[:num_keys], rows[:num_keys]

    def sum_of_squares(self, out: np.ndarray[Any, Any]) -> None:
        """Add the squares of the sum under way to `out` (float64, one per slot)."""
        if self._sum is not None:
            keys, rows = self._sum
            add_squares(slot_of(self.spec.number, keys), rows, out)

    def take_sum(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Keys, strictly increasing, and rows of the sum under way, which ends; nothing where nobody contributed."""
        taken = self._sum
        self._sum = None
        return taken or (np.empty(0, np.int64), np.empty((0, self.dim), self.dtype))

    def drop_sum(self) -> None:
        """Forget the sum under way."""
        self._sum = None

    # ---- by slot ----

    def read(self, slot: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Keys in increasing order, values and state of a slot: copies."""
        return self.read_rows(np.flatnonzero(self._slots() == slot))

    def drop_slots(self, mask: np.ndarray[Any, Any]) -> None:
        """Drop all rows of the slots for which `mask` (256 bools) is true, and give their memory back."""
        self.drop_rows(np.asarray(mask, bool)[self._slots()])

    def digest(self, slot: int) -> int:
        """A hash of a slot's keys, values and state: equal on every holder of equal rows."""
        return int(self.digests()[slot])

    def digests(self) -> np.ndarray[Any, Any]:
        """The same of all slots (uint64), in one pass."""
        out = np.zeros(NUM_SLOTS, np.uint64)
        words = self._table.array[: self.num_rows].view(np.uint32 if self.dtype.itemsize == 4 else np.uint64)
        add_digests(self._slots(), self._index.keys.array[: self.num_rows], words, out)
        return out

    def _slots(self) -> np.ndarray[Any, Any]:
        return slot_of(self.spec.number, self._index.keys.array[: self.num_rows])
