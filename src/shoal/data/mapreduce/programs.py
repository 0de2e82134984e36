"""Programs of map-reduce tasks, each in a process group of its own, which is ended as a whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from shoal import system
from shoal.errors import DataError

GRACE_S = 0.5
"""From SIGTERM to SIGKILL."""


class Programs:
    """Programs that the tasks of this process run now; `end` ends them and lets no other one start.

    An engine's machines get an empty one with each task: there the engine ends the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_over = False

    def __reduce__(self) -> tuple[type[Programs], tuple[()]]:
        return Programs, ()

    @contextlib.contextmanager
    def start(self, words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
        """A program, which does not outlive the context. A terminal's Ctrl-C reaches it through `end` alone."""
        with self._lock:
            if self._is_over:
                raise DataError(f"{words[0]} was not started: the run was interrupted.")
            process = subprocess.Popen(
                words, process_group=0, preexec_fn=system.program_dies_with_parent, **options
            )
            self._running.add(process)
        try:
            yield process
        finally:
            if process.poll() is None:
                _signal(process, signal.SIGKILL)
            process.wait()
            with self._lock:
                self._running.discard(process)

    def end(self) -> None:
        """SIGTERM to every program with all it started; SIGKILL to what is left after the grace."""
        with self._lock:
            self._is_over = True
            left = list(self._running)
        deadline = time.monotonic() + GRACE_S
        try:
            left = [each for each in left if _signal(each, signal.SIGTERM)]
            while left and time.monotonic() < deadline:
                time.sleep(0.01)
                left = [each for each in left if _signal(each, 0)]
        finally:  # at once by a second Ctrl-C
            for each in left:
                _signal(each, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], signum: int) -> bool:
    """Whether anything was left in the program's group; its number is not given anew before that is gone."""
    process.poll()  # one that has ended counts until somebody waits for it
    try:
        os.killpg(process.pid, signum)
    except ProcessLookupError:
        return False
    return True
