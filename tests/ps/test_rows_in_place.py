"""Rows that a worker reads in the memory of a server: those that the server would have answered with, or none."""

from __future__ import annotations

import os
import resource
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serverbench import Bench

from shoal.embedding.row_table import RowTable
from shoal.embedding.shared_rows import can_share_rows
from shoal.ps.client.rows_in_place import RowsInPlace
from shoal.ps.layout import slot_of
from shoal.ps.server.actions import Reply
from shoal.ps.server.core import ServerCore
from shoal.runtime.transport.messages.client_server import (
    AskRows,
    DeclareMode,
    DeclareTable,
    PullRows,
    PushRows,
    RowsAt,
    TableSpec,
    WriteRows,
)
from shoal.runtime.transport.messages.server_coordinator import ServerView

pytestmark = pytest.mark.skipif(not can_share_rows(), reason="stores may be seen in another order here")

NUM_ROWS, DIM = 300, 3
SPEC = TableSpec(
    0,
    "rows",
    DIM,
    "float32",
    "adagrad",
    {"lr": 0.5, "eps": 1e-10},
    NUM_ROWS,
    init="normal",
    scale=0.1,
    seed=5,
)
KEYS = np.arange(NUM_ROWS, dtype=np.int64)


class Shared(Bench):
    """A server that shares its rows with worker 0, in exact steps of one worker."""

    def __init__(self) -> None:
        core = ServerCore(0)
        core.state.contents.shares_rows = True
        super().__init__(DeclareMode(1, "exact"), spec=SPEC, core=core)
        self.seq = 0

    def reader(self) -> RowsInPlace:
        (reply,) = self.ask(1, AskRows(self.view, 0))
        assert isinstance(reply, Reply)
        assert isinstance(reply.message, RowsAt)
        return RowsInPlace(SPEC, reply.fds[0], reply.message.num_bytes, reply.message.edition)

    def gathered(self, keys: np.ndarray) -> np.ndarray:
        out = np.empty((len(keys), DIM), np.float32)
        assert self.ask(1, PullRows(self.view, self.seq, 0), [keys], [out])
        return out

    def step(self, keys: np.ndarray) -> None:
        self.seq += 1
        rows = np.random.default_rng(self.seq).normal(size=(len(keys), DIM)).astype(np.float32)
        self.ask(1, PushRows(self.view, 0, self.seq, 0), [keys, rows])
        assert self.end(0, self.seq, num_pushes=1)

    def write(self, keys: np.ndarray) -> None:
        rows = np.full((len(keys), DIM), len(keys), np.float32)
        self.ask(1, WriteRows(self.view, 0, 0), [keys, rows, b""])

    def move(self, num_slots: int) -> None:
        """A view in which another server has some of the slots."""
        self.view += 1
        holders = [[1] if slot < num_slots else [0] for slot in range(256)]
        self.core.view(ServerView(self.view, holders, {0: 0, 1: 0}))


some_keys = st.sets(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=40).map(
    lambda keys: np.array(sorted(keys), np.int64)
)


@settings(max_examples=60, deadline=None)
@given(events=st.lists(st.tuples(st.sampled_from(["step", "step", "write", "view"]), some_keys), max_size=8))
def test_steps_are_read_and_whatever_else_changes_rows_is_noticed(
    events: list[tuple[str, np.ndarray]],
) -> None:
    bench = Shared()
    reader, is_current, out = bench.reader(), True, np.empty((NUM_ROWS, DIM), np.float32)
    for kind, keys in events:
        if kind == "step":
            bench.step(keys)
        elif kind == "write":
            bench.write(keys)
            is_current = False
        else:
            bench.move(0)
            is_current = False
        assert reader.pull(KEYS, out) == is_current
        if not is_current:
            reader, is_current = bench.reader(), True
            assert reader.pull(KEYS, out)
        assert out.tobytes() == bench.gathered(KEYS).tobytes()
        part = np.empty((len(keys), DIM), np.float32)
        assert reader.pull(keys, part)
        assert part.tobytes() == out[keys].tobytes()


