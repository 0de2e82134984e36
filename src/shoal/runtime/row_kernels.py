"""Numba loops over rows named by ids: unique ids, gradients summed per id, and lists of several ranks merged.

The order of every sum is that of the batch, or of the ranks. Numpy only: used
by embeddings, and by the exchange of sparse gradients.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from shoal.runtime.kernel_cache import (
    INT,
    ask_ahead,
    floating_kernel,
    inlined,
    kernel,
    matrix,
    mixed,
    types,
    vector,
)

KERNELS = __name__
"""The module of these loops, as `kernel_cache.is_compiled` takes it."""

_RADIX_BITS = 11
_MAX_SCRATCH = 1 << 20


def unique(ids: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The distinct ids (int64) in increasing order, and for every id its place among them (int32).

    The flattened `ids` is keys[inverse].
    """
    ids = np.ascontiguousarray(ids, np.int64).reshape(-1)
    assert len(ids) < 2**31
    keys, inverse = np.empty(len(ids), np.int64), np.empty(len(ids), np.int32)
    return keys[: _unique(ids, _slots_for(len(ids)), keys, inverse)], inverse


class _Scratch(threading.local):
    """Memory that is warm in the cache is half the speed of deduplicating; one per thread."""

    slots = np.zeros(0, np.int32)


_scratch = _Scratch()


def _slots_for(num_ids: int) -> np.ndarray[Any, Any]:
    size = 1 << max(4, (2 * num_ids - 1).bit_length())
    if size > _MAX_SCRATCH:
        return np.zeros(size, np.int32)
    if len(_scratch.slots) < size:
        _scratch.slots = np.zeros(size, np.int32)
    return _scratch.slots[:size]


_INT32S = vector(types.int32, written=True)


@kernel((vector(types.int64), _INT32S, vector(types.int64, written=True), _INT32S))
def _unique(ids: Any, slots: Any, keys: Any, inverse: Any) -> int:
    # `slots` is zeros and becomes zeros again: 1 + the place of the id among those found so far.
    num_ids = len(ids)
    is_increasing = True
    for i in range(1, num_ids):
        if ids[i] <= ids[i - 1]:
            is_increasing = False
            break
    if is_increasing:
        for i in range(num_ids):
            keys[i] = ids[i]
            inverse[i] = i
        return num_ids
    mask = len(slots) - 1
    found = np.empty(num_ids, np.int64)
    num_keys = 0
    for i in range(num_ids):
        key = ids[i]
        at = np.int64(mixed(np.uint64(key)) & np.uint64(mask))
        while True:
            place = slots[at]
            if place == 0:
                found[num_keys] = key
                num_keys += 1
                slots[at] = num_keys
                inverse[i] = num_keys - 1
                break
            if found[place - 1] == key:
                inverse[i] = place - 1
                break
            at = (at + 1) & mask
    if num_keys * 8 > len(slots):
        slots[:] = 0
    else:
        for i in range(num_keys):
            at = np.int64(mixed(np.uint64(found[i])) & np.uint64(mask))
            while (
                slots[at] != 0
            ):  # a key that passed a slot has cleared it, or will: all of them are found keys
                slots[at] = 0
                at = (at + 1) & mask
    rank = _sort(found[:num_keys], keys)
    for i in range(num_ids):
        inverse[i] = rank[inverse[i]]
    return num_keys


@inlined
def _sort(found: Any, keys: Any) -> Any:
    """Write `found` to `keys` in increasing order; the rank of each. By its digits, the lowest first."""
    num_keys = len(found)
    low, high = found[0], found[0]
    for i in range(num_keys):
        low, high = min(low, found[i]), max(high, found[i])
    widest = np.uint64(high) - np.uint64(low)  # wraps to the right width
    order, other = np.empty(num_keys, np.int32), np.empty(num_keys, np.int32)
    digits, other_digits = np.empty(num_keys, np.uint64), np.empty(num_keys, np.uint64)
    for i in range(num_keys):
        order[i] = i
        digits[i] = np.uint64(found[i]) - np.uint64(low)
    starts = np.empty(1 << _RADIX_BITS, np.int64)
    shift, digit_mask = np.uint64(0), np.uint64((1 << _RADIX_BITS) - 1)
    while shift < 64 and (widest >> shift) != 0:
        starts[:] = 0
        for i in range(num_keys):
            starts[np.int64((digits[i] >> shift) & digit_mask)] += 1
        total = 0
        for value in range(1 << _RADIX_BITS):
            total, starts[value] = total + starts[value], total
        for i in range(num_keys):
            digit = np.int64((digits[i] >> shift) & digit_mask)
            at = starts[digit]
            starts[digit] = at + 1
            other[at] = order[i]
            other_digits[at] = digits[i]
        order, other = other, order
        digits, other_digits = other_digits, digits
        shift += np.uint64(_RADIX_BITS)
    for i in range(num_keys):
        other[order[i]] = i
        keys[i] = found[order[i]]
    return other


