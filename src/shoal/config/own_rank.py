"""`shoal.rank()` and `shoal.num_workers()`.

A process without a launcher is rank 0 of 1, and returns it without loading the options of a job.
"""

from __future__ import annotations

import os
import sys

from shoal.config.launchers import world_of

asked_at: dict[tuple[str, int], None] = {}
"""Under `shoal verify`: files and lines that asked for the rank, which a result may hang on."""


def rank() -> int:
    """This process's number, 0..num_workers-1."""
    if _is_alone():
        return 0
    from shoal.config import job as jobs

    job = jobs.share()
    if job.verify is not None:
        asking = sys._getframe(1)
        asked_at[asking.f_code.co_filename, asking.f_lineno] = None
    return job.rank


def num_workers() -> int:
    """How many workers share one global batch; 1 under plain python."""
    if _is_alone():
        return 1
    from shoal.config import job as jobs

    return jobs.num_workers()


def _is_alone() -> bool:
    """Whether no launcher of ours or of others started this process: a worker's has loaded its job before the script."""
    return "shoal.config.job" not in sys.modules and world_of(os.environ) is None
