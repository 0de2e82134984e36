"""Every way to spread a model, one file each, behind the protocol of protocol.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.core import strategy_names
from shoal.core.job import Job

if TYPE_CHECKING:
    from shoal.strategies.protocol import Strategy


def _single(job: Job) -> Strategy:
    from shoal.strategies.single import Single

    return Single(num_slices=job.verify.num_slices if job.verify else 1)


def _ddp(job: Job) -> Strategy:
    if job.sync_every is not None:
        from shoal.strategies.local_updates import LocalUpdates

        return LocalUpdates(job)
    from shoal.strategies.ddp import Ddp

    return Ddp(job)


def _ps(job: Job) -> Strategy:
    mode = strategy_names.parse(job.strategy).mode
    if mode == "exact":
        from shoal.strategies.ps import Ps

        return Ps(job)
    if mode in ("ssp", "async"):
        from shoal.strategies.ps_relaxed import PsRelaxed

        return PsRelaxed(job)
    if mode in ("drop", "stale"):
        from shoal.strategies.ps_drop import PsDrop

        return PsDrop(job)
    from shoal.strategies.ps_hybrid import PsHybrid

    return PsHybrid(job)


def _mesh(job: Job) -> Strategy:
    from shoal.strategies.model_parallel import ModelParallel

    return ModelParallel(job)


REGISTRY: dict[str, Callable[[Job], Strategy]] = {"single": _single, "ddp": _ddp, "mesh": _mesh, "ps": _ps}
"""Name to builder. A strategy is imported when it is chosen: nobody pays for the others."""


def create(job: Job) -> Strategy:
    """The strategy a job was launched with."""
    return REGISTRY[strategy_names.parse(job.strategy).base](job)
