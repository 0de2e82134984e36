"""Whole rows of the only worker at one server: they count with their note, and of two that do not count yet the newer does."""

from __future__ import annotations

import numpy as np
import pytest
from serverbench import Bench, messages, refusal

from shoal.ps.server.actions import Reply
from shoal.runtime.transport.messages.client_server import (
    AskNote,
    Commit,
    Committed,
    DeclareMode,
    Hello,
    Pulled,
    PullRows,
    PushRows,
    ReadRows,
    RowsRead,
    Summed,
    TableSpec,
)

ADAGRAD = TableSpec(0, "rows", 2, "float32", "adagrad", {"lr": 1.0, "initial_accumulator_value": 0.5})
ONE = DeclareMode(1, "exact")
TWO_PHASE = DeclareMode(1, "exact", two_phase=True)


def bench_of(mode: DeclareMode) -> Bench:
    return Bench(mode, spec=ADAGRAD)


def push_whole(bench: Bench, seq: int, keys: list[int], value: float, *, peer: int = 1) -> None:
    rows = np.full((len(keys), 4), value, np.float32)
    assert bench.ask(peer, PushRows(1, 0, seq, 0, is_whole=True), [np.array(keys), rows]) == []


def whole_rows(bench: Bench, keys: list[int], *, peer: int = 1) -> list[list[float]]:
    out = np.zeros((len(keys), 4), np.float32)
    (answer,) = messages(bench.ask(peer, PullRows(1, 0, 0, is_whole=True), [np.array(keys)], [out]))
    assert isinstance(answer, Pulled)
    return out.tolist()


@pytest.mark.parametrize("after", [0, 17])
def test_rows_are_set_with_their_state_in_pieces_and_the_updates_they_are_after(after: int) -> None:
    bench = bench_of(ONE)
    push_whole(bench, 1, [1, 5], 3.0)
    push_whole(bench, 1, [8], 4.0)
    assert whole_rows(bench, [1]) == [[0.0, 0.0, 0.5, 0.5]]  # nobody wrote it yet
    assert messages(bench.end(0, 1, num_pushes=2, whole_after=after)) == [Committed(1, 1, 1)]
    assert whole_rows(bench, [1, 5, 8, 9]) == [[3.0] * 4, [3.0] * 4, [4.0] * 4, [0.0, 0.0, 0.5, 0.5]]
    for slot in range(256):
        (reply,) = [each for each in bench.ask(1, ReadRows(1, 0, slot)) if isinstance(each, Reply)]
        assert isinstance(reply.message, RowsRead)
        assert reply.message.step == after


def test_pieces_that_are_sent_again_on_a_living_connection_count_once() -> None:
    bench = bench_of(ONE)
    for _ in range(2):  # another server was lost in between, without a new view
        push_whole(bench, 1, [-2, 5], 3.0)
        push_whole(bench, 1, [8], 4.0)
    assert messages(bench.end(0, 1, num_pushes=2, whole_after=17)) == [Committed(1, 1, 1)]
    assert whole_rows(bench, [-2, 5, 8]) == [[3.0] * 4, [3.0] * 4, [4.0] * 4]


def test_of_two_recovery_points_that_do_not_count_yet_the_newer_counts() -> None:
    bench = bench_of(TWO_PHASE)
    push_whole(bench, 1, [1], 3.0)
    assert messages(bench.end(0, 1, num_pushes=1, whole_after=100)) == [Summed(1)]
    bench.ask(9, Hello("worker-0", 1))
    push_whole(bench, 1, [1], 2.0, peer=9)
    assert messages(bench.end(0, 1, peer=9, num_pushes=1, whole_after=90)) == [Summed(1)]
    assert messages(bench.ask(9, Commit(1, 1, 1.0, True))) == [Committed(1, 1, 1)]
    assert whole_rows(bench, [1], peer=9) == [[2.0] * 4]


def test_a_point_whose_note_counted_elsewhere_is_had_count_by_the_replacement() -> None:
    bench = bench_of(TWO_PHASE)
    push_whole(bench, 1, [1], 3.0)
    bench.end(0, 1, num_pushes=1, whole_after=100)
    bench.ask(9, Hello("worker-0", 1))
    assert messages(bench.ask(9, Commit(1, 1, 1.0, True))) == [Committed(1, 1, 1)]
    assert whole_rows(bench, [1], peer=9) == [[3.0] * 4]
    (note,) = [each for each in bench.ask(9, AskNote(1, 0)) if isinstance(each, Reply)]
    assert bytes(note.frames[0]) == b"note of 0 at 1"


def test_rows_of_the_wrong_width_are_refused() -> None:
    bench = bench_of(ONE)
    said = refusal(
        bench.ask(1, PushRows(1, 0, 1, 0, is_whole=True), [np.array([1]), np.zeros((1, 2), np.float32)])
    )
    assert "whole rows of table 0 are 4 float32" in said
