"""Which slot a row belongs to: a fixed hash of (table, key).

Fixed for good: checkpoints, marks and placement are by slot. It shares no
bits with the hashes that find a row or fill it, so the rows of one slot are
spread evenly in a table's index.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.runtime.kernel_cache import INT, inlined, kernel, mixed, vector

assert NUM_SLOTS == 256, "a slot is a byte of the hash"


def slot_of(table: int, keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The slot (uint8) of each key (int64) of this table."""
    slots = np.empty(len(keys), np.uint8)
    _slot_of(table, np.ascontiguousarray(keys, np.int64), slots)
    return slots


@inlined
def slot_of_key(table: int, key: int) -> Any:
    """The same for one key, inside kernels of this file."""
    word = mixed(np.uint64(table) * np.uint64(0xD1342543DE82EF95) + np.uint64(0x2545F4914F6CDD1D))
    return mixed(np.uint64(key) ^ word) >> np.uint64(56)


@kernel((INT, vector(types.int64), vector(types.uint8, written=True)))
def _slot_of(table: int, keys: Any, slots: Any) -> None:
    for i in range(len(keys)):
        slots[i] = slot_of_key(table, keys[i])
