"""Signals and the progress display of a plain `python train.py`, and progress reports of passes without updates.

Under `shoal run` the supervisor takes the signals, asks the workers to leave
and draws the display; in a plain process this module does both.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from shoal.cluster.supervisor.display import open_display
from shoal.cluster.worker import session
from shoal.config import job as jobs
from shoal.config.job import Job
from shoal.data.batches import Batches
from shoal.data.slice import Slice
from shoal.errors import Interrupted
from shoal.runtime.transport.messages.supervisor import Progress

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


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


def passing(trainer: Trainer, phase: str, batches: Batches) -> Callable[[Slice], None]:
    """What to call after every slice of a pass without updates: tells how far it is, and leaves when asked to."""
    began_at, samples = time.monotonic(), 0
    num_steps = batches.num_steps(trainer.num_workers)
    done = 0

    def tick(part: Slice) -> None:
        nonlocal samples, done
        samples += part.num_global
        done += 1
        asked = asked_to_leave()
        if asked is not None:
            raise Interrupted(signal_name=asked, step=trainer.step, checkpoint=trainer.newest_checkpoint)
        session.report(
            phase=phase,
            epoch=0,
            num_epochs=None,
            step=done,
            num_steps=num_steps,
            loss=None,
            metrics={},
            samples=samples,
            samples_per_s=samples / max(time.monotonic() - began_at, 1e-9),
            eta_s=None,
        )

    return tick
