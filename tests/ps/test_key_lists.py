"""Key lists that are sent once: whatever the sender refers to, the other end has."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from serverbench import Bench, messages, refusal

from shoal.ps.key_lists import KeyLists, name_of
from shoal.runtime.transport.messages.client_server import DeclareMode, Pulled, PullRows, PushRows


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True), st.booleans()),
        max_size=30,
    )
)
def test_what_is_referred_to_is_there(sent: list[tuple[list[int], bool]]) -> None:
    client, server = KeyLists(limit_bytes=64), KeyLists(limit_bytes=64)
    for ids, is_lost in sent:
        keys = np.array(sorted(ids), np.int64)
        name, is_known = client.refer(keys)
        if is_known:
            known = server.find(name)
            assert known is not None
            assert known.tolist() == keys.tolist()
        else:
            server.keep(name, keys)
        if is_lost:  # the sender does not know what was heard, and forgets all
            client = KeyLists(limit_bytes=64)


def test_a_push_may_name_the_keys_of_its_pull() -> None:
    bench = Bench(DeclareMode(1, "async"))
    keys, out = np.array([1, 5], np.int64), np.zeros((2, 2), np.float32)
    name = name_of(keys)
    (answer,) = messages(bench.ask(1, PullRows(1, 0, 0, keys=name), [keys], [out]))
    assert isinstance(answer, Pulled)
    rows = np.ones((2, 2), np.float32)
    assert bench.ask(1, PushRows(1, 7, 1, 0, keys=name), [b"", rows]) == []
    bench.end(0, 1, stream=7, num_pushes=1)
    assert bench.rows() == [[-1.0, -1.0]] * 2


def test_a_list_that_was_not_sent_is_refused() -> None:
    bench = Bench(DeclareMode(2, "async"))
    keys = np.array([1, 5], np.int64)
    bench.ask(1, PullRows(1, 0, 0, keys=9), [keys], [np.zeros((2, 2), np.float32)])
    asked = bench.ask(2, PullRows(1, 0, 0, keys=9), [b""], [np.zeros((2, 2), np.float32)])
    assert "no key list 9 was sent on this connection" in refusal(asked)
