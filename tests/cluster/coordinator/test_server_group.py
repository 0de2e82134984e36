"""Whatever happens to the servers, every slot has somebody who answers for it, or it is said to be lost."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster.coordinator.journal_entries import ServerFilled
from shoal.cluster.coordinator.server_group import (
    Action,
    AnnounceView,
    Event,
    LoseSlots,
    RefuseChange,
    ServerGroup,
    Settle,
)
from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.runtime.transport.messages.server_coordinator import JoinServer, ServerView
from shoal.runtime.transport.messages.supervisor import ReapedServer, ScaleServers

MAX_SERVERS = 6


def group(num_servers: int, num_copies: int = 2) -> ServerGroup:
    return ServerGroup(num_servers=num_servers, num_copies=num_copies, max_servers=MAX_SERVERS)


def formed(num_servers: int, num_copies: int = 2) -> tuple[ServerGroup, ServerView]:
    there = group(num_servers, num_copies)
    for number in range(num_servers):
        actions = there.handle(JoinServer(number, 0, 1))
    assert [type(action) for action in actions] == [AnnounceView, Settle]
    return there, view_of(actions)


def view_of(actions: list[Action]) -> ServerView:
    told = [action.view for action in actions if isinstance(action, AnnounceView)]
    assert told, actions
    return told[-1]


def fill(there: ServerGroup, view: ServerView) -> list[Action]:
    """Every joining server reports its slots, one report each; what came of the last."""
    actions: list[Action] = []
    for number in sorted({each for joining in view.joining.values() for each in joining}):
        slots = tuple(slot for slot, joining in view.joining.items() if number in joining)
        actions = there.handle(ServerFilled(number, view.incarnations[number], view.view, slots))
    return actions


def test_the_first_view_forms_when_all_have_joined() -> None:
    there = group(3)
    assert there.handle(JoinServer(0, 0, 1)) == []
    assert there.handle(JoinServer(2, 0, 1)) == []
    assert there.missing == [1]
    view = view_of(there.handle(JoinServer(1, 0, 1)))
    assert view.view == 1
    assert view.incarnations == {0: 0, 1: 0, 2: 0}
    assert all(len(set(holders)) == 2 for holders in view.holders)
    loads = [sum(holders[0] == number for holders in view.holders) for number in range(3)]
    assert max(loads) < 1.2 * NUM_SLOTS / 3
    assert not view.joining


def test_joining_again_on_a_new_line_changes_nothing() -> None:
    there, view = formed(2)
    assert there.handle(JoinServer(1, 0, 1)) == []
    assert there.newest == view


def test_replicas_take_over_at_once_and_only_the_dead_servers_slots_change() -> None:
    there, before = formed(3)
    after = view_of(there.handle(ReapedServer(1, 0, -9)))
    for was, now in zip(before.holders, after.holders, strict=True):
        assert now == [number for number in was if number != 1]
    assert after.incarnations == {0: 0, 2: 0}
    assert not after.joining  # its successor is waited for: nobody else is filled meanwhile


def test_a_successor_is_filled_and_then_takes_its_place_back() -> None:
    there, first = formed(3)
    there.handle(ReapedServer(1, 0, -9))
    joining = view_of(there.handle(JoinServer(1, 1, 1)))
    assert {slot for slot, numbers in joining.joining.items() if numbers == [1]} == {
        slot for slot, holders in enumerate(first.holders) if 1 in holders
    }
    assert all(1 not in holders for holders in joining.holders)
    some, others = list(joining.joining)[:10], list(joining.joining)[10:]
    assert there.handle(ServerFilled(1, 1, joining.view, tuple(some))) == []
    actions = there.handle(ServerFilled(1, 1, joining.view, tuple(others)))
    back = view_of(actions)
    assert back.holders == first.holders
    assert not back.joining
    assert actions[-1] == Settle(back.view, 3)


def test_what_was_filled_for_a_move_that_was_given_up_does_not_count() -> None:
    there, _ = formed(2)
    there.handle(ReapedServer(1, 0, -9))
    joining = view_of(there.handle(JoinServer(1, 1, 1)))
    there.handle(ReapedServer(1, 1, -9))
    again = view_of(there.handle(JoinServer(1, 2, 1)))
    for late in (
        ServerFilled(1, 1, joining.view, tuple(joining.joining)),
        ServerFilled(1, 2, joining.view, tuple(range(256))),
    ):
        assert there.handle(late) == []
    assert there.newest == again


def test_who_is_filled_is_filled_anew_in_every_view() -> None:
    there, _ = formed(3)
    there.handle(ReapedServer(1, 0, -9))
    joining = view_of(there.handle(JoinServer(1, 1, 1)))
    slots = tuple(joining.joining)
    there.handle(ServerFilled(1, 1, joining.view, slots[:-1]))
    again = view_of(there.handle(JoinServer(1, 1, 1)))  # on a new line
    assert (again.view, again.joining, again.holders) == (joining.view + 1, joining.joining, joining.holders)
    assert there.handle(ServerFilled(1, 1, joining.view, slots)) == []
    assert there.handle(ServerFilled(1, 1, again.view, slots[-1:])) == []
    assert not view_of(there.handle(ServerFilled(1, 1, again.view, slots[:-1]))).joining


def test_of_several_replicas_the_first_takes_over_and_the_others_are_filled_anew() -> None:
    there, before = formed(3, num_copies=3)
    after = view_of(there.handle(ReapedServer(0, 0, -9)))
    for slot, (was, now) in enumerate(zip(before.holders, after.holders, strict=True)):
        if was[0] == 0:
            assert (now, after.joining[slot]) == ([was[1]], [was[2]])
        else:
            assert now == [number for number in was if number != 0]


@pytest.mark.parametrize("num_copies", [1, 2])
def test_slots_without_any_holder_are_lost_and_all_begin_anew(num_copies: int) -> None:
    there, first = formed(2, num_copies)
    if num_copies == 2:
        there.handle(ReapedServer(1, 0, -9))
    (lost,) = there.handle(ReapedServer(0, 0, -9))
    assert isinstance(lost, LoseSlots)
    assert (lost.number, there.newest) == (1, None)
    assert isinstance(there.handle(JoinServer(1, 0, 1))[0], RefuseChange)  # what it holds is of no use
    assert there.handle(JoinServer(0, 1, 1)) == []
    again = view_of(there.handle(JoinServer(1, 1, 1)))
    assert again.view > first.view
    assert again.holders == first.holders


def test_growing_moves_only_what_the_new_server_takes() -> None:
    there, before = formed(2)
    assert there.handle(ScaleServers(3)) == []  # nothing moves before it is there
    joining = view_of(there.handle(JoinServer(2, 0, 1)))
    assert joining.holders == before.holders
    after = view_of(fill(there, joining))
    for was, now in zip(before.holders, after.holders, strict=True):
        assert [number for number in now if number != 2] == [number for number in was if number in now]
    assert NUM_SLOTS / 6 < sum(holders[0] == 2 for holders in after.holders) < NUM_SLOTS / 2


def test_shrinking_empties_a_server_before_it_leaves() -> None:
    there, before = formed(3)
    joining = view_of(there.handle(ScaleServers(2)))
    assert joining.holders == before.holders
    actions = fill(there, joining)
    assert all(2 not in holders for holders in view_of(actions).holders)
    assert actions[-1] == Settle(there.view, 2)
    gone = view_of(there.handle(ReapedServer(2, 0, -9)))
    assert gone.incarnations == {0: 0, 1: 0}


@pytest.mark.parametrize("num_servers", [0, 1, 3, MAX_SERVERS + 1])
def test_a_number_that_cannot_be_is_refused(num_servers: int) -> None:
    there, view = formed(3)
    (refused,) = there.handle(ScaleServers(num_servers))
    assert isinstance(refused, RefuseChange)
    assert there.newest == view


# ---- whatever happens -----------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("die"), st.integers(0, MAX_SERVERS - 1)),
        st.tuples(st.just("join"), st.integers(0, MAX_SERVERS - 1)),
        st.tuples(st.just("fill"), st.integers(0, MAX_SERVERS - 1)),
        st.tuples(st.just("scale"), st.integers(1, MAX_SERVERS)),
    ),
    max_size=25,
)


class World:
    """Servers that live or do not, and a group that is told of it."""

    def __init__(self, num_servers: int, num_copies: int) -> None:
        self.group = group(num_servers, num_copies)
        self.incarnations = dict.fromkeys(range(MAX_SERVERS), 0)
        self.alive: set[int] = set()
        self.story: list[Event] = []
        self.views: list[ServerView] = []
        self.has: dict[tuple[int, int], set[int]] = {}  # what each process holds
        for number in range(num_servers):
            self.step("join", number)

    def step(self, what: str, number: int) -> None:
        newest = self.group.newest
        if what == "die" and number in self.alive:
            self.alive.discard(number)
            self.incarnations[number] += 1
            self._tell(ReapedServer(number, self.incarnations[number] - 1, -9))
        elif what == "join" and number not in self.alive and number < self.group.num_servers:
            self.alive.add(number)
            self._tell(JoinServer(number, self.incarnations[number], 1))
        elif what == "fill" and number in self.alive and newest is not None:
            slots = tuple(slot for slot, joining in newest.joining.items() if number in joining)
            me = (number, self.incarnations[number])
            self.has.setdefault(me, set()).update(slots)
            self._tell(ServerFilled(*me, newest.view, slots))
        elif what == "scale":
            self._tell(ScaleServers(number))

    def _tell(self, event: Event) -> None:
        self.story.append(event)
        for action in self.group.handle(event):
            match action:
                case AnnounceView(view):
                    self._check(view)
                case LoseSlots():
                    # All are killed and come back.
                    for number in self.alive:
                        self.incarnations[number] += 1
                    self.alive.clear()
                    self.views.clear()

    def _check(self, view: ServerView) -> None:
        if not self.views:
            for number, incarnation in view.incarnations.items():
                held = {slot for slot, holders in enumerate(view.holders) if number in holders}
                self.has[number, incarnation] = held
        else:
            assert view.view > self.views[-1].view
        for slot, holders in enumerate(view.holders):
            assert holders, f"slot {slot} has no holder and was not said to be lost"
            assert len(set(holders)) == len(holders)
            for number in holders:
                assert view.incarnations[number] == self.incarnations[number]
                assert slot in self.has[number, view.incarnations[number]], (
                    "it answers for what it was not given"
                )
        for slot, joining in view.joining.items():
            assert joining
            assert not set(joining) & set(view.holders[slot])
            assert set(joining) <= view.incarnations.keys()
        self.views.append(view)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), EVENTS)
def test_every_slot_has_a_primary_that_was_given_it_unless_it_is_lost(
    num_servers: int, num_copies: int, events: list[tuple[str, int]]
) -> None:
    world = World(num_servers, min(num_copies, num_servers))
    for what, number in events:
        world.step(what, number)
    # Left in peace, the group comes to rest with every copy there is to be.
    for _ in range(2 * MAX_SERVERS + 4):
        for number in range(MAX_SERVERS):
            world.step("join", number)
        for number in range(MAX_SERVERS):
            world.step("fill", number)
    newest = world.group.newest
    assert newest is not None
    assert not newest.joining
    wanted = min(world.group.num_copies, world.group.num_servers)
    assert all(len(holders) == wanted for holders in newest.holders)
    assert all(max(holders) < world.group.num_servers for holders in newest.holders)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), EVENTS)
def test_told_the_same_again_another_group_stands_where_this_one_stood(
    num_servers: int, num_copies: int, events: list[tuple[str, int]]
) -> None:
    world = World(num_servers, min(num_copies, num_servers))
    for what, number in events:
        world.step(what, number)
    again = group(num_servers, min(num_copies, num_servers))
    for event in world.story:
        again.handle(copy.copy(event))
    assert (again.newest, again.members, again.view) == (
        world.group.newest,
        world.group.members,
        world.group.view,
    )


def test_copies_are_on_different_hosts_also_where_a_server_is_away_from_home() -> None:
    there = ServerGroup(num_servers=3, num_copies=2, max_servers=MAX_SERVERS, hosts=(0, 1, 2))

    def join(number: int, incarnation: int, host: int) -> list[Action]:
        return there.handle(JoinServer(number, incarnation, 1, f"tls://10.0.0.{host}:{7100 + number}"))

    def holders(view: ServerView) -> set[frozenset[int]]:
        return {frozenset(each) for each in view.holders}

    for number in range(3):
        actions = join(number, 0, host=number)
    assert holders(view_of(actions)) == {frozenset(pair) for pair in ((0, 1), (0, 2), (1, 2))}
    there.handle(ReapedServer(1, 0, -9))
    actions = fill(there, view_of(join(1, 1, host=2)))  # its home is lost: beside server 2
    assert holders(view_of(actions)) == {frozenset(pair) for pair in ((0, 1), (0, 2))}
    there.handle(ReapedServer(1, 1, -9))
    actions = fill(there, view_of(join(1, 2, host=1)))
    assert holders(view_of(actions)) == {frozenset(pair) for pair in ((0, 1), (0, 2), (1, 2))}
