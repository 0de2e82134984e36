"""Tasks out, results in order: whoever dies, every task is finished once and in its place."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from shoal.data.workers.pool import TaskQueue


def queue_of(*tasks: str, processes: int = 2, ahead: int = 2) -> TaskQueue[str, str]:
    queue: TaskQueue[str, str] = TaskQueue(iter(tasks), ahead=ahead)
    for process in range(processes):
        queue.join(process)
    return queue


def sent(queue: TaskQueue[str, str]) -> list[tuple[int, str]]:
    return [(ticket.process, ticket.task) for ticket in queue.hand_out()]


def test_tasks_go_round_and_no_process_gets_more_than_it_may_hold() -> None:
    queue = queue_of(*"abcdefgh")
    assert sent(queue) == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]
    assert sent(queue) == []


def test_results_are_taken_in_order_and_only_then_is_there_more_to_do() -> None:
    queue = queue_of(*"abcdef")
    queue.hand_out()
    queue.finish(1, 1, "B")
    assert not queue.has_result
    assert sent(queue) == []  # four are under way or wait to be taken, as many as may be
    queue.finish(0, 0, "A")
    assert [queue.take(), queue.take()] == ["A", "B"]
    assert sent(queue) == [(0, "e"), (1, "f")]


def test_what_a_dead_process_held_is_handed_out_before_anything_new() -> None:
    queue = queue_of(*"abcdef")
    queue.hand_out()
    queue.lose(0)
    queue.join(0)
    assert sent(queue) == [(0, "a"), (0, "c")]


def test_only_what_a_process_was_at_is_blamed_for_its_death_and_deaths_add_up() -> None:
    queue = queue_of(*"ab", processes=1)
    for number in (1, 2, 3):
        queue.hand_out()
        assert queue.lose(0, at=0) == ("a", number)
        queue.join(0)
    queue.hand_out()
    queue.finish(0, 0, "A")
    assert queue.lose(0, at=1) == ("b", 1)


def test_nobody_is_blamed_for_the_death_of_a_process_that_was_at_nothing() -> None:
    queue = queue_of("a", processes=2)
    queue.hand_out()
    assert queue.lose(1, at=None) is None
    assert queue.lose(0, at=None) is None  # before it began
    queue.join(0)
    queue.hand_out()
    queue.finish(0, 0, "A")
    assert queue.lose(0, at=0) is None  # after it was through
    assert queue.take() == "A"


def test_a_task_that_is_given_up_is_not_handed_out_again_and_its_place_is_taken() -> None:
    queue = queue_of(*"abc", processes=1)
    queue.hand_out()
    queue.lose(0, at=0)
    queue.settle(0, "no A")
    queue.join(0)
    assert sent(queue) == [(0, "b")]
    assert queue.take() == "no A"
    assert sent(queue) == [(0, "c")]


def test_a_result_of_a_task_that_somebody_else_was_given_meanwhile_is_not_taken() -> None:
    queue = queue_of("a", processes=1)
    queue.hand_out()
    queue.lose(0)
    queue.join(1)
    assert not queue.finish(0, 0, "late")
    queue.hand_out()
    assert queue.finish(1, 0, "A")
    assert not queue.finish(1, 0, "again")
    assert queue.take() == "A"


def test_it_is_known_who_holds_up_the_others_and_over_what() -> None:
    queue = queue_of(*"abcd")
    assert queue.waits_for is None
    queue.hand_out()
    queue.finish(1, 1, "B")
    assert queue.waits_for == (0, "a")
    queue.lose(0)
    assert queue.waits_for is None
    queue.hand_out()  # to the only one left, which is still at its own
    assert queue.waits_for == (1, "d")


def test_numbers_count_through_from_queue_to_queue() -> None:
    first = queue_of(*"ab")
    first.hand_out()
    second: TaskQueue[str, str] = TaskQueue(iter("c"), ahead=1, first_number=first.next_number)
    second.join(0)
    assert [ticket.number for ticket in second.hand_out()] == [2]


def test_an_error_of_the_tasks_is_raised_where_the_task_it_prevented_would_have_been() -> None:
    def tasks() -> Any:
        yield "a"
        raise OSError("no more")

    queue: TaskQueue[str, str] = TaskQueue(tasks(), ahead=2)
    queue.join(0)
    assert sent(queue) == [(0, "a")]
    assert not queue.is_over
    queue.finish(0, 0, "A")
    queue.take()
    with pytest.raises(OSError, match="no more"):
        queue.is_over  # noqa: B018  # asking is what raises


class Pool(RuleBasedStateMachine):
    """Processes that finish, die and come in any order; a model of what each holds."""

    processes = Bundle("processes")

    def __init__(self) -> None:
        super().__init__()
        self.num_tasks = 40
        self.queue: TaskQueue[int, int] = TaskQueue(iter(range(self.num_tasks)), ahead=2)
        self.held: dict[int, list[int]] = {}
        self.deaths: dict[int, int] = {}
        self.taken: list[int] = []
        self.names = itertools.count()

    @rule(target=processes)
    def join(self) -> int:
        process = next(self.names)
        self.queue.join(process)
        self.held[process] = []
        return process

    @rule()
    def hand_out(self) -> None:
        for process, number, task in self.queue.hand_out():
            assert number == task
            self.held[process].append(task)

    @rule(process=processes, at=st.integers(0, 1))
    def finish(self, process: int, at: int) -> None:
        if at < len(self.held[process]):
            task = self.held[process].pop(at)
            assert self.queue.finish(process, task, task)
            self.deaths.pop(task, None)

    @rule(process=consumes(processes), has_begun=st.booleans())
    def die(self, process: int, has_begun: bool) -> None:
        held = self.held.pop(process)
        suspect = self.queue.lose(process, at=held[0] if held and has_begun else None)
        if held and has_begun:
            self.deaths[held[0]] = self.deaths.get(held[0], 0) + 1
            assert suspect == (held[0], self.deaths[held[0]])
        else:
            assert suspect is None

    @precondition(lambda self: self.queue.has_result)
    @rule()
    def take(self) -> None:
        self.taken.append(self.queue.take())

    @invariant()
    def results_are_in_order_and_little_is_ahead(self) -> None:
        assert self.taken == list(range(len(self.taken)))
        assert all(len(held) <= 2 for held in self.held.values())
        under_way = [task for held in self.held.values() for task in held]
        assert len(set(under_way)) == len(under_way)

    def teardown(self) -> None:
        self.join()
        while not self.queue.is_over:
            self.hand_out()
            for process, held in self.held.items():
                for task in list(held):
                    self.queue.finish(process, task, task)
                held.clear()
            while self.queue.has_result:
                self.take()
        assert self.taken == list(range(self.num_tasks))


TestPool = Pool.TestCase


@given(st.lists(st.integers(0, 3)), st.integers(1, 4), st.integers(1, 3))
def test_no_more_is_ahead_than_all_processes_may_hold(
    finishers: list[int], processes: int, ahead: int
) -> None:
    queue: TaskQueue[int, int] = TaskQueue(iter(range(1000)), ahead=ahead)
    held: dict[int, list[int]] = {process: [] for process in range(processes)}
    for process in held:
        queue.join(process)
    num_sent = num_taken = 0
    for finisher in [*finishers, 0]:
        for process, number, _ in queue.hand_out():
            held[process].append(number)
            num_sent += 1
        assert num_sent - num_taken == processes * ahead
        if held[finisher % processes]:
            number = held[finisher % processes].pop(0)
            queue.finish(finisher % processes, number, number)
        while queue.has_result:
            queue.take()
            num_taken += 1
