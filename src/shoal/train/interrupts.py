"""Ctrl-C and SIGTERM while training: asked once, finish the step and save; asked twice, leave now.

Under `shoal run` the supervisor gets the signals and asks the workers; in a
plain python process this file takes them for as long as a fit runs.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from shoal.cluster.worker import session
from shoal.config import job as jobs

_asked: str | None = None


def asked_to_leave() -> str | None:
    """The signal that asked this process to leave, if one did."""
    return _asked or session.stop_requested()


@contextlib.contextmanager
def signals_finish_the_step() -> Iterator[None]:
    """While inside, the first Ctrl-C or SIGTERM is a wish and the second one means it."""
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
