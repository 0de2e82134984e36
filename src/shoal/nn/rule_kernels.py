"""The arithmetic of the update rules, one loop each, row after row.

A row of the table is its values and then its state. Numbers that the loops
need come in the table's own precision, so that float32 stays float32.
"""

from __future__ import annotations

import math
from typing import Any

from numba import types

from shoal.core.compiled import ask_ahead, floating_kernel, matrix, vector


def _types(dtype: Any) -> tuple[Any, ...]:
    return vector(types.int32), matrix(dtype), matrix(dtype, written=True), dtype, vector(dtype)


@floating_kernel(_types)
def sgd(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """values -= lr * gradient."""
    lr, dim = numbers[0], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row = rows[i]
        for d in range(dim):
            table[row, d] -= lr * (factor * grads[i, d])


@floating_kernel(_types)
def adagrad(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """sum += g²; values -= lr * g / (sqrt(sum) + eps)."""
    lr, eps, dim = numbers[0], numbers[1], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row = rows[i]
        for d in range(dim):
            g = factor * grads[i, d]
            total = table[row, dim + d] + g * g
            table[row, dim + d] = total
            table[row, d] -= lr * (g / (math.sqrt(total) + eps))


@floating_kernel(_types)
def rowwise_adagrad(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """Adagrad with one sum for the row: of the mean of its g²."""
    lr, eps, dim = numbers[0], numbers[1], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row = rows[i]
        squares = factor * 0
        for d in range(dim):
            g = factor * grads[i, d]
            squares += g * g
        total = table[row, dim] + squares / table.dtype.type(dim)
        table[row, dim] = total
        scale = lr / (math.sqrt(total) + eps)
        for d in range(dim):
            table[row, d] -= scale * (factor * grads[i, d])


@floating_kernel(_types)
def adam(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """torch's SparseAdam: both averages of a row move only when a gradient comes for it."""
    step_size, rest1, rest2, eps, dim = numbers[0], numbers[1], numbers[2], numbers[3], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row = rows[i]
        for d in range(dim):
            g = factor * grads[i, d]
            mean = table[row, dim + d]
            mean += (g - mean) * rest1
            square = table[row, 2 * dim + d]
            square += (g * g - square) * rest2
            table[row, dim + d] = mean
            table[row, 2 * dim + d] = square
            table[row, d] -= step_size * (mean / (math.sqrt(square) + eps))


@floating_kernel(_types)
def ftrl(rows: Any, grads: Any, table: Any, factor: Any, numbers: Any) -> None:
    """FTRL-proximal (McMahan et al. 2013); state: z, then n."""
    lr, beta, l1, l2, dim = numbers[0], numbers[1], numbers[2], numbers[3], grads.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row = rows[i]
        for d in range(dim):
            g = factor * grads[i, d]
            before = table[row, 2 * dim + d]
            after = before + g * g
            sigma = (math.sqrt(after) - math.sqrt(before)) / lr
            z = table[row, dim + d] + g - sigma * table[row, d]
            table[row, dim + d] = z
            table[row, 2 * dim + d] = after
            if abs(z) <= l1:
                table[row, d] = 0
            else:
                toward = z - l1 if z > 0 else z + l1
                table[row, d] = -toward / ((beta + math.sqrt(after)) / lr + l2)


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
