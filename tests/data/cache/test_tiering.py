"""The deciding part of a store, against a model of what its tiers hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shoal.data.cache.eviction import POLICIES
from shoal.data.cache.tiering import (
    ActionFailed,
    ActionFinished,
    Changed,
    Discard,
    DropCopy,
    Enough,
    Flush,
    Full,
    Limits,
    LoadBlock,
    Move,
    NotKept,
    Offer,
    Read,
    Release,
    Settled,
    Store,
    Tier,
    Tiering,
    Wait,
    Want,
)

KEYS = st.integers(0, 4)
SIZES = st.integers(1, 40)
TIERS = st.sampled_from([Tier.DEVICE, Tier.RAM])


class Simulated(RuleBasedStateMachine):
    """Carries the actions out on dicts, some of them late and some in vain, and keeps its own account of contents."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        device=st.sampled_from([0, 30, 60]),
        ram=st.integers(0, 120),
        disk=st.sampled_from([0, 60, 200, None]),
    )
    def begin(self, policy: str, device: int, ram: int, disk: int | None) -> None:
        self.limits = Limits(device_bytes=device, ram_bytes=ram, disk_bytes=disk)
        self.tiering = Tiering(self.limits, policy)
        self.tiers: dict[Tier, dict[Any, Any]] = {tier: {} for tier in Tier}  # (key, version) on disk
        self.written: dict[int, str] = {}  # what was put or changed: must never be lost
        self.sizes: dict[int, int] = {}
        self.held: list[int] = []
        self.serial = 0
        self.pending: list[tuple[Any, Any]] = []  # slow actions of others that are still under way
        self.disk_takes = 10**9

    # ---- carrying out -----------------------------------------------------------------------------

    def content(self, key: int, tier: Tier, version: int) -> Any:
        return self.tiers[tier][(key, version) if tier == Tier.DISK else key]

    def do(self, action: Any, offered: Any = None) -> bool:
        if isinstance(action, (Store, Move)):
            value = offered or self.content(action.key, action.source, action.version)
            if action.tier == Tier.DISK:
                in_use = sum(size for _, size in self.tiers[Tier.DISK].values())
                if in_use + action.num_bytes > self.disk_takes:
                    self.report(ActionFailed(action))
                    return False
                self.tiers[Tier.DISK][action.key, action.version] = (value[0], action.num_bytes)
            else:
                self.tiers[action.tier][action.key] = (value[0], action.num_bytes)
        self.report(ActionFinished(action))
        return True

    def report(self, event: Any) -> None:
        for drop in self.tiering.handle(event):
            self.drop(drop)

    def drop(self, drop: Any) -> None:
        assert isinstance(drop, DropCopy)
        del self.tiers[drop.tier][(drop.key, drop.version) if drop.tier == Tier.DISK else drop.key]

    def ask(self, request: Any) -> Any:
        for outcome in self.tiering.handle(request):
            if isinstance(outcome, DropCopy):
                self.drop(outcome)
        return outcome

    def offer(self, key: int, value: str, size: int, tier: Tier, *, is_new: bool) -> str:
        for _ in range(200):
            match self.ask(Offer(key, size, tier, is_new)):
                case Wait():
                    self.settle()
                case Full():
                    assert is_new
                    return "full"
                case NotKept():
                    return "not kept"
                case Settled():
                    return "kept"
                case Store() as store:
                    if self.do(store, (value, size)):
                        return "kept"
                case Move() as move:
                    self.do(move)
        raise AssertionError("it never came to an end")

    def settle(self) -> None:
        assert self.pending, "told to wait, with nobody at work"
        for action, offered in self.pending:
            self.do(action, offered)
        self.pending = []

    def fresh(self, key: int) -> str:
        self.serial += 1
        return f"{key}: {self.serial}"

    # ---- what users do ----------------------------------------------------------------------------

    @rule(key=KEYS, tier=TIERS, size=SIZES, ahead=st.booleans())
    def get(self, key: int, tier: Tier, size: int, ahead: bool) -> None:
        expected = self.written.get(key, f"{key}: loaded")
        for _ in range(200):
            match self.ask(Want(key, tier, ahead)):
                case Settled():
                    if ahead:
                        return
                    assert self.tiers[tier][key][0] == expected
                    return
                case Enough():
                    assert ahead
                    return
                case Wait():
                    assert not ahead or self.pending
                    self.settle()
                case LoadBlock():
                    assert key not in self.written, "loaded again, and what was written is lost"
                    self.report(ActionFinished(LoadBlock(key)))
                    self.offer(key, expected, self.sizes.get(key, size), tier, is_new=False)
                    return
                case Read() as read:
                    assert self.content(key, read.source, read.version)[0] == expected
                    self.do(read)
                    return
                case Move() as move:
                    self.do(move)
        raise AssertionError("it never came to an end")

    @rule(key=KEYS, tier=TIERS, size=SIZES)
    def put(self, key: int, tier: Tier, size: int) -> None:
        value = self.fresh(key)
        if self.offer(key, value, size, tier, is_new=True) == "kept":
            self.written[key], self.sizes[key] = value, size

    @rule(key=KEYS)
    def is_changed(self, key: int) -> None:
        self.change(key)

    def change(self, key: int) -> None:
        block = self.tiering.blocks.get(key)
        there = [tier for tier in (Tier.DEVICE, Tier.RAM) if block is not None and tier in block.copies]
        if there:
            size = self.tiers[there[0]][key][1]
            self.written[key], self.sizes[key] = self.fresh(key), size
            self.tiers[there[0]][key] = (self.written[key], size)
            self.report(Changed(key, there[0]))

    @rule(key=KEYS)
    def hold_or_let_go(self, key: int) -> None:
        block = self.tiering.blocks.get(key)
        if key in self.held:
            self.held.remove(key)
            self.tiering.let_go(key)
        elif len(self.held) < 2 and block is not None and block.copies and block.busy is None:
            self.tiering.hold(key)
            self.held.append(key)

    @rule(key=KEYS)
    def release(self, key: int) -> None:
        for _ in range(200):
            match self.ask(Release(key)):
                case Settled() | Full():
                    return
                case Wait():
                    self.settle()
                case Move() as move:
                    self.do(move)
        raise AssertionError("it never came to an end")

    @rule(key=KEYS)
    def discard(self, key: int) -> None:
        if key not in self.held:
            if isinstance(self.ask(Discard(key)), Wait):
                self.settle()
                assert isinstance(self.ask(Discard(key)), Settled)
            self.written.pop(key, None)
            self.sizes.pop(key, None)

    @rule()
    def flush(self) -> None:
        self.tiering.try_again()
        for key in list(self.tiering.blocks):
            for _ in range(200):
                outcome = self.ask(Flush(key))
                if isinstance(outcome, Wait):
                    self.settle()
                elif isinstance(outcome, Move):
                    if not self.do(outcome):
                        return
                elif not isinstance(outcome, DropCopy):
                    assert isinstance(outcome, (Settled, Full))
                    break
            else:
                raise AssertionError("it never came to an end")
            if isinstance(outcome, Settled):
                assert key not in self.tiering.blocks or not self.tiering.is_dirty(key)

    @rule(key=KEYS, tier=TIERS, flushes=st.booleans())
    def somebody_begins_and_takes_long(self, key: int, tier: Tier, flushes: bool) -> None:
        if not self.pending and key in self.tiering.blocks:
            outcome = self.ask(Flush(key) if flushes else Want(key, tier))
            if isinstance(outcome, (Move, Read)):
                # Copied as it is now; what is written to the block meanwhile is not in the copy.
                self.pending.append((outcome, self.content(outcome.key, outcome.source, outcome.version)))

    @rule()
    def what_they_copy_is_written_to(self) -> None:
        for action, _ in self.pending:
            self.change(action.key)

    @rule()
    def they_finish(self) -> None:
        if self.pending:
            self.settle()

    @rule(takes=st.sampled_from([0, 50, 10**9]))
    def the_disk_fills_up_or_empties(self, takes: int) -> None:
        self.disk_takes = takes

    # ---- what must hold ---------------------------------------------------------------------------

    @invariant()
    def no_tier_is_over_its_limit(self) -> None:
        for tier in Tier if hasattr(self, "limits") else ():
            limit = self.limits.of(tier)
            in_use = sum(size for _, size in self.tiers[tier].values())
            assert limit is None or in_use <= self.tiering.used[tier] <= limit
            if not self.pending:
                assert in_use == self.tiering.used[tier], "room is promised to nobody"

    @invariant()
    def nothing_written_is_lost(self) -> None:
        for key, value in getattr(self, "written", {}).items():
            block = self.tiering.blocks[key]
            assert block.copies
            for tier, copy in block.copies.items():
                assert self.content(key, tier, copy.version)[0] == value

    @invariant()
    def books_and_tiers_agree(self) -> None:
        if hasattr(self, "tiering"):
            for tier in (Tier.DEVICE, Tier.RAM):
                held = {key for key, block in self.tiering.blocks.items() if tier in block.copies}
                assert held == self.tiers[tier].keys()

    def teardown(self) -> None:
        if getattr(self, "pending", None):
            self.settle()


