"""The table of keys (pure), and the store over it as torch sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import DistStoreError, HashStore, PrefixStore, Store

from shoal.cluster.coordinator.actions import Answer, Tick
from shoal.cluster.coordinator.store_table import StoreAsked, StoreClientGone, StoreTable
from shoal.errors import WaitTimedOut
from shoal.recovery.rendezvous import ShoalStore, StoreWaitTimedOut
from shoal.runtime.transport.messages.worker_coordinator import (
    StoreAdd,
    StoreCheck,
    StoreCount,
    StoreDelete,
    StoreDone,
    StoreFlag,
    StoreGet,
    StoreRefused,
    StoreSet,
    StoreValues,
    StoreWait,
    WaitExpired,
)

calm = settings(deadline=None)


# ---- the table ------------------------------------------------------------------------------------


@pytest.fixture
def table() -> StoreTable:
    return StoreTable()


def test_a_value_that_is_there_is_answered_at_once(table: StoreTable) -> None:
    assert table.handle(StoreAsked(1, StoreSet({"a": b"1", "b": b"2"}), 0.0)) == [Answer(1, StoreDone())]
    assert table.handle(StoreAsked(2, StoreGet(["b", "a"], 5.0), 0.0)) == [
        Answer(2, StoreValues([b"2", b"1"]))
    ]


def test_a_get_waits_until_the_last_of_its_keys_is_set(table: StoreTable) -> None:
    assert table.handle(StoreAsked(2, StoreGet(["a", "b"], 5.0), 0.0)) == []
    assert table.handle(StoreAsked(1, StoreSet({"a": b"1"}), 1.0)) == [Answer(1, StoreDone())]
    assert table.handle(StoreAsked(1, StoreAdd("b", 3), 2.0)) == [
        Answer(1, StoreCount(3)),
        Answer(2, StoreValues([b"1", b"3"])),
    ]
    assert table.deadline is None


def test_a_key_deleted_while_others_are_awaited_is_awaited_again(table: StoreTable) -> None:
    table.handle(StoreAsked(2, StoreWait(["a", "b"], 5.0), 0.0))
    table.handle(StoreAsked(1, StoreSet({"a": b"1"}), 0.0))
    assert table.handle(StoreAsked(1, StoreDelete("a"), 0.0)) == [Answer(1, StoreFlag(True))]
    assert table.handle(StoreAsked(1, StoreSet({"b": b"1"}), 0.0)) == [Answer(1, StoreDone())]
    assert Answer(2, StoreDone()) in table.handle(StoreAsked(1, StoreSet({"a": b"1"}), 0.0))


def test_a_wait_that_expires_names_the_keys_that_nobody_set(table: StoreTable) -> None:
    table.handle(StoreAsked(1, StoreSet({"a": b"1"}), 0.0))
    table.handle(StoreAsked(2, StoreWait(["a", "b", "c"], 5.0), 1.0))
    assert table.deadline == 6.0
    assert table.handle(Tick(5.9)) == []
    assert table.handle(Tick(6.5)) == [Answer(2, WaitExpired("the store", 5.5, ["b", "c"]))]
    assert table.handle(Tick(7.0)) == []


def test_a_client_that_is_gone_is_not_answered(table: StoreTable) -> None:
    table.handle(StoreAsked(2, StoreWait(["a"], 5.0), 0.0))
    assert table.handle(StoreClientGone(2)) == []
    assert table.handle(StoreAsked(1, StoreSet({"a": b"1"}), 0.0)) == [Answer(1, StoreDone())]
    assert table.deadline is None


@pytest.mark.parametrize("value", [b"ten", b"", b"9" * 30, b"9" * 9000, b"9223372036854775807"])
def test_what_cannot_be_counted_is_refused_and_stays_as_it_was(table: StoreTable, value: bytes) -> None:
    table.handle(StoreAsked(1, StoreSet({"a": value}), 0.0))
    [answer] = table.handle(StoreAsked(1, StoreAdd("a", 1), 0.0))
    assert isinstance(answer.message, StoreRefused)
    assert table.values == {"a": value}


keys = st.sampled_from("abc")
requests = st.one_of(
    st.builds(StoreSet, st.dictionaries(keys, st.just(b"1"), min_size=1)),
    st.builds(StoreDelete, keys),
    st.builds(StoreCheck, st.lists(keys, min_size=1)),
    st.builds(StoreWait, st.lists(keys, min_size=1), st.floats(0.0, 10.0)),
    st.builds(StoreGet, st.lists(keys, min_size=1), st.floats(0.0, 10.0)),
)


@calm
@given(st.lists(st.tuples(st.integers(0, 4), requests, st.floats(0.0, 3.0)), max_size=30))
def test_every_question_is_answered_once_and_by_its_deadline(questions: list[tuple[int, Any, float]]) -> None:
    table, now = StoreTable(), 0.0
    waiting: dict[int, float] = {}

    def check(answers: list[Answer]) -> None:
        for answer in answers:
            assert now <= waiting.pop(answer.client) or isinstance(answer.message, WaitExpired)

    for client, request, pause_s in questions:
        now += pause_s
        check(table.handle(Tick(now)))
        if client not in waiting:
            waiting[client] = now + getattr(request, "timeout_s", 0.0)
            check(table.handle(StoreAsked(client, request, now)))
        assert table.deadline == min(waiting.values(), default=None)
        assert all(deadline >= now for deadline in waiting.values())
    now += 10.0
    check(table.handle(Tick(now)))
    assert not waiting


# ---- the store, as torch sees it --------------------------------------------------------------------


@pytest.fixture
def store(start: Callable[..., Any]) -> Iterator[ShoalStore]:
    store = ShoalStore(start().path, 0, num_workers=2, timeout=timedelta(seconds=10))
    yield store
    store.close()


def test_a_wait_for_what_nobody_sets_ends_with_torchs_error_and_our_facts(store: ShoalStore) -> None:
    store.set("there", "1")
    for wait in (store.wait, PrefixStore("", store).wait):
        with pytest.raises(DistStoreError, match="waited") as caught:
            wait(["there", "/missing"], timedelta(milliseconds=20))
        assert isinstance(caught.value, WaitTimedOut)
        assert isinstance(caught.value, StoreWaitTimedOut)
        assert "missing" in caught.value.missing[-1]


def test_the_timeout_set_through_torch_bounds_a_get(store: ShoalStore) -> None:
    wrapped = PrefixStore("view-1", store)
    wrapped.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(DistStoreError, match="view-1/missing"):
        wrapped.get("missing")


def test_a_refused_question_leaves_the_store_usable(store: ShoalStore) -> None:
    store.set("word", "ten")
    with pytest.raises(DistStoreError, match="no number"):
        store.add("word", 1)
    for _ in range(2):
        store.append("long", bytes(3 << 20))
    with pytest.raises(DistStoreError, match="too large"):
        store.get("long")
    assert store.get("word") == b"ten"


def test_a_wait_in_a_clone_does_not_hold_up_the_original(store: ShoalStore) -> None:
    clone = PrefixStore("p", store).clone()
    waiter = threading.Thread(target=clone.wait, args=(["late"],))
    waiter.start()
    PrefixStore("p", store).set("late", "1")
    waiter.join()
    store.close()
    with pytest.raises(DistStoreError, match="connection is closed"):
        clone.get("late")


def test_a_closed_store_says_so(store: ShoalStore) -> None:
    store.close()
    with pytest.raises(DistStoreError, match="connection is closed"):
        store.get("a")


OPERATIONS: dict[str, st.SearchStrategy[Any]] = {
    "set": st.tuples(keys, st.sampled_from(["", "7", "x"])),
    "add": st.tuples(st.sampled_from(["n", "m"]), st.integers(-5, 5)),
    "append": st.tuples(keys, st.sampled_from(["", "y"])),
    "compare_set": st.tuples(keys, st.sampled_from(["", "7", "x"]), st.sampled_from(["8", "7"])),
    "check": st.tuples(st.lists(keys, min_size=1)),
    "delete_key": st.tuples(keys),
    "num_keys": st.just(()),
    "multi_set": st.tuples(st.lists(keys, min_size=2, max_size=2, unique=True), st.just(["1", "2"])),
    "get": st.tuples(keys),
    "multi_get": st.tuples(st.lists(keys, min_size=1)),
    "has_extended_api": st.just(()),
}
operations = st.sampled_from(sorted(OPERATIONS)).flatmap(
    lambda name: st.tuples(st.just(name), OPERATIONS[name])
)


def outcome(store: Store, name: str, arguments: tuple[Any, ...]) -> object:
    try:
        return getattr(store, name)(*arguments)
    except RuntimeError:
        return "an error"


def test_torch_cannot_tell_it_from_a_store_of_its_own(store: ShoalStore) -> None:
    runs = iter(range(10**9))

    @calm
    @given(st.lists(operations, max_size=12))
    def compare(script: list[tuple[str, tuple[Any, ...]]]) -> None:
        theirs, ours = HashStore(), PrefixStore(f"run-{next(runs)}", store)
        theirs.set_timeout(timedelta(milliseconds=1))
        ours.set_timeout(timedelta(milliseconds=1))
        others = store.num_keys()
        for name, arguments in script:
            expected, got = outcome(theirs, name, arguments), outcome(ours, name, arguments)
            assert got == (expected + others if name == "num_keys" else expected), (name, arguments)

    compare()
