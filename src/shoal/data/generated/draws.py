"""Random numbers that are looked up, not drawn: the same (key, numbers) always give the same bits.

A generator has a state, so what it gives depends on who asked before. Here a
number depends on its coordinates alone (a sample's index, a column, a pixel),
so any sample can be made by itself, in any order, in any process.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shoal.data.order.permutation import GOLDEN, splitmix64

Bits = NDArray[np.uint64]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def bits(key: int, *coordinates: Ints) -> Bits:
    """64 random bits for every combination of the coordinates, which broadcast (splitmix64 per coordinate).

    Put the small coordinate last: each one costs a pass over what has been broadcast so far.
    """
    state = np.array([key], dtype=np.uint64)
    for coordinate in coordinates:
        state = splitmix64(state + coordinate.astype(np.uint64) + GOLDEN)
    return state


def uniform(random: Bits) -> Floats:
    """Numbers in [0, 1), 53 bits fine."""
    return (random >> np.uint64(11)).astype(np.float64) * 2.0**-53


def bell(random: Bits) -> Floats:
    """Numbers of mean 0 and variance 1, near normal and never beyond ±3.47: the sum of four 16-bit pieces."""
    mask = np.uint64(0xFFFF)
    total = random & mask
    for shift in (16, 32, 48):
        total = total + ((random >> np.uint64(shift)) & mask)
    centred: Floats = total.astype(np.float64) - 2 * 65535
    return centred * (math.sqrt(3) / 65536)
