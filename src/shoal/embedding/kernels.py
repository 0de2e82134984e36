"""Numba loops from the ids of a batch to rows and back: unique ids, their rows, summed gradients, bags.

Sums run in the order of the batch, so their bits do not depend on where the
rows came from. Nothing here knows what a table is.
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
            while slots[at] != 0:  # whoever passed a slot has cleared it, or will: all of them are found keys
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


# ---- rows of the batch ------------------------------------------------------------------------------


@floating_kernel(lambda dtype: (matrix(dtype), vector(types.int32), matrix(dtype, written=True)))
def expand(rows: Any, inverse: Any, out: Any) -> None:
    """Write rows[inverse] to `out`."""
    dim = rows.shape[1]
    for i in range(len(inverse)):
        ask_ahead(inverse, i, rows)
        row = inverse[i]
        for d in range(dim):
            out[i, d] = rows[row, d]


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


# ---- bags: sums, means and weighted sums over runs of a batch's ids ------------------------------


@inlined
def _share(inverse: Any, start: int, end: int, padding: int, is_mean: bool, one: Any) -> Any:
    """Weight of an id of the bag, in the type of `one`."""
    if not is_mean:
        return one
    count = one * 0
    for i in range(start, end):
        if inverse[i] != padding:
            count += one
    return one / count if count > 0 else one


def _bag_types(dtype: Any) -> tuple[Any, ...]:
    of_bags = vector(types.int32), vector(types.int64), vector(dtype)
    return matrix(dtype), *of_bags, INT, types.boolean, matrix(dtype, written=True)


@floating_kernel(_bag_types)
def bag(rows: Any, inverse: Any, offsets: Any, weights: Any, padding: int, is_mean: bool, out: Any) -> None:
    """Write every bag's sum, or mean, of its rows to `out`; zeros for an empty one."""
    dim, one = rows.shape[1], rows.dtype.type(1)
    for b in range(len(offsets) - 1):
        for d in range(dim):
            out[b, d] = 0
        for i in range(offsets[b], offsets[b + 1]):
            row = inverse[i]
            if row != padding:
                weight = weights[i] if len(weights) else one
                for d in range(dim):
                    out[b, d] += weight * rows[row, d]
        if is_mean:
            share = _share(inverse, offsets[b], offsets[b + 1], padding, True, one)
            for d in range(dim):
                out[b, d] *= share


@floating_kernel(_bag_types)
def bag_back(
    grad: Any, inverse: Any, offsets: Any, weights: Any, padding: int, is_mean: bool, out: Any
) -> None:
    """Write to out[k] the gradient of row k, summed in the order of the ids."""
    out[:] = 0
    dim, one = grad.shape[1], grad.dtype.type(1)
    for b in range(len(offsets) - 1):
        share = _share(inverse, offsets[b], offsets[b + 1], padding, is_mean, one)
        for i in range(offsets[b], offsets[b + 1]):
            row = inverse[i]
            if row != padding:
                weight = weights[i] * share if len(weights) else share
                for d in range(dim):
                    out[row, d] += weight * grad[b, d]


@floating_kernel(
    lambda dtype: (
        matrix(dtype), matrix(dtype), vector(types.int32), vector(types.int64), INT, vector(dtype, written=True)
    )
)  # fmt: skip
def weights_back(grad: Any, rows: Any, inverse: Any, offsets: Any, padding: int, out: Any) -> None:
    """Write to out[i] the gradient of the weight of id i."""
    out[:] = 0
    for b in range(len(offsets) - 1):
        for i in range(offsets[b], offsets[b + 1]):
            row = inverse[i]
            if row != padding:
                for d in range(rows.shape[1]):
                    out[i] += grad[b, d] * rows[row, d]
