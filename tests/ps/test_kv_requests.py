"""Pushes of `shoal.ps` count exactly once and in their order, pulls see those before them, under deaths of workers and servers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_world import Link, World

from shoal.config.job import Job
from shoal.embedding.rules import RULES
from shoal.errors import ConfigError, PsError
from shoal.ps.client import kv as kv_module
from shoal.ps.client import server_group as groups
from shoal.ps.client.kv import Kv, RequestQueue
from shoal.ps.client.server_group import Group
from shoal.ps.layout import FIRST_NAMED
from shoal.runtime.transport.messages.client_server import DeclareMode, TableSpec
from slot_digests import slot_digests

MODE = DeclareMode(num_workers=2, kind="async")

KEYS = st.lists(st.integers(0, 30) | st.integers(-(2**63), 2**63 - 1), max_size=12)
SCRIPT = st.lists(
    st.tuples(st.sampled_from(["push", "push", "push after", "pull", "wait"]), KEYS), max_size=14
)


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "Link", Link)
    monkeypatch.setattr(groups, "BEHIND_S", 0.0)
    monkeypatch.setattr(kv_module, "MAX_REQUESTS", 6)


def client(world: World, rank: int = 0, incarnation: int = 0) -> Kv:
    Link.world = world
    job = Job(name="job", run_dir=Path("runs"), rank=rank, num_workers=2, incarnation=incarnation)
    group = Group(
        name=f"kv-{rank}-0",
        incarnation=incarnation,
        ways_in=["0", "1", "2"],
        ask_view=world.ask_view,
        timeout_s=9.0,
    )
    return Kv(job, group, MODE, 0)


def play(kv: Kv, script: list[tuple[str, list[int]]], totals: Counter[int], *, is_quiet: bool) -> list[Any]:
    """Run a script; what it pushed is added to `totals`. Pulls see at least what was pushed before, or just that."""
    table, handles, seen = kv.table("sums", dim=1, rule="add", dtype="float64"), [], []
    for number, (what, keys) in enumerate(script, start=1):
        if what.startswith("push"):
            values = np.full(len(keys), float(number))
            after = handles[-2:] if what == "push after" else []
            handles.append(kv.push(table, np.array(keys, np.int64), values, after=after))
            values[:] = np.nan  # it was taken
            for key in keys:
                totals[key] += number
        elif what == "pull":
            handles.append(kv.pull(table, keys, after=handles[-1:] if len(keys) % 2 else []))
            seen.append((handles[-1], [totals[key] for key in keys]))
        elif handles:
            handles[len(keys) % len(handles)].result()
    kv.wait()
    for handle, least in seen:
        found = handle.result()[:, 0].tolist()
        assert found == least if is_quiet else all(a >= b for a, b in zip(found, least, strict=True))
    return handles


def check_all(kv: Kv, world: World, totals: Counter[int]) -> None:
    keys = sorted(totals)
    assert kv.pull("sums", keys).result()[:, 0].tolist() == [totals[key] for key in keys]
    while world.step():
        pass
    digests = {number: slot_digests(core.state) for number, core in world.cores.items()}
    for slot, holders in enumerate(world.view.holders):
        assert len({digests[holder][slot] for holder in holders}) == 1
    for _, link in kv._group._links.values():
        assert not link.in_use, "memory that nobody gave back"  # type: ignore[attr-defined]
    kv.close()


@given(script=SCRIPT, seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_every_push_counts_once_and_pulls_see_what_was_pushed_before(
    script: list[tuple[str, list[int]]], seed: int
) -> None:
    world, totals = World(seed), Counter[int]()
    kv = client(world)
    play(kv, script, totals, is_quiet=True)
    check_all(kv, world, totals)


@given(script=SCRIPT, seed=st.integers(0, 2**32), dead=st.integers(0, 2), turns=st.integers(1, 120))
@settings(max_examples=120, deadline=None)
def test_no_push_is_lost_or_doubled_when_a_server_dies(
    script: list[tuple[str, list[int]]], seed: int, dead: int, turns: int
) -> None:
    world, totals = World(seed), Counter[int]()
    kv = client(world)
    world.kills[world.turn + turns] = dead
    play(kv, script, totals, is_quiet=False)
    while world.kills:
        world.step()
    check_all(kv, world, totals)


@given(script=SCRIPT, seed=st.integers(0, 2**32), ran=st.integers(0, 14), has_death=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_worker_that_died_and_runs_again_from_the_top_adds_nothing_twice(
    script: list[tuple[str, list[int]]], seed: int, ran: int, has_death: bool
) -> None:
    world, totals = World(seed), Counter[int]()
    first, other = client(world), client(world, rank=1)
    others = Counter[int]()
    play(other, script, others, is_quiet=False)
    table = first.table("sums", dim=1, rule="add", dtype="float64")
    for number, (what, keys) in enumerate(script[:ran], start=1):
        if what.startswith("push"):
            first.push(table, np.array(keys, np.int64), np.full(len(keys), float(number)))
    for _, link in list(first._group._links.values()):
        world.abandon(link)  # type: ignore[arg-type]
    if has_death:
        world.kills[world.turn + 5] = seed % 3
    again = client(world, incarnation=1)
    play(again, script, totals, is_quiet=False)
    check_all(again, world, totals + others)


def test_what_follows_something_refused_is_not_sent_and_says_why() -> None:
    world = World(0)
    kv = client(world)
    good, bad = kv.table("good", dim=1, rule="add"), kv.table("bad", dim=1, rule="add")
    while world.step():  # servers tell each other of tables
        pass
    for core in world.cores.values():
        del core.state.contents.tables[kv_module.table_number("bad")]
    refused = kv.push(bad, [1, 2, 3], [1.0, 1.0, 1.0])
    following = kv.push(good, [1], [1.0], after=[refused])
    independent = kv.push(good, [1], [2.0])
    with pytest.raises(PsError, match="was not sent, because what it was to follow was refused"):
        following.result()
    with pytest.raises(PsError, match="was never declared here"):
        kv.wait(refused)
    independent.result()
    kv.push(bad, [1], [1.0])
    assert kv.pull(good, [1]).result() == 2.0
    with pytest.raises(PsError, match="was never declared here"):  # of the push that nobody waited for
        kv.close()


def test_requests_that_fill_the_memory_wait_for_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_module, "MAX_BYTES", 10_000)
    world = World(1)
    kv = client(world)
    table = kv.table("sums", dim=1, rule="add")
    for _ in range(20):
        kv.push(table, np.arange(300), np.ones(300, np.float32))
        assert sum(each.num_bytes for each in kv._line.all) <= 10_000
    kv.push(table, np.arange(3000), np.ones(3000, np.float32))  # alone it may be larger
    assert kv.pull(table, [299, 2999]).result()[:, 0].tolist() == [21.0, 1.0]


def test_pushes_that_overtake_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_newest_first(self: RequestQueue, group: Group) -> None:
        for request in reversed(self._sent):
            request.send(group)
        self._flush()

    monkeypatch.setattr(RequestQueue, "send", send_newest_first)
    wrong = 0
    for seed in range(20):
        world, totals = World(seed), Counter[int]()
        kv = client(world)
        world.kills[world.turn + 40] = seed % 3
        play(kv, [("push", [number, 1]) for number in range(12)], totals, is_quiet=False)
        found = kv.pull("sums", sorted(totals)).result()[:, 0].tolist()
        wrong += found != [totals[key] for key in sorted(totals)]
    assert wrong > 5


@given(st.data())
@settings(deadline=None)
def test_repeats_are_summed_and_stored_ones_replaced_whatever_the_order(data: st.DataObject) -> None:
    keys = np.array(data.draw(KEYS), np.int64)
    values = np.arange(2.0 * len(keys)).reshape(-1, 2)
    for rule in RULES:
        spec = TableSpec(1, "t", 2, "float64", rule, {})
        found, rows = kv_module.once_each(spec, keys, values, merge=True)
        expected: dict[int, np.ndarray] = {}
        for key, value in zip(keys.tolist(), values, strict=True):
            expected[key] = value if rule == "store" or key not in expected else expected[key] + value
        assert found.tolist() == sorted(expected)
        assert [row.tolist() for row in rows] == [expected[key].tolist() for key in found.tolist()]


@pytest.mark.parametrize("keys", [[0.5], np.array([True]), ["a"], np.array([2**63], np.uint64)])
def test_keys_that_are_no_int64_are_refused(keys: Any) -> None:
    with pytest.raises(ConfigError, match="keys must"):
        kv_module.keys_of(TableSpec(1, "t", 1, "float32", "add", {}), keys)


def test_tables_of_names_have_numbers_that_no_model_has_and_differ() -> None:
    numbers = {kv_module.table_number(f"table {n}") for n in range(1000)}
    assert len(numbers) == 1000
    assert min(numbers) >= FIRST_NAMED


def test_a_push_counts_for_its_own_table_on_servers_that_have_none_of_its_keys_too() -> None:
    world = World(0)
    kv = client(world)
    table = kv.table("few", dim=1, rule="add")
    for _ in range(3):
        kv.push(table, [1], [[1.0]])
    kv.wait()
    number = next(iter(kv._tables.values())).number
    for core in world.cores.values():
        assert set(core.state.applied.steps(number)[core.mine].tolist()) == {3}
        assert not core.state.applied.steps(0).any()  # of a model's steps it is none
    kv.close()
