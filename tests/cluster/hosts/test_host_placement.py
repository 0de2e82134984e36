from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.hosts.placement import describe, place, place_server, spread

HOMES = (0, 0, 1, 1, 2)


@pytest.mark.parametrize("rank", range(5))
def test_a_worker_starts_at_home_even_where_another_has_more_room(rank: int) -> None:
    assert place(rank, HOMES, {0: 0, 1: -1, 2: 0}) == HOMES[rank]
    assert place(rank, HOMES, {0: 9, 1: 9, 2: 9}) == HOMES[rank]


def test_without_its_home_a_worker_starts_where_there_is_most_room() -> None:
    assert place(2, HOMES, {0: 1, 2: 3}) == 2
    assert place(2, HOMES, {0: 3, 2: 3}) == 0


def test_a_worker_waits_where_no_host_has_room() -> None:
    assert place(2, HOMES, {0: 0, 2: -1}) is None
    assert place(2, HOMES, {}) is None


def test_where_crowding_is_allowed_a_worker_starts_on_the_least_crowded_host() -> None:
    assert place(2, HOMES, {0: -2, 2: -1}, may_crowd=True) == 2
    assert place(2, HOMES, {}, may_crowd=True) is None


@given(st.dictionaries(st.integers(0, 2), st.integers(-4, 4)), st.integers(0, 4))
def test_a_worker_is_only_sent_away_to_a_host_that_is_here_and_has_room(
    rooms: dict[int, int], rank: int
) -> None:
    host = place(rank, HOMES, rooms)
    if host is not None and host != HOMES[rank]:
        assert rooms[host] > 0
        assert HOMES[rank] not in rooms
    if host is None:
        assert all(room <= 0 for room in rooms.values())


def test_where_ranks_start_again_is_said_by_host() -> None:
    assert describe({2: 0, 3: 0, 4: 1}) == "ranks 2, 3 start again on host 0; rank 4 starts again on host 1"
    assert (
        describe({2: 0, 3: None})
        == "rank 2 starts again on host 0; rank 3 waits for a host: none that is left has a core to spare"
    )


def test_workers_are_spread_by_the_cores_of_the_hosts_that_are_there() -> None:
    assert spread(4, {0: 2, 2: 2}, 3) == (2, 0, 2)
    assert spread(3, {0: 2, 1: 4}, 2) == (1, 2)
    assert spread(5, {0: 1}, 2) == (5, 0)


def test_a_server_without_its_home_is_where_the_fewest_are() -> None:
    assert place_server(1, [0, 1, 2], [], 3) == 1
    assert place_server(1, [0, 2], [0, 2], 3) == 2  # the next one
    assert place_server(1, [0, 2], [0, 2, 2], 3) == 0