TestTiering = Simulated.TestCase
TestTiering.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# ---- one by one ------------------------------------------------------------------------------------


def stored(tiering: Tiering, key: str, size: int, *, is_new: bool = False) -> list[Any]:
    """Offer until it is kept; what was done on the way."""
    done: list[Any] = []
    if not is_new:
        assert tiering.handle(Want(key, Tier.RAM)) == [LoadBlock(key)]
    while not isinstance(done[-1] if done else None, Store):
        [outcome] = tiering.handle(Offer(key, size, Tier.RAM, is_new))
        done.append(outcome)
        if isinstance(outcome, (Full, NotKept)):
            return done
        if not isinstance(outcome, DropCopy):
            tiering.handle(ActionFinished(outcome))  # type: ignore[arg-type]  # only slow ones are left
    return done[:-1]


def test_the_least_recently_used_makes_room() -> None:
    tiering = Tiering(Limits(ram_bytes=30, disk_bytes=0))
    for key in "abc":
        assert stored(tiering, key, 10) == []
    assert tiering.handle(Want("a", Tier.RAM)) == [Settled()]
    assert stored(tiering, "d", 10) == [DropCopy("b", Tier.RAM, 1)]


def test_what_can_be_loaded_again_goes_to_disk_too_for_that_is_cheaper() -> None:
    tiering = Tiering(Limits(ram_bytes=10))
    stored(tiering, "a", 10)
    assert stored(tiering, "b", 10) == [Move("a", Tier.RAM, Tier.DISK, 1, 10), DropCopy("a", Tier.RAM, 1)]
    # Back again, and its copy on disk stays good: leaving costs nothing then.
    [demotion] = tiering.handle(Want("a", Tier.RAM))
    assert demotion == Move("b", Tier.RAM, Tier.DISK, 1, 10)