@floating_kernel(lambda dtype: (matrix(dtype), vector(types.int32), matrix(dtype, written=True)))
def sum_back(grad: Any, inverse: Any, out: Any) -> None:
    """Write to out[k] the sum of all grad[i] with inverse[i] == k, in the order of i; zeros where there is none."""
    out[:] = 0
    dim = grad.shape[1]
    for i in range(len(inverse)):
        ask_ahead(inverse, i, out)
        row = inverse[i]
        for d in range(dim):
            out[row, d] += grad[i, d]


@floating_kernel(lambda dtype: (matrix(dtype), vector(types.int32), matrix(dtype, written=True)))
def take(rows: Any, places: Any, out: Any) -> None:
    """out = rows[places]."""
    for i in range(len(places)):
        ask_ahead(places, i, rows)
        to, row = out[i], rows[places[i]]
        for d in range(len(row)):
            to[d] = row[d]


@floating_kernel(lambda dtype: (matrix(dtype), vector(types.int32), matrix(dtype, written=True)))
def put(rows: Any, places: Any, out: Any) -> None:
    """out[places] = rows."""
    for i in range(len(places)):
        ask_ahead(places, i, out)
        to, row = out[places[i]], rows[i]
        for d in range(len(row)):
            to[d] = row[d]


@floating_kernel(
    lambda dtype: (
        matrix(dtype),
        vector(types.int32),
        vector(types.uint8, written=True),
        matrix(dtype, written=True),
    )
)
def add(rows: Any, places: Any, is_there: Any, out: Any) -> None:
    """out[places] += rows; what is not there yet becomes the row itself, so that a negative zero stays one."""
    for i in range(len(places)):
        ask_ahead(places, i, out)
        place = places[i]
        to, row = out[place], rows[i]
        if is_there[place]:
            for d in range(len(row)):
                to[d] += row[d]
        else:
            is_there[place] = 1
            for d in range(len(row)):
                to[d] = row[d]


# ---- lists of several ranks ---------------------------------------------------------------------------

_LAST = np.iinfo(np.int64).max  # no id: the list is at its end


@floating_kernel(
    lambda dtype: (
        vector(types.int64), vector(dtype), vector(types.int64), INT, INT, INT,
        vector(types.int64, written=True), matrix(dtype, written=True),
    )
)  # fmt: skip
def merge(
    words: Any, numbers: Any, counts: Any, stride_bytes: int, keys_at: int, rows_at: int, keys: Any, out: Any
) -> int:
    """Merge every rank's increasing keys and add up their rows in rank order; how many keys there are.

    `words` and `numbers` are one memory: a stretch of `stride_bytes` per rank,
    with its keys and its rows at these bytes within it.
    """
    num_ranks, dim = len(counts), out.shape[1]
    of_words, of_numbers = stride_bytes // 8, stride_bytes // out.itemsize
    at, key_of = np.zeros(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    for rank in range(num_ranks):
        key_of[rank] = words[rank * of_words + keys_at // 8] if counts[rank] else _LAST
    num_keys = 0
    while True:
        key = key_of[0]
        for rank in range(1, num_ranks):
            key = min(key, key_of[rank])
        if key == _LAST:
            return num_keys
        keys[num_keys] = key
        total = out[num_keys]
        total[:] = 0
        for rank in range(num_ranks):
            if key_of[rank] == key:
                begin = rank * of_numbers + rows_at // out.itemsize + at[rank] * dim
                row = numbers[begin : begin + dim]
                for d in range(dim):
                    total[d] += row[d]
                at[rank] += 1
                key_of[rank] = (
                    words[rank * of_words + keys_at // 8 + at[rank]] if at[rank] < counts[rank] else _LAST
                )
        num_keys += 1
