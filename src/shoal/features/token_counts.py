"""How often each value of a column occurs: mergeable, and cut by hash so that no piece holds a whole vocabulary.

A piece is a dict of strings, or a pair of arrays (values, counts) of whole
numbers: a pair per value, as word counts have it, costs ten times as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.features.declared import Token
from shoal.features.hashing import bucket_of, hash_ints, hash_text

NUM_PARTS = 16

Counts = dict[str, int] | tuple[NDArray[np.int64], NDArray[np.int64]]


def counted(values: NDArray[Any]) -> Iterator[tuple[int, Counts]]:
    """The counts of some values, by part."""
    if not values.size:
        return
    found, counts = np.unique(values, return_counts=True)
    is_text = found.dtype.kind == "U"
    parts = bucket_of(hash_text(found, 0) if is_text else hash_ints(found, 0), NUM_PARTS)
    order = np.argsort(parts, kind="stable")
    bounds = np.searchsorted(parts[order], np.arange(NUM_PARTS + 1))
    for part in range(NUM_PARTS):
        rows = order[bounds[part] : bounds[part + 1]]
        if not len(rows):
            continue
        if is_text:
            yield part, dict(zip(found[rows].tolist(), counts[rows].tolist(), strict=True))
        else:
            yield part, (found[rows], counts[rows].astype(np.int64))


def merged(pieces: Sequence[Counts]) -> Counts:
    """The counts of one part in all pieces."""
    if isinstance(pieces[0], dict):
        total: dict[str, int] = dict(pieces[0])
        for other in pieces[1:]:
            assert isinstance(other, dict)
            for token, count in other.items():
                total[token] = total.get(token, 0) + count
        return total
    numbers: Any = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    values, places = np.unique(numbers[0], return_inverse=True)
    counts = np.zeros(len(values), np.int64)
    np.add.at(counts, places, numbers[1])
    return values, counts


def pairs(counts: Counts) -> Iterator[tuple[Token, int]]:
    """Value and count, one by one."""
    if isinstance(counts, dict):
        return iter(counts.items())
    return zip(counts[0].tolist(), counts[1].tolist(), strict=True)
