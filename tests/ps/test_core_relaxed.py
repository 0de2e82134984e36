"""Pushes that count at once, steps that do not wait for all, and filters."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from serverbench import SPEC, Bench, messages

from shoal.ps.server.steps import PushFilters
from shoal.runtime.transport.messages.client_server import (
    Committed,
    DeclareMode,
    Hello,
    MergedPart,
    PullRows,
    ReadAppliedSeqs,
    Rest,
    WriteAppliedSeqs,
)

ASYNC = DeclareMode(2, "async")


def test_a_push_counts_at_once_and_only_once() -> None:
    bench = Bench(ASYNC)
    bench.push(0, 1, 1.0, stream=7)
    assert messages(bench.end(0, 1, stream=7)) == [Committed(1, 1, 0)]
    bench.push(1, 1, 1.0, stream=7)
    assert messages(bench.end(1, 1, stream=7)) == [Committed(1, 1, 1, is_new=False)]
    assert bench.rows() == [[-1.0, -1.0]] * 2
    assert bench.chunk() == [0.5] * 4


def test_streams_that_are_done_are_forgotten_and_never_count_again() -> None:
    bench = Bench(ASYNC)
    for stream in range(1, 6):
        bench.push(0, 1, 1.0, stream=stream)
        bench.end(0, 1, stream=stream, done_below=stream)
    assert bench.core.state.applied.of_slot(0) == [(5, 1)]
    bench.push(1, 1, 1.0, stream=2)
    bench.end(1, 1, stream=2)
    assert bench.rows() == [[-5.0, -5.0]] * 2


def test_a_pull_waits_until_the_slowest_is_near_enough() -> None:
    bench = Bench(DeclareMode(2, "ssp", bound=1))
    assert bench.rows(1) is not None
    assert bench.rows(2) is None
    bench.push(1, 1, 1.0, stream=5)
    answers = [type(message).__name__ for message in messages(bench.end(1, 1, stream=5))]
    assert answers == ["Committed", "Pulled"]


@pytest.mark.parametrize("how", ["gone", "dead", "rest"])
def test_nobody_waits_for_who_is_gone_dead_or_at_rest(how: str) -> None:
    bench = Bench(DeclareMode(2, "ssp", bound=0))
    assert bench.rows(3) is None
    actions = {
        "gone": lambda: bench.core.gone(2),
        "dead": lambda: bench.core.rank_dead(1, 0),
        "rest": lambda: bench.ask(2, Rest(1, 1)),
    }[how]()
    assert "Pulled" in [type(message).__name__ for message in messages(actions)]


def test_a_replacement_enters_at_the_slowest_clock() -> None:
    bench = Bench(DeclareMode(3, "ssp", bound=0))
    for seq in (1, 2, 3):
        for rank in (0, 1):
            bench.push(rank, seq, 1.0, stream=rank + 1)
            bench.end(rank, seq, stream=rank + 1)
    bench.ask(9, Hello("worker-2", 1))
    assert bench.core.state.clocks.clock(2) == 3


def test_control_flags_are_gathered_and_stop_stays() -> None:
    bench = Bench(ASYNC)
    bench.push(0, 1, 1.0, stream=1)
    bench.end(0, 1, stream=1, vector=np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]))
    bench.push(0, 2, 1.0, stream=1)
    (answer,) = messages(bench.end(0, 2, stream=1))
    assert isinstance(answer, Committed)
    assert answer.control_flags == 1


def test_marks_are_read_and_taken_over() -> None:
    bench, other = Bench(ASYNC), Bench(ASYNC)
    bench.push(0, 1, 1.0, stream=7)
    bench.end(0, 1, stream=7)
    (reply,) = bench.ask(1, ReadAppliedSeqs(1))
    other.ask(1, WriteAppliedSeqs(1), [bytes(reply.frames[0])])  # type: ignore[union-attr]
    other.push(0, 1, 1.0, stream=7)
    other.end(0, 1, stream=7)
    assert other.rows() == [[0.0, 0.0]] * 2


def test_drop_does_not_wait_for_the_slowest_and_says_who_was_late() -> None:
    bench = Bench(DeclareMode(3, "drop", bound=1))
    for rank in (2, 0):
        bench.push(rank, 1, 1.0)
        answers = messages(bench.end(rank, 1, factor=2.0))
    assert answers == [Committed(1, 1, 1)] * 2
    assert bench.rows(1) == [[-2.0, -2.0]] * 2
    bench.push(1, 1, 50.0)
    assert messages(bench.end(1, 1)) == [Committed(1, 1, 1, late=True)]
    assert bench.core.state.steps is not None
    assert bench.core.state.steps.num_late == 1
    assert messages(bench.end(0, 1, num_pushes=0)) == [Committed(1, 1, 1)]  # a repeat, not late


def test_stale_uses_the_last_contribution_of_who_is_missing_once_more() -> None:
    bench = Bench(DeclareMode(2, "stale", bound=1))
    bench.push(1, 1, 3.0)
    bench.end(1, 1)
    assert bench.rows(1) == [[-3.0, -3.0]] * 2
    bench.push(0, 2, 1.0)
    bench.end(0, 2, factor=2.0)
    assert bench.rows(2) == [[-7.0, -7.0]] * 2
    assert bench.core.state.steps is not None
    assert bench.core.state.steps.num_reused == 1


def test_stale_updates_with_the_settings_of_the_step_not_of_what_is_used_once_more() -> None:
    bench = Bench(DeclareMode(2, "stale", bound=1))
    bench.push(0, 1, 1.0)
    bench.end(0, 1, settings=[{"lr": 0.125}], table_settings={0: {"lr": 0.5}})
    assert (bench.rows(1), bench.chunk(1)) == ([[-0.5, -0.5]] * 2, [0.875] * 4)
    bench.push(1, 2, 1.0)
    bench.end(1, 2, factor=2.0, settings=[{"lr": 0.25}], table_settings={0: {"lr": 1.0}})
    assert (bench.rows(2), bench.chunk(2)) == ([[-2.5, -2.5]] * 2, [0.375] * 4)  # two ranks' ones


def test_a_bound_shortens_a_long_push_and_leaves_out_one_without_a_length() -> None:
    bench = Bench(ASYNC, filters=PushFilters(norm_bound=math.sqrt(8.0)))
    bench.push(0, 1, 4.0, stream=1)  # 8 numbers: its norm is four times the bound
    bench.end(0, 1, stream=1)
    assert bench.rows() == [[-1.0, -1.0]] * 2
    bench.push(0, 2, math.nan, stream=1)
    bench.end(0, 2, stream=1)
    assert bench.rows() == [[-1.0, -1.0]] * 2
    bench.push(0, 3, 0.5, stream=1)
    bench.end(0, 3, stream=1)
    assert bench.rows() == [[-1.5, -1.5]] * 2


def test_what_was_computed_long_ago_counts_less() -> None:
    bench = Bench(ASYNC, filters=PushFilters(divides_by_staleness=True))
    bench.rows(peer=2)
    for seq in (1, 2, 3):
        bench.rows()
        bench.push(0, seq, 1.0, stream=1)
        bench.end(0, seq, stream=1)
    bench.push(1, 1, 4.0, stream=2)
    bench.end(1, 1, stream=2)  # three updates came between its pull and this
    assert bench.rows() == [[-4.0, -4.0]] * 2


def test_values_that_are_no_gradients_are_not_filtered() -> None:
    spec = msgspec.structs.replace(SPEC, rule="store", settings={})
    bench = Bench(ASYNC, filters=PushFilters(norm_bound=0.5, divides_by_staleness=True), spec=spec)
    bench.push(0, 1, 4.0, stream=1)
    bench.end(0, 1, stream=1)
    assert bench.rows() == [[4.0, 4.0]] * 2


def test_a_push_of_several_batches_counts_them_all_once() -> None:
    bench = Bench(DeclareMode(2, "ssp", bound=2))
    bench.push(0, 3, 1.0, stream=7)
    assert messages(bench.end(0, 3, stream=7, num_batches=3)) == [Committed(3, 3, 0)]
    assert bench.core.state.clocks.clock(0) == 3
    bench.push(1, 3, 1.0, stream=7)  # of a backup, which adds up the same batches
    assert messages(bench.end(1, 3, stream=7, num_batches=3)) == [Committed(3, 3, 3, is_new=False)]
    assert bench.rows() == [[-1.0, -1.0]] * 2


def test_of_batches_some_of_which_count_nothing_is_applied_and_that_is_told() -> None:
    bench = Bench(ASYNC)
    bench.push(0, 2, 1.0, stream=7)
    bench.end(0, 2, stream=7, num_batches=2)
    bench.push(1, 4, 1.0, stream=7)
    assert messages(bench.end(1, 4, stream=7, num_batches=4)) == [Committed(4, 2, 2, late=True, is_new=False)]
    assert bench.rows() == [[-1.0, -1.0]] * 2
    bench.push(1, 4, 1.0, stream=7)  # what is missing can still come
    assert messages(bench.end(1, 4, stream=7, num_batches=2)) == [Committed(4, 4, 2)]


def test_batches_that_a_worker_keeps_do_not_move_its_clock() -> None:
    bench = Bench(DeclareMode(2, "ssp", bound=2))
    bench.ask(1, PullRows(1, 2, 0, unpushed=2), [np.array([1, 5])], [out := np.zeros((2, 2), np.float32)])
    assert not out.any()
    assert bench.core.state.clocks.clock(0) == 0
    assert bench.rows(3, peer=2) is None  # worker-0 has pushed nothing


def test_pushes_of_several_workers_in_one_count_for_each_of_them() -> None:
    bench = Bench(DeclareMode(3, "async"))
    bench.push(0, 1, 3.0, stream=7)
    merged = [MergedPart(8, 2, 2, 1), MergedPart(9, 1, 1, 2)]
    assert messages(bench.end(0, 1, stream=7, merged=merged)) == [Committed(1, 4, 1)]
    assert [bench.core.state.clocks.clock(rank) for rank in range(3)] == [1, 2, 1]
    for rank, stream, seq in ((0, 7, 1), (1, 8, 2), (2, 9, 1)):  # sent again by those who heard nothing
        bench.push(rank, seq, 1.0, stream=stream)
        (answer,) = messages(bench.end(rank, seq, stream=stream))
        assert isinstance(answer, Committed)
        assert (answer.is_new, answer.late) == (False, False)
    assert bench.rows() == [[-3.0, -3.0]] * 2


def test_a_merged_push_with_a_part_that_counts_is_not_applied() -> None:
    bench = Bench(DeclareMode(3, "async"))
    bench.push(1, 1, 1.0, stream=8)
    bench.end(1, 1, stream=8)
    bench.push(0, 1, 2.0, stream=7)
    (answer,) = messages(bench.end(0, 1, stream=7, merged=[MergedPart(8, 1, 1, 1)]))
    assert isinstance(answer, Committed)
    assert answer.late
    assert bench.rows() == [[-1.0, -1.0]] * 2


def test_a_merged_push_does_not_bring_back_who_died_meanwhile() -> None:
    bench = Bench(DeclareMode(2, "ssp", bound=0))
    bench.core.rank_dead(1, 0)
    bench.push(0, 1, 1.0, stream=7)
    bench.end(0, 1, stream=7, merged=[MergedPart(8, 1, 1, 1)])
    assert bench.rows(5) is not None


def test_a_stop_of_an_earlier_fit_is_over_with_the_first_merged_push_of_the_next() -> None:
    bench = Bench(ASYNC)
    first, second = 1 << 32 | 1, 2 << 32 | 1
    bench.push(0, 1, 1.0, stream=first)
    bench.end(0, 1, stream=first, vector=np.array([1.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
    bench.ask(9, Hello("kv-aggregator-0-0", 0))
    bench.push(0, 1, 1.0, stream=second, peer=9)
    (answer,) = messages(bench.end(0, 1, stream=second, peer=9, merged=[MergedPart(second + 1, 1, 1, 1)]))
    assert isinstance(answer, Committed)
    assert (answer.is_new, answer.control_flags) == (True, 0)
