from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster.coordinator.slot_map import (
    MOVE_EDGES,
    NUM_SLOTS,
    MoveState,
    SlotMap,
    SlotMove,
    evenest_seed,
    fail_over,
    place,
    plan_moves,
    switch,
)
from shoal.errors import ConfigError

calm = settings(deadline=None, max_examples=40)
names = st.sampled_from([f"server-{number}" for number in range(9)])
some_weights = st.dictionaries(names, st.sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=6)
copies = st.integers(1, 3)
seeds = st.integers(0, 1000)


def even(num_servers: int) -> dict[str, float]:
    return {f"server-{number}": 1.0 for number in range(num_servers)}


@calm
@given(some_weights, copies, seeds)
def test_every_slot_has_its_copies_on_distinct_servers(
    weights: dict[str, float], num_copies: int, seed: int
) -> None:
    placed = place(weights, num_copies=num_copies, seed=seed)
    assert len(placed) == NUM_SLOTS
    for holders in placed:
        assert len(holders) == len(set(holders)) == min(num_copies, len(weights))
        assert set(holders) <= weights.keys()


@calm
@given(some_weights, copies, seeds)
def test_placement_depends_on_nothing_but_its_arguments(
    weights: dict[str, float], num_copies: int, seed: int
) -> None:
    backwards = dict(reversed(weights.items()))
    assert place(weights, num_copies=num_copies, seed=seed) == place(
        backwards, num_copies=num_copies, seed=seed
    )


@calm
@given(some_weights.filter(lambda weights: len(weights) > 1), copies, seeds, st.data())
def test_a_server_that_leaves_moves_only_what_it_held(
    weights: dict[str, float], num_copies: int, seed: int, data: st.DataObject
) -> None:
    leaver = data.draw(st.sampled_from(sorted(weights)))
    before = place(weights, num_copies=num_copies, seed=seed)
    after = place({n: w for n, w in weights.items() if n != leaver}, num_copies=num_copies, seed=seed)
    for old, new in zip(before, after, strict=True):
        # The others keep their order and move up; at most one server is new, at the end.
        kept = tuple(name for name in old if name != leaver)
        assert new[: len(kept)] == kept
        assert leaver in old or old == new


@calm
@given(some_weights, copies, seeds)
def test_a_server_that_comes_takes_only_what_it_will_hold(
    weights: dict[str, float], num_copies: int, seed: int
) -> None:
    before = place(weights, num_copies=num_copies, seed=seed)
    after = place(weights | {"newcomer": 2.0}, num_copies=num_copies, seed=seed)
    for old, new in zip(before, after, strict=True):
        kept = tuple(name for name in new if name != "newcomer")
        assert old[: len(kept)] == kept
        assert "newcomer" in new or old == new


@pytest.mark.parametrize("num_servers", [2, 3, 4, 8])
def test_primaries_follow_the_weights(num_servers: int) -> None:
    weights = {name: 1.0 + (number == 0) for number, name in enumerate(even(num_servers))}
    counts = dict.fromkeys(weights, 0)
    for seed in range(40):
        for holders in place(weights, num_copies=1, seed=seed):
            counts[holders[0]] += 1
    share = 40 * NUM_SLOTS / sum(weights.values())
    assert counts == pytest.approx({name: weight * share for name, weight in weights.items()}, rel=0.07)


@pytest.mark.parametrize("num_servers", [2, 3, 4, 8])
def test_the_evenest_seed_leaves_no_server_far_above_its_share(num_servers: int) -> None:
    weights = even(num_servers)
    seed = evenest_seed(weights, [1.0] * NUM_SLOTS, num_copies=2, seed=100)
    assert 100 <= seed < 132
    placed = place(weights, num_copies=2, seed=seed)
    for position, share in ((0, NUM_SLOTS / num_servers), (1, NUM_SLOTS / num_servers)):
        most = max(sum(holders[position] == name for holders in placed) for name in weights)
        assert most <= 1.25 * share
    most = max(sum(name in holders for holders in placed) for name in weights)
    assert most <= 1.12 * 2 * NUM_SLOTS / num_servers


@pytest.mark.parametrize(
    ("weights", "num_copies"), [({"a": 0.0}, 1), ({"a": float("nan")}, 1), ({"a": -1.0}, 1), ({"a": 1.0}, 0)]
)
def test_weights_and_copies_that_mean_nothing_are_refused(weights: dict[str, float], num_copies: int) -> None:
    with pytest.raises(ConfigError):
        place(weights, num_copies=num_copies)


