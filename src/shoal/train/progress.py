"""Progress of a plain `python train.py`, drawn by the process itself. Under `shoal run` the supervisor draws."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from shoal.cluster import session
from shoal.cluster.display import open_display
from shoal.core.job import Job
from shoal.wire.messages import Progress


@contextlib.contextmanager
def drawn_here(job: Job, *, wanted: bool) -> Iterator[None]:
    """Show what is reported inside, unless somebody else does or nobody wants to see it."""
    raw_out, raw_err = getattr(sys.stdout, "buffer", None), getattr(sys.stderr, "buffer", None)
    if job.launched or not wanted or raw_out is None or raw_err is None:
        yield
        return
    sys.stdout.flush()
    display = open_display(raw_out, raw_err)

    def show(progress: Progress) -> None:
        display.update(progress)
        display.tick()

    session.listen(show)
    try:
        with display.owning_prints():
            yield
    finally:
        session.listen(None)
        display.close()
