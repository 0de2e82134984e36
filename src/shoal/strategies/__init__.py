"""Every way to spread a model, one file each, behind the protocol of protocol.py."""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.job import Job
from shoal.strategies.ddp import Ddp
from shoal.strategies.protocol import Strategy
from shoal.strategies.single import Single

REGISTRY: dict[str, Callable[[Job], Strategy]] = {
    "single": lambda job: Single(num_slices=job.verify.num_slices if job.verify else 1),
    "ddp": Ddp,
}


def create(job: Job) -> Strategy:
    """The strategy a job was launched with."""
    return REGISTRY[job.strategy](job)
