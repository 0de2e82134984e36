"""Exact steps at one server: who counts, when, and what everybody is told."""

from __future__ import annotations

import numpy as np
import pytest
from serverbench import Bench, drops, messages, refusal

from shoal.ps.server.actions import Reply, Tell
from shoal.runtime.transport.messages.client_server import (
    AskMissing,
    AskNote,
    Commit,
    Committed,
    DeclareMode,
    DeclareTable,
    Hello,
    Missing,
    Note,
    Post,
    Posted,
    PullRows,
    PushDense,
    PushRows,
    ReadRows,
    RowsRead,
    Summed,
    TableSpec,
    ViewOver,
    WriteRows,
)
from shoal.runtime.transport.messages.server_coordinator import ServerView, StepLost

EXACT = DeclareMode(2, "exact")
TWO_PHASE = DeclareMode(2, "exact", two_phase=True, wants_norm=True)


def test_a_step_counts_once_all_ranks_have_ended_it() -> None:
    bench = Bench(EXACT)
    bench.push(1, 1, 2.0)
    assert bench.end(1, 1) == []
    assert bench.rows() == [[0.0, 0.0], [0.0, 0.0]]
    bench.push(0, 1, 1.0)
    assert messages(bench.end(0, 1)) == [Committed(1, 1, 1)] * 2
    assert bench.rows(1) == [[-1.5, -1.5]] * 2  # (1 + 2) times num_global 1.0 over a count of 2
    assert bench.chunk(1) == [0.25] * 4


def test_a_pull_waits_for_its_clock() -> None:
    bench = Bench(EXACT)
    assert bench.rows(1) is None
    bench.push(0, 1, 1.0)
    bench.end(0, 1)
    bench.push(1, 1, 1.0)
    kinds = [type(message).__name__ for message in messages(bench.end(1, 1))]
    assert kinds == ["Committed", "Committed", "Pulled"]


def test_a_step_whose_loss_is_not_finite_is_left_out() -> None:
    bench = Bench(EXACT)
    for rank in range(2):
        bench.push(rank, 1, 1.0)
    bench.end(0, 1, vector=np.array([1.0, 0, 0, 0, np.nan, 0.0]))
    (first, _) = [action for action in bench.end(1, 1) if isinstance(action, Reply)]
    assert np.frombuffer(first.frames[0])[-2] == 0.0  # not applied
    assert bench.rows(1) == [[0.0, 0.0]] * 2


def test_two_phases_wait_for_a_commit_and_the_first_counts() -> None:
    bench = Bench(TWO_PHASE)
    bench.push(0, 1, 3.0)
    bench.end(0, 1)
    bench.push(1, 1, 4.0)
    answers = [action for action in bench.end(1, 1) if isinstance(action, Reply)]
    assert [answer.message for answer in answers] == [Summed(1), Summed(1)]
    squares = np.frombuffer(answers[0].frames[1])
    assert squares.sum() == 8 * 49.0
    assert bench.rows() == [[0.0, 0.0]] * 2
    assert messages(bench.ask(1, Commit(1, 1, 0.5, True))) == [Committed(1, 1, 1)]
    assert messages(bench.ask(2, Commit(1, 1, 99.0, True))) == [Committed(1, 1, 1)]
    assert bench.rows(1) == [[-3.5, -3.5]] * 2


def test_a_commit_of_a_replacement_waits_until_the_others_have_ended_the_step_again() -> None:
    bench = Bench(TWO_PHASE)
    bench.push(0, 1, 3.0)
    bench.end(0, 1)
    bench.ask(9, Hello("worker-0", 1))
    assert bench.ask(9, Commit(1, 1, 1.0, True)) == []
    assert messages(bench.ask(9, AskMissing())) == [Missing([1])]
    bench.push(1, 1, 4.0)
    assert messages(bench.end(1, 1)) == [Summed(1), Committed(1, 1, 1)]
    assert messages(bench.ask(2, Commit(1, 1, 99.0, True))) == [Committed(1, 1, 1)]
    assert bench.rows(1, peer=9) == [[-7.0, -7.0]] * 2


