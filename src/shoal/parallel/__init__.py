"""Parallel strategies, one file each, behind the protocol of protocol.py; the registry is `shoal.config.strategy`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.config import strategy as strategies
from shoal.config.job import Job

if TYPE_CHECKING:
    from shoal.parallel.protocol import Strategy


def create(job: Job) -> Strategy:
    """Build the strategy a job was launched with; the others are not imported."""
    if job.sync_every is not None and not job.tasks:
        from shoal.parallel.local_sgd import LocalSgd

        return LocalSgd(job)
    choice, _ = strategies.find(job.strategy)
    made: Strategy = choice.load()(job)
    return made
