"""Slots: fixed for good, even, and independent of everything else that is hashed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.ps.layout import partition, slot_of

INT64 = st.integers(-(2**63), 2**63 - 1)


def test_slots_never_change() -> None:
    # Checkpoints and marks are by slot: a change here loses every run there is.
    keys = np.array([0, 1, 2, 1000, -1, 2**63 - 1, -(2**63)])
    assert slot_of(0, keys).tolist() == [199, 154, 214, 208, 19, 31, 13]
    assert slot_of(7, keys).tolist() == [61, 122, 114, 48, 137, 135, 91]


def test_slots_are_even_also_for_neighbours_and_strides() -> None:
    for keys in (np.arange(100_000), np.arange(100_000) * 4096, np.arange(100_000) << 32):
        counts = np.bincount(slot_of(3, keys), minlength=256)
        assert counts.min() > 300
        assert counts.max() < 490


@settings(max_examples=60, deadline=None)
@given(keys=st.sets(INT64, max_size=80), num_servers=st.integers(1, 5), seed=st.integers(0, 99))
def test_a_partition_gives_every_key_to_the_owner_of_its_slot_in_order(
    keys: set[int], num_servers: int, seed: int
) -> None:
    given_keys = np.array(sorted(keys), np.int64)
    owners = np.random.default_rng(seed).integers(0, num_servers, 256).astype(np.int16)
    order, starts = partition(given_keys, owners, 5)
    assert sorted(order.tolist()) == list(range(len(keys)))
    assert starts[0] == 0
    assert starts[-1] == len(keys)
    for server in range(len(starts) - 1):
        mine = given_keys[order[starts[server] : starts[server + 1]]]
        assert (owners[slot_of(5, mine)] == server).all()
        assert (mine[1:] > mine[:-1]).all()