def test_rows_of_a_slot_that_moves_away_are_not_read() -> None:
    bench, out = Shared(), np.empty((NUM_ROWS, DIM), np.float32)
    bench.write(KEYS)
    bench.step(KEYS[::2])
    reader = bench.reader()
    bench.move(128)  # rows of the others take the places of those that go
    assert not reader.pull(KEYS, out)
    assert bench.core.state.contents.tables[0].num_rows < NUM_ROWS
    assert bench.reader().pull(KEYS, out)
    held = bench.core.state.contents.held
    mine = KEYS[held[slot_of(0, KEYS)]]
    assert out[mine].tobytes() == bench.gathered(mine).tobytes()


def test_what_is_read_while_rows_are_rewritten_never_counts() -> None:
    num_rows = 40_000
    spec = TableSpec(0, "t", 16, "float32", "sgd", {"lr": 1.0}, num_rows)
    table, keys = RowTable(spec, is_shared=True), np.arange(num_rows, dtype=np.int64)
    between = threading.Lock()  # a server answers between two changes, never within one

    def rewrite() -> None:
        for number in range(1, 120):
            with between:
                table.set(keys, np.full((num_rows, 16), number, np.float32), None, 0)
            with between:
                table.drop_rows(np.arange(table.num_rows) % 3 == 0)

    writer = threading.Thread(target=rewrite)
    writer.start()
    out, num_pulls, num_counted = np.empty((num_rows, 16), np.float32), 0, 0
    while writer.is_alive() or num_pulls == 0:
        with between:
            assert table.shared is not None
            reader = RowsInPlace(spec, table.shared.descriptor, table.shared.num_bytes, table.shared.edition)
        num_pulls += 1
        if reader.pull(keys, out):
            # All rows of one set, or what a drop left of it: the others are zeros again.
            num_set = np.count_nonzero(out[:, 0])
            assert num_set in (0, num_rows, num_rows - -(-num_rows // 3))
            assert len(np.unique(out[out != 0])) == (num_set > 0)
            num_counted += 1
    writer.join()
    assert num_counted < num_pulls  # some were read while rows changed


def test_memory_of_a_table_is_given_back_with_its_rows() -> None:
    spec = TableSpec(0, "t", 64, "float32", "sgd", {"lr": 1.0}, 50_000)
    table = RowTable(spec, is_shared=True)
    assert table.shared is not None

    def used() -> int:
        return os.stat(table.shared.descriptor).st_blocks * 512  # type: ignore[union-attr]

    keys = np.arange(50_000, dtype=np.int64)
    table.set(keys, np.ones((50_000, 64), np.float32), None, 0)
    assert used() >= 50_000 * 256
    table.drop_rows(np.arange(50_000) >= 1_000)
    assert used() <= 1_000 * 256 + 50_000 * 4 + 3 * 4096
    out = np.empty((50_000, 64), np.float32)
    table.pull(keys, out)
    assert (out[:1_000] == 1).all()
    assert (out[1_000:] == 0).all()


def test_where_files_may_not_be_as_large_the_table_is_private_and_the_same() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        table = RowTable(SPEC, is_shared=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert table.shared is None
    shared = RowTable(SPEC, is_shared=True)
    found = []
    for each in (table, shared):
        each.apply(KEYS[::3].copy(), np.ones((100, DIM), np.float32))
        out = np.empty((NUM_ROWS, DIM), np.float32)
        each.pull(KEYS, out)
        found.append(out.tobytes())
    assert found[0] == found[1]


def test_tables_of_any_id_are_not_shared() -> None:
    bench = Shared()
    bench.ask(1, DeclareTable(TableSpec(1, "hashed", 2, "float32", "sgd", {"lr": 1.0})))
    (reply,) = bench.ask(1, AskRows(1, 1))
    assert isinstance(reply, Reply)
    assert (reply.message, list(reply.fds)) == (RowsAt(0, 0), [])
