"""A call of the script into shoal: what it is given, what ranks compare before it, and whether it is over already.

A replacement runs the script from the top; calls that the others have
finished return their result, without work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.config import job as jobs
from shoal.config import placement
from shoal.config.shard import MEASURED
from shoal.data.batches import Batches, as_batches
from shoal.data.tree import Tree
from shoal.errors import BatchTooSmall, ConfigError, EmptyDataset
from shoal.recovery.replay_log import Timeline

R = TypeVar("R")

_numbers = itertools.count()


class Call:
    """A numbered call of this process. `end` it with its result."""

    is_over: bool
    """The others have finished it, with this `result`."""

    result: Any

    after: dict[str, Any] | None
    """The state of what was called, as it was after the call."""

    def __init__(
        self,
        number: int,
        timeline: Timeline | None,
        state_after: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """`state_after` is asked at the call's end; a replacement stands there once it has passed the call."""
        self._number, self._timeline, self._state_after = number, timeline, state_after
        self.is_over, kept = timeline.begin_call(number) if timeline is not None else (False, None)
        self.result, self.after = (kept["result"], kept["after"]) if kept is not None else (None, None)

    def end(self, result: R, *, kept: Any = None) -> R:
        """The call is done; `kept` (by default the result itself) is what a replacement is given for it."""
        if self._timeline is not None:
            after = self._state_after() if self._state_after is not None else None
            self._timeline.end_call(
                self._number, {"result": result if kept is None else kept, "after": after}
            )
        return result


def next_number() -> int:
    """The number of one more Trainer or loop: the same on every rank, since all run the same script."""
    return next(_numbers)


def batches_of(data: Any, *, what: str, seed: int, may_be_endless: bool = False) -> Batches:
    """What was handed to `what` as batches. Validation data is looked at here too, not after an epoch of training."""
    batches = as_batches(data, default_seed=seed)
    if batches.is_endless and not may_be_endless:
        cure = "say when to stop, fit(..., max_steps=10_000), or " if what == "fit" else ""
        raise ConfigError(
            f"{what} goes over all of the data, and repeat() gives it no end. Nothing was started; {cure}leave repeat() out, "
            "or give it a number."
        )
    if batches.num_samples == 0:
        raise EmptyDataset(what=what)
    shard = _shard(what)
    # By costs only what is trained: other data may lack the column.
    if shard is not None and (what in ("fit", "setup") or not shard.startswith("balanced")):
        batches = batches.shard_unless_said(shard)
    num_parts = jobs.current().num_data_ranks  # the ranks of tp and pp compute the same part
    size = batches.batch_size(num_parts)
    if 0 < size < num_parts:
        raise BatchTooSmall(batch_size=size, num_workers=num_parts)
    return batches


def _shard(what: str) -> str | None:
    """How batches are cut where the script does not say; by measured speed where workers compute on different kinds."""
    job = jobs.current()
    if job.shard is None and what == "fit" and job.strategy == "ddp" and placement.of_job(job).is_mixed:
        return f"weighted={MEASURED}"
    return job.shard


def described(batches: Batches) -> str:
    """Sizes, seeds and what filters chose: ranks that differ in them would train some samples twice and others never."""
    stages = batches.describe().get("stages", [])
    seeds = [stage["seed"] for stage in stages if stage.get("seed") is not None]
    size = batches.batch_size(jobs.num_workers())
    said = f"samples={batches.num_samples}, batch={size or None}"
    said += f", seeds={seeds}" if seeds else ""
    chosen = [stage["digest"] for stage in stages if stage.get("digest") is not None]
    said += f", chosen={chosen}" if chosen else ""
    return f"{said}, shard={batches.sharding.describe()}" if batches.sharding.name else said


def first_inputs(batches: Batches, num_workers: int) -> Callable[[], Tree]:
    """Reads the inputs of a first part of the data, for a strategy that measures a model before it cuts it."""

    def read() -> Tree:
        [part] = batches.slices(epoch=0, start=0, rank=0, num_workers=num_workers, stop=1)
        return part.inputs

    return read