def test_a_commit_of_a_step_whose_contribution_is_gone_is_told_to_the_coordinator_until_the_view_is_over() -> (
    None
):
    bench = Bench(TWO_PHASE)
    bench.push(1, 1, 4.0)
    bench.end(1, 1)
    bench.ask(9, Hello("worker-0", 1))
    assert bench.ask(9, Commit(1, 1, 1.0, True)) == [Tell(StepLost(1, 0))]
    assert bench.core.tick() == [Tell(StepLost(1, 0))]
    over = bench.core.view(ServerView(2, [[0]] * 256, {0: 0}))
    assert [message for message in messages(over) if message == ViewOver(2)] == [ViewOver(2)] * 2
    assert bench.core.tick() == []


def test_a_commit_of_any_step_that_counts_is_answered_so() -> None:
    bench = Bench(TWO_PHASE)
    for seq in (1, 2):
        for rank in range(2):
            bench.push(rank, seq, 1.0)
            bench.end(rank, seq)
        bench.ask(1, Commit(1, seq, 1.0, True))
    before = bench.rows(2)
    assert messages(bench.ask(1, Commit(1, 1, 1.0, True))) == [Committed(1, 2, 2)]
    assert bench.rows(2) == before
    assert "[0, 1]" in refusal(bench.ask(1, Commit(1, 4, 1.0, True)))


def test_a_replacement_that_ends_a_committed_step_is_told_of_it_and_nothing_counts_twice() -> None:
    bench = Bench(EXACT)
    for rank in range(2):
        bench.push(rank, 1, 1.0)
        bench.end(rank, 1)
    before = bench.rows(1)
    bench.ask(9, Hello("worker-1", 1))
    bench.push(1, 1, 7.0, peer=9)
    assert messages(bench.end(1, 1, peer=9)) == [Committed(1, 1, 1)]
    assert bench.rows(1) == before


def test_the_first_step_end_of_a_rank_counts_also_after_its_worker_is_gone() -> None:
    bench = Bench(EXACT)
    bench.push(1, 1, 2.0)
    bench.end(1, 1)
    bench.core.gone(2)
    bench.ask(9, Hello("worker-1", 1))
    bench.push(1, 1, 7.0, peer=9)
    bench.end(1, 1, peer=9)
    bench.push(0, 1, 1.0)
    bench.end(0, 1)
    assert bench.rows(1) == [[-1.5, -1.5]] * 2


def test_a_newer_incarnation_fences_the_older() -> None:
    bench = Bench(EXACT)
    bench.push(1, 1, 2.0)
    assert drops(bench.ask(9, Hello("worker-1", 1))) == [2]
    assert bench.core.staging.num_staged == 0
    assert "Hello" in refusal(bench.end(1, 1))
    assert "incarnation 1" in refusal(bench.ask(10, Hello("worker-1", 0)))


def test_what_is_spoilt_never_counts_and_the_coordinator_is_told() -> None:
    bench = Bench(EXACT)
    bench.push(1, 1, 1.0)
    bench.end(1, 1)
    bench.push(0, 1, 1.0)
    assert bench.end(0, 1, is_spoilt=True) == [Tell(StepLost(1, 0))]
    assert bench.core.staging.num_staged == 0
    assert bench.rows(1) is None


def test_a_step_end_that_speaks_of_other_pushes_is_refused() -> None:
    bench = Bench(EXACT)
    bench.push(0, 1, 1.0)
    assert "3 pushes, 2 are here" in refusal(bench.end(0, 1, num_pushes=3))
    bench.push(0, 1, 1.0)
    assert bench.end(0, 1) == []


