"""Virtual time: one queue of events, one seeded source of chance, and the story of what happened.

Nothing in a simulated cluster reads a clock or draws a random number but
from here, so a seed is a schedule: the same seed gives the same story.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

STORY_EVENTS = 400
"""How much of the story is kept; the end of it is what explains a failure."""

MAX_EVENTS = 20_000
"""Ten times more than any schedule needs."""


class Violated(AssertionError):
    """A promise was broken. The message says which, the story how."""


class World:
    """What all simulated processes share."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.num_events = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._story: deque[tuple[float, str, str, tuple[Any, ...]]] = deque(maxlen=STORY_EVENTS)

    def schedule(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do it so much later; of two events at one time the one asked for first comes first."""
        self.num_events += 1
        heappush(self._queue, (self.now + delay_s, self.num_events, action, arguments))

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()

    def tell(self, who: str, what: str, *about: Any) -> None:
        """Add to the story. Formatted only when somebody reads it."""
        self._story.append((self.now, who, what, about))

    def run(
        self, is_done: Callable[[], bool], *, until: Callable[[], float], check: Callable[[], None]
    ) -> None:
        """Let things happen until all is done; too late, or nothing left to happen, breaks a promise."""
        queue = self._queue
        while not is_done():
            if not queue:
                raise Violated("nobody has anything left to do, and the job is not done: it waits for ever")
            self.now, _, action, arguments = heappop(queue)
            if self.now > until():
                raise Violated("the job is not done long after the last fault: somebody waits for ever")
            if self.num_events > MAX_EVENTS:
                raise Violated(f"{MAX_EVENTS} events, and the job is not done: it goes round in circles")
            action(*arguments)
            check()

    def story(self) -> str:
        """The last events, one line each."""
        return "\n".join(
            f"{at:10.4f}  {who:<14} {what}{' ' if about else ''}{', '.join(map(str, about))}"
            for at, who, what, about in self._story
        )


class Process:
    """Something that runs, may be stopped and continued, and dies once.

    While it is stopped its timers and messages wait, as they would in the
    kernel; when it is dead they are gone.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.is_alive, self.is_stopped = True, False
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def later(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do it later, if still alive then; while stopped, when continued."""
        self.world.schedule(delay_s, self.do, action, *arguments)

    def do(self, action: Callable[..., None], *arguments: Any) -> None:
        if not self.is_alive:
            return
        if self.is_stopped:
            self._backlog.append((action, arguments))
        else:
            action(*arguments)

    def die(self) -> None:
        self.is_alive = False

    def stop(self) -> None:
        self.is_stopped = True

    def carry_on(self) -> None:
        self.is_stopped = False
        backlog, self._backlog = self._backlog, []
        for action, arguments in backlog:
            self.do(action, *arguments)

    def tell(self, what: str, *about: Any) -> None:
        self.world.tell(self.name, what, *about)
