"""Row cache of a worker: what is found in it is never staler than allowed, and it never outgrows its size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.ps.client.row_cache import RowCache

F32 = np.dtype(np.float32)


def keys(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def rows(*values: float) -> np.ndarray:
    return np.array([[value, value] for value in values], np.float32)


def test_a_row_is_found_until_it_is_too_old_for_a_step() -> None:
    cache = RowCache(64, 2, F32, max_age=3, bound=None)
    cache.put(keys(5, 9), rows(1.0, 2.0), pulled_at=10, slowest=8)
    is_hit, found, slowest = cache.look_up(keys(5, 7, 9), 12)
    assert is_hit.tolist() == [True, False, True]
    assert found.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert slowest == 8
    assert not cache.look_up(keys(5, 9), 13)[0].any()


def test_a_row_is_not_used_further_ahead_of_the_slowest_worker_than_the_bound() -> None:
    cache = RowCache(64, 2, F32, max_age=None, bound=4)
    cache.put(keys(5), rows(1.0), pulled_at=10, slowest=7)
    assert cache.look_up(keys(5), 11)[0].all()
    assert not cache.look_up(keys(5), 12)[0].any()
    cache.put(keys(5), rows(3.0), pulled_at=12, slowest=12)
    assert cache.look_up(keys(5), 16)[1].tolist() == [[3.0, 3.0]]


def test_a_full_set_gives_up_its_least_recently_used_row() -> None:
    cache = RowCache(8, 2, F32, max_age=100, bound=None)
    cache.put(keys(*range(8)), rows(*range(8)), pulled_at=1, slowest=1)
    cache.look_up(keys(0, 1, 2, 4, 5, 6, 7), 2)
    cache.put(keys(8), rows(8.0), pulled_at=3, slowest=3)
    assert cache.look_up(keys(*range(9)), 4)[0].tolist() == [True] * 3 + [False] + [True] * 5


@settings(max_examples=60, deadline=None)
@given(
    st.integers(8, 64),
    st.one_of(st.none(), st.integers(0, 4)),
    st.lists(
        st.tuples(st.sets(st.integers(-40, 40), min_size=1, max_size=30), st.integers(0, 3)), max_size=12
    ),
)
def test_every_row_found_is_the_newest_pulled_and_fresh_enough(
    num_rows: int, bound: int | None, steps: list[tuple[set[int], int]]
) -> None:
    cache, newest = RowCache(num_rows, 2, F32, max_age=3, bound=bound), dict[int, tuple[float, int, int]]()
    for clock, (ids, behind) in enumerate(steps):
        wanted = keys(*sorted(ids))
        is_hit, found, slowest = cache.look_up(wanted, clock)
        hits = [newest[each] for each in wanted[is_hit].tolist()]
        assert found[:, 0].tolist() == [value for value, _, _ in hits]
        assert all(clock - pulled_at < 3 for _, pulled_at, _ in hits)
        assert bound is None or all(clock - slowest <= bound for _, _, slowest in hits)
        assert slowest == min((each for _, _, each in hits), default=clock)
        missing = wanted[~is_hit]
        values = [float(clock * 100 + each) for each in missing.tolist()]
        cache.put(
            missing,
            rows(*values) if values else np.zeros((0, 2), np.float32),
            pulled_at=clock,
            slowest=clock - behind,
        )
        newest |= {
            each: (value, clock, clock - behind) for each, value in zip(missing.tolist(), values, strict=True)
        }
    assert cache.num_places <= num_rows


def test_nothing_is_found_once_it_is_cleared() -> None:
    cache = RowCache(64, 2, F32, max_age=3, bound=None)
    cache.put(keys(5), rows(1.0), pulled_at=0, slowest=0)
    cache.clear()
    assert not cache.look_up(keys(5), 0)[0].any()


@pytest.mark.parametrize("num_rows", [8, 9, 100, 1000])
def test_the_size_is_a_bound(num_rows: int) -> None:
    assert num_rows / 2 < RowCache(num_rows, 2, F32, max_age=1, bound=None).num_places <= num_rows
