"""Whom a waiting client waits for; and that nothing a client writes into shared memory after the check is believed."""

from __future__ import annotations

import numpy as np
from serverbench import Bench, messages, refusal

from shoal.ps.server.actions import Request
from shoal.runtime.transport.messages.client_server import (
    AskMissing,
    DeclareMode,
    Hold,
    Missing,
    Post,
    PullRows,
    PushRows,
    TableSpec,
    WriteAppliedSeqs,
    WriteRows,
)

EXACT = DeclareMode(3, "exact")


def missing(bench: Bench, rank: int) -> list[int]:
    (answer,) = messages(bench.ask(rank + 1, AskMissing()))
    assert isinstance(answer, Missing)
    return answer.ranks


def test_who_ended_a_step_waits_for_those_who_have_not() -> None:
    bench = Bench(EXACT)
    bench.push(0, 1, 1.0)
    assert missing(bench, 0) == []  # it waits for nothing yet
    bench.end(0, 1)
    assert missing(bench, 0) == [1, 2]
    bench.push(2, 1, 1.0)
    bench.end(2, 1)
    assert (missing(bench, 0), missing(bench, 1), missing(bench, 2)) == ([1], [], [1])
    bench.push(1, 1, 1.0)
    bench.end(1, 1)
    assert [missing(bench, rank) for rank in range(3)] == [[], [], []]


def test_who_pulls_ahead_of_a_step_waits_for_the_same_ranks() -> None:
    bench = Bench(EXACT)
    bench.push(1, 1, 1.0)
    bench.end(1, 1)
    assert bench.rows(1, peer=1) is None
    assert missing(bench, 0) == [2]  # and for itself, which is no news to it


def test_who_posted_waits_for_those_who_have_not() -> None:
    bench = Bench(EXACT)
    for rank in (2, 0):
        assert bench.ask(rank + 1, Post(1, 7, rank, 0), [b"mine", b"note"]) == []
    assert (missing(bench, 0), missing(bench, 1), missing(bench, 2)) == ([1], [], [1])


def test_in_bounded_steps_the_slowest_are_missing() -> None:
    bench = Bench(DeclareMode(3, "ssp", 1))
    for seq in (1, 2):
        bench.push(0, seq, 1.0, stream=1)
        bench.end(0, seq, stream=1)
    bench.push(1, 1, 1.0, stream=2)
    bench.end(1, 1, stream=2)
    assert bench.rows(2) is None
    assert missing(bench, 0) == [2]


def test_who_holds_pushes_back_is_missing_to_those_who_push() -> None:
    bench = Bench(DeclareMode(2, "async"))
    bench.ask(1, Hold(1, True))
    bench.push(1, 1, 1.0, stream=2)
    assert bench.end(1, 1, stream=2) == []
    assert (missing(bench, 0), missing(bench, 1)) == ([], [0])


# ---- memory that the client can write to ---------------------------------------------------------------

FEW = TableSpec(0, "rows", 2, "float32", "sgd", {"lr": 1.0}, num_rows=8)
OUTSIDE = 1 << 40


def shared(*arrays: np.ndarray) -> list[memoryview]:
    return [memoryview(array).cast("B") for array in arrays]


def test_keys_of_a_push_that_are_overwritten_after_the_check_do_not_count() -> None:
    bench = Bench(DeclareMode(1, "exact"), spec=FEW)
    keys, rows = np.array([1, 5]), np.ones((2, 2), np.float32)
    assert bench.core.hear(Request(1, 90, PushRows(1, 0, 1, 0), shared(keys, rows), [])) == []
    keys[:] = OUTSIDE
    bench.end(0, 1, num_pushes=1)
    assert bench.rows(1) == [[-1.0, -1.0]] * 2


def test_keys_of_a_pull_that_are_overwritten_while_it_waits_do_not_count() -> None:
    bench = Bench(DeclareMode(1, "exact"), spec=FEW)
    keys, out = np.array([1, 5]), np.ones((2, 2), np.float32)
    assert bench.core.hear(Request(1, 90, PullRows(1, 1, 0), shared(keys), shared(out))) == []
    keys[:] = OUTSIDE
    bench.push(0, 1, 3.0)
    bench.end(0, 1)
    assert out.tolist() == [[-3.0, -3.0]] * 2


def test_what_is_written_whole_is_copied_before_it_is_checked() -> None:
    bench = Bench(DeclareMode(1, "exact"), spec=FEW)
    keys, rows = np.array([1, 5]), np.ones((2, 2), np.float32)
    request = Request(1, 90, WriteRows(1, 0, 0), [*shared(keys, rows), memoryview(b"")], [])
    contents, seen = bench.core.state.contents, []
    check = contents.keys

    def overwrite(*args: object) -> object:
        checked = check(*args)  # type: ignore[arg-type]
        keys[:] = OUTSIDE
        seen.append(checked.tolist())
        return checked

    contents.keys = overwrite  # type: ignore[method-assign, assignment]
    bench.core.hear(request)
    contents.keys = check  # type: ignore[method-assign]
    assert seen == [[1, 5]]
    assert bench.rows() == [[1.0, 1.0]] * 2


def test_marks_outside_of_the_slots_are_refused() -> None:
    bench = Bench(DeclareMode(1, "async"))
    assert "slots 0..255" in refusal(bench.ask(1, WriteAppliedSeqs(1), [np.array([[256, 1, 1]])]))
