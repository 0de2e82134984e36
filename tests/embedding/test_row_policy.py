"""Admission and eviction of rows: equal to a plain dict, whatever is saved and restored in between."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.row_policy import MOST_SIGHTINGS, RowPolicy
from shoal.embedding.kernels import slot_of
from shoal.embedding.row_table import RowTable
from shoal.embedding.tiered_rows import RowBudget
from shoal.errors import ConfigError, RowPolicyRefused
from shoal.runtime.transport.messages.client_server import TableSpec

NUMBER, LR = 5, 0.5


def table(policy: RowPolicy | None, budget: RowBudget | None = None) -> RowTable:
    spec = TableSpec(
        NUMBER, "t", 2, "float32", "adagrad", {"lr": LR}, init="normal", scale=0.1, seed=3, policy=policy
    )
    return RowTable(spec, budget)


class Model:
    """The same in words: a dict of rows and a dict of counts."""

    def __init__(self, policy: RowPolicy) -> None:
        self.policy, self.step = policy, 0
        self.rows: dict[int, tuple[int, int]] = {}  # sightings, last step
        self.counts: dict[int, tuple[int, int]] = {}
        self.plain = table(None)  # values and state, of rows that are there
        self.num_evicted = 0

    def update(self, keys: list[int], grads: np.ndarray) -> None:
        self.step += 1
        admitted = []
        for key in keys:
            seen = (self.rows.get(key) or self.counts.get(key) or (0, 0))[0] + 1
            if key in self.rows or seen >= self.policy.admit_after:
                self.counts.pop(key, None)
                self.rows[key] = (seen, self.step)
                admitted.append(key)
            else:
                self.counts[key] = (seen, self.step)
        chosen = np.array([key in admitted for key in keys], bool)
        self.plain.apply(np.array(sorted(admitted), np.int64), np.ascontiguousarray(grads[chosen]))
        if self.step % self.policy.sweep_every == 0:
            before = set(self.rows)
            self.rows, self.counts = self._left(self.rows), self._left(self.counts)
            self.num_evicted += len(before - set(self.rows))
            keys_there = self.plain._index.keys.array[: self.plain.num_rows]
            self.plain.drop_rows(np.array([int(key) not in self.rows for key in keys_there], bool))

    def _left(self, held: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        policy = self.policy
        if policy.ttl_steps is not None:
            held = {key: each for key, each in held.items() if self.step - each[1] <= policy.ttl_steps}
        if policy.max_rows is None:
            return held
        weights, share, kept = policy.weights, -(-policy.max_rows // 256), {}
        slots = {key: int(slot_of(NUMBER, np.array([key], np.int64))[0]) for key in held}
        for slot in set(slots.values()):
            inside = [key for key in held if slots[key] == slot]
            score = {
                key: weights.get("sightings", 0) * held[key][0]
                + weights.get("age", 0) * (self.step - held[key][1])
                for key in inside
            }
            for key in sorted(inside, key=lambda key: (score[key], key))[-share:]:
                kept[key] = held[key]
        return kept


POLICIES = st.builds(
    RowPolicy,
    admit_after=st.integers(1, 3),
    ttl_steps=st.none() | st.integers(1, 6),
    max_rows=st.none() | st.just(256),
    keep=st.sampled_from(["recent", "frequent", {"sightings": 1.0, "age": -0.5}]),
    sweep_every=st.integers(1, 3),
)
# Several ids of one slot, so that they have to give way to each other.
IDS = [key for key in range(4000) if slot_of(NUMBER, np.array([key], np.int64))[0] in (0, 7)][:16]


@settings(max_examples=60, deadline=None)
@given(
    policy=POLICIES,
    steps=st.lists(
        st.tuples(
            st.sets(st.sampled_from(IDS), max_size=6),
            st.sampled_from(["go on", "restore", "by key", "track"]),
        ),
        max_size=14,
    ),
)
def test_rows_of_a_policy_are_those_of_a_dict(policy: RowPolicy, steps: list[tuple[set[int], str]]) -> None:
    held, model, copy = table(policy), Model(policy), table(policy)
    tracker, since = "", 0
    for number, (chosen, then) in enumerate(steps):
        keys = sorted(chosen)
        grads = np.random.default_rng(number).normal(size=(len(keys), 2)).astype(np.float32)
        held.apply(np.array(keys, np.int64), grads)
        held.sweep()
        model.update(keys, grads)
        if then == "restore":  # as a checkpoint, or a slot that moves to another server
            fresh = table(policy)
            fresh.set(*held.read_all(), held.step)
            fresh.evicted, held, tracker = held.evicted, fresh, ""
        elif then == "by key":  # as a replica follows
            everything = np.array(IDS, np.int64)
            fresh = table(policy)
            fresh.set_whole(everything, held.read_whole(everything))
            fresh.step, fresh.evicted, held, tracker = held.step, held.evicted, fresh, ""
        elif then == "track":  # as incremental saves
            clock = held.track()
            if tracker != held.tracker:
                copy = table(policy)
            copy.set(*held.read_since(None, since if tracker == held.tracker else None), held.step)
            tracker, since = held.tracker, clock
            for one, other in zip(copy.read_all(), held.read_all(), strict=True):
                np.testing.assert_array_equal(one, other)
        assert sorted(held._index.keys.array[: held.num_rows].tolist()) == sorted(model.rows)
        found, _, state = held.read_all()
        statistics = {**model.rows, **model.counts}
        assert found.tolist() == sorted(statistics)
        assert state[:, held.rule_dim].tolist() == [statistics[key][0] for key in found.tolist()]
        assert state[:, held.rule_dim + 1].tolist() == [statistics[key][1] for key in found.tolist()]
        assert held.num_evicted == model.num_evicted
        out, expected = np.empty((len(IDS), 2), np.float32), np.empty((len(IDS), 2), np.float32)
        held.pull(np.array(IDS, np.int64), out)
        model.plain.pull(np.array(IDS, np.int64), expected)
        np.testing.assert_array_equal(out, expected)


def test_a_policy_is_the_same_where_rows_are_on_disk(tmp_path: Any) -> None:
    policy = RowPolicy(admit_after=2, ttl_steps=4, sweep_every=2)
    plain, tiered = table(policy), table(policy, RowBudget(1024 * 16, str(tmp_path)))
    generator = np.random.default_rng(0)
    for _ in range(12):
        keys = np.unique(generator.integers(0, 6000, 3000))
        grads = generator.normal(size=(len(keys), 2)).astype(np.float32)
        for each in (plain, tiered):
            each.apply(keys, grads)
            each.sweep()
    assert plain.num_evicted == tiered.num_evicted > 0
    for one, other in zip(plain.read_all(), tiered.read_all(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_seconds_are_those_of_the_clock_it_is_given() -> None:
    held = table(RowPolicy(ttl_s=10.0, sweep_every=1))
    for now_s, key in ((1e9, 1), (1e9 + 8, 2), (1e9 + 12, 3)):
        held.now_s = lambda now_s=now_s: now_s  # type: ignore[misc]
        held.apply(np.array([key], np.int64), np.ones((1, 2), np.float32))
        held.sweep()
    assert sorted(held._index.keys.array[: held.num_rows].tolist()) == [2, 3]
    other = table(held.policy)
    other.set(*held.read_all(), held.step)
    np.testing.assert_array_equal(other.read_all()[2], held.read_all()[2])


def test_counting_ends_where_float32_would_round() -> None:
    held = table(RowPolicy(admit_after=1))
    state = np.array([[1.0, 1.0, MOST_SIGHTINGS, MOST_SIGHTINGS, 77]], np.float32)
    held.set(np.array([9], np.int64), np.ones((1, 2), np.float32), state, MOST_SIGHTINGS + 77 * 2**24)
    held.apply(np.array([9], np.int64), np.ones((1, 2), np.float32))
    assert held.read_all()[2][0, 2:].tolist() == [MOST_SIGHTINGS, 0, 78]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"admit_after": 0}, "admit_after"),
        ({"admit_after": True}, "admit_after"),
        ({"admit_after": MOST_SIGHTINGS + 1}, "no id would get a row"),
        ({"ttl_steps": 1.5}, "ttl_steps"),
        ({"ttl_s": -1.0}, "ttl_s"),
        ({"max_rows": 0}, "max_rows"),
        ({"keep": "biggest"}, "'biggest'"),
        ({"keep": {"clicks": 1.0}}, "'clicks'"),
        ({"keep": {"age": float("nan")}}, "finite"),
        ({"sweep_every": 0}, "sweep_every"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused_by_name(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RowPolicy(**given)
    with pytest.raises(RowPolicyRefused):
        RowPolicy(**given)


def test_a_policy_travels_and_a_wrong_one_is_a_malformed_message() -> None:
    spec = table(RowPolicy(admit_after=3, keep={"age": -1.0})).spec
    packed = msgspec.msgpack.encode(spec)
    assert msgspec.msgpack.decode(packed, type=TableSpec) == spec
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(packed.replace(b"\xabadmit_after\x03", b"\xabadmit_after\x00"), type=TableSpec)


def test_stamps_of_a_slot_that_was_elsewhere_are_not_those_of_before() -> None:
    rows = table(RowPolicy(ttl_steps=9))
    keys = np.array(IDS, np.int64)
    rows.track()
    rows.apply(keys, np.ones((len(keys), 2), np.float32))
    before, slot = rows.tracker, np.arange(256) == slot_of(NUMBER, keys)[0]
    elsewhere = rows.read_since(int(np.flatnonzero(slot)[0]), None)
    rows.drop_slots(slot)
    rows.set(elsewhere[0][1:], elsewhere[1][1:], elsewhere[2][1:], 1)  # where the first row was dropped
    assert rows.tracker != before  # so whoever asks what changed since is given all of it
