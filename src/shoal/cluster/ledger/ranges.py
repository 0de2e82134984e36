"""Arithmetic of ranges of samples: (start, stop) each, without stop. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]
"""(start, stop), without stop."""


def merged(ranges: Iterable[Range]) -> Iterator[Range]:
    """The same samples in as few ranges as there can be, in order."""
    begin = end = None
    for start, stop in sorted(each for each in ranges if each[0] < each[1]):
        if end is None or begin is None:
            begin, end = start, stop
        elif start <= end:
            end = max(end, stop)
        else:
            yield begin, end
            begin, end = start, stop
    if begin is not None and end is not None:
        yield begin, end


def both(some: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """What is in some of each."""
    left, right = list(merged(some)), list(merged(others))
    found, i, j = list[Range](), 0, 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            found.append((start, stop))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return found


def minus(some: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """What is in `some` and not in `others`."""
    found, taken, j = list[Range](), list(merged(others)), 0
    for start, stop in merged(some):
        while j < len(taken) and taken[j][1] <= start:
            j += 1
        k = j
        while k < len(taken) and taken[k][0] < stop:
            if start < taken[k][0]:
                found.append((start, taken[k][0]))
            start, k = taken[k][1], k + 1
        if start < stop:
            found.append((start, stop))
    return found


def size(ranges: Iterable[Range]) -> int:
    """Samples in them, those in two of them twice."""
    return sum(stop - start for start, stop in ranges)
