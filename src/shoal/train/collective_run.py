"""Replay of collective calls: a call of `shoal.collectives` in the group of the strategy that trains, kept for replacements."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shoal.collectives.reducer import Reducer, ViaGather
from shoal.config import job as jobs
from shoal.recovery.elastic_group import ElasticGroup
from shoal.recovery.rendezvous import CollectiveTimeout
from shoal.train.custom.loop import present_moment

T = TypeVar("T")


def run_over_deaths(call: str, number: int, run: Callable[[Reducer], T], timeout_s: float | None = None) -> T:
    """Run a collective call, again if a rank is lost; a replacement receives the results of finished ones."""
    strategy, remembered = present_moment()
    job = jobs.current()

    def exchange() -> T:
        replay_log = strategy.replay_log
        if isinstance(replay_log, ElasticGroup):
            timeout = CollectiveTimeout(call, timeout_s) if timeout_s is not None else None
            return replay_log.run(
                run,
                "a call of shoal.collectives",
                timeout=timeout,
                doing=f"{call}, its call {number} of shoal.collectives",
            )
        return run(ViaGather(job.rank, job.num_workers, strategy.gather))

    return remembered(call.partition("(")[0], exchange)
