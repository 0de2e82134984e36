"""Numba loops over rows named by ids: unique ids, gradients summed per id, and lists of several ranks merged.

The order of every sum is that of the batch, or of the ranks. Numpy only: used
by embeddings, and by the exchange of sparse gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from shoal.runtime.kernel_cache import (
    ask_ahead,
    floating_kernel,
    inlined,
    intrinsic,
    kernel,
    matrix,
    mixed,
    types,
    vector,
)

KERNELS = __name__
"""The module of these loops, as `kernel_cache.is_compiled` takes it."""

Array: TypeAlias = np.ndarray[Any, Any]

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
    """Scratch memory, one per thread: memory warm in the cache doubles the speed of deduplication."""

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
            # A key that passed a slot has cleared it, or will: all of them are found keys.
            while slots[at] != 0:
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


def sum_lists(
    keys_of: Sequence[Array],
    rows_of: Sequence[Array],
    *,
    from_zero: bool = False,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """Every key of several increasing lists once, in increasing order, and the sum of its rows in the order of the lists.

    A row of one list alone stays as it is; `from_zero`: is added to zero, which has -0.0 become 0.0. `out`: memory for as many
    keys and rows as all lists have, of which the result is the beginning.
    """
    num_rows = sum(map(len, keys_of))
    if out is None:
        out = np.empty(num_rows, np.int64), np.empty((num_rows, rows_of[0].shape[1]), rows_of[0].dtype)
    keys_at = np.array([each.ctypes.data for each in keys_of], np.int64)
    rows_at = np.array([each.ctypes.data for each in rows_of], np.int64)
    num_keys = _merge(keys_at, rows_at, np.array([*map(len, keys_of)], np.int64), from_zero, *out)
    return out[0][:num_keys], out[1][:num_keys]


@intrinsic
def _pointer(typing_context: Any, address: Any, like: Any) -> Any:
    """The address of elements like those of an array, as a pointer to them."""
    from numba import types

    kind = types.CPointer(like.dtype)  # type: ignore[no-untyped-call]  # numba describes itself in part

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(kind))

    return kind(types.int64, like), generate


_ADDRESSES = vector(types.int64)


@floating_kernel(
    lambda dtype: (
        _ADDRESSES, _ADDRESSES, vector(types.int64), types.boolean,
        vector(types.int64, written=True), matrix(dtype, written=True),
    )
)  # fmt: skip
def _merge(keys_at: Any, rows_at: Any, counts: Any, from_zero: bool, keys: Any, out: Any) -> int:
    """Merge lists of keys, by the addresses of their first ones, and add up their rows; how many keys there are."""
    num_lists, dim = len(counts), out.shape[1]
    at, key_of = np.zeros(num_lists, np.int64), np.empty(num_lists, np.int64)
    for i in range(num_lists):
        key_of[i] = _pointer(keys_at[i], keys)[0] if counts[i] else _LAST
    num_keys = 0
    while True:
        key = key_of[0]
        for i in range(1, num_lists):
            key = min(key, key_of[i])
        is_first = True
        for i in range(num_lists):
            if key_of[i] == key and at[i] < counts[i]:
                total, row = out[num_keys], _pointer(rows_at[i] + at[i] * dim * out.itemsize, out)
                if is_first and not from_zero:
                    for d in range(dim):
                        total[d] = row[d]
                elif is_first:
                    for d in range(dim):
                        total[d] = row[d] + out.dtype.type(0)
                else:
                    for d in range(dim):
                        total[d] += row[d]
                is_first = False
                at[i] += 1
                key_of[i] = _pointer(keys_at[i], keys)[at[i]] if at[i] < counts[i] else _LAST
        if is_first:
            return num_keys
        keys[num_keys] = key
        num_keys += 1
