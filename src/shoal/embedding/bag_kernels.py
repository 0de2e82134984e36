"""Bags of rows: sums, means and weighted sums over runs of a batch's ids, and their gradients.

Bag b is ids offsets[b]..offsets[b + 1]; an id whose place is `padding` counts
for nothing. `weights` has an entry per id, or none at all: then each is one.
"""

from __future__ import annotations

from typing import Any

from numba import types

from shoal.runtime.kernel_cache import INT, floating_kernel, inlined, matrix, vector


@inlined
def _share(inverse: Any, start: int, end: int, padding: int, is_mean: bool, one: Any) -> Any:
    """What an id of the bag counts, in the type of `one`."""
    if not is_mean:
        return one
    count = one * 0
    for i in range(start, end):
        if inverse[i] != padding:
            count += one
    return one / count if count > 0 else one


@floating_kernel(
    lambda dtype: (
        matrix(dtype), vector(types.int32), vector(types.int64), vector(dtype), INT, types.boolean,
        matrix(dtype, written=True),
    )
)  # fmt: skip
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


@floating_kernel(
    lambda dtype: (
        matrix(dtype), vector(types.int32), vector(types.int64), vector(dtype), INT, types.boolean,
        matrix(dtype, written=True),
    )
)  # fmt: skip
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