@pytest.mark.parametrize(
    ("message", "frames", "why"),
    [
        (PushRows(1, 0, 1, 7), [np.array([1]), np.zeros(2, np.float32)], "table 7 was never declared"),
        (PushRows(1, 0, 1, 0), [np.array([2, 1]), np.zeros(4, np.float32)], "strictly increasing"),
        (PushRows(1, 0, 1, 0), [np.array([1, 1]), np.zeros(4, np.float32)], "strictly increasing"),
        (PushRows(1, 0, 1, 0), [np.array([1, 2]), np.zeros(3, np.float32)], "need 4 values, got 3"),
        (PushRows(1, 0, 1, 0), [np.array([1, 2])], "2 frames"),
        (PushRows(1, 0, 1, 0), [b"1234567", b""], "8 bytes each"),
        (PushDense(1, 0, 1, 4), [np.zeros(4, np.float32)], "chunk 4 was never declared"),
        (PushDense(1, 0, 1, 0), [np.zeros(4, np.float64)], "16 bytes of float32, got 32"),
        (PushDense(1, 0, 1, 0, [5]), [np.zeros(4, np.float32)], "1 parts"),
        (PullRows(1, 0, 0), [np.array([1])], "the buffer for them has 0"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_staged(message, frames, why) -> None:  # type: ignore[no-untyped-def]
    bench = Bench(EXACT)
    actions = bench.ask(1, message, frames)
    assert why in refusal(actions)
    assert bench.core.staging.num_staged == 0
    for rank in range(2):
        bench.push(rank, bench.core._low + 1, 1.0)
        bench.end(rank, bench.core._low + 1)


def test_another_view_is_answered_with_the_present_one_and_a_later_one_waits_for_it() -> None:
    bench = Bench(EXACT)
    bench.core.view(ServerView(2, [[0]] * 256, {0: 0}))
    assert messages(bench.end(0, 1)) == [ViewOver(2)]
    bench.view = 3
    bench.push(0, 1, 1.0)
    assert bench.end(0, 1) == []
    bench.core.view(ServerView(3, [[0]] * 256, {0: 0}))
    bench.push(1, 1, 1.0)
    assert messages(bench.end(1, 1)) == [Committed(1, 1, 1)] * 2


def test_a_view_ends_every_wait_and_forgets_what_is_staged() -> None:
    bench = Bench(EXACT)
    bench.rows(1)
    bench.push(0, 1, 1.0)
    bench.end(0, 1)
    assert messages(bench.core.view(ServerView(2, [[0]] * 256, {0: 0}))) == [ViewOver(2)] * 2
    assert bench.core.state.steps is not None
    assert bench.core.state.steps.ended == {}


def test_keys_of_another_primary_are_refused() -> None:
    bench = Bench(EXACT)
    bench.core.view(ServerView(2, [[1]] * 256, {0: 0, 1: 0}))
    frames = [np.array([1]), np.zeros(2, np.float32)]
    assert "another server" in refusal(bench.ask(1, PushRows(2, 0, 1, 0), frames))


def test_exchanges_give_all_contributions_in_rank_order_and_again() -> None:
    bench = Bench(EXACT)
    assert bench.ask(2, Post(1, 1, 1, 1), [b"b", b""]) == []
    answers = bench.ask(1, Post(1, 1, 0, 1), [b"a", b""])
    assert messages(answers) == [Posted(1), Posted(1)]
    assert [list(answer.frames) for answer in answers if isinstance(answer, Reply)] == [[b"a", b"b"]] * 2
    (again,) = bench.ask(2, Post(1, 1, 1, 1), [b"other", b""])
    assert isinstance(again, Reply)
    assert list(again.frames) == [b"a", b"b"]


def test_a_replacement_is_told_its_note_and_what_came_since() -> None:
    bench = Bench(EXACT)
    for rank in range(2):
        bench.push(rank, 1, 1.0)
        bench.end(rank, 1)
    (reply,) = bench.ask(2, AskNote(1, 1))
    assert isinstance(reply, Reply)
    assert reply.message == Note(1, [1], [True], 1)
    assert reply.frames[0] == b"note of 1 at 1"


def test_rows_are_read_and_set_with_their_state() -> None:
    bench = Bench(EXACT)
    bench.ask(1, WriteRows(1, 0, 4), [np.array([1, 5]), np.ones((2, 2), np.float32), b""])
    assert bench.rows() == [[1.0, 1.0]] * 2
    read = 0
    for slot in range(256):
        (reply,) = bench.ask(1, ReadRows(1, 0, slot))
        assert isinstance(reply, Reply)
        assert isinstance(reply.message, RowsRead)
        read += len(reply.frames[0]) // 8
        assert not len(reply.frames[0]) or reply.message.step == 4
    assert read == 2


def test_declaring_something_else_is_refused() -> None:
    bench = Bench(EXACT)
    assert "dim=2" in refusal(
        bench.ask(1, DeclareTable(TableSpec(0, "rows", 3, "float32", "sgd", {"lr": 1.0})))
    )
    assert "exact" in refusal(bench.ask(1, DeclareMode(3, "exact")))
