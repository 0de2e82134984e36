"""Signals and the progress display while a plain `python train.py` trains.

Under `shoal run` the supervisor takes the signals, asks the workers to leave
and draws the display; in a plain process this module does both. The first
Ctrl-C or SIGTERM finishes the step and saves; the second one leaves now.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from shoal.cluster.supervisor.display import open_display
from shoal.cluster.worker import session
from shoal.config import job as jobs
from shoal.config.job import Job
from shoal.runtime.transport.messages.supervisor import Progress

_asked: str | None = None


def asked_to_leave() -> str | None:
    """The signal that asked this process to leave, if one did."""
    return _asked or session.stop_requested()


@contextlib.contextmanager
def signals_finish_the_step() -> Iterator[None]:
    """Within it, the first Ctrl-C or SIGTERM asks the loop to leave and the second one interrupts."""
    global _asked
    if jobs.current().launched or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        global _asked
        if _asked is not None:
            raise KeyboardInterrupt
        _asked = signal.Signals(number).name
        print("finishing the step and saving; Ctrl-C again to leave now", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _asked = None


@contextlib.contextmanager
def drawn_here(job: Job, *, wanted: bool) -> Iterator[None]:
    """Within it, draw what is reported, unless the supervisor does or the script does not want it."""
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
