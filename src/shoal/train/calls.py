"""A call of the script into shoal: what ranks compare before it, and whether it is over before it begins.

A replacement runs the script from the top; calls that the others have
finished return their result, without work.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

from shoal.core import job as jobs
from shoal.data.batches import Batches
from shoal.strategies.together import Together

R = TypeVar("R")

_numbers = itertools.count()


class Call:
    """A numbered call of this process. `end` it with its result."""

    is_over: bool
    """The others have finished it, with this `result`."""

    result: Any

    def __init__(self, number: int, together: Together | None) -> None:
        self._number, self._together = number, together
        self.is_over, self.result = together.begin_call(number) if together is not None else (False, None)

    def end(self, result: R, *, kept: Any = None) -> R:
        """The call is done; `kept` (by default the result itself) is what a replacement is given for it."""
        if self._together is not None:
            self._together.end_call(self._number, result if kept is None else kept)
        return result


def next_number() -> int:
    """The number of one more Trainer or loop: the same on every rank, since all run the same script."""
    return next(_numbers)


def described(batches: Batches) -> str:
    """Sizes and seeds: ranks that shuffle by different seeds would train some samples twice and others never."""
    stages = batches.describe().get("stages", [])
    seeds = [stage["seed"] for stage in stages if stage.get("seed") is not None]
    size = batches.batch_size(jobs.num_workers())
    said = f"samples={batches.num_samples}, batch={size or None}"
    return f"{said}, seeds={seeds}" if seeds else said
