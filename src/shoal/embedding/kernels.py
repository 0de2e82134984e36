"""Numba loops from the ids of a batch to rows and back: the rows of unique ids, summed gradients, bags.

Sums run in the order of the batch, so their bits do not depend on where the
rows came from. Nothing here knows what a table is. Loops that sums over
workers need as well are in `runtime/row_kernels.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.runtime.kernel_cache import INT, floating_kernel, inlined, kernel, matrix, mixed, types, vector
from shoal.runtime.row_kernels import sum_back, unique
from shoal.runtime.row_kernels import take as expand

__all__ = ["bag", "bag_back", "expand", "slot_of", "sum_back", "unique", "weights_back"]

# ---- rows of the batch ------------------------------------------------------------------------------


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


# ---- slots of rows ------------------------------------------------------------------------------


NUM_SLOTS = 256  # a slot is a byte of the hash


def slot_of(table: int, keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The slot (uint8) of each key (int64) of this table."""
    slots = np.empty(len(keys), np.uint8)
    _slot_of(table, np.ascontiguousarray(keys, np.int64), slots)
    return slots


@kernel((INT, vector(types.int64), vector(types.uint8, written=True)))
def _slot_of(table: int, keys: Any, slots: Any) -> None:
    word = mixed(np.uint64(table) * np.uint64(0xD1342543DE82EF95) + np.uint64(0x2545F4914F6CDD1D))
    for i in range(len(keys)):
        slots[i] = mixed(np.uint64(keys[i]) ^ word) >> np.uint64(56)
