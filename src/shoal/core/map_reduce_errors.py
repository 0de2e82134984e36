"""What ends a map_reduce: a user's function in another process, a task that nobody survives, a wait without end.

Part of the tree of `core/errors.py`, under DataError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.core.errors import DataError

_SAFE = "Finished tasks are kept and not run again."


class MapReduceFailed(DataError):
    """A user's function raised in one of the processes of `workers=`. The traceback is the user's own."""

    def __init__(self, *, traceback: str, task: str) -> None:
        self.traceback, self.task = traceback, task
        super().__init__(
            f"{traceback.rstrip()}\nThe error above is that of a function given to map_reduce, raised in a process of its "
            f"own in the task '{task}'. {_SAFE}"
        )


class TaskKeepsDying(DataError):
    """Every process that began a task was gone before it had finished it."""

    def __init__(self, *, task: str, what: str, attempts: Sequence[str]) -> None:
        self.task, self.what, self.attempts = task, what, list(attempts)
        super().__init__(
            f"the task '{task}' of map_reduce ({what}) was begun {len(self.attempts)} times, and each time its process was "
            f"gone before it was done: {', '.join(self.attempts)}. It was not begun again. {_SAFE} Look for a crash or for "
            "memory that runs out on those samples; buffer_bytes= and batched= say how much is held at once."
        )


class MapReduceStalled(DataError):
    """Nobody has shown progress for so long that waiting makes no sense."""

    def __init__(self, *, waited_s: float, holders: Mapping[str, str]) -> None:
        self.waited_s, self.holders = waited_s, dict(holders)
        listed = [f"'{task}' is held by {who}" for task, who in list(self.holders.items())[:8]]
        more = f", and {len(self.holders) - 8} more" if len(self.holders) > 8 else ""
        super().__init__(
            f"map_reduce waited {waited_s:.1f} s without a sign of life of the tasks that are left: "
            f"{', '.join(listed)}{more}. {_SAFE} If one sample may take that long, raise timeout_s; else end the process "
            "that is stuck, and its task goes to another."
        )
