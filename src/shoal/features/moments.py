"""Count, mean and spread of a column in one pass, mergeable (Chan, Golub and LeVeque).

A summary is an array [4, width]: how many values, their mean, the sum of
squared distances from it, how many are infinite. Missing values (NaN) do not
count. Sums of squares would lose all digits where the mean is far from zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def summary(values: Floats) -> Floats:
    """Of rows [n, width]."""
    is_finite = np.isfinite(values)
    count = is_finite.sum(0).astype(np.float64)
    known = np.where(is_finite, values, 0.0)
    mean = known.sum(0) / np.maximum(count, 1.0)
    distance = np.where(is_finite, values - mean, 0.0)
    return np.stack([count, mean, (distance**2).sum(0), np.isinf(values).sum(0).astype(np.float64)])


def merged(summaries: Sequence[Floats]) -> Floats:
    """Of all of them, in their order."""
    total = np.array(summaries[0])
    for other in summaries[1:]:
        count = total[0] + other[0]
        share = other[0] / np.maximum(count, 1.0)
        distance = other[1] - total[1]
        total[2] += other[2] + distance**2 * total[0] * share
        total[1] += distance * share
        total[0] = count
        total[3] += other[3]
    return total


def deviation(total: Floats) -> Floats:
    """Of the values around their mean, as numpy's std."""
    spread: Floats = np.sqrt(total[2] / np.maximum(total[0], 1.0))
    return spread
