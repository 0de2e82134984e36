"""The arithmetic of the update rules, one loop each, row after row.

A row of the table is its values and then its state. Numbers that the loops
need come in the table's own precision, so that float32 stays float32. Values,
state and gradient of a row are arrays of their own: so the compiler sees that
it can work on several numbers at once, at a quarter of the time for Adagrad.
"""

from __future__ import annotations

import math
from typing import Any

from numba import types

from shoal.runtime.kernel_cache import ask_ahead, floating_kernel, matrix, vector


def _types(dtype: Any) -> tuple[Any, ...]:
    return vector(types.int32), matrix(dtype), matrix(dtype, written=True), dtype, vector(dtype)


@floating_kernel(_types)
def sgd(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """values -= lr * gradient."""
    lr, dim = numbers[0], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        values, grad = table[rows[i]], grads[i]
        for d in range(dim):
            values[d] -= lr * (factor * grad[d])


@floating_kernel(_types)
def adagrad(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """sum += g²; values -= lr * g / (sqrt(sum) + eps)."""
    lr, eps, dim = numbers[0], numbers[1], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        values, squares, grad = table[rows[i], :dim], table[rows[i], dim:], grads[i]
        for d in range(dim):
            g = factor * grad[d]
            total = squares[d] + g * g
            squares[d] = total
            values[d] -= lr * (g / (math.sqrt(total) + eps))


@floating_kernel(_types)
def rowwise_adagrad(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """Adagrad with one sum for the row: of the mean of its g²."""
    lr, eps, dim = numbers[0], numbers[1], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row, grad = table[rows[i]], grads[i]
        squares = factor * 0
        for d in range(dim):
            g = factor * grad[d]
            squares += g * g
        total = row[dim] + squares / table.dtype.type(dim)
        row[dim] = total
        scale = lr / (math.sqrt(total) + eps)
        for d in range(dim):
            row[d] -= scale * (factor * grad[d])


@floating_kernel(_types)
def adam(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """torch's SparseAdam: both averages of a row move only when a gradient comes for it."""
    step_size, rest1, rest2, eps, dim = numbers[0], numbers[1], numbers[2], numbers[3], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        values, grad = table[rows[i], :dim], grads[i]
        means, squares = table[rows[i], dim : 2 * dim], table[rows[i], 2 * dim :]
        for d in range(dim):
            g = factor * grad[d]
            mean, square = means[d], squares[d]
            mean += (g - mean) * rest1
            square += (g * g - square) * rest2
            means[d] = mean
            squares[d] = square
            values[d] -= step_size * (mean / (math.sqrt(square) + eps))


@floating_kernel(_types)
def ftrl(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """FTRL-proximal (McMahan et al. 2013); state: z, then n."""
    lr, beta, l1, l2, dim = numbers[0], numbers[1], numbers[2], numbers[3], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        values, grad = table[rows[i], :dim], grads[i]
        zs, squares = table[rows[i], dim : 2 * dim], table[rows[i], 2 * dim :]
        for d in range(dim):
            g = factor * grad[d]
            before = squares[d]
            after = before + g * g
            sigma = (math.sqrt(after) - math.sqrt(before)) / lr
            z = zs[d] + g - sigma * values[d]
            zs[d] = z
            squares[d] = after
            if abs(z) <= l1:
                values[d] = 0
            else:
                toward = z - l1 if z > 0 else z + l1
                values[d] = -toward / ((beta + math.sqrt(after)) / lr + l2)


@floating_kernel(_types)
def store(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """values = what was pushed."""
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row = rows[i]
        for d in range(grads.shape[1]):
            table[row, d] = grads[i, d]


@floating_kernel(_types)
def add(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """values += what was pushed."""
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row = rows[i]
        for d in range(grads.shape[1]):
            table[row, d] += factor * grads[i, d]