# ---- failover ------------------------------------------------------------------------------------


def test_the_replica_with_the_highest_mark_takes_over() -> None:
    before = SlotMap(3, (("a", "b", "c"), ("a", "b", "c"), ("b", "a"), ("c", "b")))
    marks = {"b": [4, 5, 9, 9], "c": [5, 4, 9, 9]}
    after = fail_over(before, dead=["a"], marks=marks, view=4)
    assert after == SlotMap(4, (("c", "b"), ("b", "c"), ("b",), ("c", "b")))


def test_of_equal_replicas_the_earlier_takes_over() -> None:
    before = SlotMap(1, (("a", "b", "c"),))
    assert fail_over(before, dead=["a"], marks={"c": [7], "b": [7]}, view=2).primary(0) == "b"


def test_a_living_primary_stays_even_behind_a_replica_that_is_ahead() -> None:
    # It ships before it applies: a replica may be one ahead of what was acknowledged.
    before = SlotMap(1, (("a", "b", "c"),))
    assert fail_over(before, dead=["c"], marks={"a": [6], "b": [7]}, view=2).holders == (("a", "b"),)


def test_a_slot_that_lost_all_holders_is_named() -> None:
    after = fail_over(SlotMap(1, (("a", "b"), ("b", "c"))), dead=["a", "b"], marks={"c": [0, 2]}, view=2)
    assert after.lost == [0]
    assert after.primary(0) is None
    assert after.held_by("c") == [1]


def test_a_map_is_never_followed_by_one_of_the_same_view() -> None:
    with pytest.raises(AssertionError):
        fail_over(SlotMap(2, (("a",),)), dead=[], marks={}, view=2)


# ---- moves ---------------------------------------------------------------------------------------


@calm
@given(some_weights, some_weights, copies, seeds)
def test_a_plan_carried_out_reaches_its_target(
    old: dict[str, float], new: dict[str, float], num_copies: int, seed: int
) -> None:
    slot_map = SlotMap(1, place(old, num_copies=num_copies, num_slots=32, seed=seed))
    target = place(new, num_copies=num_copies, num_slots=32, seed=seed)
    moves = plan_moves(slot_map, target)
    assert switch(slot_map, [move for move in moves if move.missing], view=2).holders == slot_map.holders
    for index, move in enumerate(moves):
        for server in move.missing:
            moves[index] = moves[index].caught_up(server)
    assert {move.state for move in moves} <= {MoveState.READY}
    after = switch(slot_map, moves, view=2)
    assert after.holders == target
    assert plan_moves(after, target) == []


def test_a_move_waits_for_all_that_are_new() -> None:
    (move,) = plan_moves(SlotMap(1, (("a", "b"),)), [("c", "d")])
    assert (move.missing, move.state) == ({"c", "d"}, MoveState.COPYING)
    move = move.caught_up("c").caught_up("c").caught_up("a")
    assert move.state is MoveState.COPYING
    assert move.caught_up("d").state is MoveState.READY


def test_a_change_of_order_needs_no_copy() -> None:
    (move,) = plan_moves(SlotMap(1, (("a", "b"),)), [("b", "a")])
    assert move.state is MoveState.READY


@pytest.mark.parametrize("server", ["a", "b", "c"])
def test_a_move_is_given_up_when_a_holder_dies(server: str) -> None:
    (move,) = plan_moves(SlotMap(1, (("a", "b"),)), [("c", "a")])
    move = move.lost(server)
    assert move.state is MoveState.ABANDONED
    assert move.caught_up("c") == move
    assert switch(SlotMap(1, (("a", "b"),)), [move], view=2).holders == (("a", "b"),)


def test_a_death_elsewhere_does_not_touch_a_move() -> None:
    (move,) = plan_moves(SlotMap(1, (("a", "b"),)), [("b", "a")])
    assert move.lost("z") == move


def test_a_move_that_was_planned_from_another_map_is_passed_over() -> None:
    (move,) = plan_moves(SlotMap(1, (("a", "b"),)), [("b", "a")])
    failed_over = SlotMap(2, (("b",),))
    assert switch(failed_over, [move], view=3).holders == (("b",),)


def test_a_move_takes_no_edge_that_is_not_drawn() -> None:
    move = SlotMove(0, ("a",), ("b",), frozenset({"b"}), MoveState.COPYING)
    with pytest.raises(AssertionError):
        move.lost("a")._to(MoveState.READY)
    assert MOVE_EDGES[MoveState.ABANDONED] == set()
