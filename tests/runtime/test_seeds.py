"""Seeds are functions of what they are for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.seeds import mix

PARTS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4)


@given(PARTS)
def test_a_seed_fits_every_generator(parts: list[int]) -> None:
    assert 0 <= mix(*parts) < 2**63
    assert mix(*parts) == mix(*parts)


def test_neighbours_do_not_collide() -> None:
    seeds = {mix(seed, rank, step) for seed in range(10) for rank in range(10) for step in range(100)}
    assert len(seeds) == 10_000


def test_the_order_of_the_parts_matters() -> None:
    assert mix(1, 2) != mix(2, 1)
