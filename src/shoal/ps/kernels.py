"""Numba loops of the parameter server over keys and rows: the slot hash, partition, sums, squares, digests.

A row's slot is a fixed hash of (table, key), fixed for good: checkpoints,
deduplication and placement are by slot. It shares no bits with the hashes
that find a row or fill it, so the rows of one slot are spread evenly in a
table's index. Ids of a batch are turned into keys in embedding/kernels.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.runtime.kernel_cache import INT, floating_kernel, inlined, kernel, matrix, mixed, vector

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


# ---- loops over keys and rows --------------------------------------------------------------------


def partition(
    keys: np.ndarray[Any, Any], owner_of_slot: np.ndarray[Any, Any], table: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The keys' places (int32) grouped by the server that owns their slot, and where each server's group begins.

    Server s gets keys[order[starts[s]:starts[s + 1]]]: increasing where `keys` is. `starts` has one entry more than
    the highest owner plus one.
    """
    owners = np.ascontiguousarray(owner_of_slot, np.int64)
    starts = np.zeros(int(owners.max()) + 2, np.int64)
    order = np.empty(len(keys), np.int32)
    _partition(slot_of(table, keys), owners, starts, order)
    return order, starts


@kernel(
    (
        vector(types.uint8), vector(types.int64), vector(types.int64, written=True), vector(types.int32, written=True)
    )
)  # fmt: skip
def _partition(slots: Any, owners: Any, starts: Any, order: Any) -> None:
    for i in range(len(slots)):
        starts[owners[slots[i]] + 1] += 1
    for server in range(1, len(starts)):
        starts[server] += starts[server - 1]
    at = starts.copy()
    for i in range(len(slots)):
        server = owners[slots[i]]
        order[at[server]] = i
        at[server] += 1


@kernel((vector(types.int64), INT, INT))
def first_wrong_key(keys: Any, low: int, high: int) -> int:
    """The first place where keys are not strictly increasing or not in low..high (both included); -1 where all are."""
    for i in range(len(keys)):
        if keys[i] < low or keys[i] > high or (i > 0 and keys[i] <= keys[i - 1]):
            return i
    return -1


@floating_kernel(
    lambda dtype: (
        vector(types.int64), matrix(dtype), vector(types.int64), matrix(dtype),
        vector(types.int64, written=True), matrix(dtype, written=True),
    )
)  # fmt: skip
def add_rows(keys_a: Any, rows_a: Any, keys_b: Any, rows_b: Any, keys: Any, rows: Any) -> int:
    """Merge two increasing runs of keys, adding b's row to a's where both have it; how many there are."""
    a, b, num_keys, dim = 0, 0, 0, rows.shape[1]
    while a < len(keys_a) or b < len(keys_b):
        if b == len(keys_b) or (a < len(keys_a) and keys_a[a] < keys_b[b]):
            keys[num_keys] = keys_a[a]
            for d in range(dim):
                rows[num_keys, d] = rows_a[a, d]
            a += 1
        elif a == len(keys_a) or keys_b[b] < keys_a[a]:
            keys[num_keys] = keys_b[b]
            for d in range(dim):
                rows[num_keys, d] = rows_b[b, d]
            b += 1
        else:
            keys[num_keys] = keys_a[a]
            for d in range(dim):
                rows[num_keys, d] = rows_a[a, d] + rows_b[b, d]
            a += 1
            b += 1
        num_keys += 1
    return num_keys


@floating_kernel(lambda dtype: (vector(types.uint8), matrix(dtype), vector(types.float64, written=True)))
def add_squares(slots: Any, rows: Any, out: Any) -> None:
    """Add the square of every number to its slot's entry of `out`, row after row."""
    for i in range(len(slots)):
        total = 0.0
        for d in range(rows.shape[1]):
            value = np.float64(rows[i, d])
            total += value * value
        out[slots[i]] += total


@kernel(
    (vector(types.uint8), vector(types.int64), matrix(types.uint32), vector(types.uint64, written=True)),
    (vector(types.uint8), vector(types.int64), matrix(types.uint64), vector(types.uint64, written=True)),
)
def add_digests(slots: Any, keys: Any, words: Any, out: Any) -> None:
    """Add a hash of every row (its key and all its bits) to its slot's entry of `out`; the order of rows is no matter."""
    for i in range(len(slots)):
        state = mixed(np.uint64(keys[i]) + np.uint64(0x9E3779B97F4A7C15))
        for d in range(words.shape[1]):
            state = mixed(state + np.uint64(words[i, d]) + np.uint64(0x9E3779B97F4A7C15))
        out[slots[i]] += state