def test_a_changed_block_reaches_the_next_tier_before_it_leaves() -> None:
    tiering = Tiering(Limits(ram_bytes=10))
    stored(tiering, "a", 10)
    tiering.handle(Changed("a", Tier.RAM))
    assert tiering.is_dirty("a")
    [move, drop] = stored(tiering, "b", 10)
    assert (move, drop) == (Move("a", Tier.RAM, Tier.DISK, 2, 10), DropCopy("a", Tier.RAM, 2))
    assert not tiering.is_dirty("a")


def test_a_block_written_to_while_it_is_copied_stays_dirty() -> None:
    tiering = Tiering(Limits(ram_bytes=10))
    stored(tiering, "a", 10, is_new=True)
    [move] = tiering.handle(Flush("a"))
    tiering.handle(Changed("a", Tier.RAM))
    assert tiering.handle(ActionFinished(move)) == [DropCopy("a", Tier.DISK, 1)]  # type: ignore[arg-type]  # a Move
    assert tiering.is_dirty("a")


def test_without_room_for_what_was_changed_a_new_block_is_refused_and_nothing_moves() -> None:
    tiering = Tiering(Limits(ram_bytes=10, disk_bytes=0))
    stored(tiering, "a", 10, is_new=True)
    assert stored(tiering, "b", 10, is_new=True) == [Full()]
    assert stored(tiering, "c", 10) == [NotKept()]
    assert tiering.handle(Want("a", Tier.RAM)) == [Settled()]


def test_held_blocks_stay() -> None:
    tiering = Tiering(Limits(ram_bytes=20, disk_bytes=0))
    stored(tiering, "a", 10)
    stored(tiering, "b", 10)
    tiering.hold("a")
    assert stored(tiering, "c", 10) == [DropCopy("b", Tier.RAM, 1)]
    tiering.let_go("a")
    assert stored(tiering, "d", 10) == [DropCopy("a", Tier.RAM, 1)]


