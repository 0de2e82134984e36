"""Every way to spread a model, one file each, behind the protocol of protocol.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.config import strategy_spec as strategy_names
from shoal.config.job import Job

if TYPE_CHECKING:
    from shoal.parallel.protocol import Strategy


def _single(job: Job) -> Strategy:
    from shoal.parallel.single import Single

    return Single(num_slices=job.verify.num_slices if job.verify else 1)


def _ddp(job: Job) -> Strategy:
    if job.sync_every is not None:
        from shoal.parallel.local_sgd.local_sgd import LocalUpdates

        return LocalUpdates(job)
    from shoal.parallel.ddp import Ddp

    return Ddp(job)


def _ps(job: Job) -> Strategy:
    mode = strategy_names.parse(job.strategy).mode
    if mode == "exact":
        from shoal.parallel.ps.exact import Ps

        return Ps(job)
    if mode in ("ssp", "async"):
        from shoal.parallel.ps.relaxed import PsRelaxed

        return PsRelaxed(job)
    if mode in ("drop", "stale"):
        from shoal.parallel.ps.partial import PsDrop

        return PsDrop(job)
    from shoal.parallel.ps.hybrid import PsHybrid

    return PsHybrid(job)


def _mesh(job: Job) -> Strategy:
    from shoal.parallel.mesh import ModelParallel

    return ModelParallel(job)


REGISTRY: dict[str, Callable[[Job], Strategy]] = {"single": _single, "ddp": _ddp, "mesh": _mesh, "ps": _ps}
"""Name to builder. A strategy is imported when it is chosen: nobody pays for the others."""


def create(job: Job) -> Strategy:
    """The strategy a job was launched with."""
    return REGISTRY[strategy_names.parse(job.strategy).base](job)
