"""Contiguous cuts of a row of costs whose heaviest part is as light as can be.

Pure. The smallest load that suffices is found by bisection over what a part
may carry; within it each cut is laid as near as it can be to where an even
share would end, so that parts are not merely small enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]

_HALVINGS = 64  # of the interval between the mean load and all of it: beyond the precision of a float


def balanced_cuts(costs: Costs, num_parts: int) -> list[int]:
    """`num_parts` + 1 ascending bounds in [0, len(costs)]; no cuts give a lighter heaviest part.

    Costs are finite and not negative. Where all of them are 0 the parts are
    equal in length.
    """
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    total, num_costs = sums[-1], len(costs)
    if num_parts == 1 or not total:
        return [num_costs * part // num_parts for part in range(num_parts + 1)]
    limit = _smallest_limit(sums, num_parts, max(total / num_parts, float(costs.max())))
    # From the right: where part `part` has to begin at the earliest, for the rest to fit into the parts from it on.
    earliest = [num_costs] * (num_parts + 1)
    for part in range(num_parts - 1, -1, -1):
        earliest[part] = int(np.searchsorted(sums, sums[earliest[part + 1]] - limit, side="left"))
    cuts = [0]
    for part in range(1, num_parts):
        latest = _reach(sums, cuts[-1], limit)
        cuts.append(min(max(_nearest(sums, total * part / num_parts), earliest[part], cuts[-1]), latest))
    return [*cuts, num_costs]


@dataclass(frozen=True, slots=True)
class Load:
    """How even some cuts are: of all batches together, the heaviest parts over the mean parts. 1 is even."""

    max_over_mean: float
    num_batches: int

    @classmethod
    def of(cls, batches: list[tuple[Costs, list[int]]]) -> Load:
        """Over batches, each as its costs and its cuts. A step lasts as long as its heaviest part."""
        heaviest = mean = 0.0
        for costs, cuts in batches:
            sums = np.concatenate([[0.0], np.cumsum(costs)])
            loads = np.diff(sums[cuts])
            heaviest += float(loads.max())
            mean += float(loads.mean())
        return cls(heaviest / mean if mean else 1.0, len(batches))


def _smallest_limit(sums: Costs, num_parts: int, low: float) -> float:
    """The load that suffices for so many parts, to the precision of a float. `low` is not above it."""
    if _fits(sums, num_parts, low):
        return low
    high = float(sums[-1])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if _fits(sums, num_parts, middle):
            high = middle
        else:
            low = middle
    return high


def _fits(sums: Costs, num_parts: int, limit: float) -> bool:
    at = len(sums) - 1
    # From the right, as the cuts are checked: rounding must not let one direction pass and the other fail.
    for _ in range(num_parts):
        at = int(np.searchsorted(sums, sums[at] - limit, side="left"))
        if at == 0:
            return True
    return False


def _reach(sums: Costs, begin: int, limit: float) -> int:
    """How far a part that begins at `begin` may go."""
    end = int(np.searchsorted(sums, sums[begin] + limit, side="right")) - 1
    # sums[end] - limit, as the check from the right has it, may round to the other side.
    while end + 1 < len(sums) and sums[end + 1] - limit <= sums[begin]:
        end += 1
    return end


def _nearest(sums: Costs, wanted: float) -> int:
    above = int(np.searchsorted(sums, wanted, side="left"))
    return above - 1 if above and wanted - sums[above - 1] < sums[above] - wanted else above