def test_freed_blocks_stay_usable_until_a_request_for_memory_releases_the_coldest_of_them() -> None:
    tiering = Tiering(Limits(ram_bytes=100, disk_bytes=0), policy="delayed")  # threshold: 25 bytes
    for key in "abcde":
        stored(tiering, key, 10)
    for key in "ab":
        assert tiering.handle(Release(key)) == [Settled()]
    assert stored(tiering, "f", 10) == []  # below the threshold nothing is marked
    tiering.handle(Release("c"))  # 30 bytes are freed: the sweep marks the coldest until 12 are left
    assert tiering.handle(Want("a", Tier.RAM)) == [Settled()]  # marked and still usable: it is in use again
    assert stored(tiering, "g", 10) == [
        DropCopy("b", Tier.RAM, 1)
    ]  # there was room enough: the marked go all the same
    assert "c" in tiering.blocks


def test_a_block_that_was_asked_for_less_often_does_not_displace_a_hot_one() -> None:
    tiering = Tiering(Limits(ram_bytes=10, disk_bytes=0), policy="count")
    stored(tiering, "hot", 10)
    for _ in range(3):
        tiering.handle(Want("hot", Tier.RAM))
    for _ in range(3):
        assert stored(tiering, "cold", 10) == [NotKept()]
    assert stored(tiering, "cold", 10) == [DropCopy("hot", Tier.RAM, 1)]  # as hot by now


def test_lfu_forgets_how_hot_a_block_was_long_ago() -> None:
    tiering = Tiering(Limits(ram_bytes=20, disk_bytes=0), policy="lfu")
    stored(tiering, "once", 10)
    for _ in range(90):
        tiering.handle(Want("once", Tier.RAM))
    stored(tiering, "now", 10)
    for _ in range(250):
        tiering.handle(Want("now", Tier.RAM))
    assert stored(tiering, "new", 10) == [DropCopy("once", Tier.RAM, 1)]


def test_reading_ahead_fills_half_a_tier_at_most() -> None:
    tiering = Tiering(Limits(ram_bytes=40, disk_bytes=0))
    for key in "ab":
        assert tiering.handle(Want(key, Tier.RAM, ahead=True)) == [LoadBlock(key)]
        [store] = tiering.handle(Offer(key, 10, Tier.RAM, is_new=False))
        tiering.handle(ActionFinished(store))  # type: ignore[arg-type]  # a Store
    assert tiering.handle(Want("c", Tier.RAM, ahead=True)) == [Enough()]
    assert tiering.handle(Want("a", Tier.RAM)) == [Settled()]
    assert tiering.handle(Want("c", Tier.RAM, ahead=True)) == [LoadBlock("c")]


def test_a_disk_that_is_full_is_not_tried_again_until_something_left_it_or_somebody_flushes() -> None:
    tiering = Tiering(Limits(ram_bytes=10))
    stored(tiering, "a", 10, is_new=True)
    [move] = tiering.handle(Offer("b", 10, Tier.RAM, True))
    assert isinstance(move, Move)
    assert tiering.handle(ActionFailed(move)) == []
    assert tiering.handle(Offer("b", 10, Tier.RAM, True)) == [Full()]
    tiering.try_again()
    assert isinstance(tiering.handle(Flush("a"))[0], Move)


@pytest.mark.parametrize("bad", [{"ram_bytes": -1}, {"ram_bytes": 1, "disk_bytes": -1}])
def test_limits_refuse_what_cannot_be_meant(bad: dict[str, int]) -> None:
    with pytest.raises(Exception, match="must be 0 or more"):
        Limits(**bad)


def test_no_block_goes_down_and_up_for_room_that_cannot_be_made() -> None:
    state = Simulated()
    state.begin(policy="lru", device=60, ram=33, disk=0)
    state.put(key=3, size=1, tier=Tier.DEVICE)
    state.put(key=2, size=33, tier=Tier.DEVICE)
    state.get(ahead=False, key=0, size=17, tier=Tier.DEVICE)
    state.get(ahead=False, key=1, size=11, tier=Tier.DEVICE)
    state.nothing_written_is_lost()
