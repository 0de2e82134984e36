"""Background jobs in a thread that exists only while there is work."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable


class BackgroundJobs:
    """Runs one job after the other in the background, and keeps no thread when there is none left.

    So its owner needs no `close`, and an ending process waits only for the running job. Jobs handle
    their own exceptions. A forked child begins without jobs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._jobs: deque[Callable[[], None]] = deque()
        self._begin()

    def __call__(self, job: Callable[[], None]) -> None:
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    @property
    def is_idle(self) -> bool:
        return self._thread is None or self._pid != os.getpid()

    def finish(self) -> None:
        """Drop waiting jobs, and wait for the running one."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            self._jobs.clear()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._jobs, self._thread = deque(), None

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            job()
            del job  # or it would stay alive until the next one comes
