from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.ledger.ledger import Range, both, merged, minus, size

some_ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def members(ranges: list[Range]) -> set[int]:
    return {each for start, stop in ranges for each in range(start, stop)}


@given(some_ranges, some_ranges)
def test_they_are_what_sets_of_their_samples_are(one: list[Range], other: list[Range]) -> None:
    assert members(both(one, other)) == members(one) & members(other)
    assert members(minus(one, other)) == members(one) - members(other)
    joined = list(merged(one))
    assert members(joined) == members(one)
    assert size(joined) == len(members(one))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(joined))
