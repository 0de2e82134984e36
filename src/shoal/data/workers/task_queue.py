"""Task assignment of a reader pool: which process reads what, and results in order.

Pure: no process, no pipe, no clock. `pool.py` feeds in joins, results and
deaths, and sends out what `hand_out` says.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class Ticket(NamedTuple, Generic[Task]):
    """One task for one process."""

    process: int
    number: int
    """The place of its result. Counts through, over all queues of a pool."""

    task: Task


class SuspectTask(NamedTuple, Generic[Task]):
    """What a process was at when it died."""

    task: Task
    num_deaths: int
    """Processes that died at it, this one among them."""


class TaskQueue(Generic[Task, Result]):
    """Hands tasks to processes and their results back in the order of the tasks.

    Every task is finished once, however many processes die at it: what a dead
    one held is handed out again, before anything new.
    """

    def __init__(self, tasks: Iterator[Task], *, ahead: int, first_number: int = 0) -> None:
        """`ahead`: tasks that a process holds at a time. So many per process are under way or wait to be taken."""
        self._tasks, self._ahead = tasks, ahead
        self._is_drained = False
        self._broken: Exception | None = None
        self._open: dict[int, Task] = {}  # handed out, not finished
        self._held: dict[int, deque[int]] = {}
        self._returned: list[int] = []
        self._deaths: dict[int, int] = {}
        self._results: dict[int, Result] = {}
        self._next_taken = self.next_number = first_number

    def join(self, process: int) -> None:
        """A process is there to work."""
        self._held[process] = deque()

    def hand_out(self) -> list[Ticket[Task]]:
        """What to send now, in order. A process that holds little is served first."""
        tickets = []
        while free := [process for process, held in self._held.items() if len(held) < self._ahead]:
            process = min(free, key=lambda process: len(self._held[process]))
            number = heapq.heappop(self._returned) if self._returned else self._draw()
            if number is None:
                break
            self._held[process].append(number)
            tickets.append(Ticket(process, number, self._open[number]))
        return tickets

    def finish(self, process: int, number: int, result: Result) -> bool:
        """A result is there; False where nobody waits for it."""
        held = self._held.get(process)
        if held is None or number not in held:
            return False
        held.remove(number)
        del self._open[number]
        self._deaths.pop(number, None)
        self._results[number] = result
        return True

    def lose(self, process: int, *, at: int | None = None) -> SuspectTask[Task] | None:
        """A process is gone and its tasks are to be handed out again; the one it was `at` may have ended it."""
        held = self._held.pop(process, deque())
        for number in held:
            heapq.heappush(self._returned, number)
        if at is None or at not in held:  # it had not begun, or it was through with it
            return None
        self._deaths[at] = self._deaths.get(at, 0) + 1
        return SuspectTask(self._open[at], self._deaths[at])

    def settle(self, number: int, result: Result) -> None:
        """A task that nobody holds is not handed out again; this stands in the place of its result."""
        self._returned.remove(number)
        heapq.heapify(self._returned)
        del self._open[number]
        self._results[number] = result

    @property
    def has_result(self) -> bool:
        """Whether the next result in order is there."""
        return self._next_taken in self._results

    @property
    def is_over(self) -> bool:
        """Whether every result has been taken. An error of the tasks' own iterator is raised here, at its place."""
        if self._next_taken < self.next_number or not self._is_drained:
            return False
        if self._broken is not None:
            raise self._broken
        return True

    @property
    def waits_for(self) -> tuple[int, Task] | None:
        """The process that holds the next task in order, and the task it is at: that one, or one before it."""
        for process, held in self._held.items():
            if self._next_taken in held:
                return process, self._open[held[0]]
        return None

    def take(self) -> Result:
        """The next result in order."""
        result = self._results.pop(self._next_taken)
        self._next_taken += 1
        return result

    def _draw(self) -> int | None:
        if self._is_drained or self.next_number - self._next_taken >= self._ahead * len(self._held):
            return None
        try:
            task = next(self._tasks)
        except StopIteration:
            self._is_drained = True
            return None
        except Exception as error:
            self._is_drained, self._broken = True, error
            return None
        number, self.next_number = self.next_number, self.next_number + 1
        self._open[number] = task
        return number
