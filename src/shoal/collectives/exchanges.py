"""Every way of summing over the ranks, by its name."""

from __future__ import annotations

import platform
from collections.abc import Callable

from shoal.collectives.native import Native
from shoal.collectives.reducer import Reducer
from shoal.collectives.shm import Shm
from shoal.core.job import Job


def open_exchange(job: Job, native: Native, is_broken: Callable[[], bool]) -> Reducer:
    """The reducer of a new view, over the group that `native` stands for. Collective."""
    name = _best(job) if job.exchange == "auto" else job.exchange
    if name == "shm" and job.num_workers > 1:
        return Shm(native, is_broken=is_broken, timeout_s=job.step_timeout_s)
    return native


def _best(job: Job) -> str:
    # The rings rely on stores that are seen in the order in which they were made.
    is_ordered = platform.machine() in ("x86_64", "AMD64")
    return "shm" if job.num_hosts == 1 and is_ordered else "native"
